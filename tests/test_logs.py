"""Lines of a log: one JSON object each whatever they hold, and the options of `pgqueue work` that say where they go."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from datetime import UTC, datetime, timedelta
from math import inf, nan
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import pgqueue, working
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import logs
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job, fields
from pgqueue.logs import Json, Text


def record(message: Any = "text", *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "args": args, "name": "shop", "levelname": "WARNING", **extra})
    made.created = datetime(2026, 11, 20, 10, 0, 0, 250_000, UTC).timestamp()
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    """The object on its line; fails if it is more than a line, beyond ASCII, or no JSON for everybody."""
    line = Json().format(made)
    assert line.isascii() and len(line.splitlines()) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(line, parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()  # no half of a surrogate pair
    return found


def failure(error: BaseException) -> Any:
    try:
        raise error
    except BaseException:
        return sys.exc_info()


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_line_is_time_level_logger_message_and_the_extras() -> None:
    assert as_json(record("job %d", 7, job_id=7, seconds=0.25, tags=["a", None])) == {
        "time": "2026-11-20T10:00:00.250Z",
        "level": "warning",
        "logger": "shop",
        "process": os.getpid(),
        "message": "job 7",
        "job_id": 7,
        "seconds": 0.25,
        "tags": ["a", None],
    }


def test_the_exception_is_told_whole_and_so_is_a_text_of_one() -> None:
    trace = as_json(record(exc_info=failure(KeyError("sku"))))["exception"]
    assert trace.startswith("Traceback") and trace.endswith("KeyError: 'sku'")
    assert as_json(record(exc_text="Traceback …"))["exception"] == "Traceback …"
    assert "exception" not in as_json(record(exc_info=(None, None, None)))
    assert "exception" in as_json(record(exc_info=failure(BrokenError())))
    assert as_json(record(stack_info="Stack …"))["stack"] == "Stack …"


@pytest.mark.parametrize(
    "value",
    [
        nan, inf, [nan], {"a": -inf}, {(1, 2): 3}, {1: 2}, {3}, b"\xff", datetime.now(UTC), timedelta(1), Broken(),
        [Broken()], {"a": Broken()}, object(), "\ud800", "\U0001f600", "\x00\x1b[31m\x85\u2028", 10**5000,
        ("é", 10**4299),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_that_json_has_no_word_for_becomes_text(value: Any) -> None:
    found = as_json(record(value, extra=value, other=7))
    assert (found["other"], found["logger"]) == (7, "shop")
    assert {"message", "extra"} <= found.keys()


def test_what_refers_to_itself_becomes_text() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert as_json(record(extra=circle))["extra"] == "[[...]]"


def test_arguments_that_do_not_fit_are_shown_beside_the_message() -> None:
    assert as_json(record("%d jobs of %s", "seven"))["message"] == "%d jobs of %s ('seven',)"
    assert as_json(record("100 %", 1))["message"] == "100 % (1,)"


def test_an_extra_does_not_take_the_place_of_what_every_line_has() -> None:
    found = as_json(record("text", time=1, level=2, logger=3, exception="mine", exc_info=failure(KeyError("sku"))))
    assert (found["level"], found["level_"], found["logger"], found["logger_"]) == ("warning", 2, "shop", 3)
    assert (found["time_"], found["exception_"]) == (1, "mine")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers() | st.floats(), inner),
    max_leaves=10,
)


@pytest.mark.second
@given(st.text(st.characters()), st.lists(anything, max_size=2), anything)
def test_a_line_is_one_object_whatever_it_holds(message: str, args: list[Any], extra: Any) -> None:
    as_json(record(message, *args, extra=extra))


@pytest.mark.parametrize("number", [None, 12])
def test_text_is_time_level_logger_place_message(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "worker_id", number)
    place = os.getpid() if number is None else f"{os.getpid()} worker {number}"
    assert Text().format(record("job %d", 7)) == f"2026-11-20T10:00:00.250Z WARNING shop[{place}]: job 7"
    assert as_json(record("job %d", 7)).get("worker") == number


@pytest.mark.parametrize(
    ("level", "outcome", "colour"),
    [
        ("WARNING", None, 33),
        ("ERROR", "failed", 31),
        ("CRITICAL", None, 31),
        ("INFO", "completed", 32),
        ("INFO", None, 0),
    ],
)
def test_on_a_terminal_the_level_has_a_colour(level: str, outcome: str | None, colour: int) -> None:
    extra = {} if outcome is None else {"outcome": outcome}
    made = record("a WARNING INFO ERROR ", levelname=level, levelno=getattr(logging, level), **extra)
    plain, coloured = Text().format(made), Text(colours=True).format(made)
    assert coloured == (plain.replace(f" {level} ", f"\x1b[{colour}m {level} \x1b[0m", 1) if colour else plain)


def test_the_fields_of_a_job() -> None:
    row = claimed(id=7, queue="mail", task="mail.send", attempt=2)
    assert fields(Job(row, claim=1), hook="x") == {
        "job_id": 7,
        "task": "mail.send",
        "queue": "mail",
        "attempt": 2,
        "hook": "x",
    }


# The options ---------------------------------------------------------------------------------------------------------

TASKS = """
import logging
import pgqueue

logging.getLogger("shop").info("imported")

@pgqueue.task(name="fails", retry=1)
def fails() -> None:
    raise ValueError("line one\\nline two \\u2028 \\x85 \\x00 \\"quoted\\" {json}")

@pgqueue.task(name="speaks")
async def speaks() -> None:
    logging.getLogger("shop").info("said %s", "so", extra={"order": 7})
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(TASKS)
    (tmp_path / "own_format.py").write_text(
        "import logging\nclass Short(logging.Formatter):\n    def format(self, record):\n"
        "        return f'{record.name}|{getattr(record, \"job_id\", None)}|{record.getMessage()}'\n"
    )
    return tmp_path


def config(app: Path, content: object) -> str:
    (app / "logging.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(app / "logging.json")


def enqueue(dsn: str, *tasks: str) -> list[int]:
    with psycopg.connect(dsn) as conn:
        rows = [conn.execute("SELECT pgqueue.enqueue(%s)", [task]).fetchone() for task in tasks]
    return [row[0] for row in rows if row]


def test_a_failed_attempt_is_one_line_of_json_with_its_job(dsn: str, app: Path) -> None:
    [id] = enqueue(dsn, "fails")
    with working("shop", "--log-format", "json", dsn=dsn, cwd=app) as worker:
        worker.says("line one")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    [line] = [found for found in map(json.loads, worker.lines) if found["logger"] == "pgqueue.job"]
    assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta(0)
    assert 0 < line.pop("seconds") < 60
    assert line.pop("exception").startswith("Traceback")
    assert line.pop("message").startswith(f"job {id} (fails, queue default, attempt 1) failed after ")
    assert (line.pop("process"), line.pop("worker")) == (worker.process.pid, 1)
    assert line == {
        "level": "error",
        "logger": "pgqueue.job",
        "job_id": id,
        "task": "fails",
        "queue": "default",
        "attempt": 1,
        "outcome": "failed",
        "reason": "error",
        "error_type": "ValueError",
        "error": 'line one\nline two \u2028 \x85 \\0 "quoted" {json}',
    }


@pytest.mark.parametrize("level", ["debug", "info"])
def test_starts_and_good_ends_are_told_at_debug_only(dsn: str, app: Path, level: str) -> None:
    [id] = enqueue(dsn, "speaks")
    with working("shop", "--log-level", level, dsn=dsn, cwd=app) as worker:
        worker.says("]: said so")
        if level == "debug":
            place = f"[{worker.process.pid} worker 1]"
            worker.says(f"DEBUG pgqueue.job{place}: job {id} (speaks, queue default, attempt 1) started")
            worker.says(f"DEBUG pgqueue.job{place}: job {id} (speaks, queue default, attempt 1) completed after 0.")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    assert ("pgqueue.job" in worker.output) is (level == "debug")


@pytest.mark.promise("F285")
@pytest.mark.parametrize("options", [(), ("--no-log-jobs",)], ids=["as it is", "not wanted"])
def test_on_a_terminal_each_job_has_a_line(dsn: str, app: Path, options: tuple[str, ...]) -> None:
    good, _ = enqueue(dsn, "speaks", "fails")
    with working("shop", *options, dsn=dsn, cwd=app, terminal=True) as worker:
        worker.says("line one")
        worker.says("]: said so")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    lines = [line for line in worker.lines if f"job {good} (speaks" in line]
    place = rf"pgqueue\.job\[{worker.process.pid} worker 1\]"
    told = (
        rf"\S+Z\x1b\[32m INFO \x1b\[0m{place}: job {good} \(speaks, queue default, attempt 1\) completed after 0\.\d+ s"
    )
    assert len(lines) == (0 if options else 1) and all(re.fullmatch(told, line) for line in lines), worker.output


@pytest.mark.promise("F285")
def test_a_line_for_each_job_may_be_asked_for(dsn: str, app: Path) -> None:
    [good] = enqueue(dsn, "speaks")
    with working("shop", "--log-jobs", "--log-format", "json", dsn=dsn, cwd=app) as worker:
        worker.says("completed after")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    [line] = [found for found in map(json.loads, worker.lines) if found["logger"] == "pgqueue.job"]
    assert (line["job_id"], line["outcome"], line["level"]) == (good, "completed", "info")


def test_a_file_says_where_lines_go_and_how_they_look(dsn: str, app: Path) -> None:
    file = config(
        app,
        {
            "version": 1,
            "formatters": {"short": {"()": "own_format.Short"}, "json": {"()": "pgqueue.logs.Json"}},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "formatter": "short"},
                "file": {"class": "logging.FileHandler", "filename": str(app / "jobs.log"), "formatter": "json"},
            },
            "loggers": {"pgqueue.job": {"level": "DEBUG", "handlers": ["file"]}},
            "root": {"level": "INFO", "handlers": ["stderr"]},
        },
    )
    [id] = enqueue(dsn, "speaks")
    with working("shop", "--log-config", file, dsn=dsn, cwd=app) as worker:
        worker.says("shop|None|imported")
        worker.says("shop|None|said so")
        worker.says(f"pgqueue.job|{id}|job {id} (speaks, queue default, attempt 1) completed")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    lines = [json.loads(line) for line in (app / "jobs.log").read_text().splitlines()]
    assert [(line["job_id"], line.get("outcome")) for line in lines] == [(id, None), (id, "completed")]


def test_loggers_the_file_does_not_name_are_not_silenced(dsn: str, app: Path) -> None:
    root = {"level": "INFO", "handlers": ["all"]}
    file = config(app, {"handlers": {"all": {"class": "logging.StreamHandler"}}, "root": root})
    [id] = enqueue(dsn, "fails")
    with working("shop", "--log-config", file, dsn=dsn, cwd=app) as worker:
        worker.says("ready")
        worker.says(f"job {id} (fails, queue default, attempt 1) failed")


CONSOLE = "'console': {'class': 'logging.StreamHandler'}"
SET_UP = "import logging.config\nlogging.config.dictConfig({'version': 1, %s})\n"
OWN = {
    "a root": SET_UP % f"'handlers': {{{CONSOLE}}}, 'root': {{'level': 'INFO', 'handlers': ['console']}}",
    "no handler": SET_UP % "'root': {'level': 'INFO'}",
    "only a file": SET_UP
    % (
        "'handlers': {'file': {'class': 'logging.FileHandler', 'filename': 'own.log'}}, "
        "'root': {'level': 'INFO', 'handlers': ['file']}"
    ),
    "a logger of ours that is silent": SET_UP % "'loggers': {'pgqueue': {'level': 60}}",
    "all is switched off": "import logging\nlogging.disable(logging.CRITICAL)\n",
}


@pytest.mark.promise("F221")
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_a_start_that_fails_says_why_whatever_the_application_does_to_logging(app: Path, own: str) -> None:
    (app / "own.py").write_text(own + "import shop\n")
    done = pgqueue("work", "own", dsn="postgresql://nobody@localhost:1/x", cwd=app)
    assert done.returncode == 3
    assert done.stderr.count("database unreachable or refused: ") == 1, done.stderr


@pytest.mark.promise("F221")
def test_an_application_that_sets_up_logging_does_not_silence_us(dsn: str, app: Path) -> None:
    """dictConfig switches off all loggers that there are, and that it does not name."""
    (app / "own.py").write_text(OWN["a root"] + "import shop\n")
    [id] = enqueue(dsn, "fails")
    with working("own", dsn=dsn, cwd=app) as worker:
        worker.says("ready")
        worker.says(f"job {id} (fails, queue default, attempt 1) failed")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no JSON"),
        ("[]", "must be a JSON object"),
        ({"version": 2}, "Unsupported version"),
        ({"handlers": {"x": {"class": "nowhere.Handler"}}}, "Unable to configure handler 'x' (Cannot resolve"),
        ({"root": {"handlers": ["missing"]}}, "root"),
        (None, "does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_mistake_of_usage(app: Path, content: Any, says: str) -> None:
    file = str(app / "none.json") if content is None else config(app, content)
    done = pgqueue("work", "shop", "--log-config", file, dsn="postgresql://nobody@localhost:1/x", cwd=app)
    assert done.returncode == 2
    assert says in done.stderr and Path(file).name in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", [("--log-level", "info"), ("--log-format", "text")])
def test_the_file_and_the_other_options_exclude_each_other(app: Path, option: tuple[str, str]) -> None:
    done = pgqueue(
        "work", "shop", "--log-config", config(app, {}), *option, dsn="postgresql://x@localhost:1/x", cwd=app
    )
    assert done.returncode == 2
    assert "--log-config" in done.stderr and "--log-level" in done.stderr


FORGED = "job\n2026-11-20T10:00:00.000Z ERROR pgqueue: forged\r\x1b[2J\x9b31m\x85\x7f\u2028\u202e\u2066\ud800\0"


@pytest.mark.promise("F49")
@pytest.mark.parametrize("how", ["message", "argument", "exception", "stack"])
def test_no_foreign_text_forges_an_entry_or_controls_a_terminal(how: str) -> None:
    match how:
        case "message":
            made = record(FORGED)
        case "argument":
            made = record("job %d (%s)", 7, FORGED)
        case "exception":
            made = record(exc_info=failure(ValueError(FORGED)))
        case _:
            made = record(stack_info=FORGED)
    first, *others = Text().format(made).split("\n")
    assert first.startswith(f"2026-11-20T10:00:00.250Z WARNING shop[{os.getpid()}]: ")
    assert others and all(not line or line.startswith("  ") for line in others)
    assert all(line.isprintable() for line in [first, *others])


def test_an_entry_of_several_lines_keeps_them() -> None:
    assert Text().format(record("ready\n  database: x\n\n  end")).split(": ", 1)[1] == "ready\n  database: x\n\n  end"
    assert Text().format(record("no\nat\n  x")).split(": ", 1)[1] == "no\n  at\n    x"

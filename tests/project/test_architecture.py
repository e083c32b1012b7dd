"""The code from above: each wing imports what it may know, every statement says what it promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

import pgqueue
from pgqueue.database import statements

PACKAGE = Path(__file__).parents[2] / "pgqueue"

GROUND = "errors config databases logs manual distribution early_signals options plain_text stderr steady_clock"
# What each wing may import: itself, and these. A name with dots is one module and nothing else of its wing.
WINGS = {
    **{module: GROUND for module in GROUND.split()},
    # Read and never run: `pgqueue` imports a name at its first use.
    "names": "admin client config database errors jobs relay worker",
    "jobs": GROUND,
    "database": GROUND,
    "client": f"{GROUND} database jobs",
    "admin": f"{GROUND} client database jobs",
    "worker": f"{GROUND} client database jobs",
    # The cursor of the outbox is the watermark of the fetch.
    "relay": f"{GROUND} client database jobs worker.fetch.watermark",
    "supervisor": f"{GROUND} database jobs worker",
    # It knows no worker: the worker offers plain numbers (jobs/totals.py), and the command line brings both together.
    "telemetry": f"{GROUND} admin client database jobs",
    # The refused rows of an outbox that lies in the queue's own database.
    "web": f"{GROUND} admin client database jobs relay.refused telemetry",
    "testing": f"{GROUND} admin client database jobs worker pgqueue",
    "cli": f"{GROUND} admin client database jobs relay supervisor telemetry testing web worker pgqueue",
    # A framework's own way to what an application has. Only the package of a framework imports that framework.
    "integrations": f"{GROUND} __main__ admin cli client database jobs web worker pgqueue",
    "pytest_plugin": f"{GROUND} database testing",
    # Before anything else is imported.
    "init_process": "",
    "__main__": "cli config early_signals init_process",
}
# The same between the rooms of the worker and the modules that stand beside them.
ROOMS = {
    "settings": "",
    "pace": "settings",
    "claims": "",
    "state": "claims pace settings",
    "doubles": "",
    "left_alone": "",
    "mover": "doubles left_alone",
    "run": "state",
    "complete": "doubles left_alone state",
    # Where a measurement begins to read lanes is the watermark of the fetch.
    "leader": "fetch.watermark left_alone mover state",
    "concurrency": "doubles left_alone mover run.slots state",
    "flows": "left_alone mover state",
    "transactions": "complete.outcome_sql run.run run.running_jobs state",
    "liveness": "doubles left_alone mover run.child_processes run.run run.running_jobs state",
    "fetch": "concurrency doubles leader.election left_alone mover run.slots state",
    "context": "complete run state transactions",
    "counters": "run.running_jobs state",
    "duties": "",
    "neighbours": "complete concurrency fetch flows liveness run state",
    "capacity": "concurrency.rate_limiter neighbours run.slots",
    "held_jobs": "capacity concurrency.chains neighbours run.slots",
    "services": (
        "capacity complete concurrency context counters duties fetch flows held_jobs leader liveness run state "
        "transactions"
    ),
    "last_message": "complete.outcome_sql run.child_processes services",
    "worker": "last_message liveness run.executor services settings state",
}
EXEMPT = {
    ("client.handle", "admin.queries"),  # a handle asks as `get` does; that module knows none of the client
    ("worker.concurrency.declared_limits", "admin.limits"),  # what tasks declare is written as people write it by hand
    ("worker.leader.bulks", "admin.bulk.steps"),  # an operation goes on as the command does it that has begun it
}
"""Imports that the two tables do not have: module, and what it imports."""

DUTIES = {
    "fetch": "fetcher notifier notify_watch reconciler poison_jobs",
    "run": "executor cancellation progress",
    "complete": "completer",
    "concurrency": "unblocker rate_limiter sweep declared_limits",
    "flows": "releaser",
    "leader": "scheduler ticks pruner history_fold depth bulks lead_watch",
    "liveness": "heartbeat rescue watchdog",
}
ACTORS = {f"worker.{room}.{name}" for room, names in DUTIES.items() for name in names.split()}
"""Modules of the worker with one duty each; none knows another."""
MEETING = {"worker.neighbours", "worker.services"}
"""Where actors meet: in services, and in what two of its parts know of it."""


# What a job is does no I/O: none of these modules opens a connection, a socket, a process or a file.
IO_MODULES = {
    "asyncio",
    "fcntl",
    "multiprocessing",
    "psycopg",
    "psycopg_pool",
    "select",
    "socket",
    "subprocess",
    "threading",
}


@cache
def modules() -> dict[str, Path]:
    """Every module by its name under pgqueue, a package by the name of its folder; not pgqueue itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if name}


def files() -> list[str]:
    return list(modules())


def imports(name: str) -> Iterator[str]:
    """Whatever this module imports, also inside functions and for types only."""
    path = modules()[name]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole.removeprefix("pgqueue.") in modules() else node.module


@cache
def ours(name: str) -> frozenset[str]:
    """The modules of pgqueue that this one imports, by their names; "pgqueue" for the package itself."""
    found = (imported for imported in imports(name) if imported.split(".")[0] == "pgqueue")
    return frozenset(imported.removeprefix("pgqueue.") for imported in found) - {name}


def within(name: str, allowed: Collection[str]) -> bool:
    """Whether the module is one of these, or in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in allowed)


def refused(name: str) -> list[str]:
    """What this module imports and its wing or its room may not know."""
    wing, *below = name.split(".")
    told = [other for other in ours(name) if other != wing and not within(other, [wing, *WINGS[wing].split()])]
    if wing == "worker" and below:
        room = below[0]
        allowed = [f"worker.{each}" for each in (room, *ROOMS[room].split())]
        told += [other for other in ours(name) if within(other, ["worker"]) and not within(other, allowed)]
    return sorted(other for other in told if (name, other) not in EXEMPT)


def test_every_wing_and_room_is_in_the_table() -> None:
    """A new one is given a line here."""
    assert {name.split(".")[0] for name in files()} == set(WINGS)
    rooms = {name.split(".")[1] for name in files() if name.startswith("worker.")}
    assert rooms - set(ROOMS) == set()


def test_a_module_imports_what_its_wing_and_its_room_may_know() -> None:
    assert {name: others for name in files() if (others := refused(name))} == {}


def test_every_exemption_is_needed() -> None:
    assert [(name, other) for name, other in sorted(EXEMPT) if other not in ours(name)] == []


def test_no_actor_knows_another_and_they_meet_in_one_place() -> None:
    assert set(files()) >= ACTORS
    known = {name: sorted(ours(name) & ACTORS) for name in files() if name.startswith("worker.")}
    assert {name: others for name, others in known.items() if name in ACTORS and others} == {}
    assert {name for name, others in known.items() if len(others) > 1} <= MEETING


def test_no_module_imports_itself_in_a_circle() -> None:
    left = {name: ours(name) & set(files()) for name in files()}
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert left == {}


def test_what_a_job_is_does_no_io() -> None:
    known = {name: imports(name) for name in files() if name.split(".")[0] == "jobs"}
    assert len(known) > 10
    assert {name for name, all in known.items() if {each.split(".")[0] for each in all} & IO_MODULES} == set()


def test_the_wheel_with_the_server_is_imported_by_embedded_only() -> None:
    users = {name for name in files() if any(imported.startswith("pixeltable") for imported in imports(name))}
    assert users == {"database.embedded"}


@pytest.mark.promise("F270")
def test_a_framework_is_imported_by_its_own_integration_only() -> None:
    """But for `drivers` and `testing`, which look at connections of a framework that the application has imported."""
    users = {name for name in files() if any(each.split(".")[0] == "django" for each in imports(name))}
    looking = {"database.drivers", "testing.context", "testing.steps"}
    assert {name for name in users if not name.startswith("integrations.django.")} == looking
    assert [
        name for name in files() if within("integrations", ours(name)) and not name.startswith("integrations")
    ] == []


# Functions that open a connection with options that they are given, or to a server that the caller has named for a test
# or for the demo, on this machine.
UNTIMED = {
    ("database.primary", "connect"),
    ("database.primary", "aconnect"),
    ("worker.transactions.opening", "connect"),  # options of the pool, which are those of `sessions`
    ("web.connections", "connect"),  # the same for the dashboard's pool
    ("cli.database", "_places"),  # it does not wait
    ("cli.demo", "_play"),
    ("cli.demo", "_version"),
    ("cli.demo.processes", "fresh_database"),
    ("cli.demo.processes", "_run"),
    ("pytest_plugin", "__init__"),
    ("pytest_plugin", "pgqueue_conn"),
    ("pytest_plugin", "_async_fixture"),
    ("pytest_plugin", "aconn"),
}
OPENS = re.compile(r"(?:psycopg\.connect|Connection\.connect|\bkind\.connect|primary\.a?connect|PGconn\.\w+)\Z")
TIMED = {"connect_timeout", "connect_timeout_at_most", "options", "_patient"}
"""What gives a connection its time: the rule of `conninfo`, and the options that have it from there."""


def opening() -> Iterator[tuple[str, str, bool]]:
    """Each function that opens a connection of psycopg: its module, its name, whether it says for how long."""
    for name, path in modules().items():
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                called = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(map(OPENS.search, called)):
                    yield name, function.name, any(each.split(".")[-1] in TIMED for each in called)


@pytest.mark.promise("F467")
def test_each_connection_takes_its_time_from_one_rule() -> None:
    """Naive: it waits for each frozen host for as long as the driver does, which is two minutes."""
    found = list(opening())
    assert len(found) > 20
    assert {(name, function) for name, function, timed in found if not timed} == UNTIMED


def test_every_module_says_what_it_is() -> None:
    """All but the empty ones, which make a folder a package."""
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    assert {
        name for name, source in sources.items() if source.strip() and not ast.get_docstring(ast.parse(source))
    } == set()


# Statements ----------------------------------------------------------------------------------------------------------


def pieces() -> list[str]:
    """Each statement with its name and its comments, and the head of each file."""
    sources = (path.read_text(encoding="utf-8") for path in statements._files().values())
    return [
        piece for source in sources for piece in re.split(r"(?=^-- name:)", source, flags=re.MULTILINE) if piece.strip()
    ]


def test_every_statement_has_a_name_and_a_promise() -> None:
    for piece in pieces():
        code = [line for line in piece.splitlines() if line and not line.startswith("--")]
        if not code:
            continue  # the head of a file
        head = piece[:100]
        assert re.match(r"-- name: [a-z_]+\n-- \S", piece), f"no `-- name: words` and line of what it promises: {head}"
        assert sum(line.rstrip().endswith(";") for line in code) <= 1, f"several statements under one name: {head}"
        # A placeholder in quotes is a text that happens to look like one: silently a constant.
        assert [text for text in re.findall(r"'(?:[^']|'')*'", "\n".join(code)) if "%(" in text] == [], head


def test_a_statement_is_named_after_its_file_and_found_there() -> None:
    for stem in statements._files():
        names = list(statements._file(stem))
        assert names != [], stem
        assert [name for name in names if name != stem and not name.startswith(f"{stem}_")] == []
        assert [name for name in names if statements.home(name) != stem] == []


def test_statements_stand_in_folders_named_after_wings() -> None:
    assert {path.parent.name for path in statements._files().values()} <= set(WINGS)


# The package itself --------------------------------------------------------------------------------------------------


def in_a_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_public_name_is_one_line_for_type_checkers_and_at_run_time() -> None:
    """What `import *` gives and where each name comes from is read from the lines that type checkers read."""
    lines = [node for node in ast.parse(modules()["names"].read_text(encoding="utf-8")).body[1:]]
    assert all(isinstance(node, ast.ImportFrom) and len(node.names) == 1 for node in lines)
    typed = {node.names[0].name: node.module for node in lines if isinstance(node, ast.ImportFrom)}
    assert len(typed) == len(lines) > 100 and all(node.names[0].asname in typed for node in lines)  # type: ignore[attr-defined]
    assert pgqueue._places() == typed
    assert pgqueue.__all__ == sorted(typed) and {*typed, "__all__"} <= set(dir(pgqueue))
    assert pgqueue.schedules.__name__ == f"{typed.pop('schedules')}.schedules"
    assert all(getattr(pgqueue, name).__module__ == place for name, place in typed.items())


def test_a_star_gives_the_public_names_and_imports_no_list_of_them() -> None:
    said = in_a_process(
        "from pgqueue import *; print(*sorted(each for each in dir() if each[0] != '_')); "
        "import sys; print('pgqueue.names' in sys.modules)"
    )
    assert said == f"{' '.join(pgqueue.__all__)}\nFalse\n"


def test_the_public_names_are_there_where_no_code_can_be_read() -> None:
    said = in_a_process(
        "import pgqueue; pgqueue.PathFinder = type('Blind', (), {'find_spec': lambda *_: None}); "
        "print(pgqueue.Job, *pgqueue.__all__)"
    )
    assert said == f"{pgqueue.Job} {' '.join(pgqueue.__all__)}\n"


def test_the_package_imports_nothing_before_it_is_used() -> None:
    assert in_a_process("import pgqueue, sys; print(*[m for m in sys.modules if 'pgqueue' in m])") == "pgqueue\n"


def test_no_module_directly_in_the_package_is_named_like_a_public_function() -> None:
    """Else what `pgqueue.name` is depends on what was imported first."""
    functions = {name for name in pgqueue.__all__ if name.islower() and callable(getattr(pgqueue, name))}
    assert {"enqueue", "task"} <= functions
    assert {name.split(".")[0] for name in files()} & functions == set()


def test_a_module_is_found_as_what_it_is_and_nonsense_is_not() -> None:
    in_a_process("import pgqueue; pgqueue.errors.Error")
    with pytest.raises(AttributeError, match="'nonsense'"):
        pgqueue.nonsense  # noqa: B018


MOST_PARAMETERS = 6
# What the application gives, by name; its own values, and not services.
GIVEN_BY_NAME = {"Worker", "RetryPolicy"}


def test_no_constructor_takes_more_than_six_things() -> None:
    """What more would be wanted is one thing: the worker's state, or a part that has a name."""
    many = {
        f"{name}.{cls.name}": len(made.args.args) - 1 + len(made.args.kwonlyargs)
        for name, path in modules().items()
        for cls in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(cls, ast.ClassDef) and cls.name not in GIVEN_BY_NAME
        for made in cls.body
        if isinstance(made, ast.FunctionDef) and made.name == "__init__"
    }
    assert {name: number for name, number in many.items() if number > MOST_PARAMETERS} == {}

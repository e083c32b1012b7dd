"""Calls that look right and are wrong: everything that `import pgqueue` exports answers in its own words."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from workers import Eyes

import pgqueue
from pgqueue.errors import Error, InvalidArguments, InvalidOption

OURS = {
    "AuditEntry",
    "Bulk",
    "BulkPreview",
    "Diagnosis",
    "ErrorGroup",
    "Finding",
    "FlowHandle",
    "FlowInfo",
    "FlowNodes",
    "HistoryRow",
    "Job",
    "JobHandle",
    "JobInfo",
    "JobOutcome",
    "NewJob",
    "Node",
    "NodeInfo",
    "QueueInfo",
    "Stack",
    "Reason",
    "StagedJob",
    "Task",
    "Why",
}
"""pgqueue makes these, and no application."""
NO_OPTIONS = {"aenqueue", "aenqueue_many", "current_job", "enqueue", "enqueue_many"}
"""They take no keywords, or the keywords of the task."""
CALLED = sorted(
    name
    for name in pgqueue.__all__
    if callable(made := getattr(pgqueue, name))
    and not (isinstance(made, type) and issubclass(made, Error))
    and name not in OURS | NO_OPTIONS
)


@pgqueue.task(name="calls.plain")
def plain(number: int = 0) -> None:
    pass


anything: Any = pgqueue


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = function(*args, **kwargs)
    return asyncio.run(made) if inspect.iscoroutine(made) else made


def required(function: Callable[..., Any]) -> list[Any]:
    """Something for each parameter that must be given by position."""
    return [
        object()
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]


@pytest.mark.promise("F132")
@pytest.mark.parametrize("name", CALLED)
def test_a_misspelt_keyword_is_answered_with_the_ones_that_there_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it was a bare TypeError, or the value went somewhere else."""
    monkeypatch.setenv("PGQUEUE_DSN", "host=/nowhere")
    function = getattr(pgqueue, name)
    known = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name not in ("self", "conn")
    ]
    with pytest.raises(InvalidOption, match="no option qqq; there are"):
        called(function, *required(function), qqq=1)
    for word in known:
        misspelt = f"{word[0]}x{word[1:]}" if len(word) > 3 else None
        if misspelt is not None:
            with pytest.raises(InvalidOption, match=rf"no option {misspelt} \(did you mean \w+\?\)"):
                called(function, *required(function), **{misspelt: 1})


@pytest.mark.promise("F132")
@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [
        ("configure", "dns", "dsn"),
        ("connect", "autocomit", "autocommit"),
        ("aconnect", "aplication_name", "application_name"),
        ("Worker", "concurency", "concurrency"),
        ("find", "tsak", "task"),
        ("Retry", "countdown", "delay"),
    ],
)
def test_it_names_the_option_that_is_meant(name: str, word: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", "host=/nowhere")
    function = getattr(pgqueue, name)
    with pytest.raises(InvalidOption, match=rf"no option {word} \(did you mean {meant}\?\)"):
        called(function, *required(function), **{word: "x"})


BY_ID = ["get", "aget", "why", "awhy", "cancel", "acancel", "retry", "aretry", "discard", "adiscard"]


@pytest.mark.promise("F132")
@pytest.mark.each_value
@pytest.mark.parametrize("wrong", ["7", True, 7.0, None, [7], 2**63, b"7"], ids=repr)
@pytest.mark.parametrize("name", [*BY_ID, "result", "aresult"])
def test_what_is_no_id_is_refused(unchanged_dsn: str, name: str, wrong: Any) -> None:
    """A text was sent to the server before, and True was the job 1."""
    function = getattr(pgqueue, name)
    with psycopg.connect(unchanged_dsn) as conn, pytest.raises(InvalidOption, match="no id of a job"):
        called(function, wrong) if "result" in name else called(function, conn, wrong)


@pytest.mark.promise("F132")
def test_a_handle_is_answered_with_its_id(conn: psycopg.Connection[Any]) -> None:
    handle: Any = plain.enqueue(conn)
    for name in ("get", "cancel", "retry", "discard"):
        with pytest.raises(InvalidOption, match=r"did you mean its \.id\?"):
            getattr(pgqueue, name)(conn, handle)
    with pytest.raises(InvalidOption, match=r"did you mean \*ids\?"):
        anything.cancel(conn, [handle.id])


@pytest.mark.promise("F132")
def test_a_call_without_anything_says_what_comes_first() -> None:
    calls: list[Any] = [pgqueue.enqueue, pgqueue.aenqueue, pgqueue.enqueue_many, pgqueue.aenqueue_many]
    calls += [plain.enqueue, plain.aenqueue, plain.enqueue_many, plain.aenqueue_many]
    for call in calls:
        with pytest.raises(InvalidArguments, match="the connection of your transaction comes first"):
            called(call)
    for call in calls[:4]:
        with pytest.raises(InvalidArguments, match="the connection of your transaction comes first"):
            called(call, object())


@pytest.mark.promise("F132")
def test_one_job_or_none_is_no_batch(conn: psycopg.Connection[Any]) -> None:
    for wrong in (plain.new(), 5):
        with pytest.raises(InvalidArguments, match="enqueue_many takes several jobs"):
            anything.enqueue_many(conn, wrong)


@pytest.mark.promise("F132")
def test_schedule_is_no_method_of_a_task() -> None:
    with pytest.raises(AttributeError, match=r"task 'calls\.plain' has no 'schedule'\. Here it is @task"):
        plain.schedule(1)  # type: ignore[attr-defined]


@pytest.mark.promise("F132")
@pytest.mark.parametrize(
    "call",
    [
        lambda conn: anything.configure(dsn=5),
        lambda conn: anything.configure(notify="no"),
        lambda conn: anything.Worker(queues="mail", dsn="host=/nowhere"),
        lambda conn: anything.Worker(concurrency="5", dsn="host=/nowhere"),
        lambda conn: anything.find(conn, limit="5"),
        lambda conn: anything.find(conn, queue=5),
        lambda conn: anything.find(conn, task=plain),
        lambda conn: anything.find(conn, since="2h"),
        lambda conn: anything.audit(conn, since="2h"),
        lambda conn: anything.history(conn, until=5),
        lambda conn: anything.error_groups(conn, since=5),
        lambda conn: anything.error_groups(conn, limit="5"),
        lambda conn: anything.audit(conn, limit="5"),
        lambda conn: anything.bulks(conn, limit=True),
        lambda conn: anything.migrate(5),
        lambda conn: asyncio.run(anything.amigrate(conn)),
    ],
    ids=[
        "dsn",
        "notify",
        "queues",
        "concurrency",
        "limit",
        "queue",
        "task",
        "since",
        "record",
        "until",
        "groups",
        "most",
        "rows",
        "bulks",
        "migrate",
        "amigrate",
    ],
)
def test_a_value_of_the_wrong_type_is_refused(conn: psycopg.Connection[Any], call: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidOption):
        call(conn)


@pytest.mark.promise("F132")
async def test_an_application_migrates_from_its_loop(empty_dsn: str) -> None:
    made = await pgqueue.amigrate(empty_dsn)
    assert made and await pgqueue.amigrate(empty_dsn) == []
    eyes = Eyes(empty_dsn)
    assert eyes.one("SELECT max(version) FROM pgqueue.migration") == len(made)
    eyes.conn.close()

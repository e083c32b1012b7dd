"""Declaring tasks, the registry, and the jobs that tasks make."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest

import pgqueue
from pgqueue.client import tasks
from pgqueue.client.tasks import Task, declared, find, remote, task
from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.retry import RetryPolicy

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def own_registry() -> None:
    """Every test starts without tasks."""
    tasks.registry.clear()


def names() -> set[str]:
    return set(tasks.registry)


def charge(customer: int, note: str = "") -> str:
    return f"{customer}{note}"


async def send(job: Job, address: str) -> int:
    return len(address)


# -- Declaration -----------------------------------------------------------------------------------------------------


def test_a_bare_task_is_named_after_its_function_and_still_just_called() -> None:
    declared_task = task(charge)
    assert declared_task.name == f"{__name__}.charge"
    assert declared_task(7, note="!") == "7!"
    assert (declared_task.queue, declared_task.priority, declared_task.retry) == ("default", 5, RetryPolicy())
    assert (declared_task.is_async, declared_task.wants_job, declared_task.fn) == (False, False, charge)
    assert repr(declared_task).startswith(f"Task(name='{__name__}.charge'")


def passing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as it is often written: it knows nothing of async functions."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


async def on_loop() -> None: ...
def generates() -> Iterator[int]:
    yield 1


async def generates_on_loop() -> AsyncIterator[int]:
    yield 1


@pytest.mark.promise("F48")
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (on_loop, "on_loop is async"),
        (passing(on_loop), "on_loop is async"),
        (generates, "generates is a generator"),
        (generates_on_loop, "generates_on_loop is a generator"),
    ],
)
def test_a_decorator_that_hides_a_body_is_named_at_declaration(
    fn: Callable[..., Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not refused: the wrapper may run the body itself, as with asyncio.run."""
    task(name="hidden")(passing(fn))
    [record] = caplog.records
    assert record.getMessage().startswith(f"task hidden: a decorator hides that {says}.")


class Session:
    """What a decorator gives."""


def with_session(db, customer: int, *, note: str = "") -> int:  # type: ignore[no-untyped-def]
    return customer


def with_typed_session(db: Session, customer: int) -> int:
    return customer


def injects(fn: Callable[..., Any], *, signed: bool) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(Session(), *args, **kwargs)

    if signed:
        whole = inspect.signature(fn)
        vars(wrapper)["__signature__"] = whole.replace(parameters=list(whole.parameters.values())[1:])
    return wrapper


def injects_into_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(customer: int) -> Any:
        return fn(Session(), customer)

    return wrapper


@pytest.mark.promise("F224")
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (
            injects_into_one(with_session),
            r"the decorator around it takes \(customer: .*, and the function \(db, customer",
        ),
        (
            injects_into_one(with_typed_session),
            r"the decorator around it takes \(customer: .*, and the function \(db: .*Session",
        ),
        (
            injects(with_typed_session, signed=False),
            r"parameter db: .*Session cannot be stored: .*`__signature__` without it",
        ),
    ],
)
def test_an_argument_that_a_decorator_gives_is_no_argument_of_the_job(fn: Callable[..., Any], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        task(name="injected")(fn)


@pytest.mark.promise("F224")
@pytest.mark.parametrize("fn", [with_typed_session, with_session])
def test_a_wrapper_may_say_what_it_takes(fn: Callable[..., Any]) -> None:
    made = task(name="signed")(injects(fn, signed=True))
    assert made.new(7).args == '{"customer":7}' and made(7) == 7


@pytest.mark.promise("F224")
def test_a_private_field_of_attrs_is_no_part_of_an_argument() -> None:
    private = attrs.make_class("Private", {"_only": attrs.field(type=int)})

    def takes(given: object) -> None: ...

    for annotation in (private, list[private], dict[str, private | None]):  # type: ignore[valid-type]
        takes.__annotations__["given"] = annotation
        with pytest.raises(InvalidOption, match=r"Private\._only is not written"):
            task(name="private")(takes)


def test_a_decorator_that_hides_nothing_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    @functools.wraps(on_loop)
    async def wrapper() -> None:
        await on_loop()

    shown: list[Callable[..., Any]] = [wrapper, passing(charge), on_loop]
    for number, fn in enumerate(shown):
        task(name=f"shown{number}")(fn)
    assert caplog.records == []


def test_options_and_an_async_function_with_its_job() -> None:
    declared_task = task(name="mail.send", aliases=["mail.deliver"], queue="mail", priority=0, retry=3)(send)
    assert (declared_task.queue, declared_task.priority, declared_task.retry.attempts) == ("mail", 0, 3)
    assert (declared_task.is_async, declared_task.wants_job) == (True, True)
    assert declared_task.new("a@b").args == '{"address":"a@b"}'
    assert asyncio.run(declared_task(None, "a@b")) == 3  # type: ignore[arg-type]  # no job is needed here
    assert find("mail.send") is find("mail.deliver") is declared_task
    assert find("mail.nobody") is None
    assert declared() == [declared_task]


def test_a_retry_function() -> None:
    policy = task(name="x", retry=lambda attempt, exc: attempt * 2.0)(charge).retry
    assert policy.decide(4, OSError()) == 8.0


class Plain:
    def method(self, a: int) -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @staticmethod
    def loose(a: int) -> None: ...

    def __call__(self) -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (generator, "a generator does nothing"),
        (async_generator, "a generator does nothing"),
        (Plain, "a class is no task"),
        (Plain().method, "a bound method carries an object"),
        (Plain.of_class, "a bound method carries an object"),
        (Plain.method, "a method needs its object"),
        (Plain.__dict__["loose"], "put @staticmethod above @task"),
        (Plain.__dict__["of_class"], "put @classmethod above @task"),
        (Plain(), "a partial or other callable object"),
        (functools.partial(charge, 1), "a partial or other callable object"),
        (len, "a partial or other callable object"),
        ("billing.charge", "the options of a task are keywords"),
        (lambda: None, "a lambda has no name"),
    ],
)
def test_what_cannot_be_a_task_is_said_at_declaration(fn: Any, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        task(fn)
    assert names() == set()


def test_a_task_is_declared_once() -> None:
    with pytest.raises(InvalidOption, match=rf"it is the task '{__name__}\.charge' already"):
        task(task(charge))


def test_a_static_method_is_a_plain_function() -> None:
    assert task(Plain.loose).new(a=1).args == '{"a":1}'


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": ""}, "task name"),
        ({"name": "two words"}, "task name 'two words'"),
        ({"name": "x" * 201}, "task name"),
        ({"name": "a\nb"}, "task name"),
        ({"name": "a\u00a0b"}, "task name"),
        ({"name": 5}, "task name 5"),
        ({"aliases": ["a b"]}, "task name 'a b'"),
        ({"aliases": "old"}, r"aliases=\['old'\]"),
        ({"queue": ""}, "queue"),
        ({"queue": "x" * 41}, "queue"),
        ({"queue": "a b"}, "queue"),
        ({"queue": "mail\n"}, "queue"),
        ({"priority": -1}, "priority"),
        ({"priority": 10}, "priority 10"),
        ({"priority": True}, "priority"),
        ({"priority": "5"}, "priority '5'"),
        ({"retry": 0}, "retry"),
        ({"rate": "user"}, "rate 'user': write COUNT/PERIOD"),
        ({"speed": "high"}, "no option speed"),
    ],
)
def test_a_wrong_option_is_said_at_declaration(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        task(**options)(charge)
    assert names() == set()


def test_main_has_no_name_a_worker_could_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charge, "__module__", "__main__")
    with pytest.raises(InvalidOption, match=r"@task\(name='charge'\)"):
        task(charge)
    assert task(name="charge")(charge).name == "charge"


def test_two_functions_cannot_have_one_name() -> None:
    first = task(name="billing.charge", aliases=["billing.pay"])(charge)
    for options in ({"name": "billing.charge"}, {"name": "billing.pay"}, {"name": "x", "aliases": ["billing.pay"]}):
        with pytest.raises(InvalidOption, match=rf"is taken by {__name__}\.charge.*{__name__}\.send.*pass name="):
            task(**options)(send)
    assert names() == {"billing.charge", "billing.pay"}
    assert find("billing.pay") is first


def test_a_module_imported_again_replaces_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from pgqueue.client.tasks import task\n@task(aliases=[{}])\ndef work(): return {}\n"
    module_file = tmp_path / "reloaded_tasks.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module_file.write_text(source.format("'first'", 1))
    module = importlib.import_module("reloaded_tasks")
    assert names() == {"reloaded_tasks.work", "first"}
    module_file.write_text(source.format("'second'", 22))
    importlib.reload(module)
    assert names() == {"reloaded_tasks.work", "second"}, "an alias the module no longer gives is gone"
    assert module.work() == 22
    assert [each() for each in declared()] == [22]


# -- The jobs a task makes -------------------------------------------------------------------------------------------


def test_new_is_checked_and_complete() -> None:
    job = task(name="billing.charge", queue="billing", priority=3, retry=4)(charge).new(7)
    assert job == NewJob("billing.charge", '{"customer":7}', "billing", 3, None, None, None, None)
    for args, kwargs in ((("7",), {}), ((), {}), ((7,), {"nota": "x"})):
        with pytest.raises(InvalidArguments, match=r"task 'billing\.charge'"):
            registry_task("billing.charge").new(*args, **kwargs)


def registry_task(name: str) -> Task[..., Any]:
    found = find(name)
    assert found is not None
    return found


def test_using_changes_the_jobs_and_not_the_task() -> None:
    declared_task = task(charge)
    other = declared_task.using(queue="q", priority=0, delay=timedelta(minutes=2), retry=3, headers={"trace": "x"})
    assert other.new(1) == NewJob(f"{__name__}.charge", '{"customer":1}', "q", 0, None, 120.0, '{"trace":"x"}', 3)
    assert declared_task.new(1) == NewJob(f"{__name__}.charge", '{"customer":1}', "default", 5, None, None, None, None)
    assert find(f"{__name__}.charge") is declared_task
    assert other(1) == "1"


def test_using_twice_keeps_what_is_not_said_again() -> None:
    first = task(charge).using(delay=30, priority=1)
    assert (first.using(queue="q").delay_seconds, first.using(queue="q").priority) == (30.0, 1)
    at = first.using(run_at=NOON)
    assert (at.run_at, at.delay_seconds) == (NOON, None)
    assert (at.using(delay=0).run_at, at.using(delay=0).delay_seconds) == (None, 0.0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"run_at": NOON, "delay": 5}, "run_at or delay, not both"),
        ({"run_at": datetime(2026, 3, 1)}, "time zone"),
        ({"run_at": "2026-03-01"}, "time zone"),
        ({"delay": -1}, "delay -1"),
        ({"delay": float("nan")}, "delay nan"),
        ({"delay": timedelta(days=-1)}, "delay"),
        ({"delay": "5"}, "delay '5'"),
        ({"queue": ""}, "queue ''"),
        ({"timeout": 0}, "timeout 0"),
        ({"timeout": -1}, "timeout -1"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"timeout": float("inf")}, "timeout inf"),
        ({"timeout": timedelta(days=40_000)}, "timeout"),
        ({"timeout": "5"}, "timeout '5'"),
        ({"timeout": True}, "timeout True"),
        ({"priority": 10}, "priority 10"),
        ({"retry": 0}, "attempts 0"),
        ({"retry": RetryPolicy(fail_on=(OSError,))}, "belong to the code"),
        ({"retry": "often"}, "attempts 'often'"),
    ],
)
def test_a_wrong_option_of_using(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        task(charge).using(**options)


@pytest.mark.parametrize("headers", [{"a": NOON}, {"a": "\0"}, {1: "a"}, ["a"], "a"])
def test_headers_are_a_json_object(headers: Any) -> None:
    with pytest.raises(InvalidArguments, match=rf"task '{__name__}\.charge', headers"):
        task(charge).using(headers=headers)


def test_a_remote_task_takes_plain_keywords_and_is_not_ours() -> None:
    far = remote("billing.charge", queue="billing", priority=1)
    assert far.new(customer=7, tags=["a"]) == NewJob(
        "billing.charge", '{"customer":7,"tags":["a"]}', "billing", 1, None, None, None, None
    )
    assert far.using(delay=5).new().delay == 5
    assert names() == set()
    with pytest.raises(InvalidArguments, match="given 1 positional argument;"):
        far.new(7)
    with pytest.raises(InvalidArguments, match="needs a plain JSON value"):
        far.new(at=NOON)
    with pytest.raises(Error, match="another codebase"):
        far(customer=7)
    for name, queue, priority in (("a b", "q", 5), ("a", "", 5), ("a", "q", 10)):
        with pytest.raises(InvalidOption):
            remote(name, queue=queue, priority=priority)


# -- Through the database --------------------------------------------------------------------------------------------

ROWS: list[Any] = [(1,), {"customer": 2, "note": "x"}, (3, "y")]
STORED = [({"customer": 1},), ({"customer": 2, "note": "x"},), ({"customer": 3, "note": "y"},)]
READ = "SELECT args FROM pgqueue.job ORDER BY id"


def test_enqueue_and_enqueue_many(conn: psycopg.Connection) -> None:
    declared_task = task(charge)
    handle = declared_task.enqueue(conn, 1)
    many = declared_task.enqueue_many(conn, ROWS[1:])
    assert conn.execute(READ).fetchall() == STORED
    assert conn.execute("SELECT array_agg(id ORDER BY id) FROM pgqueue.job").fetchall() == [
        ([handle.id, *(each.id for each in many)],)
    ]
    assert declared_task.enqueue_many(conn, []) == []


async def test_aenqueue_and_aenqueue_many(aconn: psycopg.AsyncConnection) -> None:
    declared_task = task(charge)
    await declared_task.aenqueue(aconn, 1)
    await declared_task.aenqueue_many(aconn, ROWS[1:])
    assert await (await aconn.execute(READ)).fetchall() == STORED


@pytest.mark.promise("F17")
@pytest.mark.parametrize("bad", [("1",), {"customer": 1, "note": "a\0b"}, {"nota": 1}, [1], 5, None])
def test_a_bad_row_is_named_and_the_transaction_stays_usable(conn: psycopg.Connection, bad: Any) -> None:
    declared_task = task(charge)
    conn.execute("CREATE TEMP TABLE mine (x int)")
    with pytest.raises(InvalidArguments) as raised:
        declared_task.enqueue_many(conn, [*ROWS, bad])
    assert raised.value.__notes__ == ["in row 3 of the rows given (the first is 0)"]
    with pytest.raises(InvalidArguments):
        declared_task.enqueue(conn, "1")  # type: ignore[arg-type]  # refused by type checkers too
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    declared_task.enqueue(conn, 1)
    assert conn.execute(READ).fetchall() == STORED[:1]


Policy: Any = RetryPolicy
untyped: Any = task


def named(call: Callable[[], object]) -> str:
    with pytest.raises((pgqueue.Error, AttributeError)) as caught:
        call()
    return str(caught.value)


def test_words_of_other_queues_are_answered_with_ours() -> None:
    ours: Any = task(name="words.charge")(charge)
    assert "task.enqueue(conn, …)" in named(lambda: ours.delay(1))
    assert "task.using(delay=30)" in named(lambda: ours.perform_in(60, 1))
    assert "task.using(delay=30).enqueue(conn, …)" in named(lambda: ours.apply_async((1,), countdown=3))
    assert "job.enqueue(task, …)" in named(lambda: ours.s(1))
    assert named(lambda: ours.nothing) == "'Task' object has no attribute 'nothing'"
    assert not hasattr(ours, "delay") and copy.copy(ours).name == ours.name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda t: t.using(countdown=3),
            "no option countdown (did you mean delay?); there are queue, priority",
        ),
        (lambda t: t.using(que="x"), "no option que (did you mean queue?)"),
        (lambda t: t.using(zzz=1, eta=2), "no option eta (did you mean run_at?), zzz; there are"),
        (lambda t: Policy(max_attempts=3), "RetryPolicy: no option max_attempts (did you mean attempts?)"),
        (lambda t: Policy(base_delay=3), "did you mean first?"),
        (lambda t: untyped(max_retries=3), "@task: no option max_retries (did you mean retry?)"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_may_be_meant(call: Any, said: str) -> None:
    assert said in named(lambda: call(task(name="words.charge")(charge)))


@pytest.mark.parametrize("conn", [7, None, object(), 3.5])
def test_where_the_connection_is_missing_that_is_what_is_said(conn: object) -> None:
    """The arguments have moved by one, so all of them seem to be wrong."""
    ours: Any = task(name="words.charge")(charge)
    for call in (lambda: ours.enqueue(conn), lambda: pgqueue.enqueue(conn, "words.charge", customr=1)):
        with pytest.raises(pgqueue.UnsupportedConnection, match="as the first argument"):
            call()


OPTIONS: dict[str, Any] = {
    "queue": "mail", "priority": 1, "run_at": "2030-01-01T00:00:00Z", "delay": 10, "retry": 3, "headers": {"a": 1},
    "deadline": 60, "timeout": 5, "lock": "k", "limit": 3, "rate": "1/s", "unique": "k", "idempotency_key": "k",
    "countdown": 10, "eta": "2030-01-01T00:00:00Z", "max_retries": 3, "unique_key": "k", "lock_key": "k",
}  # fmt: skip


def test_of_a_task_elsewhere_a_keyword_is_an_argument_also_by_the_name_of_an_option(
    conn: psycopg.Connection[Any],
) -> None:
    """A task elsewhere may have such a parameter: nothing here can know. Where it has none, its worker says it."""
    for made in (pgqueue.enqueue(conn, "elsewhere", **OPTIONS), pgqueue.remote("elsewhere").enqueue(conn, **OPTIONS)):
        job = pgqueue.get(conn, made.id)
        assert (job.args, job.state, job.queue, job.priority) == (OPTIONS, "available", "default", 5)
    ours = task(name="words.charge")(charge)
    for name, value in OPTIONS.items():
        with pytest.raises(pgqueue.InvalidArguments, match=rf"there is no '{name}'; it takes .* task\.using\("):
            ours.codec.decode(json.dumps({"customer": 1, name: value}))


def test_an_option_that_can_be_no_argument_is_refused_with_what_to_write(conn: psycopg.Connection[Any]) -> None:
    sure: dict[str, Any] = {
        "lock": pgqueue.Lock("k"), "limit": pgqueue.Limit(3), "rate": pgqueue.Rate("1/s"),
        "retry": pgqueue.RetryPolicy(), "unique": pgqueue.Unique("k"),
        "delay": timedelta(1), "run_at": datetime(2030, 1, 1, tzinfo=UTC), "countdown": timedelta(1),
    }  # fmt: skip
    for name, value in sure.items():
        said = named(functools.partial(pgqueue.enqueue, conn, "elsewhere", **{name: value}))
        option = "delay" if name == "countdown" else name
        assert f"task.using({option}=…).enqueue(conn, …), also of a task = pgqueue.remote(name)" in said
    assert "using" not in named(lambda: pgqueue.enqueue(conn, "elsewhere", customer=timedelta(1)))


def test_a_name_that_is_declared_here_is_taken_as_that_task(conn: psycopg.Connection[Any]) -> None:
    """By its name alone an option would be taken for an argument, and each attempt would fail in the worker."""
    ours = task(name="words.charge", queue="billing", priority=2)(charge)
    for wrong in ({"customr": 1}, {"customer": 1, "queue": "mail"}):
        with pytest.raises(pgqueue.InvalidArguments):
            pgqueue.enqueue(conn, "words.charge", **wrong)
    job = pgqueue.get(conn, pgqueue.enqueue(conn, "words.charge", customer=1).id)
    assert (job.task, job.queue, job.priority) == (ours.name, "billing", 2)
    elsewhere = pgqueue.get(conn, pgqueue.enqueue(conn, "words.elsewhere", customr=1).id)
    assert (elsewhere.queue, elsewhere.priority) == ("default", 5)

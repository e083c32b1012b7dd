"""Patience: which errors are waited out, how pauses grow, and that a loop ends for the right reasons only."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg import errors

from pgqueue.database.backoff import (
    FAILED_SECONDS,
    LOST_SECONDS,
    Backoff,
    described,
    doubled,
    is_loss,
    jittered,
    one_line,
    persist,
    transient,
    wait,
)
from pgqueue.database.foreign_errors import POOLED

TRANSIENT = [
    psycopg.OperationalError("connection refused"),
    psycopg.InterfaceError("the connection is closed"),
    errors.AdminShutdown("terminating connection"),
    errors.CrashShutdown("crash"),
    errors.CannotConnectNow("starting up"),
    errors.TooManyConnections("too many"),
    errors.QueryCanceled("statement timeout"),
    errors.LockNotAvailable("lock timeout"),
    errors.DeadlockDetected("deadlock"),
    errors.SerializationFailure("serialize"),
    errors.DiskFull("full"),
    errors.OutOfMemory("memory"),
    errors.ReadOnlySqlTransaction("a standby not yet promoted"),
    errors.ObjectNotInPrerequisiteState("recovery is in progress"),
    errors.FeatureNotSupported("cached plan must not change result type"),
    errors.InvalidSqlStatementName("a pooler lost the prepared statement"),
    TimeoutError(),
    ConnectionResetError(),
    MemoryError(),
    RuntimeError("can't start new thread"),
]
FATAL = [
    errors.UndefinedTable("no table"),
    errors.UndefinedFunction("no function"),
    errors.InsufficientPrivilege("no right"),
    errors.InvalidTextRepresentation("bad value"),
    errors.CheckViolation("bad row"),
    ValueError("ours"),
    RuntimeError("ours"),
    KeyError("ours"),
]


@pytest.mark.promise("F06")
@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_what_passes_is_waited_out(error: BaseException) -> None:
    assert transient(error)


@pytest.mark.promise("F06")
@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
def test_what_does_not_pass_ends_the_worker(error: BaseException) -> None:
    assert not transient(error)


def test_pauses_grow_stay_bounded_and_begin_anew() -> None:
    backoff = Backoff(first=0.1, most=1.0)
    pauses = [backoff.pause() for _ in range(20)]
    assert 0.05 <= pauses[0] <= 0.1
    assert all(pause <= 1.0 for pause in pauses)
    assert all(pause >= 0.5 for pause in pauses[5:])
    assert len(set(pauses)) == len(pauses)  # jitter
    backoff.succeeded()
    assert backoff.pause() <= 0.1
    assert all(2.0 <= jittered(2.0) <= 4.0 for _ in range(100))


@pytest.mark.promise("F30")
@pytest.mark.parametrize("times", [1_000, 1_024, 1_025, 10_000, 10**9])
def test_a_pause_is_doubled_however_often_and_never_overflows(times: int) -> None:
    assert [doubled(0.05, few, 5.0) for few in range(9)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert doubled(0.05, times, 5.0) == 5.0


async def test_a_loop_survives_transient_errors_and_ends_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def no_sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    answers = [errors.DiskFull("full"), None, errors.DiskFull("full"), ValueError("a bug")]

    async def step() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    with pytest.raises(ValueError, match="a bug"):
        await persist(step, name="test")
    assert answers == []
    assert len(pauses) == 2 and max(pauses) <= 0.05  # the success in between began the pauses anew


@pytest.mark.promise("F181")
async def test_what_only_counts_is_tried_again_whatever_it_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    async def no_sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    answers = [*FATAL, *TRANSIENT, asyncio.CancelledError()]

    async def step() -> None:
        raise answers.pop(0)

    with pytest.raises(asyncio.CancelledError):
        await persist(step, name="test", only_counts=True)
    assert pauses[: len(FATAL)] == [FAILED_SECONDS] * len(FATAL) and max(pauses[len(FATAL) :]) <= 5.0
    told = [record for record in caplog.records if record.exc_info]
    ours = [error for error in FATAL if not isinstance(error, psycopg.Error)]  # the server's may quote a row
    assert [record.exc_info[1] for record in told if record.exc_info] == ours
    assert caplog.text.count("this failed, and is tried again later") == len(FATAL)


@pytest.mark.promise("F30")
async def test_a_step_that_was_answered_nothing_starts_no_pauses_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: each step that returns does. Then a fetch that fails, and waits for a wake in between, never backs off."""
    pauses: list[float] = []

    async def no_sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    answered, rounds = 0, 0

    async def step() -> None:
        nonlocal answered, rounds
        rounds += 1
        if rounds == 31:
            answered += 1
        elif rounds % 2:
            raise errors.DiskFull("full")

    await persist(step, name="test", until=lambda: rounds == 33, answers=lambda: answered)
    assert len(pauses) == 16 and pauses[13] >= 2.5 and pauses[14] >= 2.5 and pauses[15] <= 0.05


@pytest.mark.promise("F30")
async def test_a_lost_session_is_waited_for_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    async def no_sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)

    async def step() -> None:
        raise psycopg.OperationalError("connection refused")

    await persist(step, name="test", until=lambda: len(pauses) == 20)
    assert set(pauses) == {LOST_SECONDS} and caplog.records == []


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (psycopg.OperationalError("connection refused"), True),
        (psycopg.InterfaceError("the connection is closed"), True),
        (ConnectionResetError("reset"), True),
        (TimeoutError(), True),
        (errors.AdminShutdown("terminating"), True),
        (errors.CannotConnectNow("starting up"), True),
        (errors.TooManyConnections("too many"), True),
        (errors.ConnectionFailure("a pooler's"), True),
        (errors.DeadlockDetected("deadlock"), False),
        (errors.QueryCanceled("statement timeout"), False),
        (errors.DiskFull("full"), False),
        (errors.ReadOnlySqlTransaction("a standby"), True),
        (errors.UndefinedTable("no table"), False),
        (ValueError("ours"), False),
    ],
)
def test_a_lost_connection_is_told_from_an_answer(error: BaseException, lost: bool) -> None:
    assert is_loss(error) is lost
    assert one_line(error) and "\n" not in one_line(error)


async def test_a_loop_ends_when_told_or_cancelled() -> None:
    rounds = 0

    async def step() -> None:
        nonlocal rounds
        rounds += 1
        await asyncio.sleep(0)

    await persist(step, name="test", until=lambda: rounds == 3)
    assert rounds == 3
    task = asyncio.ensure_future(persist(step, name="test"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_waiting_says_whether_the_event_came_and_never_clears_it() -> None:
    event = asyncio.Event()
    assert not await wait(event, 0.0)
    assert not await wait(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait(event, None)
    assert event.is_set()
    assert await wait(event, 0.0)


def test_the_setting_for_a_pooler_that_forgets_prepared_statements_is_named_in_every_line() -> None:
    """All services of a worker say the same, again and again: `it does not exist` helps no reader of a log."""
    for error in (errors.DuplicatePreparedStatement("it exists"), errors.InvalidSqlStatementName("there is none")):
        assert described(error) == f"{error}. {POOLED}" and "PGQUEUE_PREPARE=off" in POOLED
    assert described(errors.DuplicateTable("it exists")) == "it exists"


async def test_a_loop_says_it(caplog: pytest.LogCaptureFixture) -> None:
    tries = 0

    async def step() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise errors.InvalidSqlStatementName("prepared statement does not exist")

    await persist(step, name="fetch", until=lambda: tries == 2)
    assert "fetch: prepared statement does not exist. A pooler is in between" in caplog.text

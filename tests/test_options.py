"""An option that there is not gets an answer that names the one that may be meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.admin import limits, locks, workers
from pgqueue.client import schedules


@pytest.mark.promise("F75")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: pgqueue.Lock("k", limt=3), r"Lock: no option limt \(did you mean limit\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Limit(3, nam="x"), r"Limit: no option nam \(did you mean name\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Rate("1/s", brst=1), r"Rate: no option brst \(did you mean burst\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Unique("k", ttl=3), "Unique: no option ttl; there are key, hold"),  # type: ignore[call-arg]
        (lambda: pgqueue.Cron("* * * * *", timezone="UTC"), r"timezone \(did you mean tz\?\)"),  # type: ignore[call-arg]
        (lambda: schedules.pause(5, "x", actr="ann"), r"pause: no option actr \(did you mean actor\?\)"),  # type: ignore[call-arg]
        (lambda: locks.release(5, "k", actr="ann"), r"release: no option actr \(did you mean actor\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Every(minutes=5), "Every: no option minutes; there are seconds, catch_up"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_option_names_those_that_there_are(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(pgqueue.InvalidOption, match=why):
        make()


@pytest.mark.parametrize(
    "cls", [pgqueue.Lock, pgqueue.Limit, pgqueue.Rate, pgqueue.Unique, pgqueue.Cron, pgqueue.Every]
)
def test_what_is_missing_or_too_much_is_pythons_own_error(cls: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required"):
        cls()
    assert "self" not in inspect.signature(cls).parameters
    assert "options" not in inspect.signature(cls).parameters


def unconnected() -> psycopg.Connection[Any]:
    """A connection that never came to be."""
    return psycopg.Connection(psycopg.pq.PGconn.connect_start(b"host=/nowhere"))


TEXTS: dict[str, Callable[[Any, str], Any]] = {
    "cancel": lambda conn, odd: pgqueue.cancel(conn, task=odd),
    "retry": lambda conn, odd: pgqueue.retry(conn, task=odd),
    "discard": lambda conn, odd: pgqueue.discard(conn, task=odd),
    "bulk": lambda conn, odd: pgqueue.bulk(conn, "cancel", task=odd),
    "preview_bulk": lambda conn, odd: pgqueue.preview_bulk(conn, "cancel", task=odd),
    "find": lambda conn, odd: pgqueue.find(conn, key=odd),
    "audit": lambda conn, odd: pgqueue.audit(conn, actor=odd),
    "audit of an action": lambda conn, odd: pgqueue.audit(conn, action=odd),
    "history": lambda conn, odd: pgqueue.history(conn, queue=odd),
    "history of a task": lambda conn, odd: pgqueue.history(conn, task=odd),
    "error_groups": lambda conn, odd: pgqueue.error_groups(conn, queue=odd),
    "error_groups of a task": lambda conn, odd: pgqueue.error_groups(conn, task=odd),
    "locks": lambda conn, odd: locks.locks(conn, odd),
    "workers": lambda conn, odd: workers.workers(conn, host=odd),
    "tell": lambda conn, odd: workers.tell(conn, "quiet", host=odd),
    "change_rate": lambda conn, odd: limits.change_rate(conn, odd, "1/s"),
    "schedules.pause": lambda conn, odd: schedules.pause(conn, odd),
    "schedules.run": lambda conn, odd: schedules.run(conn, odd),
    "schedules.remove": lambda conn, odd: schedules.remove(conn, odd),
}


@pytest.mark.promise("F75")
@pytest.mark.parametrize("odd", ["a\0b", "\ud800"], ids=["NUL", "surrogate"])
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_text_for_postgresql_is_refused_before_anything_is_sent(name: str, odd: str) -> None:
    """asyncpg sends a NUL, and the server ends the transaction of the caller. This connection can send nothing."""
    with pytest.raises(pgqueue.InvalidOption, match="has no NUL and no lone surrogate"):
        TEXTS[name](unconnected(), odd)


@pytest.mark.promise("F75")
@pytest.mark.parametrize("act", ["cancel", "retry", "discard"])
def test_a_filter_by_task_is_no_longer_than_a_task_is_named(act: str) -> None:
    """Else an operation keeps a filter of any size, which fits no job, and shows it in each list."""
    for call in (pgqueue.bulk, pgqueue.preview_bulk):
        with pytest.raises(pgqueue.InvalidOption, match="200 characters at most"):
            call(unconnected(), act, task="x" * 201)
    with pytest.raises(psycopg.OperationalError):
        pgqueue.preview_bulk(unconnected(), act, task="x" * 200)

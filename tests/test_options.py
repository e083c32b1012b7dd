"""What a lock may be, and the key it makes of a call."""

from __future__ import annotations

from datetime import date
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import pytest
from workers import Eyes

import pgqueue
from pgqueue import InvalidArguments, InvalidOption, Lock, remote, task


class Side(Enum):
    LEFT = "left"


@task(name="options.move", lock="account:{account}")
def move(account: int | None, cents: int = 5) -> None: ...


@task(name="options.plain")
def plain(account: int, side: Side = Side.LEFT, day: date | None = None, name: str = "x") -> None: ...


def key(lock: Any, *args: Any, **kwargs: Any) -> str | None:
    return plain.using(lock=lock).new(*args, **kwargs).lock_key


def test_a_template_is_filled_with_the_arguments_of_the_call() -> None:
    new = move.new(7)
    assert (new.lock_key, new.lock_limit, new.on_locked) == ("account:7", 1, "wait")
    assert move.new(account=8, cents=1).lock_key == "account:8"
    assert key("{account}/{side}/{name}", 1) == "1/left/x"
    assert key("{day}:{{{account}}}", 1, day=date(2026, 1, 2)) == "2026-01-02:{1}"
    assert key("everything", 1) == "everything"


def test_a_function_is_given_the_parameters_it_names() -> None:
    assert key(lambda account: f"a{account}", 1, name="z") == "a1"
    assert key(lambda name, account: f"{name}{account}", 1, name="z") == "z1"
    assert key(lambda **every: ",".join(sorted(every)), 1) == "account,day,name,side"
    assert key(lambda account, other="none": f"{account}{other}", 1) == "1none"


def test_none_means_no_lock() -> None:
    new = move.new(None)
    assert (new.lock_key, new.lock_limit, new.on_locked) == (None, None, None)
    assert key(lambda account: None, 1) is None
    assert key("{day}", 1) is None


def test_using_replaces_the_lock_for_some_jobs() -> None:
    new = move.using(lock=Lock("other:{account}", limit=3, on_locked="once")).new(1)
    assert (new.lock_key, new.lock_limit, new.on_locked) == ("other:1", 3, "once")
    assert move.using(priority=0).new(1).lock_key == "account:1"
    assert remote("elsewhere").using(lock="customer:{customer}").new(customer=3).lock_key == "customer:3"


@pytest.mark.parametrize(
    ("lock", "why"),
    [
        ("{acount}", "no parameter 'acount'"),
        (lambda acount: "x", "no parameter 'acount'"),
        ("{account.id}", "write parameters as"),
        ("{account:>5}", "write parameters as"),
        ("{0}", "write parameters as"),
        ("{account", "expected '}'"),
        (lambda *args: "x", "called with keywords"),
    ],
)
def test_a_key_is_checked_against_the_signature_at_declaration(lock: Any, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        plain.using(lock=lock)


@pytest.mark.parametrize(
    "options", [{"limit": 0}, {"limit": True}, {"limit": 1.5}, {"limit": 1 << 31}, {"on_locked": "later"}, {"key": 7}]
)
def test_a_lock_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Lock(**{"key": "k", **options})


@pytest.mark.parametrize("value", ["", "x" * 501, "a\0b", "\ud800", 7])
def test_a_key_that_cannot_be_stored_is_refused_at_enqueue(value: Any) -> None:
    with pytest.raises(InvalidArguments):
        key(lambda account: value, 1)
    assert key(lambda account: "é" * 250, 1) == "é" * 250


def test_a_value_without_a_json_form_needs_a_function() -> None:
    with pytest.raises(InvalidArguments):
        move.new(UUID(int=1))  # type: ignore[arg-type]


def test_a_task_with_a_lock_is_cancelled_when_its_worker_is_cut_off_unless_it_says_otherwise() -> None:
    keeps = task(name="options.keeps", lock="k", on_lost_lease="keep")

    @keeps
    def kept() -> None: ...

    assert (move.on_lost_lease, plain.on_lost_lease, kept.on_lost_lease) == ("cancel", "keep", "keep")


def test_the_row_has_the_key_however_it_was_enqueued(conn: psycopg.Connection, eyes: Eyes) -> None:
    odd = plain.using(lock=Lock(lambda account: f"a\n{account}'\"", limit=2, on_locked="skip"))
    move.enqueue(conn, 1)
    move.using(delay=60).enqueue(conn, 2)
    odd.enqueue(conn, 3)
    pgqueue.enqueue_many(conn, [odd.new(4), plain.new(5), move.using(delay=60).new(6), move.new(None)])
    conn.execute("SELECT pgqueue.enqueue('sql', lock_key => 'k')")
    conn.execute("INSERT INTO pgqueue.job (task, lock_key) VALUES ('plain sql', 'k')")
    conn.commit()
    assert eyes.all("SELECT lock_key, lock_limit, on_locked, state FROM pgqueue.job ORDER BY id") == [
        ("account:1", 1, "wait", "available"),
        ("account:2", 1, "wait", "scheduled"),
        ("a\n3'\"", 2, "skip", "available"),
        ("a\n4'\"", 2, "skip", "available"),
        (None, None, None, "available"),
        ("account:6", 1, "wait", "scheduled"),
        (None, None, None, "available"),
        ("k", None, None, "available"),
        ("k", None, None, "available"),
    ]


@pytest.mark.parametrize(
    "values", ["lock_key => ''", "lock_key => repeat('x', 501)", "lock_key => repeat('x', 501), run_at => 'tomorrow'"]
)
def test_sql_refuses_a_key_that_fits_no_index(conn: psycopg.Connection, values: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="1 to 500"):
        conn.execute(f"SELECT pgqueue.enqueue('x', {values})".encode())


@pytest.mark.parametrize("state", ["available", "scheduled"])
def test_the_tables_refuse_a_key_that_fits_no_index(conn: psycopg.Connection, state: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute(
            "INSERT INTO pgqueue.job (state, task, run_at, lock_key) VALUES (%s, 'x', pgqueue.now(), %s)",
            [state, "x" * 501],
        )

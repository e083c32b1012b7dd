"""What a lock, a limit and a rate may be, and the keys they make of a call."""

from __future__ import annotations

from datetime import date
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import pytest
from workers import Eyes

import pgqueue
from pgqueue import InvalidArguments, InvalidOption, Limit, Lock, Rate, remote, task
from pgqueue.jobs.values import parse_rate


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


async def later(account: int) -> str:
    return "x"


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
        (later, "called for its answer: use a plain def"),
        (lambda account: (yield "x"), "called for its answer: use a plain def"),
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


# Limits and rates ----------------------------------------------------------------------------------------------------


@task(name="options.slow", limit=5, rate="100/minute")
def slow(account: int | None = None) -> None: ...


@task(
    name="options.shared", limit=Limit(2, name="api"), rate=Rate("5/10s", key="account:{account}", name="bank", burst=3)
)
def shared(account: int | None = None) -> None: ...


def test_a_limit_and_a_rate_have_the_name_of_their_task_or_their_own() -> None:
    new = slow.new(7)
    assert (new.limit_key, new.rate_key) == ("options.slow", "options.slow")
    new = shared.new(7)
    assert (new.limit_key, new.rate_key) == ("api", "bank:account:7")
    assert (plain.new(7).limit_key, plain.new(7).rate_key) == (None, None)
    assert slow.using(priority=0, lock="x").new(7).rate_key == "options.slow"


def test_a_key_that_is_none_means_no_rate() -> None:
    assert (shared.new(None).limit_key, shared.new(None).rate_key) == ("api", None)

    @task(name="options.by_function", rate=Rate("1/s", key=lambda account: account and f"a{account}"))
    def by_function(account: int | None) -> None: ...

    assert (by_function.new(None).rate_key, by_function.new(3).rate_key) == (None, "options.by_function:a3")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("100/minute", (100, 60.0)), ("5/10s", (5, 10.0)), ("1/second", (1, 1.0)), ("3/ 2 hours", (3, 7200.0)),
        ("7/d", (7, 86400.0)), ("2/1.5m", (2, 90.0)), ("9 / day", (9, 86400.0)), ("1000000/s", (1_000_000, 1.0)),
    ],
)  # fmt: skip
def test_a_rate_is_a_count_and_a_period(text: str, what: tuple[int, float]) -> None:
    assert parse_rate(text) == what
    assert (Rate(text).count, Rate(text).period) == what


@pytest.mark.parametrize(
    "text",
    ["", "often", "0/s", "5", "5/", "/s", "5/0s", "5/0.5s", "-1/s", "5/week", "5/s/s", "5/1e3s", "1.5/s", "1000001/s"],
)
def test_a_rate_that_cannot_work_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"COUNT/PERIOD|use a count"):
        Rate(text)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "5", None, 1 << 31])
def test_a_limit_that_cannot_work_is_refused(n: Any) -> None:
    with pytest.raises(InvalidOption):
        Limit(n)


@pytest.mark.parametrize("name", ["", "a b", "é" * 101, "a\n", "\ud800", 7])
def test_a_name_that_cannot_be_is_refused(name: Any) -> None:
    with pytest.raises(InvalidOption, match="name"):
        Limit(1, name=name)
    with pytest.raises(InvalidOption, match="name"):
        Rate("1/s", name=name)


@pytest.mark.parametrize("options", [{"burst": 0}, {"burst": True}, {"name": "a:b"}, {"key": 7}, {"rate": 5}])
def test_options_of_a_rate_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Rate(**{"rate": "1/s", **options})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("options.x", {"rate": Rate("1/s", key="{acount}")}),
        ("options.x", {"rate": 5}),
        ("options.x", {"limit": "5"}),
        ("options:x", {"rate": "1/s"}),
        ("é" * 101, {"limit": 1}),
    ],
)
def test_limit_and_rate_are_checked_at_declaration(name: str, options: Any) -> None:
    def fn(account: int) -> None: ...

    with pytest.raises(InvalidOption):
        task(name=name, **options)(fn)


@pytest.mark.parametrize("value", ["", "x" * 486, "a\0b", "\ud800", 7])
def test_the_key_of_a_rate_that_cannot_be_stored_is_refused_at_enqueue(value: Any) -> None:
    @task(name="options.stored", rate=Rate("1/s", key=lambda account: value))
    def stored(account: int) -> None: ...

    with pytest.raises(InvalidArguments, match=r"task 'options\.stored': rate key"):
        stored.new(1)


def test_the_key_of_a_rate_has_500_bytes_with_its_name() -> None:
    @task(name="options.long", rate=Rate("1/s", key="{key}"))
    def long(key: str) -> None: ...

    assert len(long.new("x" * 487).rate_key or "") == 500


def test_the_row_has_limit_and_rate_however_it_was_enqueued(conn: psycopg.Connection, eyes: Eyes) -> None:
    odd = plain.using(lock="k")
    both = [shared.new(4), odd.new(5), slow.using(delay=60).new(6), shared.new(None)]
    slow.enqueue(conn, 1)
    shared.using(delay=60).enqueue(conn, 2)
    shared.using(unique="u:{account}").enqueue(conn, 3)
    shared.using(unique="u:{account}").enqueue(conn, 3)
    pgqueue.enqueue_many(conn, both)
    pgqueue.enqueue_many(conn, [slow.using(idempotency_key="i").new(7), *both[:1]])
    conn.execute("SELECT pgqueue.enqueue('options.slow')")
    conn.execute("INSERT INTO pgqueue.job (task) VALUES ('options.slow')")
    conn.commit()
    own, bank = ("options.slow", "options.slow"), ("api", "bank:account:4")
    assert eyes.all("SELECT limit_key, rate_key FROM pgqueue.job ORDER BY id") == [
        own, ("api", "bank:account:2"), ("api", "bank:account:3"), bank, (None, None), own, ("api", None), own, bank,
        (None, None), (None, None),
    ]  # fmt: skip


def test_a_replaced_job_has_the_keys_of_the_one_that_replaced_it(conn: psycopg.Connection, eyes: Eyes) -> None:
    unique = pgqueue.Unique("r", on_duplicate="replace")
    slow.using(unique=unique).enqueue(conn, 1)
    shared.using(unique=unique).enqueue(conn, 2)
    plain.using(unique=unique, delay=60).enqueue(conn, 2)
    shared.using(unique=unique, delay=60).enqueue(conn, 3)
    conn.commit()
    assert eyes.all("SELECT limit_key, rate_key, state FROM pgqueue.job") == [("api", "bank:account:3", "scheduled")]

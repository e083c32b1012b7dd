"""A flow where it is enqueued: which rows there are, that there are all or none, and what a transaction is worth after
a refusal. On real connections, without a worker.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from driver_kinds import ASYNC, KINDS, drive
from psycopg import errors
from roles import Role
from roles import role as role
from workers import Eyes

import pgqueue
from pgqueue import DuplicateJob, Flow, InvalidOption, NewJob, PayloadTooLarge, SchemaMissing
from pgqueue.client import flow_enqueue, job_parameters
from pgqueue.client.observers import Sending, observers

Conn = psycopg.Connection[Any]

step = pgqueue.remote("step")
COUNT = (
    "SELECT (SELECT count(*) FROM pgqueue.job), (SELECT count(*) FROM pgqueue.flow), "
    "(SELECT count(*) FROM pgqueue.node), (SELECT count(*) FROM pgqueue.unique_key)"
)


def steps(number: int, **arguments: Any) -> list[NewJob[Any]]:
    return [step.new(n=n, **arguments) for n in range(number)]


def counts(conn: Conn) -> tuple[int, ...]:
    return tuple(conn.execute(COUNT).fetchone() or ())


def order(flow: Flow) -> Flow:
    """That of the head of docs/flows.md."""
    paid = flow.add(step.new(n=0), name="paid")
    picked = flow.add_many(steps(3), after=[paid], name="picked")
    sent = flow.add(step.new(parcels=picked.result, receipt=paid.result))
    flow.add(step.new(), after=[sent.failed])
    flow.add(step.new(), after=[sent.ended])
    return flow


# The rows ------------------------------------------------------------------------------------------------------------


def test_each_job_has_its_node_and_what_waits_is_blocked(conn: Conn) -> None:
    flow = order(Flow("order 7"))
    handle = flow.enqueue(conn)
    base = handle.id << 20
    rows = conn.execute("SELECT id, state, node, key FROM pgqueue.job ORDER BY id").fetchall()
    ids = [job.id for node in flow.nodes for job in handle.jobs(node)]
    assert [row[0] for row in rows] == ids == sorted(ids)
    assert [row[1:] for row in rows] == [
        ("available", base | 1, None),
        *[("blocked", -(base | 2), f"node:{base | 1}")] * 3,
        ("blocked", -(base | 3), f"node:{base | 2}"),
        ("blocked", -(base | 4), f"node:{base | 3}"),
        ("blocked", -(base | 5), f"node:{base | 3}"),
    ]
    assert conn.execute(
        "SELECT id, name, enqueued_at = (SELECT min(enqueued_at) FROM pgqueue.job) FROM pgqueue.flow"
    ).fetchall() == [(handle.id, "order 7", True)]
    columns = "id - %s, name, after, after_end, after_failure, results"
    nodes = conn.execute(f"SELECT {columns} FROM pgqueue.node ORDER BY id".encode(), [base]).fetchall()  # noqa: S608
    assert nodes == [
        (1, "paid", [], [], [], None),
        (2, "picked", [base | 1], [], [], None),
        (
            3,
            None,
            [base | 1, base | 2],
            [],
            [],
            {"parcels": {"node": base | 2, "many": True}, "receipt": {"node": base | 1}},
        ),
        (4, None, [], [], [base | 3], None),
        (5, None, [], [base | 3], [], None),
    ]


def test_a_job_keeps_what_its_task_says_and_a_delay_of_one_that_waits_counts_from_its_release(conn: Conn) -> None:
    flow = Flow("order 7")
    said = step.using(
        queue="slow", priority=2, headers={"a": 1}, retry=3, lock="l", rate="5/minute", unique="u", delay=60
    )
    first = flow.add(said.new(n=1))
    flow.add(said.using(unique="v").new(n=2), after=[first])
    at = datetime(2040, 1, 1, tzinfo=UTC)
    flow.add(step.using(run_at=at, deadline=at, idempotency_key="i").new(), after=[first])
    flow.enqueue(conn)
    rows = conn.execute(
        "SELECT state, args, queue, priority, rank, headers, max_attempts, lock_key, rate_key, unique_key, "
        "idempotency_key, run_at, deadline, run_at > now() FROM pgqueue.job ORDER BY id"
    ).fetchall()
    same = ("slow", 2, 5)
    assert [(row[0], row[1], *row[2:5]) for row in rows[:2]] == [
        ("scheduled", {"n": 1}, *same),
        ("blocked", {"n": 2}, *same),
    ]
    assert [row[5:11] for row in rows[:2]] == [
        ({"a": 1}, 3, "l", "step", "u", None),
        ({"a": 1, "pgqueue:delay": 60.0}, 3, "l", "step", "v", None),
    ]
    assert [row[11:] for row in rows[1:]] == [(None, None, None), (at, at, True)]
    assert rows[0][13]
    assert rows[2][10] == "i"
    assert conn.execute("SELECT key FROM pgqueue.unique_key ORDER BY 1").fetchall() == [
        ("idempotency:i",),
        ("unique:u",),
        ("unique:v",),
    ]


def test_a_node_without_a_name_that_waits_for_nothing_needs_no_row(conn: Conn) -> None:
    flow = Flow("order 7")
    flow.add_many(steps(3))
    flow.enqueue(conn)
    assert counts(conn) == (3, 1, 0, 0)


def test_a_flow_without_jobs_is_a_flow(conn: Conn) -> None:
    flow = Flow("nothing to do")
    empty = flow.add_many(list[NewJob[Any]](), name="picked")
    assert flow.enqueue(conn).jobs(empty) == []
    Flow("not a node").enqueue(conn)
    assert counts(conn) == (0, 2, 1, 0)


def test_a_handle_knows_the_nodes_of_its_flow_only(conn: Conn) -> None:
    flow, other = Flow("order 7"), Flow("order 8").add(step.new())
    paid, picked = flow.add(step.new()), flow.add_many(steps(2))
    handle = flow.enqueue(conn)
    assert [job.info(conn).args for job in handle.jobs(picked)] == [{"n": 0}, {"n": 1}]
    assert [job.info(conn).state for job in handle.jobs(paid)] == ["available"]
    with pytest.raises(InvalidOption, match="node 1 of flow 'order 8'> is no node of it"):
        handle.jobs(other)


def test_workers_hear_of_the_jobs_that_may_run_and_of_no_other(conn: Conn, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as listening:
        for channel in ("a", "b", "c", ":scheduled"):
            listening.execute(f'LISTEN "pgqueue.{channel}"'.encode())
        flow = Flow("order 7")
        first = flow.add_many([step.using(queue="a").new(), step.using(queue="a").new(), step.using(queue="b").new()])
        flow.add(step.using(queue="c").new(), after=[first])
        flow.add(step.using(delay=60).new())
        flow.enqueue(conn)
        conn.commit()
        heard = sorted(note.channel for note in listening.notifies(timeout=5, stop_after=3))
    assert heard == ["pgqueue.:scheduled", "pgqueue.a", "pgqueue.b"]


def test_the_releaser_hears_of_a_job_that_waits_for_what_cannot_fail(conn: Conn, dsn: str) -> None:
    """Naive: no job ends, so only the sweep finds it."""
    with psycopg.connect(dsn, autocommit=True) as listening:
        listening.execute('LISTEN "pgqueue.:control"')
        flow = Flow("order 7")
        first, empty = flow.add(step.new()), flow.add_many(list[NewJob[Any]]())
        flow.add(step.new(), after=[empty.failed, first])
        later = flow.add(step.new())
        flow.add(step.new(), after=[empty.failed, later])  # it watches `later`, which ends
        handle = flow.enqueue(conn)
        conn.commit()
        heard = [note.payload for note in listening.notifies(timeout=5, stop_after=1)]
        assert heard == [f"node:{handle.id << 20 | empty.number}"]
        conn.execute("NOTIFY \"pgqueue.:control\", 'end'")
        conn.commit()
        assert [note.payload for note in listening.notifies(timeout=5, stop_after=1)] == ["end"]


def test_observers_are_told_and_what_they_put_in_is_sent(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sending] = []

    class Traces:
        def enqueuing(self, sending: Sending) -> Any:
            sending.jobs = [
                pgqueue.remote("step").using(headers={"trace": n}).new() for n, _ in enumerate(sending.jobs)
            ]
            told.append(sending)
            return lambda error: None

    monkeypatch.setattr("pgqueue.client.observers.observers", observers)
    observers.append(Traces())  # type: ignore[arg-type]  # it is told of enqueues only
    try:
        handle = order(Flow("order 7")).enqueue(conn)
    finally:
        observers.clear()
    rows = conn.execute("SELECT id, (headers ->> 'trace')::int FROM pgqueue.job ORDER BY id").fetchall()
    assert [row[1] for row in rows] == list(range(7))
    assert [job.id for job in told[0].handles] == [row[0] for row in rows] == list(handle._ids)


# All or nothing ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F386")
def test_a_flow_is_there_after_the_commit_of_its_transaction_and_not_after_its_rollback(conn: Conn, eyes: Eyes) -> None:
    order(Flow("order 7")).enqueue(conn)
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 0
    conn.rollback()
    assert counts(conn) == (0, 0, 0, 0)
    order(Flow("order 7")).enqueue(conn)
    conn.commit()
    assert eyes.all("SELECT count(*) FROM pgqueue.job") == [(7,)]


@pytest.mark.promise("F386")
@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("duplicate", ["return", "raise", "replace"])
def test_if_a_key_is_held_elsewhere_nothing_is_written_and_the_transaction_stays_usable(
    dsn: str, eyes: Eyes, autocommit: bool, duplicate: Any
) -> None:
    held = step.using(unique=pgqueue.Unique("order:{order}", on_duplicate=duplicate))
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        there = pgqueue.enqueue(conn, held, order=7)
        flow = Flow("order 7")
        first = flow.add(step.using(unique="free").new())
        flow.add_many([held.new(order=6), held.new(order=7)], after=[first], name="picked")
        with pytest.raises(
            DuplicateJob, match=rf"node 2 \('picked'\) of flow 'order 7': job {there.id} has the unique key"
        ) as e:
            flow.enqueue(conn)
        assert e.value.existing == there.id
        assert counts(conn) == (1, 0, 0, 1)
        pgqueue.cancel(conn, there.id)
        handle = flow.enqueue(conn)  # the same value, once the key is free
        conn.commit()
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE node IS NOT NULL") == 3
    assert eyes.one("SELECT id FROM pgqueue.flow") == handle.id


def test_a_naive_enqueue_of_job_by_job_leaves_half_a_flow(conn: Conn) -> None:
    """The naive version: what was written before the duplicate stays."""
    held = step.using(unique=pgqueue.Unique("k", on_duplicate="raise"))
    pgqueue.enqueue(conn, held)
    with pytest.raises(DuplicateJob):
        pgqueue.enqueue_many(conn, [step.new(), held.new()])
    assert counts(conn)[0] == 2


def test_one_key_of_two_jobs_of_the_flow_is_refused_before_anything_is_sent(conn: Conn) -> None:
    flow = Flow("order 7")
    flow.add(step.using(idempotency_key="k").new(), name="paid")
    flow.add_many([step.new(), step.using(idempotency_key="k").new()])
    with pytest.raises(
        InvalidOption, match=r"two jobs of a flow have the idempotency key 'k': one of <node 1 \('paid'\)"
    ):
        flow.enqueue(conn)
    assert conn.info.transaction_status.name == "IDLE"


def test_a_flow_is_enqueued_once_and_takes_no_more_nodes(conn: Conn) -> None:
    flow = order(Flow("order 7"))
    handle = flow.enqueue(conn)
    for act in (lambda: flow.enqueue(conn), lambda: flow.add(step.new()), lambda: flow.add_many(steps(2))):
        with pytest.raises(InvalidOption, match=f"flow 'order 7': .*: it was enqueued already, as flow {handle.id}"):
            act()
    with pytest.raises(InvalidOption, match="is a node of another flow"):
        Flow("order 8").add(step.new(), after=[flow.nodes[0]])


def test_what_a_statement_cannot_hold_is_refused_with_the_flow(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_parameters, "_MOST_CHARACTERS", 1000)
    flow = Flow("order 7")
    flow.add_many(steps(3, text="x" * 400))
    with pytest.raises(PayloadTooLarge, match=r"flow 'order 7': 1,\d+ characters in one batch, the limit is 1,000"):
        flow.enqueue(conn)
    assert conn.info.transaction_status.name == "IDLE"


def test_more_than_the_nodes_may_have_is_refused_before_anything_is_sent(
    conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the server refuses it, and the application's transaction has failed."""
    flow = order(Flow("order 7"))
    monkeypatch.setattr(flow_enqueue, "NODES_BYTES", 300)
    with pytest.raises(PayloadTooLarge, match=r"flow 'order 7': \d+ bytes of names of nodes .* the limit is 300; jobs"):
        flow.enqueue(conn)
    assert conn.info.transaction_status.name == "IDLE"
    monkeypatch.undo()
    flow.enqueue(conn)


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("waits_for", [1, 9, 99, 999])
def test_nodes_take_no_more_room_than_is_counted(
    conn: Conn, monkeypatch: pytest.MonkeyPatch, waits_for: int, takes: bool
) -> None:
    """Naive: the length of the text. Short numbers take several times as much in jsonb."""
    flow = Flow("large")
    parts = [flow.add(step.new()) for _ in range(waits_for)]
    for _ in range(20):
        new = step.new(**{f"p{part.number}": part.result for part in parts}) if takes else step.new()
        flow.add(new, after=parts, name=f"node {len(flow.nodes)}")
    jobs = [job for node in flow.nodes for job in node.jobs]

    def statement() -> Any:
        return flow_enqueue.statement("large", flow.nodes, jobs, schema="pgqueue", notify=True)

    [size] = conn.execute("SELECT pg_column_size(%s::text::jsonb)", [statement().params["nodes"]]).fetchone() or (0,)
    monkeypatch.setattr(flow_enqueue, "NODES_BYTES", size)
    with pytest.raises(PayloadTooLarge):
        statement()


def test_without_a_schema_it_says_so(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as conn, pytest.raises(SchemaMissing):
        order(Flow("order 7")).enqueue(conn)


# The door ------------------------------------------------------------------------------------------------------------

JOB = (
    "ROW('t', '{{}}', {queue}, {priority}, NULL, NULL, {run_at}, NULL, {lock}, NULL, NULL, NULL, NULL, {unique}, NULL, "
    "'live', 0, true)::pgqueue.keyed_job"
)
PLAIN = {"queue": "'q'", "priority": "5", "run_at": "NULL", "lock": "NULL", "unique": "NULL"}


def call(nodes: str = "[]", numbers: str = "{1,2}", name: str = "'f'", **job: str) -> bytes:
    row = JOB.format(**PLAIN | job)
    return f"SELECT * FROM pgqueue.enqueue_flow({name}, '{nodes}', '{numbers}', ARRAY[{row}, {row}])".encode()  # noqa: S608


def node(number: object, **said: object) -> str:
    return json.dumps([{"number": number, "name": None, "after": [], "after_end": [], "after_failure": []} | said])


WRONG = {
    "no name": call(name="NULL"),
    "long name": call(name="repeat('x', 801)"),
    "fewer numbers": call(numbers="{1}"),
    "number 0": call(numbers="{0,1}"),
    "no number": call(numbers="{NULL,1}"),
    "number of another flow": call(numbers="{1,1048576}"),
    "node 0": call(node(0)),
    "node without number": call(node(None)),
    "waits for itself": call(node(2, after=[2])),
    "waits for a later node": call(node(1, after_end=[2])),
    "waits for a node of another flow": call(node(2, after_failure=[1 << 20 | 1])),
    "waits for none": call(node(2, after=[0])),
    "waits for too many": call(node(20000, after=list(range(1, 10002)))),
    "result of itself": call(node(2, after=[1], results={"x": {"node": 2}})),
    "result of nothing": call(node(2, after=[1], results={"x": {}})),
    "result of perhaps many": call(node(2, after=[1], results={"x": {"node": 1, "many": "perhaps"}})),
    "result of neither one nor many": call(node(2, after=[1], results={"x": {"node": 1, "many": None}})),
    "long name of a node": call(node(2, after=[1], name="x" * 801)),
    "empty name of a node": call(node(2, after=[1], name="")),
    "no queue": call(queue="''"),
    "priority 10": call(priority="10"),
    "no time": call(run_at="'infinity'"),
    "long lock": call(lock="repeat('x', 501)"),
    "long key": call(unique="repeat('x', 501)"),
}


@pytest.mark.promise("F387")
@pytest.mark.parametrize("case", WRONG)
def test_the_door_refuses_what_is_no_flow(conn: Conn, case: str) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"this is no flow|a unique key has"):
        conn.execute(WRONG[case])


@pytest.mark.promise("F387")
def test_the_door_takes_what_a_flow_may_say_at_most(conn: Conn) -> None:
    results = {"one": {"node": 1, "many": False}, "many": {"node": 1, "many": True}, "plain": {"node": 1}}
    conn.execute(call(node(2, after=[1], name="x" * 800, results=results)))
    assert counts(conn) == (2, 1, 1, 0)


@pytest.mark.promise("F387")
def test_a_waiting_job_of_a_stranger_is_checked_as_one_that_is_ready(conn: Conn) -> None:
    """`job_blocked` itself would take it."""
    conn.execute(call(node(2, after=[1]), lock="repeat('x', 500)"))
    with pytest.raises(errors.InvalidParameterValue, match="this is no flow"):
        conn.execute(call(node(2, after=[1]), lock="repeat('x', 501)"))


@pytest.mark.promise("F387")
def test_a_role_that_enqueues_enqueues_flows_and_has_no_right_on_their_tables(role: Role, eyes: Eyes) -> None:
    mine = role("enqueue")
    with psycopg.connect(mine) as conn:
        flow = order(Flow("order 7"))
        flow.add(step.using(unique="k").new(), after=flow.nodes[:1])
        flow.enqueue(conn)
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE node IS NOT NULL") == 8
    for sql in (
        "SELECT * FROM pgqueue.flow",
        "SELECT * FROM pgqueue.node",
        "INSERT INTO pgqueue.flow (name) VALUES ('f')",
        "INSERT INTO pgqueue.node (id) VALUES (1)",
        "INSERT INTO pgqueue.job (task, node) VALUES ('t', 1048577)",
        "SELECT nextval('pgqueue.flow_id_seq')",
        "DELETE FROM pgqueue.flow_kept",
    ):
        with psycopg.connect(mine) as conn, pytest.raises(errors.InsufficientPrivilege):
            conn.execute(sql.encode())


# Large ones ----------------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_a_hundred_thousand_nodes_are_one_statement(conn: Conn) -> None:
    flow = Flow("large")
    last: list[pgqueue.Node[Any]] = []
    for n in range(100_000):
        last = [flow.add(step.new(n=n), after=last)]
    statement = flow_enqueue.statement(
        "large", flow.nodes, [job for node in flow.nodes for job in node.jobs], schema="pgqueue", notify=True
    )
    assert len(statement.params) < 40
    handle = flow.enqueue(conn)
    assert counts(conn) == (100_000, 1, 99_999, 0)
    assert conn.execute("SELECT count(*) FROM pgqueue.job_blocked WHERE key = 'node:' || (-node - 1)").fetchone() == (
        99_999,
    )
    assert handle.jobs(last[0])[0].info(conn).args == {"n": 99_999}


@pytest.mark.second
def test_ten_thousand_before_one(conn: Conn) -> None:
    flow = Flow("fan-in")
    parts = flow.add_many(steps(10_000))
    flow.add(step.new(all=parts.result))
    singles = [flow.add(step.new(n=n)) for n in range(10_000)]
    flow.add(step.new(), after=singles)
    flow.enqueue(conn)
    assert counts(conn) == (20_002, 1, 2, 0)
    assert conn.execute("SELECT max(cardinality(after)) FROM pgqueue.node").fetchone() == (10_000,)


# Every kind of connection --------------------------------------------------------------------------------------------


@pytest.mark.promise("F386")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_connection_enqueues_a_flow_or_nothing(dsn: str, eyes: Eyes, kind: str) -> None:
    async def enqueue(flow: Flow, app: Any) -> pgqueue.FlowHandle:
        return await flow.aenqueue(app.conn) if kind in ASYNC else flow.enqueue(app.conn)

    async def scenario() -> None:
        async with KINDS[kind](dsn, False) as app:
            await app.execute("SELECT 1")  # asyncpg begins its transaction by this
            await enqueue(order(Flow("order 7")), app)
            await app.rollback()
            await app.execute("SELECT 1")
            kept = order(Flow("order 8"))
            kept.add(step.using(unique="k").new(text="\n{}'%s$1"))
            handle = await enqueue(kept, app)
            again = Flow("order 9")
            again.add_many([step.new(), step.using(unique="k").new()])
            with pytest.raises(DuplicateJob) as caught:
                await enqueue(again, app)
            assert caught.value.existing == handle.jobs(kept.nodes[-1])[0].id
            await enqueue(Flow("without jobs"), app)
            await app.commit()

    drive(kind, scenario())
    assert eyes.all("SELECT name FROM pgqueue.flow ORDER BY id") == [("order 8",), ("without jobs",)]
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 8

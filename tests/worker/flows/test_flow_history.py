"""What a flow needs outlives history as long as a job of it waits; what no flow needs any more is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest
from flow_rows import Desk, Made, end, put
from workers import Eyes

import pgqueue
from pgqueue.worker.leader import pruner
from pgqueue.worker.leader.pruner import Pruner


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    made = Desk(dsn)
    yield made
    await made.close()


def turn(eyes: Eyes, kind: str, leaves: int) -> None:
    """Turn this history once around: no row is left of what has ended before."""
    for _ in range(leaves):
        assert eyes.one("SELECT pgqueue.advance_ring(%s, true)", kind)


@pytest.mark.promise("F378")
async def test_results_and_failures_outlive_history_while_a_job_waits(eyes: Eyes, desk: Desk) -> None:
    (_, completed), (failed_node, [failed]), (last, [living]), (_, [waiting]), (_, [cancelled]) = put(
        eyes.conn,
        Made(jobs=[{}, {}]),
        Made(),
        Made(),
        Made(after=[0, 2], after_end=[1], results={"got": (0, True)}),
        Made(after=[1, 2]),
    )
    [(other, [plain])] = put(eyes.conn, Made())
    end(eyes, *completed, result="7")
    end(eyes, failed, state="failed")
    end(eyes, plain, result="8")
    turn(eyes, "done", 8)
    turn(eyes, "dead", 16)
    assert eyes.states() == {"available": 1, "blocked": 2}
    assert eyes.all("SELECT node, id, state, result FROM pgqueue.flow_kept WHERE id <> %s ORDER BY id", failed) == [
        (failed_node - 1, id, "completed", 7) for id in completed
    ]
    end(eyes, living)
    await desk.look(last)
    assert eyes.all("SELECT state, args FROM pgqueue.job WHERE id = %s", waiting) == [("available", {"got": [7, 7]})]
    assert eyes.one("SELECT reason FROM pgqueue.job WHERE id = %s", cancelled) == "dependency"
    assert eyes.one("SELECT count(*) FROM pgqueue.flow_kept WHERE node = %s", other) == 0


@pytest.mark.promise("F378")
async def test_what_no_flow_needs_is_forgotten(eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flows without a job, their nodes, what was kept of them; a flow with a job in history or alive stays."""
    monkeypatch.setattr(pruner, "FLOWS_MOST", 3)
    made = [put(eyes.conn, Made(), Made(after=[0])) for _ in range(10)]
    for (node, [first]), _ in made[:9]:
        end(eyes, first)
        await desk.look(node)
    turn(eyes, "done", 8)  # nothing waits any more in nine of them
    assert eyes.one("SELECT count(*) FROM pgqueue.flow_kept") == 0
    end(eyes, *[second for _, (_, [second]) in made[1:7]])
    turn(eyes, "done", 8)
    end(eyes, made[7][1][1][0])
    eyes.do("UPDATE pgqueue.flow SET enqueued_at = now() - interval '30 days' WHERE id <> %s", made[8][0][0] >> 20)
    end(eyes, made[8][1][1][0])
    work = Pruner(desk.session)
    await work.flows()
    left = [made[at][0][0] >> 20 for at in (0, 7, 8, 9)]
    assert [id for (id,) in eyes.all("SELECT id FROM pgqueue.flow ORDER BY id")] == left
    assert eyes.all("SELECT DISTINCT id >> 20 FROM pgqueue.node ORDER BY 1") == [(id,) for id in left]


@pytest.mark.promise("F378")
async def test_what_was_kept_goes_when_no_job_of_the_flow_waits(eyes: Eyes, desk: Desk) -> None:
    flows = [put(eyes.conn, Made(), Made(), Made(after=[0, 1])) for _ in range(2)]
    end(eyes, *[first for (_, [first]), _, _ in flows])
    turn(eyes, "done", 8)
    assert eyes.one("SELECT count(*) FROM pgqueue.flow_kept") == 2
    (_, [second]), (node, _) = flows[0][1], flows[0][1]
    end(eyes, second)
    await desk.look(node)
    await Pruner(desk.session).kept_of_flows()
    assert eyes.all("SELECT node FROM pgqueue.flow_kept") == [(flows[1][0][0],)]


@pytest.mark.promise("F378")
async def test_a_job_that_was_cancelled_for_another_gets_its_results_after_a_retry_days_later(
    dsn: str, eyes: Eyes, desk: Desk
) -> None:
    """Nothing of the flow waits while history turns. The naive keeper drops what completed, and `got` is null."""
    (_, [completed]), (failed_node, [failed]), (_, [waiting]) = put(
        eyes.conn, Made(), Made(), Made(after=[0, 1], results={"got": (0, False)})
    )
    end(eyes, completed, result='"kept"')
    end(eyes, failed, state="failed")
    await desk.look(failed_node)
    assert eyes.states() == {"completed": 1, "failed": 1, "cancelled": 1}
    turn(eyes, "done", 8)
    await Pruner(desk.session).kept_of_flows()
    with psycopg.connect(dsn) as conn:
        assert all(answer.changed for answer in pgqueue.retry(conn, failed, waiting))
    end(eyes, failed)
    await desk.look(failed_node)
    assert eyes.all("SELECT state, args FROM pgqueue.job WHERE id = %s", waiting) == [("available", {"got": "kept"})]


@pytest.mark.promise("F378")
async def test_a_retry_alone_is_judged_by_a_failure_that_history_has_forgotten(
    dsn: str, eyes: Eyes, desk: Desk
) -> None:
    """The failed job goes with its leaf; what was cancelled for it stands in the next one."""
    [(node, [failed]), (_, [waiting])] = put(eyes.conn, Made(), Made(after=[0]))
    end(eyes, failed, state="failed")
    turn(eyes, "dead", 1)
    await desk.look(node)
    turn(eyes, "dead", 15)
    assert eyes.states() == {"cancelled": 1}
    await Pruner(desk.session).kept_of_flows()
    with psycopg.connect(dsn) as conn:
        pgqueue.retry(conn, waiting)
    await desk.look(node)
    assert eyes.state(waiting) == "cancelled"
    turn(eyes, "dead", 16)
    await Pruner(desk.session).kept_of_flows()
    assert eyes.one("SELECT count(*) FROM pgqueue.flow_kept") == 0


@pytest.mark.promise("F378")
@pytest.mark.parametrize("waits", [False, True])
def test_a_turn_asks_once_for_all_rows_of_a_leaf(waits: bool, eyes: Eyes) -> None:
    """The naive turn calls a function for each of them: with 3 million it takes longer than a statement may; history
    grows for ever."""
    rest = [Made(after=[0])] if waits else []
    made = [put(eyes.conn, Made(jobs=[{}] * 2_000), *rest) for _ in range(5)]
    end(eyes, *[id for (_, ids), *_ in made for id in ids])
    turn(eyes, "done", 7)
    with eyes.conn.transaction():
        eyes.do("SET LOCAL track_functions = 'all'")
        turn(eyes, "done", 1)
        calls = dict(eyes.all("SELECT funcname, calls FROM pg_stat_xact_user_functions"))
    assert calls["advance_ring"] == 1
    assert max(calls.values()) < 10, calls
    assert eyes.one("SELECT count(*) FROM pgqueue.flow_kept") == (10_000 if waits else 0)


@pytest.mark.promise("F378")
async def test_what_was_kept_is_walked_some_flows_and_some_rows_at_a_time(
    eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round goes on where the last one stopped, leaves the flows in which a job waits, and comes to all others."""
    monkeypatch.setattr(pruner, "FLOWS_MOST", 3)
    monkeypatch.setattr(pruner, "KEPT_MOST", 4)
    monkeypatch.setattr(pruner, "FLOWS_SECONDS", 0.0)
    made = [put(eyes.conn, Made(jobs=[{}] * 3), Made(), Made(after=[0, 1])) for _ in range(8)]
    end(eyes, *[id for (_, ids), _, _ in made for id in ids])
    turn(eyes, "done", 8)
    for at in (0, 1, 2, 4, 5, 7):
        node, ids = made[at][1]
        end(eyes, *ids)
        await desk.look(node)
    left = []
    work = Pruner(desk.session)
    for _ in range(6):
        await work.kept_of_flows()
        left.append(eyes.one("SELECT count(*) FROM pgqueue.flow_kept"))
    assert left == [20, 16, 12, 9, 6, 6]
    kept = [made[at][0][0] for at in (3, 6)]
    assert eyes.all("SELECT DISTINCT node FROM pgqueue.flow_kept ORDER BY 1") == [(node,) for node in kept]


@pytest.mark.promise("F234")
async def test_flows_are_forgotten_some_nodes_at_a_time_and_as_fast_as_they_end(
    eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow may have a million nodes: the naive statement deletes those of a thousand flows at once. While there is
    more to forget the next round is soon: the naive one is a minute later, and more flows end than are forgotten."""
    monkeypatch.setattr(pruner, "FLOWS_MOST", 3)
    monkeypatch.setattr(pruner, "NODES_MOST", 5)
    monkeypatch.setattr(pruner, "FLOWS_SECONDS", 0.0)
    for _ in range(5):
        put(eyes.conn, Made(), Made(), Made(), Made())
    eyes.do("DELETE FROM pgqueue.job_available WHERE node >> 20 <> 3")
    eyes.do("UPDATE pgqueue.flow SET enqueued_at = now() - interval '30 days'")
    work, left, more = Pruner(desk.session), [], []
    for _ in range(6):
        more.append(await work.flows())
        left.append(eyes.all("SELECT (SELECT count(*) FROM pgqueue.node), (SELECT count(*) FROM pgqueue.flow)")[0])
    assert left == [(15, 5), (12, 3), (7, 3), (4, 1), (4, 1), (4, 1)]
    assert more == [pruner.MORE_SECONDS, pruner.MORE_SECONDS, pruner.MORE_SECONDS, None, None, None]
    assert eyes.all("SELECT DISTINCT id >> 20 FROM pgqueue.node") == [(3,)]


MOVED = "WITH gone AS (DELETE FROM pgqueue.job WHERE node & 1048575 = 3 RETURNING id, task, args, node) "
LIVES = {
    "available": "(state, {0}) SELECT 'available', {0} FROM gone",
    "scheduled": "(state, run_at, {0}) SELECT 'scheduled', now() + interval '1 h', {0} FROM gone",
    "running": "(state, worker_id, claim, started_at, {0}) SELECT 'running', 1, 1, now(), {0} FROM gone",
    "blocked": "(state, limit_key, key, {0}) SELECT 'blocked', 'k', 'limit:k', {0} FROM gone",
}
PAGE = "SELECT result FROM pgqueue.node_page(%s, 0, 1000, 1000000)"


@pytest.mark.promise("F382")
@pytest.mark.parametrize("state", LIVES)
async def test_results_outlive_history_until_the_last_job_that_may_read_them_has_ended(
    state: str, eyes: Eyes, desk: Desk
) -> None:
    """The reader has been released, and waits for a worker, or is at work for days. The naive keeper asks for jobs that
    wait for their release: the handler reads nothing, and says nothing."""
    flows = [put(eyes.conn, Made(jobs=[{}] * 3, name=name), Made(), Made(after_end=[0, 1])) for name in ("parts", None)]
    for (node, parts), (_, [failed]), _ in flows:
        end(eyes, *parts, result="7")
        end(eyes, failed, state="failed")
        await desk.look(node, node + 1)
    (node, parts), (_, [failed]), (_, [reader]) = flows[0]
    eyes.do(MOVED + "INSERT INTO pgqueue.job " + LIVES[state].format("id, task, args, node"))
    assert eyes.states() == {"completed": 6, "failed": 2, state: 2}
    assert [answer.did for answer in pgqueue.discard(eyes.conn, parts[0], failed)] == ["needed"] * 2
    turn(eyes, "done", 8)
    turn(eyes, "dead", 16)
    await Pruner(desk.session).kept_of_flows()
    assert eyes.states() == {state: 2}
    assert eyes.all(PAGE, node) == [("7",)] * 3
    assert eyes.all("SELECT id FROM pgqueue.flow_kept ORDER BY id") == [(id,) for id in sorted([*parts, failed])]
    end(eyes, reader)
    await Pruner(desk.session).kept_of_flows()
    assert eyes.one("SELECT count(*) FROM pgqueue.flow_kept") == 0

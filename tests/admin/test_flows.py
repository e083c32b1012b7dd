"""Flows where people see them and act on them: lists, changes by `flow=`, and what a discard leaves alone."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from roles import Role, role

import pgqueue
from pgqueue import Flow, InvalidOption
from pgqueue.admin import actions, flows, queries
from pgqueue.admin.bulk import runner
from pgqueue.admin.filters import Filter, finding

Conn = psycopg.Connection[Any]

__all__ = ["role"]

step = pgqueue.remote("step")


def enqueued(conn: Conn, name: str = "order 7", queue: str = "default") -> pgqueue.FlowHandle:
    """A flow of one job, then three, then one."""
    flow = Flow(name)
    paid = flow.add(step.using(queue=queue).new(n=1), name="paid")
    picked = flow.add_many([step.new(n=n) for n in (2, 3, 4)], after=[paid])
    flow.add(step.using(delay=60).new(n=5), after=[picked.ended])
    return flow.enqueue(conn)


def end(conn: Conn, id: int, state: str = "completed") -> None:
    """End a job that is available, as a worker does."""
    part = "done" if state == "completed" else "dead"
    columns = "queue, priority, task, args, enqueued_at, node, id"
    conn.execute(
        f"""WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING {columns})
            INSERT INTO pgqueue.job_{part} (state, reason, finished_at, attempt, {columns})
            SELECT %s, 'error', now(), 1, {columns} FROM gone""".encode(),  # noqa: S608
        [id, state],
    )


def numbers(jobs: list[pgqueue.JobInfo]) -> list[int]:
    return [job.args["n"] for job in jobs]


def test_a_job_says_its_flow_and_its_node(conn: Conn) -> None:
    handle = enqueued(conn)
    plain = pgqueue.enqueue(conn, step, n=9)
    found = pgqueue.find(conn, flow=handle.id)
    assert [(job.flow, job.node) for job in found] == [(handle.id, number) for number in (3, 2, 2, 2, 1)]
    assert (plain.info(conn).flow, plain.info(conn).node) == (None, None)


def test_a_list_of_a_flow_has_its_jobs_and_no_other(conn: Conn) -> None:
    first, second = enqueued(conn), enqueued(conn, queue="slow")
    pgqueue.enqueue(conn, step, n=9)
    for handle in (first, second):
        assert numbers(pgqueue.find(conn, flow=handle.id)) == [5, 4, 3, 2, 1]
    assert pgqueue.find(conn, flow=second.id + 1) == []
    assert pgqueue.find(conn, flow=(1 << 43) - 1) == []
    assert numbers(pgqueue.find(conn, flow=first.id, state="available")) == [1]
    assert numbers(pgqueue.find(conn, flow=second.id, queue="slow")) == [1]
    assert numbers(pgqueue.find(conn, flow=first.id, args={"n": 3}, state="blocked")) == [3]
    end(conn, min(first._ids))
    assert numbers(pgqueue.find(conn, flow=first.id, state="completed")) == [1]


def test_a_list_of_a_flow_goes_on_where_it_ended(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = enqueued(conn)
    page = queries.search(conn, flow=handle.id, limit=2)
    assert (numbers(list(page.jobs)), page.searched, page.after) == ([5, 4], None, page.jobs[-1].id)
    page = queries.search(conn, flow=handle.id, limit=4, after=page.after)
    assert (numbers(list(page.jobs)), page.searched) == ([3, 2, 1], 3)
    monkeypatch.setattr(queries, "SEARCHED_MOST", 2)
    page = queries.search(conn, flow=handle.id, state="available")
    assert (page.jobs, page.searched, page.complete) == ((), 2, False)
    page = queries.search(conn, flow=handle.id, key="no such key")
    assert page.jobs == ()


@pytest.mark.promise("F318")
def test_a_list_of_a_node_has_its_jobs_and_no_other(conn: Conn) -> None:
    handle, other = enqueued(conn), enqueued(conn)
    assert [numbers(pgqueue.find(conn, flow=handle.id, node=n)) for n in (1, 2, 3, 4)] == [[1], [4, 3, 2], [5], []]
    assert numbers(pgqueue.find(conn, flow=other.id, node=2, state="blocked", limit=2)) == [4, 3]
    refused: list[Any] = [{"node": 1}, {"flow": handle.id, "node": 0}, {"flow": handle.id, "node": 1 << 20}]
    for wrong in refused:
        with pytest.raises(InvalidOption, match="give the number of a node in its flow, and the flow"):
            pgqueue.find(conn, **wrong)


@pytest.mark.promise("F228")
def test_a_list_of_a_node_misses_no_job_however_large_the_flow_is(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive list looks at the last jobs of the flow, and then for the node: it finds none of the first node."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 3)
    handle = enqueued(conn)
    node = handle.id << 20 | 1
    for n in (6, 7, 8, 9):  # as a job of the first node adds jobs to it: their ids are the highest
        conn.execute("INSERT INTO pgqueue.job (task, args, node) VALUES ('step', %s, %s)", [json.dumps({"n": n}), node])
    end(conn, min(handle._ids))
    assert numbers(pgqueue.find(conn, flow=handle.id, node=1)) == [9, 8, 7]
    assert numbers(pgqueue.find(conn, flow=handle.id, node=1, state="completed")) == []
    found, after = [], None
    while True:
        page = queries.search(conn, flow=handle.id, node=1, after=after)
        found += numbers(list(page.jobs))
        after = page.after
        if after is None:
            break
    assert found == [9, 8, 7, 6, 1]
    assert numbers(pgqueue.find(conn, flow=handle.id, node=2)) == [4, 3, 2]


@pytest.mark.promise("F228")
def test_pages_of_a_flow_have_all_of_its_jobs(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive is to walk from the last node, and to go on below the lowest id: what an early node was given is lost."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 3)
    handle = enqueued(conn)
    for n in (6, 7, 8, 9):
        conn.execute(
            "INSERT INTO pgqueue.job (task, args, node) VALUES ('step', %s, %s)",
            [json.dumps({"n": n}), handle.id << 20 | 1],
        )
    end(conn, min(handle._ids))
    found, after = [], None
    while True:
        page = queries.search(conn, flow=handle.id, after=after)
        found += numbers(list(page.jobs))
        after = page.after
        if after is None:
            break
    assert found == [9, 8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("flow", [0, -1, "7", 7.0, True, 1 << 43])
def test_what_is_no_flow_is_refused(conn: Conn, flow: Any) -> None:
    for ask in (pgqueue.find, pgqueue.cancel, pgqueue.retry, pgqueue.discard):
        with pytest.raises(InvalidOption, match=r"flow .*: give the id of a flow"):
            ask(conn, flow=flow)
    with pytest.raises(InvalidOption, match="choose all jobs: give at least one of state, queue, task and flow"):
        pgqueue.cancel(conn, flow=None)


def test_a_cancel_takes_all_living_jobs_of_a_flow(conn: Conn) -> None:
    first, second = enqueued(conn), enqueued(conn)
    end(conn, min(first._ids))
    answers = pgqueue.cancel(conn, flow=first.id)
    assert [(answer.id, answer.did) for answer in answers] == [(id, "cancelled") for id in list(first._ids)[1:]]
    assert {job.state for job in pgqueue.find(conn, flow=second.id)} == {"available", "blocked"}
    assert pgqueue.audit(conn)[0].target == {
        "states": ["available", "scheduled", "blocked", "running"],
        "flow": first.id,
    }
    assert pgqueue.cancel(conn, flow=second.id, state="blocked", limit=1)[0].id == second._ids[1]


@pytest.mark.promise("F323")
@pytest.mark.parametrize("autocommit", [False, True])
def test_a_cancel_takes_jobs_that_are_added_while_it_goes_on(
    dsn: str, autocommit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to cancel what one look has found: jobs of two commits after it go on."""
    with psycopg.connect(dsn, autocommit=autocommit) as conn, psycopg.connect(dsn, autocommit=True) as worker:
        handle = enqueued(conn)
        conn.commit()
        added: list[int] = []

        def find_and_add(asked: Filter) -> Any:
            found = yield from finding(asked)
            if len(added) < 2:  # as a running job does with its end
                put = "INSERT INTO pgqueue.job (task, node) VALUES ('added', %s) RETURNING id"
                added.append(worker.execute(put, [handle.id << 20 | 1]).fetchall()[0][0])
            return found

        monkeypatch.setattr(actions, "finding", find_and_add)
        answers = pgqueue.cancel(conn, flow=handle.id)
        assert [answer.id for answer in answers] == [*handle._ids, *added]
        assert {answer.did for answer in answers} == {"cancelled"}
        assert {job.state for job in pgqueue.find(conn, flow=handle.id)} == {"cancelled"}


@pytest.mark.promise("F388")
def test_a_discard_leaves_what_a_waiting_job_needs(conn: Conn) -> None:
    handle, other = enqueued(conn), pgqueue.enqueue(conn, step, n=9)
    first = min(handle._ids)
    end(conn, first)
    end(conn, other.id)
    answers = pgqueue.discard(conn, first, other.id)
    assert [(answer.id, answer.did, answer.changed) for answer in answers] == [
        (first, "needed", False),
        (other.id, "discarded", True),
    ]
    assert [answer.did for answer in pgqueue.discard(conn, flow=handle.id)] == ["needed"]
    pgqueue.cancel(conn, flow=handle.id)
    assert {answer.did for answer in pgqueue.discard(conn, flow=handle.id)} == {"discarded"}
    assert pgqueue.find(conn, flow=handle.id) == []


@pytest.mark.promise("F388")
def test_a_discard_leaves_what_a_job_needs_that_a_retry_lets_wait_again(conn: Conn) -> None:
    """Of a flow whose end was cancelled the jobs before it stay, however they ended, until that one goes, too."""
    handle = enqueued(conn)
    first, *_, last = list(handle._ids)
    end(conn, first, "failed")
    pgqueue.cancel(conn, flow=handle.id)
    assert pgqueue.discard(conn, first)[0].did == "needed"
    middle = list(handle._ids)[1:-1]
    assert {answer.did for answer in pgqueue.discard(conn, first, *middle)} == {"needed"}
    assert pgqueue.discard(conn, last)[0].did == "discarded"
    assert {answer.did for answer in pgqueue.discard(conn, first, *middle)} == {"discarded"}


@pytest.mark.promise("F388")
@pytest.mark.parametrize("autocommit", [False, True])
def test_a_whole_flow_is_discarded_by_one_call_however_many_statements_it_takes(
    dsn: str, autocommit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first statement has the first jobs, which those of the next ones need."""
    monkeypatch.setattr(actions, "BATCH", 1)
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        handle = enqueued(conn)
        end(conn, min(handle._ids), "failed")
        pgqueue.cancel(conn, flow=handle.id)
        answers = pgqueue.discard(conn, flow=handle.id)
        assert [answer.did for answer in answers] == ["discarded"] * 5
        assert pgqueue.find(conn, flow=handle.id) == []


@pytest.mark.promise("F388")
def test_an_operation_leaves_it_too(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        handle = enqueued(conn)
        end(conn, min(handle._ids))
        begun = pgqueue.bulk(conn, "discard", task="step")
    with psycopg.connect(dsn, autocommit=True) as conn:
        steps = runner.take(conn, "test", begun.id)
        assert steps is not None
        while steps.open:
            runner.step(conn, steps)
        done = pgqueue.get_bulk(conn, begun.id)
        assert dict(done.counts) == {"needed": 1}
        assert len(pgqueue.find(conn, flow=handle.id)) == 5


# The newest flows, and one with its nodes ----------------------------------------------------------------------------


def test_the_newest_flows_come_first_with_their_state(conn: Conn) -> None:
    first, second, third = enqueued(conn, "a"), enqueued(conn, "b"), Flow("c").enqueue(conn)
    end(conn, min(first._ids), "failed")
    pgqueue.cancel(conn, flow=first.id)
    found = pgqueue.flows(conn)
    assert [(flow.id, flow.name, flow.state, dict(flow.jobs)) for flow in found] == [
        (third.id, "c", "empty", {}),
        (second.id, "b", "running", {"available": 1, "blocked": 4}),
        (first.id, "a", "failed", {"cancelled": 4, "failed": 1}),
    ]
    assert [flow.finished_at is None for flow in found] == [True, True, False]
    assert all(flow.exact for flow in found)
    assert [flow.id for flow in pgqueue.flows(conn, limit=1)] == [third.id]
    assert [flow.id for flow in pgqueue.flows(conn, before=third.id)] == [second.id, first.id]


def test_no_more_jobs_are_counted_than_a_list_may(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "COUNTED_MOST", 2)
    enqueued(conn)
    [flow] = pgqueue.flows(conn)
    assert (dict(flow.jobs), flow.exact) == ({"available": 1, "blocked": 2}, False)


def test_a_flow_has_the_state_of_all_its_jobs_whatever_was_counted(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the last ones have completed, so the flow has."""
    monkeypatch.setattr(flows, "COUNTED_MOST", 2)

    def found() -> tuple[str, dict[str, int], bool, bool]:
        [flow] = pgqueue.flows(conn)
        return flow.state, dict(flow.jobs), flow.exact, flow.finished_at is None

    made = Flow("order 7")
    first, later = made.add(step.new(n=1)), made.add(step.using(delay=60).new(n=2))
    last = made.add_many([step.new(n=n) for n in (3, 4)])
    handle = made.enqueue(conn)
    for job in handle.jobs(last):
        end(conn, job.id)
    assert found() == ("running", {"completed": 2, "available": 1, "scheduled": 1}, False, True)
    pgqueue.cancel(conn, handle.jobs(later)[0].id)
    assert found() == ("running", {"completed": 2, "available": 1, "cancelled": 1}, False, True)
    end(conn, handle.jobs(first)[0].id, "failed")
    assert found() == ("failed", {"completed": 2, "failed": 1, "cancelled": 1}, False, False)


@pytest.mark.second
def test_a_flow_of_a_hundred_thousand_nodes_is_shown_within_seconds(conn: Conn) -> None:
    """Naive: all counts are looked through for each node."""
    flow = Flow("large")
    last: list[pgqueue.Node[Any]] = []
    for n in range(100_000):
        last = [flow.add(step.new(n=n), after=last)]
    handle = flow.enqueue(conn)
    conn.execute("SET LOCAL statement_timeout = '8s'")
    one = pgqueue.get_flow(conn, handle.id)
    assert (dict(one.flow.jobs), one.nodes_count) == ({"available": 1, "blocked": 99_999}, 100_000)
    assert [(node.number, dict(node.jobs), node.waiting, node.after) for node in one.nodes] == [
        (1, {"available": 1}, 0, ()),
        *[(n, {"blocked": 1}, 1, (n - 1,)) for n in range(2, 1_001)],
    ]


def test_a_flow_has_its_nodes_with_what_they_wait_for(conn: Conn) -> None:
    handle = enqueued(conn)
    one = pgqueue.get_flow(conn, handle.id)
    assert (one.flow.id, one.flow.name, one.flow.state, one.nodes_count) == (handle.id, "order 7", "running", 3)
    assert [(node.number, node.name, node.task, dict(node.jobs), node.waiting) for node in one.nodes] == [
        (1, "paid", "step", {"available": 1}, 0),
        (2, None, "step", {"blocked": 3}, 3),
        (3, None, "step", {"blocked": 1}, 1),
    ]
    assert [(node.after, node.after_end, node.after_failure) for node in one.nodes] == [
        ((), (), ()),
        ((1,), (), ()),
        ((), (2,), ()),
    ]
    assert [node.state for node in one.nodes] == ["running", "waiting", "waiting"]
    assert [flows.after_of(node) for node in one.nodes] == ["", "1", "2 ended"]
    pgqueue.cancel(conn, flow=handle.id)
    assert [node.state for node in pgqueue.get_flow(conn, handle.id).nodes] == ["cancelled"] * 3


def test_a_node_without_jobs_is_a_node_and_a_large_flow_shows_the_first_ones(
    conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "NODES_MOST", 2)
    flow = Flow("large")
    flow.add_many(list[pgqueue.NewJob[Any]](), name="nothing")
    for n in range(3):
        flow.add(step.new(n=n))
    one = pgqueue.get_flow(conn, flow.enqueue(conn).id)
    assert ([(node.number, node.state, node.task) for node in one.nodes], one.nodes_count) == (
        [(1, "empty", None), (2, "running", "step")],
        4,
    )


def test_a_flow_that_is_not_there_is_named(conn: Conn) -> None:
    for id in (7, (1 << 63) - 1):
        with pytest.raises(pgqueue.FlowNotFound, match=f"flow {id} is not there"):
            pgqueue.get_flow(conn, id)
    with pytest.raises(InvalidOption, match="flow"):
        pgqueue.get_flow(conn, 0)
    with pytest.raises(InvalidOption, match="limit"):
        pgqueue.flows(conn, limit=1001)


def test_a_role_that_reads_sees_flows(conn: Conn, role: Role) -> None:
    handle = enqueued(conn)
    conn.commit()
    with psycopg.connect(role("read")) as reader:
        assert pgqueue.flows(reader)[0].id == handle.id
        assert pgqueue.get_flow(reader, handle.id).nodes_count == 3
        assert len(pgqueue.find(reader, flow=handle.id)) == 5
    with psycopg.connect(role("operate")) as operator:
        assert len(pgqueue.cancel(operator, flow=handle.id)) == 5
        assert {answer.did for answer in pgqueue.discard(operator, flow=handle.id)} == {"discarded"}


# The commands --------------------------------------------------------------------------------------------------------


def test_the_commands_show_flows_and_act_on_one(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        first, second = enqueued(conn, "order 7"), enqueued(conn, "order 8")
    lines = command("flows", dsn=dsn).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", str(second.id), str(first.id)]
    assert "order 8  running  1 available, 4 blocked  since" in lines[1]
    lines = command("flows", str(first.id), dsn=dsn).stdout.splitlines()
    assert lines[0].startswith(f"flow {first.id} 'order 7': running, since ")
    assert [line.split() for line in lines[3:]] == [
        ["1", "paid", "step", "running", "1", "available"],
        ["2", "step", "waiting", "3", "blocked", "1"],
        ["3", "step", "waiting", "1", "blocked", "2", "ended"],
    ]
    jobs = command("jobs", "--flow", str(first.id), dsn=dsn).stdout.splitlines()
    assert [int(line.split()[0]) for line in jobs[1:]] == sorted(first._ids, reverse=True)
    jobs = command("jobs", "--flow", str(first.id), "--node", "2", dsn=dsn).stdout.splitlines()
    assert [int(line.split()[0]) for line in jobs[1:]] == sorted(list(first._ids)[1:4], reverse=True)
    one = command("jobs", str(max(first._ids)), dsn=dsn).stdout
    assert f"flow:            {first.id}\n" in one and "node:            3\n" in one
    with psycopg.connect(dsn) as conn:
        conn.execute("UPDATE pgqueue.flow SET enqueued_at = now() - interval '400 days' WHERE id = %s", [first.id])
    assert "It is older than history, " in command("flows", str(first.id), dsn=dsn).stdout
    done = command("cancel", "--flow", str(first.id), "--yes", dsn=dsn)
    assert (done.returncode, done.stdout) == (0, "5 cancelled\n")
    [item] = json.loads(command("flows", str(first.id), "--json", dsn=dsn).stdout)["items"]
    assert (item["state"], [node["state"] for node in item["nodes"]]) == ("cancelled", ["cancelled"] * 3)
    assert command("discard", "--flow", str(first.id), "--yes", dsn=dsn).stdout == "5 discarded\n"
    newest, *_ = json.loads(command("flows", "--json", dsn=dsn).stdout)["items"]
    assert (newest["id"], newest["state"]) == (second.id, "running")


def test_the_command_says_what_is_not_there_and_what_excludes_each_other(dsn: str) -> None:
    assert command("flows", dsn=dsn).stdout == "There is no flow.\n"
    missing = command("flows", "7", dsn=dsn)
    assert (missing.returncode, "flow 7 is not there" in missing.stderr) == (1, True)
    assert command("flows", "7", "--limit", "1", dsn=dsn).returncode == 2

"""`run_flow`: a flow without a database, with the results of its nodes; it ends as the same flow does in a drain."""

from __future__ import annotations

from random import Random
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import Error, Flow, NewJob
from pgqueue.testing import arun_flow, drain, flows, run_flow

ONCE = pgqueue.RetryPolicy(attempts=1)
ran: list[str] = []


@pytest.fixture
def step() -> pgqueue.Task[..., Any]:
    ran.clear()

    @pgqueue.task(name="step", retry=ONCE)
    def step(job: pgqueue.Job, word: str, got: Any = None) -> Any:
        ran.append(word)
        if word.startswith("fails"):
            raise RuntimeError(word)
        if word == "adds":
            job.add(step.new("added"))
        if word == "retries":
            return pgqueue.Retry(5)
        return [word, job.flow] if got is None else got

    return step


def test_the_results_are_by_node_and_those_of_one_are_arguments_of_another(step: pgqueue.Task[..., Any]) -> None:
    flow = Flow("order 7")
    first = flow.add(step.new("a"))
    many = flow.add_many([step.new("b"), step.new("adds")], after=[first])
    empty = flow.add_many(list[NewJob[Any]]())
    last = flow.add(step.new("c", many.result))
    back = flow.add(step.new("never"), after=[last.failed])
    results = run_flow(flow)
    assert results == {
        first: ["a", 1],
        many: [["b", 1], ["adds", 1], ["added", 1]],
        empty: [],
        last: [["b", 1], ["adds", 1], ["added", 1]],
    }
    assert back not in results
    assert ran == ["a", "b", "adds", "added", "c"]


def test_a_failure_is_raised_unless_a_node_waits_for_it(step: pgqueue.Task[..., Any]) -> None:
    flow = Flow("order 7")
    bad = flow.add_many([step.new("a"), step.new("fails")])
    flow.add(step.new("b"), after=[bad])
    with pytest.raises(RuntimeError, match="fails"):
        run_flow(flow)
    close = flow.add(step.new("c", bad.result), after=[bad.ended])
    assert run_flow(flow) == {bad: [["a", 1], None], close: [["a", 1], None]}
    alone = flow.add(step.new("fails alone"))
    sorry = flow.add(step.new("sorry", alone.result), after=[alone.failed])
    results = run_flow(flow)
    assert alone not in results and results[sorry] == ["sorry", 1]


def test_an_answer_that_is_no_result_is_a_failure(step: pgqueue.Task[..., Any]) -> None:
    flow = Flow("order 7")
    node = flow.add(step.new("retries"))
    with pytest.raises(
        Error, match=r"node 1 of flow 'order 7': step answered Retry\(.*, and run_flow runs each job once"
    ):
        run_flow(flow)
    flow.add(step.new("a"), after=[node.ended])
    assert node not in run_flow(flow)


async def test_on_the_loop_of_a_test(step: pgqueue.Task[..., Any]) -> None:
    @pgqueue.task(name="twice")
    async def twice(n: int) -> int:
        return 2 * n

    flow = Flow("order 7")
    first = flow.add(twice.new(4))
    second = flow.add(twice.new(first.result))
    bad = flow.add(step.new("fails"), after=[second])
    flow.add(step.new("c"), after=[bad.ended])
    assert (await arun_flow(flow))[second] == 16


def test_what_cannot_be_run_is_named(step: pgqueue.Task[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow("order 7")
    flow.add(pgqueue.remote("elsewhere").new())
    with pytest.raises(Error, match="task 'elsewhere' is not declared here"):
        run_flow(flow)
    monkeypatch.setattr(flows, "MOST", 2)
    flow = Flow("order 7")
    flow.add_many([step.new("a"), step.new("b"), step.new("c")])
    with pytest.raises(Error, match="run_flow ran 2 jobs and there is more to do"):
        run_flow(flow)
    flow = Flow("order 7")
    typed = flow.add(step.new("a"))
    flow.add(step.new(typed.result))
    with pytest.raises(pgqueue.InvalidArguments, match=r"parameter word: needs `str`, found `array`"):
        run_flow(flow)


@pytest.mark.parametrize("seed", range(8))
def test_random_flows_end_as_in_a_drain(conn: psycopg.Connection[Any], step: pgqueue.Task[..., Any], seed: int) -> None:
    """Each node has an end that a node waits for, so that no failure is raised."""
    random = Random(seed)
    flow = Flow("random")
    nodes: list[pgqueue.Node[Any]] = []
    for n in range(12):
        said = random.sample(nodes, min(len(nodes), random.randrange(4)))
        after: list[Any] = [random.choice([each, each, each.ended, each.failed]) for each in said]
        made = [step.new(random.choice(["a", "b", "fails"]) + str(n)) for _ in range(random.randrange(4))]
        nodes.append(flow.add_many(made, after=after))
    flow.add(step.new("last"), after=[node.ended for node in nodes])
    results = run_flow(flow)
    handle = flow.enqueue(conn)
    drain(conn)
    for node in nodes:
        infos = [job.info(conn) for job in handle.jobs(node)]
        assert {info.state for info in infos} <= {"completed", "failed", "cancelled", "skipped"}
        if node in results:
            assert [info.result and info.result[0] for info in infos] == [value and value[0] for value in results[node]]
        else:
            assert {info.state for info in infos} <= {"cancelled", "skipped"}

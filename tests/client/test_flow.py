"""Flows as values: what `add` accepts, which nodes each one waits for, and what stands where a result will be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import pgqueue
from pgqueue import DuplicateJob, Flow, FlowHandle, InvalidArguments, InvalidOption, NewJob
from pgqueue.client import flow as flows
from pgqueue.client import flow_enqueue, schedules
from pgqueue.jobs.nodes import AFTER_MOST, Conditions

step = pgqueue.remote("step")
NOTHING: list[NewJob[Any]] = []


@dataclass
class Parcel:
    weight: float


def jobs(number: int, **arguments: Any) -> list[NewJob[Any]]:
    return [step.new(n=n, **arguments) for n in range(number)]


def waits(*added: pgqueue.Node[Any]) -> list[Conditions]:
    return [node.conditions for node in added]


# What a node waits for -----------------------------------------------------------------------------------------------


def test_a_node_waits_for_what_after_says() -> None:
    flow = Flow("order 7")
    paid = flow.add(step.new())
    picked = flow.add_many(jobs(3), after=[paid])
    sent = flow.add(step.new(), after=[picked, paid.ended])
    back = flow.add(step.new(), after=[sent.failed, picked.failed, paid])
    assert waits(paid, picked, sent, back) == [((), (), ()), ((1,), (), ()), ((2,), (1,), ()), ((1,), (), (2, 3))]
    assert flow.nodes == (paid, picked, sent, back)
    assert [len(node.jobs) for node in flow.nodes] == [1, 3, 1, 1]


def test_a_node_that_is_named_twice_is_waited_for_once_and_a_completion_is_an_end() -> None:
    flow = Flow("order 7")
    paid = flow.add(step.new())
    both = flow.add(step.new(), after=[paid, paid, paid.ended])
    assert both.conditions == ((1,), (), ())


def test_nodes_that_are_added_while_after_is_read_have_numbers_of_their_own() -> None:
    """Naive: the number is taken first, and two nodes have it."""
    flow = Flow("order 7")
    both = flow.add(step.new(), after=(flow.add(step.new(n=n)) for n in range(2)))
    assert [node.number for node in flow.nodes] == [1, 2, 3]
    assert (both.number, both.conditions) == (3, ((1, 2), (), ()))


@pytest.mark.promise("F385")
def test_what_waits_for_a_node_without_jobs_waits_for_what_that_would_have_waited_for() -> None:
    flow = Flow("order 7")
    a, b = flow.add(step.new()), flow.add(step.new())
    empty = flow.add_many(NOTHING, after=[a])
    behind = flow.add_many(NOTHING, after=[empty, b.failed])
    assert waits(empty, behind) == [((1,), (), ()), ((1,), (), (2,))]
    assert flow.add(step.new(), after=[behind]).conditions == ((1,), (2,), ())
    assert flow.add(step.new(), after=[behind.ended]).conditions == ((), (1, 2), ())
    assert flow.add(step.new(), after=[behind.failed]).conditions == ((), (), (1,))
    assert flow.add(step.new(), after=[behind, a]).conditions == ((1,), (2,), ())


def test_a_node_without_jobs_that_waits_for_nothing_has_ended_and_cannot_fail() -> None:
    flow = Flow("order 7")
    empty = flow.add_many(NOTHING)
    assert waits(flow.add(step.new(), after=[empty]), flow.add(step.new(), after=[empty.ended])) == [((), (), ())] * 2
    assert flow.add(step.new(), after=[empty.failed]).conditions == ((), (), (1,))


# Results -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ship() -> pgqueue.Task[..., Any]:
    @pgqueue.task(name="ship")
    def ship(order: int, parcels: list[Parcel], note: str = "", *marks: str, **more: int) -> None: ...

    return ship


def test_a_result_is_left_out_of_the_arguments_and_its_node_is_waited_for(ship: pgqueue.Task[..., Any]) -> None:
    flow = Flow("order 7")
    picked = flow.add_many(jobs(2))
    sent = flow.add(ship.new(7, picked.result, "now", more=1))
    assert [job.args for job in sent.jobs] == ['{"order":7,"note":"now","more":1}']
    assert sent.results == (("parcels", picked),)
    assert sent.conditions == ((1,), (), ())


def test_a_result_can_be_any_argument_that_has_a_name(ship: pgqueue.Task[..., Any]) -> None:
    flow = Flow("order 7")
    paid = flow.add(step.new())
    sent = flow.add(ship.new(paid.result, [Parcel(1.5)], extra=paid.result))
    assert [job.args for job in sent.jobs] == ['{"parcels":[{"weight":1.5}]}']
    assert sent.results == (("order", paid), ("extra", paid))
    with pytest.raises(InvalidArguments, match=r"parameter marks\[0\]: given <result of .*\(NodeResult\)"):
        ship.new(7, [], "", paid.result)


def test_the_other_arguments_are_checked_as_ever(ship: pgqueue.Task[..., Any]) -> None:
    paid = Flow("order 7").add(step.new())
    with pytest.raises(InvalidArguments, match="task 'ship': parameter note: given 5"):
        ship.new(7, paid.result, 5)
    with pytest.raises(InvalidArguments, match=r"parameter parcels\[0\]: given <result"):
        ship.new(paid.result, [paid.result])
    with pytest.raises(InvalidArguments, match=r"missing 'parcels'; it takes \(order, parcels,"):
        ship.new(order=paid.result)
    with pytest.raises(InvalidArguments, match=r"parameter more: given 'x' \(str\), needs int"):
        ship.new(7, paid.result, more="x")


def test_after_decides_how_a_node_with_a_result_has_to_end() -> None:
    flow = Flow("order 7")
    picked = flow.add_many(jobs(2))
    one = flow.add(step.new(all=picked.result), after=[picked.ended])
    other = flow.add(step.new(all=picked.result), after=[picked.failed])
    assert waits(one, other) == [((), (1,), ()), ((), (), (1,))]
    assert one.results == (("all", picked),)


def test_the_result_of_a_node_without_jobs_is_an_empty_list(ship: pgqueue.Task[..., Any]) -> None:
    flow = Flow("order 7")
    paid = flow.add(step.new())
    picked = flow.add_many(NOTHING, after=[paid])
    sent = flow.add(ship.new(7, picked.result, extra=paid.result))
    assert [job.args for job in sent.jobs] == ['{"order":7,"parcels":[]}']
    assert sent.results == (("extra", paid),)
    assert sent.conditions == ((1,), (), ())


def test_all_jobs_of_a_node_take_the_same_results() -> None:
    flow = Flow("order 7")
    a, b = flow.add(step.new()), flow.add(step.new())
    both = flow.add_many([step.new(n=n, x=a.result) for n in range(3)])
    assert both.results == (("x", a),)
    for wrong in ([step.new(x=a.result), step.new(x=b.result)], [step.new(), step.new(x=a.result)]):
        with pytest.raises(InvalidOption, match="node 4 of flow 'order 7': its jobs take results of different nodes"):
            flow.add_many(wrong)


def test_a_result_of_another_flow_is_refused_also_if_its_node_has_the_number_of_the_own_one() -> None:
    """Naive: the second job of the node would be given the result of the own node 1."""
    flow, other = Flow("order 7"), Flow("order 8")
    mine, theirs = flow.add(step.new()), other.add(step.new())
    with pytest.raises(InvalidOption, match="node 2 of flow 'order 7': its jobs take results of different nodes"):
        flow.add_many([step.new(x=mine.result), step.new(x=theirs.result)])
    assert flow.nodes == (mine,)


KEYS: dict[str, Any] = {
    "template": "order:{order}",
    "format": lambda order: f"order:{order}",
    "str": lambda order: "order:" + str(order),
    "repr": lambda order: f"order:{order!r}",
    "itself": lambda order: order,
    "percent": lambda order: "order:%s" % order,  # noqa: UP031
    "truth": lambda order: "paid" if order else "open",
    "not": lambda order: None if not order else "paid",
    "equal": lambda order: "seven" if order == 7 else "other",
    "unequal": lambda order: "other" if order != 7 else "seven",
    "one of": lambda order: "odd" if order in (1, 3, 5) else "even",
    "of a table": lambda order: {7: "seven"}.get(order, "other"),
    "attribute": lambda order: f"order:{order.id}",
    "perhaps an attribute": lambda order: f"order:{getattr(order, 'id', 0)}",
    "kind": lambda order: "text" if isinstance(order, str) else "number",
    "item": lambda order: order["id"],
    "each": lambda order: ",".join([each for each in order]),
    "length": lambda order: f"{len(order)} lines",
    "has": lambda order: "red" if "red" in order else "blue",
    "less": lambda order: "small" if order < 7 else "large",
    "sum": lambda order: "order:" + order,
    "all": lambda **arguments: str(sorted(arguments.items())),
}


@pytest.mark.parametrize("option", ["lock", "rate", "unique"])
@pytest.mark.parametrize("kind", KEYS)
def test_no_key_is_made_of_a_result(kind: str, option: str) -> None:
    """Naive: the function is given what stands for the result, and makes the same key for all results, or decides by
    it."""
    key = KEYS[kind]
    said: dict[str, Any] = {option: pgqueue.Rate("5/minute", key=key) if option == "rate" else key}

    def pack(order: Any) -> None: ...

    task: Any = pgqueue.task(name="pack", **said)(pack)
    paid = Flow("order 7").add(step.new())
    with pytest.raises(InvalidArguments, match="<result of node 1 of flow 'order 7'> is not known at the enqueue"):
        task.new(paid.result)


def test_a_key_is_made_of_the_other_arguments() -> None:
    @pgqueue.task(lock=lambda **all_of_them: f"order:{all_of_them['order']}", unique="{order}")
    def pack(order: int, parcels: list[int]) -> None: ...

    new = pack.new(7, Flow("order 7").add_many(jobs(2)).result)
    assert (new.lock_key, list(new.keys.names() if new.keys else ())) == ("order:7", ["unique:7"])


@pytest.mark.parametrize("of", [step, step.using(delay=5), step.using(lock="a")], ids=["plain", "later", "lock"])
def test_a_job_that_waits_for_a_result_is_enqueued_by_its_flow_only(of: pgqueue.Task[..., Any]) -> None:
    new = of.new(x=Flow("order 7").add(step.new()).result)
    for send in (
        lambda conn: pgqueue.enqueue(conn, of, x=Flow("order 7").add(step.new()).result),
        lambda conn: pgqueue.enqueue_many(conn, [step.new(), new]),
        lambda conn: pgqueue.enqueue_many(conn, [new]),
        lambda conn: pgqueue.enqueue_many(pgqueue.Outbox(conn), [new]),
    ):
        with pytest.raises(
            InvalidOption, match="task 'step': parameter x is <result of node 1 of flow 'order 7'>: only"
        ):
            send(None)


def test_a_schedule_keeps_no_result() -> None:
    new = step.new(x=Flow("order 7").add(step.new()).result)
    with pytest.raises(InvalidOption, match="a schedule cannot keep results"):
        schedules.spec(pgqueue.Every("1h"), new, "x")


def test_a_task_that_stores_no_result_has_none() -> None:
    @pgqueue.task(store_result=False)
    def forget() -> None: ...

    node = Flow("order 7").add(forget.new(), name="forgotten")
    with pytest.raises(InvalidOption, match=r"node 1 \('forgotten'\) of flow 'order 7': it has no result"):
        _ = node.result


# What is refused -----------------------------------------------------------------------------------------------------


def test_nodes_of_another_flow_are_refused_and_the_flow_stays_as_it_was() -> None:
    flow, other = Flow("order 7"), Flow("order 8")
    mine, theirs = flow.add(step.new()), other.add(step.new(), name="paid")
    wrong: list[list[Any]] = [[theirs], [theirs.ended], [mine, theirs.failed]]
    for after in wrong:
        with pytest.raises(InvalidOption, match=r"node 2 of flow 'order 7': node 1 \('paid'\) of flow 'order 8' is"):
            flow.add(step.new(), after=after)
    with pytest.raises(InvalidOption, match="is a node of another flow"):
        flow.add(step.new(x=theirs.result))
    assert flow.nodes == (mine,)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (7, "after is a list of nodes"),
        ("paid", "after is a list of nodes"),
        (None, "after is a list of nodes"),
        ([7], "after has 7, which is no node"),
        ([step.new()], "after has NewJob"),
    ],
)
def test_after_takes_nodes_only(after: Any, said: str) -> None:
    with pytest.raises(InvalidOption, match=f"node 1 of flow 'order 7': {said}"):
        Flow("order 7").add(step.new(), after=after)


def test_after_takes_a_list_and_no_single_node_nor_its_result() -> None:
    flow = Flow("order 7")
    paid = flow.add(step.new())
    for after in (paid, paid.ended):
        with pytest.raises(InvalidOption, match="after is a list of nodes"):
            flow.add(step.new(), after=after)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="A result stands among the arguments; here stands its node"):
        flow.add(step.new(), after=[paid.result])


def test_a_node_cannot_wait_for_both_ends_of_another() -> None:
    flow = Flow("order 7")
    paid = flow.add(step.new())
    with pytest.raises(InvalidOption, match="it waits for node 1 of flow 'order 7' to complete, and for its failure"):
        flow.add(step.new(), after=[paid, paid.failed])
    hidden: list[list[Any]] = [[paid.ended, paid, paid.failed], [paid.failed, paid.ended, paid]]
    for after in hidden:
        with pytest.raises(InvalidOption, match="to complete, and for its failure: only one can be"):
            flow.add(step.new(), after=after)
    assert flow.add(step.new(), after=[paid.ended, paid.failed]).conditions == ((), (1,), (1,))


def test_what_is_no_job_is_refused() -> None:
    flow = Flow("order 7")
    with pytest.raises(InvalidArguments, match=r"flow 'order 7': add takes what task\.new"):
        flow.add(step)  # type: ignore[arg-type]
    with pytest.raises(InvalidArguments, match="add_many takes several jobs"):
        flow.add_many(step.new())  # type: ignore[arg-type]
    with pytest.raises(InvalidArguments, match=r"add_many takes what task\.new") as caught:
        flow.add_many([step.new(), 7], name="picked")  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["job 2 of node 1 ('picked') of flow 'order 7'"]
    assert flow.nodes == ()


def test_arguments_that_do_not_fit_are_refused_with_the_node() -> None:
    def rows() -> Iterator[NewJob[Any]]:
        yield step.new(n=1)
        yield step.new(n=object())

    with pytest.raises(InvalidArguments, match="task 'step': parameter n") as caught:
        Flow("order 7").add_many(rows(), name="picked")
    assert caught.value.__notes__ == ["job 2 of node 1 ('picked') of flow 'order 7'"]


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\x1b[31m", None, 7, "\ud800"])
def test_names_are_printable_texts(name: Any) -> None:
    with pytest.raises(InvalidOption, match="flow: name "):
        Flow(name)
    if name is not None:
        with pytest.raises(InvalidOption, match=r"name .*: use 1 to 200 printable characters"):
            Flow("order 7").add(step.new(), name=name)


def test_a_flow_has_a_name_of_a_node_once() -> None:
    flow = Flow("order 7")
    flow.add(step.new(), name="paid")
    with pytest.raises(InvalidOption, match=r"node 2 \('paid'\) of flow 'order 7': another node of the flow has this"):
        flow.add_many(NOTHING, name="paid")
    Flow("order 8").add(step.new(), name="paid")


def test_a_flow_has_so_many_nodes_and_a_node_waits_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow("order 7")
    most = [flow.add(step.new()) for _ in range(AFTER_MOST + 1)]
    assert flow.add(step.new(), after=most[1:]).conditions.size == AFTER_MOST
    empty = flow.add_many(NOTHING, after=most[1:])
    with pytest.raises(InvalidOption, match=r"waits for 10,001 nodes, the limit is 10,000; .*flow\.add_many"):
        flow.add(step.new(), after=most)
    with pytest.raises(InvalidOption, match=r"waits for 10,001 nodes, the limit is 10,000"):
        flow.add(step.new(), after=[empty, most[0]])
    monkeypatch.setattr(flows, "NODES_MOST", len(flow.nodes))
    with pytest.raises(InvalidOption, match=r"has 10,003 nodes, the most there may be; .*flow\.add_many"):
        flow.add(step.new())


def test_unknown_options_are_named() -> None:
    with pytest.raises(InvalidOption, match=r"add: no option afte \(did you mean after\?\)"):
        Flow("order 7").add(step.new(), afte=[])  # type: ignore[call-arg]


def test_an_outbox_is_refused_before_anything_is_sent() -> None:
    flow = Flow("order 7")
    flow.add(step.new())
    with pytest.raises(InvalidOption, match="stage a job that enqueues the flow"):
        flow.enqueue(pgqueue.Outbox(object()))
    pgqueue.configure(outbox=True)
    with pytest.raises(InvalidOption, match="stage a job that enqueues the flow"):
        flow.enqueue(object())
    with pytest.raises(InvalidArguments, match="the connection of your transaction comes first"):
        flow.enqueue()  # type: ignore[call-arg]


async def test_while_a_flow_is_sent_it_is_not_sent_again_and_takes_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: it counts as enqueued from the answer on. Then a second task enqueues it, too, and a node that is added
    meanwhile is lost."""
    begun, go, sent = asyncio.Event(), asyncio.Event(), list[object]()

    async def suspended(conn: object, name: str, nodes: object) -> FlowHandle:
        sent.append(nodes)
        begun.set()
        await go.wait()
        if len(sent) == 1:
            raise DuplicateJob("job 7 has the unique key 'k'", existing=7, job_id=7)
        return FlowHandle(7, name, {}, ())

    async def sending(flow: Flow) -> asyncio.Task[FlowHandle]:
        begun.clear()
        go.clear()
        task = asyncio.create_task(flow.aenqueue(object()))
        await begun.wait()
        for act in (lambda: flow.enqueue(object()), lambda: flow.add(step.new()), lambda: flow.add_many(jobs(2))):
            with pytest.raises(InvalidOption, match=r"flow 'order 7': .*: it is just being enqueued"):
                act()
        with pytest.raises(InvalidOption, match="aenqueue: it is just being enqueued"):
            await flow.aenqueue(object())
        go.set()
        return task

    monkeypatch.setattr(flow_enqueue, "aenqueue", suspended)
    flow = Flow("order 7")
    first = flow.add(step.new())
    with pytest.raises(DuplicateJob):
        await (await sending(flow))
    second = flow.add(step.new())
    assert (await (await sending(flow))).id == 7
    assert sent == [(first,), (first, second)]
    with pytest.raises(InvalidOption, match="it was enqueued already, as flow 7"):
        flow.add(step.new())

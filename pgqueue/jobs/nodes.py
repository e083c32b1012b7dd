"""Nodes of a flow, and what may be said of one: `node.result`, `node.failed`, `node.ended`. Values, no I/O.

A `Flow` (pgqueue/client/flow.py) makes nodes. A job of a later node is given `node.result` as an argument: a
`NodeResult` stands where the value will be. The codec leaves it out of the stored arguments; the release of the job
merges the value in.

Conditions are kept by the numbers of nodes with jobs. A node without jobs has no end that could be waited for, so
whatever waits for it waits for what it would have waited for itself (`Conditions.of`):

1. A node without jobs has completed once its own conditions are met. So `after=[empty]` adds them.
2. A job behind an `.ended` or `.failed` condition runs, or is skipped, which counts as completed. So what comes behind
   an empty node waits for the end of these, whatever it is.
3. It would have been cancelled if a node of its plain conditions had failed. So `empty.ended` waits for the ends of all
   its conditions, and `empty.failed` for a failure of one of its plain ones. Without plain ones it can not fail: then
   the number of the empty node itself stays, and the job behind it is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, cast

from pgqueue.errors import InvalidArguments, InvalidOption

NewJob = Any
"""A NewJob. Its module imports this one, so its type cannot be imported here."""
T_co = TypeVar("T_co", covariant=True)

AFTER_MOST = 10_000
"""The most nodes that one node may wait for."""
NODE_BITS = 20
"""The id of a node is that of its flow, shifted left by so many bits, and the node's number."""
NODES_MOST = (1 << NODE_BITS) - 1
"""The most nodes of a flow."""
FLOW_HIGHEST = (1 << 63 - NODE_BITS) - 1
FEWER = "jobs that are waited for together are one node: flow.add_many(…)"


class NodeResult:
    """Stands for the result of a node among the arguments of a job; the value comes at the release of the job."""

    __slots__ = ("node",)

    def __init__(self, node: Node[Any]) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"<result of {self.node.shown}>"

    def __str__(self) -> str:
        self.refuse()

    def __format__(self, spec: str) -> str:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise InvalidArguments: the value was used before it is there, as in the function of a key."""
        raise InvalidArguments(
            f"{self!r} is not known at the enqueue, so no text and no key can be made of it: a lock, a rate or a "
            "unique key needs arguments that are there"
        )


class UnknownResult:
    """Stands for a result in what the function of a key is given. Whatever looks at it raises InvalidArguments: what
    was made of it, or decided by it, would not be made of the value that comes."""

    __slots__ = ("_result",)

    def __init__(self, result: NodeResult) -> None:
        self._result = result


def _refuse(unknown: UnknownResult, *_: object) -> NoReturn:
    result: NodeResult = object.__getattribute__(unknown, "_result")
    result.refuse()


for _look in (
    *("__getattribute__", "__repr__", "__str__", "__format__", "__bytes__", "__bool__", "__int__", "__float__"),
    *("__index__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__len__", "__iter__"),
    *("__contains__", "__getitem__", "__add__", "__radd__", "__mod__", "__rmod__"),
):
    setattr(UnknownResult, _look, _refuse)


class Conditions(NamedTuple):
    """The nodes that a node waits for, by number and in order: these complete, these end, one of these fails."""

    completed: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    @classmethod
    def of(cls, said: Iterable[Condition], what: str) -> Conditions:
        """The conditions that were said, through nodes without jobs. Raises InvalidOption if there are too many, or
        two contradict each other."""
        completed, ended, failed = set[int](), set[int](), set[int]()
        explicit: dict[int, set[str]] = {}
        for condition in said:
            node, kind = condition.node, condition.kind
            kinds = explicit.setdefault(node.number, set())
            kinds.add(kind)
            if kinds >= {"completed", "failed"}:
                raise InvalidOption(
                    f"{what}: it waits for {node.shown} to complete, and for its failure: only one can be"
                )
            if node.jobs:
                {"completed": completed, "ended": ended, "failed": failed}[kind].add(node.number)
                continue
            own = node.conditions
            if kind == "failed":
                failed.update(own.completed or (node.number,))
            elif kind == "ended":
                ended.update(own.completed, own.ended, own.failed)
            else:
                completed.update(own.completed)
                ended.update(own.ended, own.failed)
        found = cls(tuple(sorted(completed)), tuple(sorted(ended - completed)), tuple(sorted(failed)))
        if (count := found.size) > AFTER_MOST:
            raise InvalidOption(f"{what}: it waits for {count:,} nodes, the limit is {AFTER_MOST:,}; {FEWER}")
        return found

    @property
    def size(self) -> int:
        """How many nodes are waited for."""
        return len(self.completed) + len(self.ended) + len(self.failed)


NONE = Conditions()


@dataclass(frozen=True, slots=True, eq=False)
class Node(Generic[T_co]):
    """A set of jobs of a flow, made by `flow.add` or `flow.add_many`; `T_co` is what its job returns, or a list of it.

    A node has ended when none of its jobs lives. It stands in `after` of a later node: that one then waits for all of
    its jobs to complete.

        sent = flow.add(ship.new(7), after=[paid])
    """

    flow: object
    """The flow that has made it."""
    number: int
    """Its place in the flow, from 1."""
    jobs: tuple[NewJob, ...]
    conditions: Conditions = NONE
    name: str | None = None
    many: bool = False
    stores: bool = True
    results: tuple[tuple[str, Node[Any]], ...] = ()
    """Parameters that get the result of a node, with that node."""

    @property
    def shown(self) -> str:
        """The node in words, for messages."""
        return f"node {self.number}" + (f" ({self.name!r})" if self.name is not None else "") + f" of {self.flow!r}"

    @property
    def result(self) -> T_co:
        """The result of this node, as an argument of a later job: `ship.new(7, parcels=picked.result)`.

        That job waits for this node, as by `after=[node]`, unless `after` says something else of it. Of `add_many` it
        is a list in the order of the jobs, with None for a job that did not complete. Raises InvalidOption if the task
        is declared with store_result=False.

            sent = flow.add(ship.new(7, parcels=picked.result))
        """
        if not self.stores:
            raise InvalidOption(f"{self.shown}: it has no result, because its task has store_result=False")
        return cast("T_co", NodeResult(self))

    @property
    def failed(self) -> Condition:
        """The condition that a job of this node failed or was cancelled. If none did, what waits for it is skipped.

        flow.add(refund.new(7), after=[sent.failed])
        """
        return Condition(self, "failed")

    @property
    def ended(self) -> Condition:
        """The condition that this node has ended, however its jobs ended.

        flow.add(tell_shop.new(7), after=[sent.ended])
        """
        return Condition(self, "ended")

    def __repr__(self) -> str:
        return f"<{self.shown}>"


class Condition(NamedTuple):
    """How a node has to end before another one starts."""

    node: Node[Any]
    kind: Literal["completed", "ended", "failed"]


def conditions(
    flow: object, after: object, results: Iterable[NodeResult], what: str
) -> tuple[Conditions, tuple[Node[Any], ...]]:
    """What `after` and the results among the arguments ask for, and the nodes whose results these are.

    Raises InvalidOption if one is no node of this flow.
    """
    if isinstance(after, Node | Condition) or not isinstance(after, Iterable) or isinstance(after, str):
        raise InvalidOption(f"{what}: after is a list of nodes, such as after=[paid, sent.failed], not {after!r:.80}")
    said = [each if isinstance(each, Condition) else Condition(_node(each, what), "completed") for each in after]
    named = {condition.node.number for condition in said}
    wanted = [result.node for result in results]
    for node in [*(condition.node for condition in said), *wanted]:
        if node.flow is not flow:
            raise InvalidOption(f"{what}: {node.shown} is a node of another flow")
    if len(said) > AFTER_MOST:
        raise InvalidOption(f"{what}: it waits for {len(said):,} nodes, the limit is {AFTER_MOST:,}; {FEWER}")
    said += [Condition(node, "completed") for node in wanted if node.number not in named]
    return Conditions.of(said, what) if said else NONE, tuple(wanted)


def _node(given: object, what: str) -> Node[Any]:
    if isinstance(given, Node):
        return given
    hint = ". A result stands among the arguments; here stands its node" if isinstance(given, NodeResult) else ""
    raise InvalidOption(
        f"{what}: after has {given!r:.80}, which is no node: use what flow.add and flow.add_many return{hint}"
    )


def refuse_results(jobs: Iterable[NewJob]) -> None:
    """Raise InvalidOption if a job waits for the result of a node: only its flow can enqueue it."""
    for job in jobs:
        if job.results:
            name, result = next(iter(job.results.items()))
            raise InvalidOption(
                f"task {job.task!r}: parameter {name} is {result!r}: only a job of that flow can have it. Write "
                "flow.add(task.new(…)), and enqueue the flow"
            )

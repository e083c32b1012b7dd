"""A flow: jobs that wait for other jobs. It is built as a value, and enqueued as a whole.

Called by the application. `add` and `add_many` check what they are given and send nothing. `enqueue` hands the flow to
`flow_enqueue`. A cycle cannot be written: a node waits only for nodes that were there before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from pgqueue.client import flow_enqueue
from pgqueue.client.flow_enqueue import FlowHandle
from pgqueue.client.registry import declared_tasks
from pgqueue.errors import InvalidArguments, InvalidOption
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.nodes import NODES_MOST, Condition, Node, NodeResult, conditions
from pgqueue.options import checks_options, names_options, needs_arguments

R = TypeVar("R")

NAME_MOST = 200
_CONN = "the connection of your transaction comes first: flow.enqueue(conn)"


@names_options
class Flow:
    """Jobs that wait for other jobs, as a value. Nothing is sent before `enqueue`, which sends the whole of it.

    `name` is a text of 1 to 200 characters, for people; several flows may have one name.

    >>> import pgqueue
    >>> charge, ship = pgqueue.remote("charge"), pgqueue.remote("ship")
    >>> flow = Flow("order 7")
    >>> paid = flow.add(charge.new(order_id=7), name="paid")
    >>> sent = flow.add(ship.new(receipt=paid.result))
    >>> sent, sent.conditions.completed
    (<node 2 of flow 'order 7'>, (1,))
    >>> flow.add(ship.new(), after=[Flow("order 8").add(charge.new())])
    Traceback (most recent call last):
    ...
    pgqueue.errors.InvalidOption: node 3 of flow 'order 7': node 1 of flow 'order 8' is a node of another flow
    """

    __slots__ = ("_handle", "_names", "_nodes", "_sending", "name")

    def __init__(self, name: str) -> None:
        self.name = _check_name(name, "flow")
        self._nodes: list[Node[Any]] = []
        self._names: set[str] = set()
        self._handle: FlowHandle | None = None
        self._sending = False

    @property
    def nodes(self) -> tuple[Node[Any], ...]:
        """The nodes in the order of `add`.

        >>> Flow("order 7").nodes
        ()
        """
        return tuple(self._nodes)

    @checks_options
    def add(
        self, new: NewJob[R], /, *, after: Iterable[Node[Any] | Condition] = (), name: str | None = None
    ) -> Node[R]:
        """Add one job, which waits for all of `after`, and return its node.

        `after` has nodes of this flow, which must complete; also `node.ended` and `node.failed`. If several are
        `.failed`, a failure of one is enough. The job also waits for the nodes whose results are among its arguments.
        `name` is for people; a flow has it once.

        Raises InvalidOption if `after` has something else, or the flow was enqueued; InvalidArguments if `new` is no
        job.

            sent = flow.add(ship.new(7), after=[paid])
        """
        if not isinstance(new, NewJob):
            raise InvalidArguments(f"{self!r}: add takes what task.new(…) returns, not {type(new).__qualname__}")
        return self._add((new,), after, name, many=False)

    @checks_options
    def add_many(
        self, jobs: Iterable[NewJob[R]], /, *, after: Iterable[Node[Any] | Condition] = (), name: str | None = None
    ) -> Node[list[R]]:
        """Add one node of several jobs, or of none. What waits for the node waits for all of them.

        The options are those of `add`. A node without jobs has completed when what it would have waited for has. All
        jobs of a node take the same results. If the iterable raises, its exception has a note of the node.

            picked = flow.add_many((pick.new(item) for item in items), after=[paid])
        """
        if isinstance(jobs, NewJob) or not isinstance(jobs, Iterable):
            raise InvalidArguments(
                f"{self!r}: add_many takes several jobs, [task.new(…), …], not {type(jobs).__qualname__}"
            )
        made: list[NewJob[Any]] = []
        try:
            for new in jobs:
                if not isinstance(new, NewJob):
                    raise InvalidArguments(f"add_many takes what task.new(…) returns, not {type(new).__qualname__}")
                made.append(new)
        except InvalidArguments as error:
            error.add_note(f"job {len(made) + 1} of {self._next(name)}")
            raise
        return self._add(tuple(made), after, name, many=True)

    @needs_arguments(2, _CONN)
    def enqueue(self, conn: object, /) -> FlowHandle:
        """Enqueue the whole flow on the application's connection, and return its handle. One statement; no commit.

        The flow is part of the connection's transaction: it is there after the COMMIT, or nothing of it is. If another
        job holds a unique key of one of the jobs, DuplicateJob is raised and nothing of the flow is written, whatever
        the task's `on_duplicate` says; the transaction stays usable. A flow is enqueued once.

        Raises InvalidOption for an Outbox, PayloadTooLarge, UnsupportedConnection, SchemaMissing, or the driver's
        errors.

            with psycopg.connect(dsn) as conn:
                conn.execute("INSERT INTO orders (id) VALUES (7)")
                handle = flow.enqueue(conn)
        """
        with self._sent("enqueue") as nodes:
            self._handle = flow_enqueue.enqueue(conn, self.name, nodes)
        return self._handle

    @needs_arguments(2, _CONN)
    async def aenqueue(self, conn: object, /) -> FlowHandle:
        """`enqueue` for async connections.

        handle = await flow.aenqueue(session)
        """
        with self._sent("aenqueue") as nodes:
            self._handle = await flow_enqueue.aenqueue(conn, self.name, nodes)
        return self._handle

    def __repr__(self) -> str:
        return f"flow {self.name!r}"

    def _add(self, jobs: tuple[NewJob[Any], ...], after: object, name: str | None, *, many: bool) -> Node[Any]:
        if isinstance(after, Iterable) and not isinstance(after, Node | Condition | str):
            after = tuple(after)  # an iterator may add nodes: they have their numbers before this one
        self._refuse_enqueued("add")
        number = len(self._nodes) + 1
        if number > NODES_MOST:
            raise InvalidOption(
                f"{self!r} has {NODES_MOST:,} nodes, the most there may be; jobs that nothing distinguishes are one "
                "node: flow.add_many(…)"
            )
        what = self._next(name)
        if name is not None and _check_name(name, what) in self._names:
            raise InvalidOption(f"{what}: another node of the flow has this name")
        results = _results(jobs, what)
        waits, wanted = conditions(self, after, results.values(), what)
        jobs, kept = _with_empty(jobs, zip(results, wanted, strict=True))
        node: Node[Any] = Node(self, number, jobs, waits, name, many, _stores(jobs), kept)
        self._nodes.append(node)
        if name is not None:
            self._names.add(name)
        return node

    def _next(self, name: str | None) -> str:
        """The node that is about to be added, in words."""
        named = f" ({name!r:.80})" if name is not None else ""
        return f"node {len(self._nodes) + 1}{named} of {self!r}"

    @contextmanager
    def _sent(self, what: str) -> Iterator[tuple[Node[Any], ...]]:
        """The nodes to send. Meanwhile nothing is added, and the flow is not sent again; after an error both may be."""
        self._refuse_enqueued(what)
        self._sending = True
        try:
            yield self.nodes
        finally:
            self._sending = False

    def _refuse_enqueued(self, what: str) -> None:
        if self._sending:
            raise InvalidOption(f"{self!r}: {what}: it is just being enqueued; build a new one")
        if self._handle is not None:
            raise InvalidOption(
                f"{self!r}: {what}: it was enqueued already, as flow {self._handle.id}; build a new one"
            )


def _check_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_MOST or not name.isprintable():
        raise InvalidOption(f"{what}: name {name!r:.80}: use 1 to {NAME_MOST} printable characters")
    return str.__str__(name)


def _stores(jobs: Iterable[NewJob[Any]]) -> bool:
    """Whether the tasks of all jobs keep their results, as far as they are declared here."""
    declared = (declared_tasks.get(task) for task in {job.task for job in jobs})
    return all(task is None or task.store_result for task in declared)


def _results(jobs: Iterable[NewJob[Any]], what: str) -> Mapping[str, NodeResult]:
    """Which parameters get results: the same for all jobs of a node."""
    said: dict[str, NodeResult] | None = None
    for job in jobs:
        mine = job.results or {}
        if said is None:
            said = mine
        elif mine is not said and {n: r.node for n, r in mine.items()} != {n: r.node for n, r in said.items()}:
            raise InvalidOption(f"{what}: its jobs take results of different nodes: add them as several nodes")
    return said or {}


def _with_empty(
    jobs: tuple[NewJob[Any], ...], results: Iterable[tuple[str, Node[Any]]]
) -> tuple[tuple[NewJob[Any], ...], tuple[tuple[str, Node[Any]], ...]]:
    """The jobs with the results of nodes without jobs, which are known: an empty list. And the results to wait for."""
    pairs = list(results)
    known = [name for name, node in pairs if not node.jobs]
    if known:
        jobs = tuple(
            msgspec.structs.replace(job, args=_merged(job.args, dict.fromkeys(known, msgspec.Raw(b"[]"))))
            for job in jobs
        )
    return jobs, tuple((name, node) for name, node in pairs if node.jobs)


def _merged(args: str, values: Mapping[str, msgspec.Raw]) -> str:
    return msgspec.json.encode({**msgspec.json.decode(args, type=dict[str, msgspec.Raw]), **values}).decode()

"""No test stops, signals, cancels or asks a worker on the word of a row that says `running`.

The row is there as soon as a worker has claimed the job. The worker may not have read the answer, and the handler has
not begun: what the test does then meets another job's life than it means, now and then. `begun` (handlers.py) waits for
a handler in the test's own process, `event` for one that reports by `say`. What a function of the same file does counts
where it is called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WAITS = {"until", "wait_until"}
HANDLERS = {"begun", "event"}
ACTS = {
    "signal",
    "send_signal",
    "insist",
    "killpg",
    "kill",
    "terminate",
    "restart",
    "stop",
    "quiet",
    "cancel",
    "acancel",
}
ACTS |= {"stack", "astack"}
RUNNING = re.compile(
    r"job_running\b"  # the table
    r"|\bstate (?:=|IN) \(?[^)]*'running'|\bworker_id IS NOT NULL"  # the view
    r"|\brunning <> '\{\}'|cardinality\(running\)"  # what a heartbeat has written
    r"|is_in\(.+'running'|\.get\('running'|\bstates?\([^()]*\).*'running'"
)
GONE = re.compile(r"\bnot\b|NOT EXISTS|count\(\*\)(?:::int)? = 0|== 0|== \[\]")
"""What waits until no job runs any more."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_of(call: ast.Call) -> set[str]:
    """What is called, by its last name, and what it is to call itself: `kill` of `to_thread(process.kill)`."""
    return {str(getattr(each, "attr", getattr(each, "id", ""))) for each in (call.func, *call.args)}


def as_they_end(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    """The calls among these, as they end in the text."""
    found = [each for each in nodes if isinstance(each, ast.Call)]
    return sorted(found, key=lambda call: (call.end_lineno, call.end_col_offset))


@cache
def calls_in(function: Function) -> list[ast.Call]:
    return as_they_end(each for node in function.body for each in ast.walk(node))


def hasty(source: str) -> list[int]:
    """The lines that stop, signal, cancel or ask after a wait for a row, where no handler was waited for."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    functions = {each.name: each for each in nodes if isinstance(each, Function)}
    assigned = [(each.targets[0], each.value) for each in nodes if isinstance(each, ast.Assign)]
    values = {target.id: ast.unparse(value) for target, value in assigned if isinstance(target, ast.Name)}

    def kind(call: ast.Call) -> str:
        """Whether it waits for a row or a handler, or acts."""
        names = names_of(call)
        if names & WAITS:
            inside = [node for each in call.args for node in ast.walk(each)]
            meant = [values.get(node.id, "") for node in inside if isinstance(node, ast.Name)]
            asked = " ".join([*map(ast.unparse, call.args), *meant]).replace('"', "'").replace("\\'", "'")
            if any(getattr(node, "attr", "") == "events" for node in inside):
                return "handler"
            return "row" if RUNNING.search(asked) and not GONE.search(asked) else ""
        return "handler" if names & HANDLERS else "act" if names & ACTS else ""

    kinds = {call: kind(call) for call in as_they_end(nodes)}
    if "row" not in kinds.values():
        return []

    def steps(function: Function, *within: str) -> Iterator[tuple[str, int]]:
        """What happens in this order; what another function of this file does has the line of its call."""
        for call in calls_in(function):
            yield kinds[call], call.lineno
            for name in (names_of(call) & functions.keys()).difference(within) if not kinds[call] else ():
                yield from ((what, call.lineno) for what, _ in steps(functions[name], name, *within))

    found = set()
    for name, function in functions.items():
        seen = set()
        for what, line in steps(function, name):
            seen.add(what)
            if what == "act" and seen >= {"row"} and "handler" not in seen:
                found.add(line)
    return sorted(found)


def test_no_test_stops_a_worker_on_the_word_of_a_row() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in TESTS.rglob("*.py")
        if "running" in (source := path.read_text()) and "until(" in source
        for line in hasty(source)
    }
    assert found == set(), "wait for the handler: `begun(job)` of handlers.py, or `event(…)` of a process"


NAIVE = [
    """
async def test_cancel(eyes):
    await until(eyes.is_in(job, "running"))
    pgqueue.cancel(eyes.conn, job)
""",
    """
def test_kill(eyes):
    with working("shop") as worker:
        wait_until(lambda: eyes.states().get("running") == 2)
        [child] = psutil.Process(worker.process.pid).children()
        os.kill(child.pid, signal.SIGKILL)
""",
    """
def test_signal(conn):
    until(conn, "SELECT running <> '{}' FROM pgqueue.worker")
    worker.signal(SIGTERM)
    process.event("stopped")
""",
    """
RUNS = "SELECT count(*) FROM pgqueue.job WHERE task = 't' AND state = 'running'"

async def started(eyes):
    await until(lambda: eyes.one(RUNS))

async def test_stack(eyes):
    await started(eyes)
    await asyncio.to_thread(pgqueue.stack, eyes.conn, 7)
""",
    """
async def test_quiet(eyes):
    await until(lambda: states(eyes) == ["running"])
    worker.quiet()
""",
]
STEADY = [
    NAIVE[0].replace('until(eyes.is_in(job, "running"))', "begun(job)"),
    NAIVE[0].replace("    pgqueue.cancel", "    await begun(job)\n    pgqueue.cancel"),
    NAIVE[1].replace("        [child]", '        one.event("began")\n        [child]'),
    NAIVE[3].replace("until(lambda: eyes.one(RUNS))", "asyncio.to_thread(process.event, 'began')"),
    NAIVE[4].replace('states(eyes) == ["running"]', '"running" not in eyes.states()'),
    NAIVE[4].replace("worker.quiet()", "gate.set()"),
    """
def test_gone(eyes):
    wait_until(lambda: not eyes.all("SELECT id FROM pgqueue.job_running WHERE worker_id = 7"))
    first.signal(signal.SIGCONT)
""",
]


@pytest.mark.parametrize("source", NAIVE)
def test_the_rule_finds_the_naive_way(source: str) -> None:
    assert len(hasty(source)) == 1


@pytest.mark.parametrize("source", STEADY)
def test_the_rule_finds_nothing_where_the_handler_is_waited_for(source: str) -> None:
    assert source not in NAIVE and hasty(source) == []

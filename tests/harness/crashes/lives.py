"""The lives of the crash harness: workers, applications and rescuers, forked from one preloaded process.

As a program (`python -m crashes.lives`) it is that process, the nursery: it imports everything, opens nothing, and
forks a child for each plan it reads (a line of JSON); a child lives its plan and dies of it, or ends in order. Both
report by lines on the standard output. series.py writes the plans and keeps the account.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import logging
import os
import random
import select
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

import psycopg

from crashes import naive, tasks
from crashes.points import Fault, Points, arm, say
from crashes.tasks import TASKS, Home, enter, follow, mixed
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.worker.complete.completer import Completer
from pgqueue.worker.liveness.heartbeat import Heartbeat
from pgqueue.worker.liveness.rescue import Rescue
from pgqueue.worker.run.executor import Executor
from pgqueue.worker.worker import Worker

SCHEMA = "pgqueue"


# What the processes do -----------------------------------------------------------------------------------------------


async def work(plan: dict[str, Any], points: Points) -> None:
    """A worker: until it has begun so many jobs, its time is over, or it is told to stop; then it stops in order."""
    tasks.home = home = Home(plan["dsn"], plan["jobs"])
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, tell_tasks, plan["life"])
    for cls, name in SHUTDOWN:
        points.around(cls, name)
    worker = Worker(
        dsn=plan["dsn"],
        tasks=[*TASKS.values(), follow],
        queues=plan["queues"],
        concurrency=3,
        poll=0.1,
        lease=plan["lease"],
    )
    await worker.start()
    points.late = lambda: worker.services.completer.fenced
    waiting = [asyncio.ensure_future(event.wait()) for event in (told, home.enough)]
    await asyncio.wait(waiting, timeout=plan["seconds"], return_when=asyncio.FIRST_COMPLETED)
    points.phase = "shutdown, "
    await worker.stop(plan["grace"])
    say("late", life=plan["life"], late=points.late())


def tell_tasks(life: int) -> None:
    """Write where each task stands. Threads are written by faulthandler, at SIGUSR1."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
    say("told", life=life)


SHUTDOWN: list[tuple[type, str]] = [
    (Worker, "quiet"),
    (Executor, "cancel"),
    (Completer, "flushed"),
    (Heartbeat, "stop"),
    (Session, "close"),
]
"""Steps of a shutdown that are no statements."""


async def apply(plan: dict[str, Any], points: Points) -> None:
    """An application: some transactions that enqueue, one in four of them rolled back."""
    with psycopg.connect(plan["dsn"], application_name="app") as conn:
        for number in range(4):
            tokens = enter(conn, mixed(2))
            if number == 1:
                conn.rollback()
                continue
            points.promised[:] = tokens
            conn.commit()


async def rescue(plan: dict[str, Any], points: Points) -> None:
    """Somebody who knows that a process is dead and gives its jobs back."""
    session = Session(Link(plan["dsn"], SCHEMA), "rescue")
    await rescue_all(Rescue(session, notify=True, rescued=lambda: None), session, plan["pid"])
    await session.close()


async def rescue_all(rescuer: Rescue, session: Session, pid: int) -> int:
    """Rescue whatever workers the dead process was; how many."""
    sql = f"SELECT id, beat FROM {SCHEMA}.worker WHERE pid = %(pid)s::integer AND dead_at IS NULL"  # noqa: S608
    [rows] = await session.run(Statement(sql, {"pid": pid}, list))
    for worker_id, beat in rows:
        await rescuer.rescue(worker_id, beat)
    return len(rows)


LIVES = {"work": work, "apply": apply, "rescue": rescue}


# The nursery ---------------------------------------------------------------------------------------------------------


def live(plan: dict[str, Any]) -> None:
    """Live this plan in the process just forked; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1)
        random.seed(plan["seed"])
        points = Points(plan["life"], [Fault(**fault) for fault in plan["faults"]])
        arm(points)
        if plan["naive"]:
            getattr(naive, plan["naive"])()
        asyncio.run(LIVES[plan["kind"]](plan, points))
        if plan["record"]:
            points.say_seen()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def nurse() -> None:
    """Fork a child for each plan, report each death, until the harness closes our input; then nobody is left."""
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    heard, told = os.pipe()
    os.set_blocking(told, False)
    os.set_blocking(heard, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(told)
    gc.freeze()
    lives: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0, heard], [], [])
        if heard in ready:
            with suppress(BlockingIOError):
                os.read(heard, 4096)
            reap(lives)
        if 0 in ready:
            got = os.read(0, 65536)
            if not got:
                break
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                bear(json.loads(line), lives)
    for pid in lives:
        os.kill(pid, signal.SIGKILL)


def bear(plan: dict[str, Any], lives: dict[int, int]) -> None:
    pid = os.fork()
    if not pid:
        live(plan)
    lives[pid] = plan["life"]
    say("born", life=plan["life"], pid=pid)


def reap(lives: dict[int, int]) -> None:
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        say("ended", life=lives.pop(pid), pid=pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    sys.modules["crashes.lives"] = sys.modules["__main__"]
    nurse()

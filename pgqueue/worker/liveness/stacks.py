"""Where the handler of a running job stands: read for a person who has asked, and written as the answer.

Called by the heartbeat's thread, after a heartbeat. So it is answered although the event loop is blocked, which is when
it is wanted most, and without a NOTIFY within a third of the lease.

Why no job and no heartbeat is harmed:

1. Nothing of the handler is called, and no value of it is read: of each frame only its file, its line and its name.
   Of awaited objects only those of the interpreter's own types are followed. So no code of the application runs here.
2. No file is opened: the lines of the source are not shown.
3. The loop is not asked, and no lock is taken. Under the interpreter's lock, a frame that is held cannot go away. One
   that moves on meanwhile gives a line that was true a moment ago.
4. The frames are let go before anything is sent. If a handler returns in just that moment, its values end here.
5. If the thread or the task has gone on to another job meanwhile, that is seen afterwards, and nothing is answered.
6. The heartbeat has gone through before the first request is read. What follows may take a sixth of the lease, and
   waits for no lock on a row. An error is logged, and costs no heartbeat: the next one is due as before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

import psycopg

from pgqueue.database.backoff import one_line
from pgqueue.database.sessions import Session
from pgqueue.worker.run.run import Run
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

STACK = "stack"
"""What a NOTIFY of `:control` says when there is a request."""
FRAMES_MOST = 100
"""A deeper stack is answered without its outer frames."""
NAME_MOST = 300
"""Characters of a file's or a function's name."""
OURS = f"{Path(__file__).parents[2]}{os.sep}"
"""Where the files of this package are."""
CALLERS = f"{OURS}worker{os.sep}run{os.sep}"
"""Where those are that call handlers."""
Frame = tuple[str, int, str]


class Stacks:
    """Answers for the jobs of one worker, over the heartbeat's session. Made on the thread of the event loop."""

    def __init__(self, state: WorkerState, running: RunningJobs, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self._state = state
        self._running = running
        self._loop = loop
        self._loop_thread = thread
        self._refused = False
        """Whether the database has refused a statement: then it is not sent again."""

    async def answer(self, session: Session, worker_id: int) -> None:
        """Answer what is asked of the jobs that run here. Raises no error of the database."""
        if self._refused or not self._running.runs:
            return
        link = session.link
        try:
            async with asyncio.timeout(self._state.settings.lease / 6):
                [rows] = await session.run(link.statement("stacks_wanted", worker_id=worker_id))
                for request, job_id, claim in rows:
                    said = json.dumps({**self.of(job_id, claim), "worker": worker_id})
                    await session.run(link.statement("stacks_answer", id=request, answer=said))
        except (psycopg.Error, TimeoutError) as error:
            self._refused = isinstance(error, psycopg.errors.InsufficientPrivilege)
            log.warning("requests for stacks could not be answered: %s", one_line(error))

    def of(self, job_id: int, claim: int) -> dict[str, Any]:
        """Where this job stands: `where` (thread, task, waiting), its `frames`, outermost first, and how many were left
        out. From any thread."""
        run = self._running.runs.get(job_id)
        job = None if run is None else run.job
        if run is None or job is None or job.id != job_id or job.claim != claim:
            return {"where": "waiting", "frames": [], "left_out": 0}
        frames = self._of_thread(run) if run.lock is not None else self._of_task(run)
        if run.job is not job:
            return {"where": "waiting", "frames": [], "left_out": 0}
        where = "thread" if run.lock is not None else "task"
        shown = [(file[-NAME_MOST:], line, name) for file, line, name in frames[-FRAMES_MOST:]]
        return {"where": where, "frames": shown, "left_out": len(frames) - len(shown)}

    def _of_thread(self, run: Run) -> list[Frame]:
        return _outwards(sys._current_frames().get(run.ident))

    def _of_task(self, run: Run) -> list[Frame]:
        task: asyncio.Task[Any] | None = run.again or run.task
        if task is None:
            return []
        if asyncio.current_task(self._loop) is task:  # it has the loop just now, and may block it
            return _outwards(sys._current_frames().get(self._loop_thread))
        return _inwards(task.get_coro())


def _outwards(frame: FrameType | None) -> list[Frame]:
    """This frame and those that have called it, outermost first."""
    found: list[Frame] = []
    while frame is not None and len(found) <= 10 * FRAMES_MOST:
        found.append(_frame(frame))
        frame = frame.f_back
    return _from_handler(found[::-1])


def _inwards(awaited: object) -> list[Frame]:
    """A coroutine that waits, and what it awaits, outermost first."""
    found: list[Frame] = []
    while len(found) <= 10 * FRAMES_MOST:
        frame: FrameType | None
        if type(awaited) is CoroutineType:
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif type(awaited) is GeneratorType:
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        elif type(awaited) is AsyncGeneratorType:
            frame, awaited = awaited.ag_frame, awaited.ag_await
        else:
            break
        if frame is not None:
            found.append(_frame(frame))
    return _from_handler(found)


def _from_handler(frames: list[Frame]) -> list[Frame]:
    """These frames without the outer ones: those of the thread or the loop, and those of this package that call the
    handler. If no other is there, all of them."""
    called = next((at for at, (file, _, _) in enumerate(frames) if file.startswith(CALLERS)), len(frames))
    first = next((at for at in range(called, len(frames)) if not frames[at][0].startswith(OURS)), 0)
    return frames[first:]


def _frame(frame: FrameType) -> Frame:
    code = frame.f_code
    return code.co_filename, frame.f_lineno or 0, code.co_qualname[:NAME_MOST]

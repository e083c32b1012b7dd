"""The harness's side of the nursery (lives.py): starts it, gives it plans, hears what became of the lives."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from workers import until

HARNESS = str(Path(__file__).parent.parent)
PATH = [HARNESS, *filter(None, [os.environ.get("PYTHONPATH")])]
"""Where a program of the harness finds its modules: it is started from any directory."""
SPARE_SECONDS = 60.0
"""How long a life may take beyond the time of its plan: to start, to stop, to wait for a server."""
TELL_SECONDS = 5.0
"""How long a life that is stuck has for telling where it stands."""


@dataclass(slots=True)
class Life:
    """A process of the nursery and what became of it."""

    plan: dict[str, Any]
    pid: int = 0
    killed: str = ""
    crashed: str = ""
    """Where it crashed the server."""
    seen: list[str] = field(default_factory=list)
    late: int = 0
    cuts: int = 0
    promised: list[int] = field(default_factory=list)


class Nursery:
    """The preloaded process and its children."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors
        self._lives: dict[int, tuple[Life, asyncio.Future[Life], asyncio.Event]] = {}
        self._told = asyncio.Event()
        """A life that is stuck has told where its tasks stand."""
        self._number = 0
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    @asynccontextmanager
    async def open(cls, program: str = "crashes.lives") -> AsyncIterator[Nursery]:
        """Start this program, and end it with all of its children."""
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                program,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(PATH)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
            nursery = cls(process, errors)
            try:
                yield nursery
            finally:
                assert process.stdin is not None
                process.stdin.close()
                await process.wait()
                await nursery._reading

    async def live(self, born: asyncio.Future[Life] | None = None, **plan: Any) -> Life:
        """Have a process live this plan; what became of it. `born` is told of it at its birth.

        A life that takes much longer than its plan is ended, and the error says where its threads and tasks stood.
        """
        self._number += 1
        life = Life(
            {"life": self._number, "seed": self._number, "naive": "", "jobs": 200, "seconds": 2.0, "grace": 0.2}
            | {"record": False, "faults": [], "queues": ["default"], "lease": 2.0}
            | plan
        )
        ended: asyncio.Future[Life] = asyncio.get_running_loop().create_future()
        birth = asyncio.Event()
        self._lives[self._number] = life, ended, birth
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(life.plan).encode() + b"\n")
        await birth.wait()
        if born is not None:
            born.set_result(life)
        seconds = life.plan["seconds"] + life.plan["grace"] + SPARE_SECONDS
        try:
            return await asyncio.wait_for(asyncio.shield(ended), seconds)
        except TimeoutError:
            raise AssertionError(f"{life} has not ended within {seconds:g} s\n{await self.stands(life.pid)}") from None

    async def begin(self, **plan: Any) -> tuple[Life, asyncio.Task[Life]]:
        """Have a process live this plan; it is born when this returns. The task ends with it."""
        born: asyncio.Future[Life] = asyncio.get_running_loop().create_future()
        going = asyncio.ensure_future(self.live(born, **plan))
        return await born, going

    async def stands(self, pid: int) -> str:
        """End this process, and say where its threads and tasks stood."""
        [ended] = [ended for life, ended, _ in self._lives.values() if life.pid == pid and not ended.done()]
        self._told.clear()
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGUSR2)
        with suppress(TimeoutError):  # its loop may be what is stuck
            await asyncio.wait_for(self._told.wait(), TELL_SECONDS)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait([ended])
        ended.exception()  # taken: it was us
        return self._said()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            life, ended, birth = self._lives[said["life"]]
            match said["event"]:
                case "born":
                    life.pid = said["pid"]
                    birth.set()
                case "seen":
                    life.seen += said["points"]
                case "late":
                    life.late = said["late"]
                case "crashed":
                    life.crashed = said["point"]
                case "cut":
                    life.cuts += 1
                case "told":
                    self._told.set()
                case "killed":
                    life.killed, life.late, life.promised = said["point"], said["late"], said["promised"]
                case "ended":
                    if said["code"] == (-9 if life.killed else 0):
                        ended.set_result(life)
                    else:
                        ended.set_exception(AssertionError(f"{life} ended with {said['code']}\n{self._said()}"))
        for life, ended, birth in self._lives.values():
            if not ended.done():
                ended.set_exception(AssertionError(f"the nursery has ended, and {life} with it\n{self._said()}"))
                birth.set()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-20_000:].decode(errors="replace")


async def lived(nursery: Nursery, done: Callable[[], bool], **plan: Any) -> Life:
    """A worker's life until this is done, recorded. What comes then is its shutdown."""
    life, going = await nursery.begin(kind="work", jobs=1 << 40, seconds=60.0, record=True, **plan)
    await until(done, 50.0)
    await asyncio.sleep(0.3)  # for the last steps of the handler's thread, which nothing shows
    os.kill(life.pid, signal.SIGTERM)
    return await going

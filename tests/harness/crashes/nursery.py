"""The harness's side of the nursery (lives.py): starts it, gives it plans, hears what became of the lives."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from workers import until

HARNESS = str(Path(__file__).parent.parent)
PATH = [HARNESS, *filter(None, [os.environ.get("PYTHONPATH")])]
"""Where a program of the harness finds its modules: it is started from any directory."""


@dataclass(slots=True)
class Life:
    """A process of the nursery and what became of it."""

    plan: dict[str, Any]
    pid: int = 0
    killed: str = ""
    seen: list[str] = field(default_factory=list)
    late: int = 0
    cuts: int = 0
    promised: list[int] = field(default_factory=list)


class Nursery:
    """The preloaded process and its children."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors
        self._lives: dict[int, tuple[Life, asyncio.Future[Life], asyncio.Event]] = {}
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
        """Have a process live this plan; what became of it. `born` is told of it at its birth."""
        self._number += 1
        life = Life(
            {"life": self._number, "seed": self._number, "naive": "", "jobs": 200, "seconds": 2.0, "grace": 0.2}
            | {"record": False, "faults": []}
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
        return await ended

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
                case "cut":
                    life.cuts += 1
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
        return self._errors.read()[-5000:].decode(errors="replace")


async def lived(nursery: Nursery, done: Callable[[], bool], **plan: Any) -> Life:
    """A worker's life until this is done, recorded. What comes then is its shutdown."""
    born: asyncio.Future[Life] = asyncio.get_running_loop().create_future()
    life = asyncio.ensure_future(nursery.live(born, kind="work", jobs=1 << 40, seconds=60.0, record=True, **plan))
    pid = (await born).pid
    await until(done, 50.0)
    await asyncio.sleep(0.3)  # for the last steps of the handler's thread, which nothing shows
    os.kill(pid, signal.SIGTERM)
    return await life

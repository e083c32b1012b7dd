"""Whoever is measured runs in a process of its own and is spoken to in lines of JSON, one answer to each line.

So the one that measures takes no CPU from the one that is measured (it waits), and a process's CPU is one side's CPU.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Message = dict[str, Any]
ROOT = Path(__file__).parent.parent


class Process:
    """A child: `python -m MODULE ARGUMENTS…`. It ends when its input is closed."""

    def __init__(self, module: str, *arguments: str) -> None:
        import psutil  # not at the top: the worker imports this module too, and its memory is measured

        pipe = subprocess.PIPE
        command = [sys.executable, "-m", module, *arguments]
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        self._observed = psutil.Process(self._child.pid)
        self._name = " ".join([module, *arguments[1:]])

    def say(self, **message: Any) -> None:
        """Send a line."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def hear(self, timeout: float = 300.0) -> Message:
        """Wait for the next line; RuntimeError when the child has died or says nothing."""
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], timeout)
        line = self._child.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"{self._name}: {'died' if ready else f'no answer within {timeout:g} s'}")
        answer: Message = json.loads(line)
        return answer

    def ask(self, **message: Any) -> Message:
        self.say(**message)
        return self.hear()

    def cpu(self) -> float:
        """CPU seconds so far, all threads (10 ms steps)."""
        times = self._observed.cpu_times()
        return float(times.user + times.system)

    def rss(self) -> float:
        """Resident memory in MiB."""
        return float(self._observed.memory_info().rss) / (1 << 20)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=40)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


@contextmanager
def compiled() -> Iterator[dict[str, str]]:
    """The environment of a command of pgqueue whose code is compiled once, as it is where it was installed.

    A checkout may forbid that (`PYTHONDONTWRITEBYTECODE`), and would be compiled anew in every process.
    """
    import tempfile  # not at the top, as above

    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-") as directory:
        yield kept | {"PYTHONPYCACHEPREFIX": directory}


def answer(message: Message) -> None:
    """The child's side: say one line."""
    print(json.dumps(message), flush=True)


def serve(commands: Mapping[str, Callable[..., Message]]) -> None:
    """The child's side: `{"do": NAME, …}` calls a command with the rest, until the input ends."""
    answer({"ready": True})
    for line in sys.stdin:
        message = json.loads(line)
        answer(commands[message.pop("do")](**message))

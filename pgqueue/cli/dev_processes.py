"""The processes of `pgqueue dev`: they are started, and end, together.

1. Each is in a session of its own. So a Ctrl-C reaches it once, from here, whether a terminal or another program has
   sent it. The end of the terminal (SIGHUP) reaches it as SIGTERM.
2. A signal is only noted by its handler. `run` passes it on, to all that still run.
3. The first process that ends by itself ends the others: half of a workplace would look whole.
4. A thread waits for each process, because nothing else can wait for several of them and for signals.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from types import FrameType

ANSWERS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""What is passed on for each signal."""


class DevProcesses:
    """Processes with these command lines and this environment."""

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        self._commands = commands
        self._environment = environment
        self._news: SimpleQueue[subprocess.Popen[bytes] | signal.Signals] = SimpleQueue()

    def run(self) -> int:
        """Run them until one ends or a signal comes; the exit code of that one, or after a signal of the first."""
        before = {number: signal.signal(number, self._note) for number in ANSWERS}
        started: list[subprocess.Popen[bytes]] = []
        decides: subprocess.Popen[bytes] | None = None
        try:
            for command in self._commands:
                started.append(subprocess.Popen(command, env=self._environment, start_new_session=True))
                threading.Thread(target=self._wait, args=(started[-1],), daemon=True).start()
            running = started[:]
            while running:
                news = self._news.get()
                if isinstance(news, signal.Signals):
                    decides = decides or started[0]
                    _tell(running, ANSWERS[news])
                else:
                    running.remove(news)
                    if decides is None:
                        decides = news
                        _tell(running, signal.SIGTERM)
        finally:
            for process in started:
                process.kill()  # which does nothing to one that has ended
            for number, handler in before.items():
                signal.signal(number, handler)
        assert decides is not None
        return decides.returncode if decides.returncode >= 0 else 128 - decides.returncode

    def _note(self, number: int, _: FrameType | None) -> None:
        self._news.put(signal.Signals(number))

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._news.put(process)


def _tell(running: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in running:
        process.send_signal(number)

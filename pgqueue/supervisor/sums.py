"""What the processes of one supervisor have counted, added up: one endpoint for metrics is enough for all of them.

The supervisor asks when it is asked itself. A process answers on its pipe; `worker_end` is the other side. An orderly
process says once more what it has counted before it ends.

Why no sum goes down, and nothing is counted twice:

1. A process counts from 0 on, and its numbers only grow.
2. A report is added as what it has more than the report before of the same process. The sum is never made anew.
3. A process that has ended says nothing more: what it had said stays in the sum.
4. A report counts when its last line has come. One that was cut off is left out, and the next one has all of it.

What is lost: what a process that was killed had counted since its last report.

Of the present, only what living processes have said counts. Gauges count only in the answer to the present question. So
when the leading process has lost the lead, or has ended, its gauges are gone at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from pgqueue.jobs.totals import Numbers, Sample, Totals
from pgqueue.supervisor.pipe import Message
from pgqueue.supervisor.process import Process

ANSWER_SECONDS = 2.5
"""So long a process may take to answer. One that takes longer is shown as it was when it last answered."""


class Sums:
    """Adds up what processes report. Everything here is called on the loop."""

    def __init__(self) -> None:
        self._total = Totals()
        self._reports: dict[int, Numbers] = {}
        """By number of the process, its last report."""
        self._lines: dict[int, list[Message]] = {}
        self._gauges: Sequence[Sample] = ()
        self._ask = 0
        self._open: set[int] = set()
        """The processes that were asked and have not answered yet: they are not asked again."""
        self._missing: set[int] = set()
        """Those of them that the present question waits for."""
        self._answered = asyncio.Event()
        self._turn = asyncio.Lock()

    async def ask(self, processes: Iterable[Process]) -> Numbers:
        """Ask these processes; return the sums, of the answers that come in time and of what was known before."""
        async with self._turn:
            self._ask += 1
            self._gauges = ()
            asked = [process for process in processes if process.child.number not in self._open]
            self._missing = {process.child.number for process in asked}
            self._open |= self._missing
            self._answered.clear()
            for process in asked:
                process.pipe.say("count", ask=self._ask)
            if self._missing:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await self._answered.wait()
                except TimeoutError:
                    pass  # what they have said before is shown
            return self._numbers()

    def heard(self, number: int, message: Message) -> None:
        """A line of a report has come from this process."""
        self._lines.setdefault(number, []).append(message)
        if message["last"]:
            report, before = Numbers.of_lines(self._lines.pop(number)), self._reports.get(number)
            self._total.include(report.totals, before.totals if before else None)
            self._reports[number] = report
            if message["ask"] == self._ask and report.gauges:
                self._gauges = report.gauges
            if message["ask"]:
                self._open.discard(number)
                self._settle(number)

    def gone(self, number: int) -> None:
        """This process has ended."""
        report = self._reports.pop(number, None)
        self._lines.pop(number, None)
        self._open.discard(number)
        if report is not None and report.leads:
            self._gauges = ()
        self._settle(number)

    def _settle(self, number: int) -> None:
        self._missing.discard(number)
        if not self._missing:
            self._answered.set()

    def _numbers(self) -> Numbers:
        made = Numbers(gauges=self._gauges)
        made.totals.include(self._total)
        for report in self._reports.values():
            for state, n in report.slots.items():
                made.slots[state] = made.slots.get(state, 0) + n
        return made

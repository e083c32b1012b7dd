"""What became of a job that was to be changed by hand: the words for it, for lines, pages and operations.

`cancel`, `retry`, `discard` and `reschedule` answer with one word for each job, an operation by filter counts the jobs
of each. What a word means stands here and nowhere else. Knows no database and no page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one job. `did` is a word of `WORDS`; `state` is the state the job was found in.

    `new` is the job that is available now. `holder` is the job that has the unique key.
    """

    id: int
    did: str
    state: str | None
    new: int | None = None
    holder: int | None = None

    @property
    def changed(self) -> bool:
        """Whether something was done to the job."""
        return self.did in CHANGED


@dataclass(frozen=True, slots=True)
class Words:
    """How an answer is told. What is empty is told nowhere: no change of that kind has this answer.

    - `line`: behind "job 7", `{0}` is the answer.
    - `notice`: on the page of the job.
    - `reason`: behind the id of a job of an operation.
    """

    line: str = ""
    notice: str = ""
    reason: str = ""


WORDS: Mapping[str, Words] = {
    "cancelled": Words("cancelled", "The job is cancelled.", "is cancelled"),
    "requested": Words(
        "runs; its worker was asked to stop it",
        "The job runs. Its worker was asked to stop it.",
        "runs; its worker was asked to stop it",
    ),
    "ended": Words("had ended already: {0.state}", "Nothing was done: the job had ended before."),
    "retried": Words("is available again", "The job is available again.", "is available again"),
    "again": Words(
        "had completed; job {0.new} does it again",
        "This new job does again what the other one had done.",
        "had completed; a new job does it again",
    ),
    "completed": Words(
        "had completed; --again runs it once more, as a new job", "Nothing was done: the job has completed."
    ),
    "alive": Words(
        "has not ended: {0.state}", "Nothing was done: the job has not ended.", "left out: it has not ended"
    ),
    "held": Words(
        "was not retried: job {0.holder} has its unique key",
        "Nothing was done: another job has its unique key.",
        "left out: another job has its unique key",
    ),
    "unreleased": Words(
        "was skipped before its turn came: it is not run again",
        "Nothing was done: the job was skipped before its turn came.",
        "left out: it was skipped before its turn came",
    ),
    "needed": Words(
        "was not discarded: a job of its flow waits, or would wait after a retry",
        "Nothing was done: a job of its flow waits, or would wait after a retry.",
        "left out: a job of its flow waits, or would wait after a retry",
    ),
    "discarded": Words("discarded", "The job is deleted, with its attempts.", "is deleted, with its attempts"),
    "rescheduled": Words("is rescheduled", "The job has a new time.", "has a new time"),
    "running": Words("runs already: it cannot be rescheduled", "Nothing was done: the job runs already."),
    "over": Words("has ended: {0.state}; pgqueue retry runs it again", "Nothing was done: the job has ended."),
    # A filter may have found the job, and it does not fit any more.
    "missing": Words("is not there: no job has this id, it is not committed, or retention has removed it"),
    "locked": Words(reason="left out: another transaction had it, at each try"),
    "moved": Words(reason="left out: when it was tried again, it had another state"),
    "refused": Words(reason="left out: the server refused the change, as a trigger of the application may do"),
}
CHANGED = frozenset({"cancelled", "requested", "retried", "again", "discarded", "rescheduled"})
"""The answers of jobs that were changed; the fragment `bulk_stepped` counts the same ones."""


def sentence(answer: Answer) -> str:
    """The answer in words, for people."""
    return f"job {answer.id} {WORDS[answer.did].line.format(answer)}"


def counted(counts: Mapping[str, int]) -> str:
    """How many jobs have each answer; nothing if there is none.

    >>> counted({"retried": 1250, "held": 2})
    '2 held, 1,250 retried'
    """
    return ", ".join(f"{count:,} {did}" for did, count in sorted(counts.items()))

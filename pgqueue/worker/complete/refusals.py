"""The question whether the server can read what a job has said, when it refuses to end the job (see row_errors).

Used by the completer, when the refused job is alone in its message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pgqueue.client.job_parameters import values
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.outcomes import Cancelled, Completed, Failed, Handed, Outcome, Released, Retried


def question(outcome: Outcome, schema: str) -> Statement[Any]:
    """The statement by which the server reads what this outcome says, and writes nothing."""
    jsons, texts, seconds = list[str](), list[str](), list[float]()
    for said in _contents(outcome):
        match said:
            case Completed(result, successors):
                jsons += _given([result])
                for new in successors:
                    jsons += _given([new.args, new.headers])
                    texts += _given([new.task, new.queue, new.lock_key, new.limit_key, new.rate_key])
                    seconds += _given([new.delay, values(new)["deadline_seconds"]])
            case Retried(delay):
                seconds.append(delay)
            case _:
                pass
        problem = getattr(said, "problem", None)
        if problem is not None:
            texts += _given([problem.outcome, problem.error_type, problem.message, problem.traceback])
    return Statement(text("complete_read", schema), {"jsons": jsons, "texts": texts, "seconds": seconds}, list)


def _contents(outcome: Outcome) -> Iterable[Completed | Retried | Failed | Cancelled | Released]:
    if isinstance(outcome, Handed):
        return [outcome.otherwise]
    return [outcome] if isinstance(outcome, Completed | Retried | Failed | Cancelled | Released) else []


def _given(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]

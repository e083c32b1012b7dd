"""What holds back a job that waits for other jobs of its flow. Decides from what a statement has answered."""

from __future__ import annotations

from pgqueue.admin.why.reasons import Facts, Reason, counted, holders_of, lasting
from pgqueue.database import shown
from pgqueue.plain_text import plural

OVERDUE_SECONDS = 60.0
"""If all that a job waits for has ended for so long, the reason says that its release is overdue."""


def reasons(facts: Facts) -> list[Reason]:
    """Which nodes the job waits for; or that all have ended, and it is about to be released."""
    living, nodes, first = facts["living"], facts["nodes"], facts["first"]
    details: dict[str, object] = {"node": facts["node"], "nodes": nodes, "living": living}
    if first is None:
        ended = shown.moment(facts["ended_at"])
        now = shown.moment(facts["now"])
        assert now is not None
        seconds = 0.0 if ended is None else (now - ended).total_seconds()
        text = "all jobs that it waits for have ended, and a worker is about to release it"
        if seconds > OVERDUE_SECONDS:
            text = f"all jobs that it waits for have ended {lasting(seconds)} ago, and no worker has released it yet"
        return [Reason("release_overdue", text, ended, {**details, "seconds": seconds})]
    name = f"node {first['name']!r}" if first["name"] else f"node {first['number']}"
    details |= {"first": first["node"], "name": first["name"], "jobs": first["living"]}
    number = counted(first["living"], not first["more"], first["most"])
    text = (
        f"it waits for {plural(first['living'], 'job', 'jobs', number)} of {name}, first for job {first['job']['id']}"
    )
    if living > 1:
        text += f"; and for {plural(living - 1, 'node', 'nodes')} more, of {nodes:,} in all"
    return [Reason("node", text, None, details, holders_of([first["job"]]))]

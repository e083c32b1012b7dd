"""What may have become of an id without a job, as far as it can be told.

The order of ids is nearly that of enqueues, so the next job that is there tells when this one was enqueued.

1. An id above the last that the sequence gave was never given.
2. Else its transaction may be open: one that has written, and began before the next job was enqueued. When a prepared
   transaction began is not known, only when it was prepared, which may be later.
3. It may have been removed with history: only if that next job was enqueued longer ago than ended jobs are kept.
4. What is left is a transaction that was rolled back, a job that was discarded, or a row that was deleted by hand.
"""

from __future__ import annotations

from pgqueue.admin.why.reasons import Facts, Reason, lasting, sessions_of
from pgqueue.database import shown


def reasons(id: int, facts: Facts) -> list[Reason]:
    """What is possible, the likeliest first; one reason alone is certain."""
    last = facts["last"]
    if last is not None and id > last:
        text = f"no job has had this id yet: the last that was given is {last}"
        return [Reason("never_given", text, None, {"last": last})]
    return [*_open(facts), *_pruned(facts), _gone()]


def _open(facts: Facts) -> list[Reason]:
    after = shown.moment(facts["after"])
    found = [
        each
        for each in facts["open"]
        if after is None or each["pid"] is None or (since := shown.moment(each["since"])) is None or since <= after
    ]
    if not found:
        return []
    sessions = sessions_of(found)
    details = {"transactions": len(found)}
    now, since = shown.moment(facts["now"]), sessions[0].since
    text = f"it may not be committed yet: {len(found)} transactions are open, the oldest that of {sessions[0]}"
    if len(found) == 1:
        text = f"it may not be committed yet: {sessions[0]} has a transaction open"
    if now is not None and since is not None:
        text += f", since {lasting((now - since).total_seconds())}"
    return [Reason("not_committed", text, since, details, (), sessions)]


def _pruned(facts: Facts) -> list[Reason]:
    now, after = shown.moment(facts["now"]), shown.moment(facts["after"])
    assert now is not None
    done, dead = facts["done_kept"], facts["dead_kept"]
    if done is None or dead is None or (after is not None and (now - after).total_seconds() < min(done, dead)):
        return []
    details = {"done_kept": done, "dead_kept": dead, "older": facts["older"]}
    text = (
        f"it may have been removed with history: jobs that completed are kept for {lasting(done)}, "
        f"those that failed for {lasting(dead)}"
    )
    if after is not None:
        text += f", and the next job was enqueued {lasting((now - after).total_seconds())} ago"
        if not facts["older"]:
            text += "; no older one is there"
    return [Reason("pruned", text, None, details)]


def _gone() -> Reason:
    return Reason("gone", "its transaction was rolled back, or the job was discarded or deleted by hand")

"""The ticks of schedules in a test, both of declared tasks and of schedules that were added as rows.

Used by the clock when it is turned. The statements are those of the leading worker.
"""

from __future__ import annotations

import json

from pgqueue.client import tasks
from pgqueue.database.asking import named
from pgqueue.testing.steps import Steps
from pgqueue.worker.leader import ticks


def declare() -> Steps[None]:
    """Write the schedules of the imported modules at the present time: their ticks come after it."""
    specs = tasks.scheduled(tasks.declared())
    if specs:
        yield named("ticks_settle", own=json.dumps(specs), notify=False)
    now, found = ticks.schedules((yield named("ticks_read")))
    places = [ticks.placed(each, now) for each in found if ticks.misplaced(each, now)]
    if places:
        yield named("ticks_place", places=json.dumps(places))


def tick() -> Steps[None]:
    """Make every tick that is due."""
    if tasks.scheduled(tasks.declared()):
        yield from declare()  # after a turn of more than ten minutes the schedules would count as orphaned
    while True:
        now, found = ticks.schedules((yield named("ticks_read")))
        due = [each for each in found if each.next_at is not None and each.next_at <= now]
        moved = 0
        for batch in ticks.batches([ticks.move(each, now, ticks.BATCH) for each in due]):
            moves = json.dumps([each.said() for each in batch])
            [(names, *_)] = yield named("ticks_make", moves=moves, notify=False)
            moved += len(json.loads(names))
        if not moved:  # no tick is due, or another session holds the rows
            return

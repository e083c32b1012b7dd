"""The relay: staged jobs go from the outbox of an application's database to the queue. `Relay` is the whole of it.

    Relay -> Source (reads, deletes, holds the lock) -> rows -> Target (fence, memory, jobs)

It stands beside the worker and knows nothing of it. Why nothing is lost and nothing is doubled is said in `relay.py`.
"""

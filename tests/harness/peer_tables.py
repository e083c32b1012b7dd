"""Tables of peers for tests of the comparison: each of them begins with pgqueue itself, in a size for tests."""

from __future__ import annotations

OURS = """
[peers.pgqueue]
title = "pgqueue"
language = "python"
adapter = "pgqueue_tasks"
settings = { concurrency = 10, bulk = 1000 }
size = 5000
done = "committed"
unfinished = "SELECT EXISTS (SELECT FROM pgqueue.job_available) OR EXISTS (SELECT FROM pgqueue.job_running)"
history = "always"
durability = "flushed"
"""

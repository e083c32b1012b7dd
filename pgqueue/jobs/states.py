"""The states of jobs, and the sets of them that questions and changes by hand name; job.py draws the states.

This module imports nothing: a command line that only shows its help loads it, too.
"""

WAITING = ("available", "scheduled", "blocked")
LIVE = (*WAITING, "running")
DONE = ("completed", "skipped")
DEAD = ("failed", "cancelled")
ENDED = (*DONE, *DEAD)

RETRYING = "retrying"
"""Not a state: the scheduled jobs that wait for another attempt. A filter takes it as one."""

PARTITIONS = {
    "scheduled": ("scheduled",),
    "available": ("available",),
    "blocked": ("blocked",),
    "running": ("running",),
    "done": DONE,
    "dead": DEAD,
}
"""The partitions of the table of jobs, and the states each holds."""
STATES = tuple(state for states in PARTITIONS.values() for state in states)
ASKED = (*STATES, RETRYING)
"""What a search may be asked for as a state."""

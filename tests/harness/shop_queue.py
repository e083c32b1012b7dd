"""The queue of a shop for tests that look at pages: jobs in every state, workers, limits, schedules, what happened.

All of it is written by hand, as rows. So nothing in it says on which machine it was made, and every run has the same.
"""

from __future__ import annotations

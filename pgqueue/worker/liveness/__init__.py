"""Which workers live, and what becomes of a dead worker's jobs."""

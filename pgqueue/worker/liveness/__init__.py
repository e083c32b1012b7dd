"""Which worker lives, and what becomes of the jobs of one that died."""

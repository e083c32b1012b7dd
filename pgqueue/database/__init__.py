"""How pgqueue speaks to PostgreSQL. Knows nothing of jobs."""

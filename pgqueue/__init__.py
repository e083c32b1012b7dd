"""pgqueue: the job queue that lives entirely in PostgreSQL."""

-- What the transactions of handlers need beside the completion itself (complete.sql).

-- name: transactions_end_session
-- After a COMMIT without an answer: end that session of our own, so that its transaction comes to its end. Answers how many.
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE pid = %(pid)s::integer AND backend_start = %(backend_start)s::text::timestamptz;

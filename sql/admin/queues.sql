-- name: queues_pause
-- From this transaction's COMMIT on no claim takes jobs of this queue: every claim reads this row. No row back: it was
-- paused already.
INSERT INTO pgqueue.queue AS q (name, paused_at) VALUES (%(queue)s::text, pgqueue.now())
ON CONFLICT (name) DO UPDATE SET paused_at = excluded.paused_at WHERE q.paused_at IS NULL
RETURNING name;

-- name: queues_resume
-- The queue is open again, and its workers look at once. No row back: it was not paused.
DELETE FROM pgqueue.queue WHERE name = %(queue)s::text AND paused_at IS NOT NULL
RETURNING name, CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:control', '') END;

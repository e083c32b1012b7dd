-- name: registration_register
-- A new worker process: an id that was never used before and never will be again; and the names of the tasks that it
-- knows; and beside each queue the slots of its own, NULL where it shares the common ones. `listens`: whether it is set to
-- LISTEN.
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, slots, listens, state)
VALUES (make_interval(secs => %(lease)s::float8), %(pid)s::integer, %(concurrency)s::integer, %(host)s::text,
        %(version_tag)s::text, %(queues)s::text[], %(tasks)s::text[], %(slots)s::integer[], %(listens)s::boolean, 'starting')
RETURNING id;

-- name: registration_version
-- Note when the first worker of this version started, if that is not noted yet. A version with a longer name than an index
-- takes is known by its workers alone. Sent by itself and not in a transaction of the client: workers of one version that
-- start together wait for each other here, and a process that is stopped meanwhile must hold up no other.
INSERT INTO pgqueue.version_start (version_tag, first_at)
SELECT w.version_tag, min(w.started_at) FROM pgqueue.worker w
WHERE w.version_tag = %(version_tag)s::text AND octet_length(w.version_tag) <= 1000
GROUP BY w.version_tag
ON CONFLICT (version_tag) DO NOTHING;

-- name: registration_restore_settings
-- Put back the rows of `ring` and `duty`, if a fixture that truncates all tables has taken them along. Answers how many.
SELECT pgqueue.restore_settings();

-- name: registration_leave
-- Delete the row of a worker that ended in order. A worker that still has jobs leaves its row for rescue (see the
-- next).
DELETE FROM pgqueue.worker w
WHERE w.id = %(worker_id)s::bigint
  AND NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.worker_id = w.id)
RETURNING id;

-- name: registration_retire
-- If the row of a worker that ended in order cannot be deleted, it is left as that of a dead one. It waits for claims as
-- the DELETE does: they hold the row FOR KEY SHARE.
WITH mine AS MATERIALIZED (
    SELECT w.id FROM pgqueue.worker w
    WHERE w.id = %(worker_id)s::bigint AND NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.worker_id = w.id) FOR UPDATE
)
UPDATE pgqueue.worker SET dead_at = coalesce(dead_at, pgqueue.now()), state = 'stopped' WHERE id IN (SELECT id FROM mine)
RETURNING id;

-- name: registration_abandon
-- The jobs that are left did not crash: the operator's deadline ended them. Rescue gives their attempts back. Jobs that
-- still run (`stuck`) end with the process, so they are noted as interrupted here.
WITH noted AS (
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome, message,
                                 version_tag)
    SELECT r.id, r.enqueued_at, r.attempt, r.worker_id, r.claim, r.started_at, pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'),
           'interrupted', 'its worker was shut down, and could not stop it',
           (SELECT version_tag FROM pgqueue.worker WHERE id = %(worker_id)s::bigint)
    FROM pgqueue.job_running r
    WHERE r.id = ANY (%(stuck)s::bigint[]) AND r.worker_id + 0 = %(worker_id)s::bigint
)
UPDATE pgqueue.worker SET running = '{}', beat_at = pgqueue.now() WHERE id = %(worker_id)s::bigint RETURNING id;

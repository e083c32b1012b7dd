-- What is done by hand to queues and tasks. Each change is a row of the record.

-- name: queues_pause
-- From this transaction's COMMIT on no claim takes jobs of this queue: every claim reads this row. No row back: it was
-- paused already.
WITH paused AS (
    INSERT INTO pgqueue.queue AS q (name, paused_at, paused_by) VALUES (%(name)s::text, pgqueue.now(), {{actor}})
    ON CONFLICT (name) DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by WHERE q.paused_at IS NULL
    RETURNING name
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target)
    SELECT {{actor}}, 'pause', jsonb_build_object('queue', name) FROM paused
)
SELECT name FROM paused;

-- name: queues_pause_task
-- As `queues_pause`, for a task, in all queues.
WITH paused AS (
    INSERT INTO pgqueue.paused_task (name, paused_at, paused_by) VALUES (%(name)s::text, pgqueue.now(), {{actor}})
    ON CONFLICT (name) DO NOTHING
    RETURNING name
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target)
    SELECT {{actor}}, 'pause', jsonb_build_object('task', name) FROM paused
)
SELECT name FROM paused;

-- name: queues_resume
-- The queue is open again, and its workers look at once. No row back: it was not paused.
WITH open AS (
    DELETE FROM pgqueue.queue WHERE name = %(name)s::text AND paused_at IS NOT NULL RETURNING name
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target)
    SELECT {{actor}}, 'resume', jsonb_build_object('queue', name) FROM open
)
SELECT name, CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:control', '') END FROM open;

-- name: queues_resume_task
-- As `queues_resume`, for a task. Its jobs may lie behind the cursors of workers: these find by themselves that it is open again (see
-- paused_tasks.py).
WITH open AS (
    DELETE FROM pgqueue.paused_task WHERE name = %(name)s::text RETURNING name
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target)
    SELECT {{actor}}, 'resume', jsonb_build_object('task', name) FROM open
)
SELECT name, CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:control', '') END FROM open;

-- What people do to schedules by hand, and what they see of them.

-- name: schedules_add
-- Add a schedule, or change the one of this name that was added so; its next time is kept if its line is. No row: one that
-- code declares has the name. One row: whether it is new.
WITH added AS (
    INSERT INTO pgqueue.schedule AS s (name, line, tz, catch_up, task, args, queue, priority, options)
    VALUES (%(name)s::text, %(line)s::text, %(tz)s::text, %(catch_up)s::text, %(task)s::text, %(args)s::text::jsonb,
            %(queue)s::text, %(priority)s::smallint, %(options)s::text::jsonb)
    ON CONFLICT (name) DO UPDATE
    SET line = excluded.line, tz = excluded.tz, catch_up = excluded.catch_up, task = excluded.task, args = excluded.args,
        queue = excluded.queue, priority = excluded.priority, options = excluded.options, refused = NULL,
        next_at = CASE WHEN s.line = excluded.line AND s.tz = excluded.tz AND s.refused IS NULL THEN s.next_at END,
        since = CASE WHEN s.line = excluded.line AND s.tz = excluded.tz AND s.refused IS NULL THEN s.since ELSE excluded.since END
    WHERE s.declared_at IS NULL
    RETURNING s.xmax = 0 AS new
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, details)
    SELECT {{actor}}, 'schedules add', jsonb_build_object('schedule', %(name)s::text), jsonb_build_object('new', new) FROM added
)
SELECT new, CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:scheduled', 'schedules')::text END FROM added;

-- name: schedules_pause
-- Make no more ticks of a schedule. No row: there is none. One row: whether it was not paused.
WITH paused AS (
    UPDATE pgqueue.schedule SET paused_at = pgqueue.now() WHERE name = %(name)s::text AND paused_at IS NULL RETURNING name
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target)
    SELECT {{actor}}, 'schedules pause', jsonb_build_object('schedule', name) FROM paused
)
SELECT EXISTS (SELECT FROM paused) FROM pgqueue.schedule WHERE name = %(name)s::text;

-- name: schedules_resume
-- Tick again; what was missed meanwhile is made by catch_up. No row: there is none. One row: whether it was paused, or refused.
WITH resumed AS (
    UPDATE pgqueue.schedule SET paused_at = NULL, refused = NULL
    WHERE name = %(name)s::text AND (paused_at IS NOT NULL OR refused IS NOT NULL)
    RETURNING name
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target)
    SELECT {{actor}}, 'schedules resume', jsonb_build_object('schedule', name) FROM resumed
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:scheduled', 'schedules')::text END AS done
    FROM resumed WHERE %(notify)s::boolean
)
SELECT EXISTS (SELECT FROM resumed), (SELECT count(done) FROM told)
FROM pgqueue.schedule WHERE name = %(name)s::text;

-- name: schedules_run
-- One job of a schedule now, by hand: its tick is this moment. Its next time, a pause and its orphanhood stay. No row: there
-- is none. One row: the id.
WITH made AS (
    INSERT INTO pgqueue.job_available (state, {{scheduled_columns}})
    SELECT 'available', {{scheduled_values}}
    FROM pgqueue.schedule s CROSS JOIN (SELECT pgqueue.now() AS at) AS made WHERE s.name = %(name)s::text
    RETURNING id, queue
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, jobs)
    SELECT {{actor}}, 'schedules run', jsonb_build_object('schedule', %(name)s::text), ARRAY[id] FROM made
)
SELECT id, CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.' || queue, '')::text END FROM made;

-- name: schedules_remove
-- Delete a schedule, unless code that lives declares it: it would be back at once. No row: there is none. One row: whether it
-- is gone.
WITH gone AS (
    DELETE FROM pgqueue.schedule
    WHERE name = %(name)s::text AND NOT EXISTS (
        SELECT FROM pgqueue.declaration d
        JOIN pgqueue.worker w ON w.id = d.worker_id AND w.dead_at IS NULL AND w.state IN ('starting', 'running')
        WHERE d.schedules -> %(name)s::text IS NOT NULL)
    RETURNING name
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target)
    SELECT {{actor}}, 'schedules remove', jsonb_build_object('schedule', name) FROM gone
)
SELECT EXISTS (SELECT FROM gone) FROM pgqueue.schedule WHERE name = %(name)s::text;

-- name: schedules_list
-- All schedules by name, or one of them, as one JSON array. Arguments and options are JSON as text, as those of jobs (fragment `shown`).
SELECT coalesce(json_agg(json_build_object(
    'name', s.name, 'line', left(s.line, 1000), 'tz', left(s.tz, 1000), 'catch_up', s.catch_up, 'task', s.task, 'queue', s.queue,
    'priority', s.priority,
    'args', CASE WHEN octet_length(said.args) <= 2097152 THEN said.args ELSE '{"pgqueue": "not shown: too large"}' END,
    'options', CASE WHEN octet_length(said.options) <= 2097152 THEN said.options ELSE '{"pgqueue": "not shown: too large"}' END,
    'next_at', CASE WHEN isfinite(s.next_at) THEN s.next_at END, 'last_at', s.last_at, 'last_job', s.last_job,
    'declared_at', s.declared_at, 'paused_at', s.paused_at, 'refused', left(s.refused, 10000),
    'state', CASE WHEN s.refused IS NOT NULL THEN 'refused' WHEN s.paused_at IS NOT NULL THEN 'paused'
                  WHEN s.declared_at <= clock.now - interval '10 minutes' THEN 'orphaned'
                  WHEN NOT isfinite(s.next_at) THEN 'over' ELSE 'active' END
    ) ORDER BY s.name), '[]')::text
FROM pgqueue.schedule s CROSS JOIN (SELECT pgqueue.now() AS now) AS clock
CROSS JOIN LATERAL (SELECT pgqueue.text_of(s.args) AS args, pgqueue.text_of(s.options) AS options OFFSET 0) AS said
WHERE %(name)s::text IS NULL OR s.name = %(name)s::text;

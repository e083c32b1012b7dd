-- What a worker that makes ticks sends: it reads the schedules, writes when they tick next, and makes the ticks. Times
-- travel as microseconds since 1970 where they are read, as texts where they are written: any driver does that.

-- name: ticks_declare
-- Write down what this worker's code declares, once. A worker that begins anew has another id.
INSERT INTO pgqueue.declaration (worker_id, hash, schedules)
VALUES (%(worker_id)s::bigint, %(hash)s::text, %(schedules)s::text::jsonb)
ON CONFLICT (worker_id) DO NOTHING
RETURNING worker_id;

-- name: ticks_settle
-- Make the schedules what live code declares. If workers disagree, the worker that was started last is right, and `own`
-- (NULL: nothing) before all of them. Every few minutes, note of each schedule that it is still declared.
--
-- If a row is locked, it waits for the next time. If `line` or `tz` was changed, there is no next time yet. Answers how
-- many schedules are new or were changed.
WITH clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now
), live AS MATERIALIZED (
    (SELECT DISTINCT ON (d.hash) d.worker_id, d.schedules
     FROM pgqueue.declaration d
     WHERE EXISTS (SELECT FROM pgqueue.worker w
                   WHERE w.id = d.worker_id AND w.dead_at IS NULL AND w.state IN ('starting', 'running'))
     ORDER BY d.hash, d.worker_id DESC)
    UNION ALL
    SELECT 9223372036854775807, %(own)s::text::jsonb WHERE %(own)s::text IS NOT NULL
), wanted AS MATERIALIZED (
    SELECT DISTINCT ON (said.name) said.name, it.line, it.tz, it.catch_up, it.task, it.args, it.queue, it.priority, it.options
    FROM live CROSS JOIN LATERAL jsonb_each(live.schedules) AS said (name, spec)
    CROSS JOIN LATERAL jsonb_to_record(said.spec) AS it (
        line text, tz text, catch_up text, task text, args jsonb, queue text, priority smallint, options jsonb)
    ORDER BY said.name, live.worker_id DESC
), stale AS MATERIALIZED (
    SELECT s.name, s.ctid,
        (s.line, s.tz) IS DISTINCT FROM (w.line, w.tz) OR s.refused IS NOT NULL OR s.declared_at IS NULL AS moved,
        (s.line, s.tz, s.catch_up, s.task, s.args, s.queue, s.priority, s.options) IS DISTINCT FROM
        (w.line, w.tz, w.catch_up, w.task, w.args, w.queue, w.priority, w.options) OR s.declared_at IS NULL AS changed
    FROM wanted w JOIN pgqueue.schedule s ON s.name = w.name CROSS JOIN clock
    WHERE (s.line, s.tz, s.catch_up, s.task, s.args, s.queue, s.priority, s.options) IS DISTINCT FROM
          (w.line, w.tz, w.catch_up, w.task, w.args, w.queue, w.priority, w.options)
       OR s.declared_at IS NULL OR s.declared_at <= clock.now - interval '4 minutes' OR s.declared_at > clock.now
    FOR UPDATE OF s SKIP LOCKED
), changed AS (
    UPDATE pgqueue.schedule s
    SET line = w.line, tz = w.tz, catch_up = w.catch_up, task = w.task, args = w.args, queue = w.queue,
        priority = w.priority, options = w.options, declared_at = clock.now,
        refused = CASE WHEN NOT stale.changed THEN s.refused END,
        next_at = CASE WHEN NOT (stale.changed AND stale.moved) THEN s.next_at END,
        since = CASE WHEN stale.changed AND stale.moved THEN clock.now ELSE s.since END
    FROM stale JOIN wanted w ON w.name = stale.name CROSS JOIN clock
    WHERE s.name = stale.name
    RETURNING stale.changed
), added AS (
    INSERT INTO pgqueue.schedule (name, line, tz, catch_up, task, args, queue, priority, options, since, declared_at)
    SELECT w.name, w.line, w.tz, w.catch_up, w.task, w.args, w.queue, w.priority, w.options, clock.now, clock.now
    FROM wanted w CROSS JOIN clock
    WHERE NOT EXISTS (SELECT FROM pgqueue.schedule s WHERE s.name = w.name)
    ORDER BY w.name
    ON CONFLICT (name) DO NOTHING
    RETURNING name
), news AS (
    SELECT (SELECT count(*) FROM changed WHERE changed) + (SELECT count(*) FROM added) AS n
)
SELECT n, CASE WHEN n > 0 AND %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:scheduled', 'schedules')::text END FROM news;

-- name: ticks_read
-- The schedules that tick: not paused, refused or orphaned, nor at their end. Times in microseconds since 1970; the
-- last column is the time now. Python knows the years 1 to 9999. A row written by hand may have others: a next time
-- outside of these never comes, and the other times count as the nearest that Python knows.
WITH clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now, timestamptz '0001-01-02 00:00:00+00' AS low, timestamptz '9999-12-30 00:00:00+00' AS high
)
SELECT s.name, s.line, s.tz, s.catch_up,
       (extract(epoch FROM s.next_at) * 1000000)::bigint,
       (extract(epoch FROM CASE WHEN s.last_at IS NOT NULL THEN least(greatest(s.last_at, low), high) END) * 1000000)::bigint,
       (extract(epoch FROM least(greatest(s.since, low), high)) * 1000000)::bigint,
       (extract(epoch FROM clock.now) * 1000000)::bigint
FROM clock LEFT JOIN pgqueue.schedule s
    ON s.paused_at IS NULL AND s.refused IS NULL AND (s.next_at BETWEEN low AND high) IS NOT FALSE
    AND (s.declared_at IS NULL OR s.declared_at > clock.now - interval '10 minutes');

-- name: ticks_place
-- Write when schedules tick next, or why they do not, if each is still as it was read. Answers those that were.
WITH asked AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(places)s::text::jsonb)
        AS p (name text, line text, tz text, expected timestamptz, next timestamptz, refused text)
), picked AS MATERIALIZED (
    SELECT s.name, asked.next, asked.refused
    FROM asked JOIN pgqueue.schedule s ON s.name = asked.name
    WHERE s.line = asked.line AND s.tz = asked.tz AND s.next_at IS NOT DISTINCT FROM asked.expected
    FOR UPDATE OF s SKIP LOCKED
), placed AS (
    UPDATE pgqueue.schedule s SET next_at = picked.next, refused = picked.refused
    FROM picked WHERE s.name = picked.name
    RETURNING s.name
)
SELECT coalesce(json_agg(name), '[]')::text FROM placed;

-- name: ticks_make
-- Make the ticks of schedules that are due and still as they were read. Each tick is a row of `tick` and an available
-- job; the schedule gets its next time. A schedule is left out if it was moved meanwhile, is locked, or must not tick.
-- A time is left out if it has a job already. Answers the schedules that were moved, how many jobs there are, and the
-- time now.
WITH clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now
), asked AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(moves)s::text::jsonb)
        AS m (name text, line text, tz text, expected timestamptz, next timestamptz, ats jsonb)
), picked AS MATERIALIZED (
    SELECT s.name, s.line, s.tz, s.task, s.args, s.queue, s.priority, s.options, asked.next, asked.ats
    FROM asked JOIN pgqueue.schedule s ON s.name = asked.name CROSS JOIN clock
    WHERE s.next_at = asked.expected AND s.line = asked.line AND s.tz = asked.tz
      AND s.next_at <= clock.now AND s.paused_at IS NULL AND s.refused IS NULL
      AND (s.declared_at IS NULL OR s.declared_at > clock.now - interval '10 minutes')
    FOR UPDATE OF s SKIP LOCKED
), made AS (
    INSERT INTO pgqueue.tick (schedule, at, job_id)
    SELECT picked.name, tick.at::timestamptz, nextval('pgqueue.job_id_seq')
    FROM picked CROSS JOIN LATERAL jsonb_array_elements_text(picked.ats) AS tick (at)
    ORDER BY 2, 1
    ON CONFLICT (schedule, at) DO NOTHING
    RETURNING schedule, at, job_id
), moved AS (
    UPDATE pgqueue.schedule s
    SET next_at = picked.next, last_at = greatest(s.last_at, newest.at), last_job = coalesce(newest.job_id, s.last_job)
    FROM picked LEFT JOIN (SELECT schedule, max(at) AS at, max(job_id) AS job_id FROM made GROUP BY schedule) AS newest
        ON newest.schedule = picked.name
    WHERE s.name = picked.name
    RETURNING s.name
), jobs AS (
    INSERT INTO pgqueue.job_available (state, id, {{scheduled_columns}})
    SELECT 'available', made.job_id, {{scheduled_values}}
    FROM made JOIN picked s ON s.name = made.schedule ORDER BY made.at, made.schedule
    RETURNING queue
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || queue, '')::text END AS done
    FROM (SELECT DISTINCT queue FROM jobs WHERE %(notify)s::boolean) AS q
)
SELECT (SELECT coalesce(json_agg(name), '[]')::text FROM moved), (SELECT count(*) FROM jobs),
       (extract(epoch FROM clock.now) * 1000000)::bigint, (SELECT count(done) FROM told)
FROM clock;

-- name: ticks_readable
-- Read what a job of this schedule would be, as `ticks_make` does, and write nothing (see row_errors.py).
SELECT count(job) FROM (
    SELECT {{scheduled_values}}
    FROM pgqueue.schedule s CROSS JOIN (SELECT pgqueue.now() AS at) AS made WHERE s.name = %(schedule)s::text
) AS job;

-- name: ticks_overdue
-- Whether a tick is so late that the worker that should make it seems to fail.
SELECT EXISTS (
    SELECT FROM pgqueue.schedule s CROSS JOIN (SELECT pgqueue.now() AS now) AS clock
    WHERE s.next_at < clock.now - interval '5 seconds' AND s.next_at >= timestamptz '0001-01-02 00:00:00+00' -- as in ticks_read
      AND s.paused_at IS NULL AND s.refused IS NULL
      AND (s.declared_at IS NULL OR s.declared_at > clock.now - interval '10 minutes'));

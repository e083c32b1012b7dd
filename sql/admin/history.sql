-- What happened to jobs, for people: the rows of the history, added up.

-- name: history_minutes
-- A row for each minute from `since` on and before `until`, in order: by queue and task, by queue, or of all together (`by`). As JSON.
WITH line AS MATERIALIZED (
    SELECT m.at, CASE WHEN %(by)s::text = 'all' THEN '' ELSE m.queue END AS queue, CASE WHEN %(by)s::text = 'task' THEN m.task ELSE '' END AS task,
        {{happenings}}, m.wait_seconds, m.run_seconds, m.wait, m.run
    FROM pgqueue.history_minute m
    WHERE m.at >= date_bin('1 minute', coalesce(%(since)s::text::timestamptz, pgqueue.now() - interval '1 hour'), '2000-01-01 00:00:00+00')
      AND m.at < coalesce(%(until)s::text::timestamptz, 'infinity')
      AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text) AND (%(task)s::text IS NULL OR m.task = %(task)s::text)
), {{history_summed}}
SELECT coalesce(json_agg(each), '[]')::text
FROM (SELECT extract(epoch FROM at)::float8 AS at, queue, task, {{happenings}}, wait_seconds, run_seconds, wait, run
      FROM summed ORDER BY summed.at, queue, task) AS each;

-- name: history_hours
-- The same by hour. An hour that is not over yet, or just now, is added up from its minutes.
WITH line AS MATERIALIZED (
    SELECT rows.at, CASE WHEN %(by)s::text = 'all' THEN '' ELSE rows.queue END AS queue,
        CASE WHEN %(by)s::text = 'task' THEN rows.task ELSE '' END AS task,
        {{happenings}}, rows.wait_seconds, rows.run_seconds, rows.wait, rows.run
    FROM (
        SELECT {{history_columns}} FROM pgqueue.history_hour h
        UNION ALL
        SELECT date_bin('1 hour', m.at, '2000-01-01 00:00:00+00') AS at, m.queue, m.task, {{happenings}}, wait_seconds, run_seconds, wait, run
        FROM pgqueue.history_minute m WHERE m.at >= (SELECT d.done_at FROM pgqueue.duty d WHERE d.name = 'history')
    ) AS rows
    WHERE rows.at >= date_bin('1 hour', coalesce(%(since)s::text::timestamptz, pgqueue.now() - interval '1 day'), '2000-01-01 00:00:00+00')
      AND rows.at < coalesce(%(until)s::text::timestamptz, 'infinity')
      AND (%(queue)s::text IS NULL OR rows.queue = %(queue)s::text) AND (%(task)s::text IS NULL OR rows.task = %(task)s::text)
), {{history_summed}}
SELECT coalesce(json_agg(each), '[]')::text
FROM (SELECT extract(epoch FROM at)::float8 AS at, queue, task, {{happenings}}, wait_seconds, run_seconds, wait, run
      FROM summed ORDER BY summed.at, queue, task) AS each;

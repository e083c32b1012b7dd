-- What happened to jobs, for people: the rows of the history, added up; and how many jobs waited, as it was measured.

-- name: history_minutes
-- A row for each minute from `since` on and before `until`, in order: by queue and task, by queue, or of all together (`by`). As JSON.
WITH asked AS MATERIALIZED (
    SELECT m.* FROM pgqueue.history_minute m
    WHERE m.at >= date_bin('1 minute', coalesce(%(since)s::text::timestamptz, pgqueue.now() - interval '1 hour'), '2000-01-01 00:00:00+00')
      AND m.at < coalesce(%(until)s::text::timestamptz, 'infinity') AND {{history_asked}}
), line AS MATERIALIZED (
    SELECT m.at, CASE WHEN %(by)s::text = 'all' THEN '' ELSE m.queue END AS queue, CASE WHEN %(by)s::text = 'task' THEN m.task ELSE '' END AS task,
        {{happenings}}, m.wait_seconds, m.run_seconds, m.wait, m.run
    FROM asked AS m WHERE m.state IS NULL
), measured AS MATERIALIZED (
    SELECT m.at, m.queue, m.state, m.n, m.oldest FROM asked AS m WHERE m.state IS NOT NULL
), {{history_summed}}, {{history_deep}}
{{history_answer}};

-- name: history_hours
-- The same by hour. An hour that is not over yet, or just now, is added up from its minutes; so is each one before the first is written.
WITH asked AS MATERIALIZED (
    SELECT m.* FROM (
        SELECT {{history_columns}}, state, n, oldest FROM pgqueue.history_hour h
        UNION ALL
        SELECT date_bin('1 hour', m.at, '2000-01-01 00:00:00+00') AS at, m.queue, m.task, {{happenings}}, wait_seconds, run_seconds, wait, run,
            state, n, oldest
        FROM pgqueue.history_minute m WHERE m.at >= coalesce((SELECT d.done_at FROM pgqueue.duty d WHERE d.name = 'history'), '-infinity')
    ) AS m
    WHERE m.at >= date_bin('1 hour', coalesce(%(since)s::text::timestamptz, pgqueue.now() - interval '1 day'), '2000-01-01 00:00:00+00')
      AND m.at < coalesce(%(until)s::text::timestamptz, 'infinity') AND {{history_asked}}
), line AS MATERIALIZED (
    SELECT m.at, CASE WHEN %(by)s::text = 'all' THEN '' ELSE m.queue END AS queue, CASE WHEN %(by)s::text = 'task' THEN m.task ELSE '' END AS task,
        {{happenings}}, m.wait_seconds, m.run_seconds, m.wait, m.run
    FROM asked AS m WHERE m.state IS NULL
), measured AS MATERIALIZED (
    SELECT m.at, m.queue, m.state, m.n, m.oldest FROM asked AS m WHERE m.state IS NOT NULL
), {{history_summed}}, {{history_deep}}
{{history_answer}};

-- name: history_depths
-- How many jobs of each of these queues were available or blocked, by minute from `since` on, as the leading worker has measured it. As JSON: [queue, time, jobs], in order.
SELECT coalesce(json_agg(json_build_array(d.queue, extract(epoch FROM d.at)::float8, d.n) ORDER BY d.queue, d.at), '[]')::text
FROM (
    SELECT e.queue, e.at, coalesce(sum(e.n) FILTER (WHERE e.state IN ('available', 'blocked')), 0)::bigint AS n
    FROM (SELECT m.queue, m.at, m.state, max(m.n) AS n FROM pgqueue.history_minute m
          WHERE m.at >= %(since)s::text::timestamptz AND m.state IS NOT NULL AND m.queue = ANY (%(queues)s::text[])
          GROUP BY m.queue, m.at, m.state) AS e
    GROUP BY e.queue, e.at
) AS d;

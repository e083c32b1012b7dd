-- How many jobs there are, for people: counted at once while the tables are small, dead rows and all. Else what the leader has measured
-- last, in table `depth` (see worker/leader/depth.py).

-- name: depth_read_queues
-- What is said of each queue, or of this `queue`, as one JSON object. `small`: all tables of waiting and running jobs are small, and
-- `depth_read_live` counts them. Else `at` is the time of the newest measurement (NULL: none is fresh, the reader has to measure), and
-- `groups` are its numbers: [queue, state, reason, task, n, exact, since]. `longest` is [queue, since], `served` [queue, number of live
-- workers], `paused` [queue, since, by]. Times are seconds since 1970.
WITH clock AS MATERIALIZED (
    -- 64 blocks are read in 0.2 ms.
    SELECT pgqueue.now() AS now, greatest(pg_relation_size('pgqueue.job_available'), pg_relation_size('pgqueue.job_scheduled'),
                                          pg_relation_size('pgqueue.job_blocked'), pg_relation_size('pgqueue.job_running')) <= 524288 AS small
), told AS MATERIALIZED (
    SELECT d.at, d.queue, d.state, d.reason, d.task, d.n, d.exact, d.oldest, d.longest_blocked
    FROM clock CROSS JOIN LATERAL ({{newest_depth}}) AS newest JOIN pgqueue.depth d ON d.at = newest.at
    WHERE %(queue)s::text IS NULL OR d.queue IN (%(queue)s::text, '')
)
SELECT json_build_object(
    'now', extract(epoch FROM clock.now)::float8,
    'small', clock.small,
    'at', (SELECT extract(epoch FROM min(at))::float8 FROM told),
    'groups', (SELECT coalesce(json_agg(json_build_array(
                   queue, state, reason, task, n, exact, extract(epoch FROM oldest)::float8)), '[]') FROM told WHERE NOT clock.small AND queue <> ''),
    'longest', (SELECT coalesce(json_agg(json_build_array(queue, extract(epoch FROM longest_blocked)::float8)), '[]')
                FROM told WHERE longest_blocked IS NOT NULL AND queue <> ''),
    'served', (SELECT coalesce(json_agg(json_build_array(s.queue, s.workers)), '[]')
               FROM (SELECT u.queue, count(*) AS workers
                     FROM (SELECT w.queues FROM pgqueue.worker w
                           WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND w.beat_at >= clock.now - 3 * w.lease
                           ORDER BY w.id DESC LIMIT 1000) AS live
                     CROSS JOIN unnest(live.queues) AS u (queue)
                     WHERE %(queue)s::text IS NULL OR u.queue = %(queue)s::text GROUP BY u.queue) AS s),
    'paused', (SELECT coalesce(json_agg(json_build_array(q.name, extract(epoch FROM q.paused_at)::float8, left(q.paused_by, 200))), '[]')
               FROM pgqueue.queue q WHERE %(queue)s::text IS NULL OR q.name = %(queue)s::text)
)::text
FROM clock;

-- name: depth_read_live
-- The jobs of each queue, or of this `queue`, counted now; as JSON groups. For small tables only.
WITH taker AS MATERIALIZED (
    {{takers}}
), counted AS (
    SELECT g.queue, 'available' AS state, {{waits_for}} AS reason, g.task, g.n, g.since
    FROM (SELECT j.queue, j.task, count(*) AS n, min({{since}}) AS since FROM pgqueue.job_available j GROUP BY j.queue, j.task) AS g
    UNION ALL
    SELECT g.queue, 'scheduled', g.reason, '', count(*), {{due_since}}
    FROM (SELECT j.queue, {{scheduled_for}} AS reason, j.task, j.run_at FROM pgqueue.job_scheduled j) AS g GROUP BY g.queue, g.reason
    UNION ALL
    SELECT g.queue, 'blocked', CASE WHEN g.reason <> 'flow' AND {{is_unknown}} THEN 'unknown' ELSE g.reason END, g.task, g.n, NULL
    FROM (SELECT j.queue, {{blocked_by}} AS reason, j.task, count(*) AS n FROM pgqueue.job_blocked j GROUP BY 1, 2, 3) AS g
    UNION ALL
    SELECT j.queue, 'running', '', '', count(*), NULL FROM pgqueue.job_running j GROUP BY 1
), amount AS (
    SELECT c.queue, c.state, c.reason, CASE WHEN c.reason IN ('unknown', 'task_paused') THEN c.task ELSE '' END AS task, sum(c.n)::bigint AS n, min(c.since) AS since
    FROM counted c WHERE %(queue)s::text IS NULL OR c.queue = %(queue)s::text GROUP BY 1, 2, 3, 4
)
SELECT coalesce(json_agg(json_build_array(queue, state, reason, task, n, true, extract(epoch FROM since)::float8)), '[]')::text FROM amount;

-- name: depth_read_history
-- How many jobs history has in each state, as JSON groups, and since 1970 when they were counted; NULL if its tables are large, and no
-- measurement is fresh.
WITH clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now
), newest AS MATERIALIZED (
    SELECT newest.at FROM clock CROSS JOIN LATERAL ({{newest_depth}}) AS newest
), small AS MATERIALIZED (
    SELECT sum(pg_relation_size(t.relid)) <= 524288 AS whole
    FROM (SELECT relid FROM pg_partition_tree('pgqueue.job_done') WHERE isleaf
          UNION ALL SELECT relid FROM pg_partition_tree('pgqueue.job_dead') WHERE isleaf) AS t
), amount AS (
    SELECT j.state, count(*) AS n, true AS exact FROM pgqueue.job_done j WHERE (SELECT whole FROM small) GROUP BY 1
    UNION ALL
    SELECT j.state, count(*), true FROM pgqueue.job_dead j WHERE (SELECT whole FROM small) GROUP BY 1
    UNION ALL
    SELECT d.state, d.n, d.exact FROM pgqueue.depth d WHERE d.at = (SELECT at FROM newest) AND d.queue = '' AND NOT (SELECT whole FROM small)
)
SELECT CASE WHEN small.whole OR EXISTS (SELECT FROM newest)
            THEN coalesce((SELECT json_agg(json_build_array('', state, '', '', n, exact, NULL)) FROM amount), '[]')::text END,
       extract(epoch FROM CASE WHEN small.whole THEN clock.now ELSE (SELECT at FROM newest) END)::float8
FROM small CROSS JOIN clock;

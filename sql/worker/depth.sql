-- How many jobs there are, and since when the first of them wait. Measured by the leader, and by a reader if no measurement is fresh. Every
-- statement that measures is bounded however many rows there are: nothing is counted beyond 10,000 of a lane or 200,000 in all. A larger
-- number is estimated from about 300 blocks of the table, always the same ones. Unlike the planner's statistics that is true to what is
-- there now, whether or not ANALYZE was ever run.

-- name: depth_due
-- In how many seconds the next measurement is due, after the newest one; NULL if there is none, or it is of a time to come. And how many
-- seconds ago that was.
SELECT CASE WHEN newest.at <= clock.now THEN extract(epoch FROM newest.next_at - clock.now)::float8 END,
       extract(epoch FROM clock.now - newest.at)::float8
FROM (SELECT pgqueue.now() AS now) AS clock
LEFT JOIN (SELECT d.at, d.next_at FROM pgqueue.depth d ORDER BY d.at DESC LIMIT 1) AS newest ON true;

-- name: depth_reading
-- What the watermark has to know before the lanes are read, in this order: the snapshot, the last position drawn, an id of our own.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0), pg_current_xact_id()::text::int8, pg_current_snapshot()::text;

-- name: depth_lanes
-- The available jobs. `known` are the queues that are looked at in any case; others are found by jumping along the indexes of the lanes,
-- between the known ones only, so that what known queues have left behind is not walked over. A lane is read behind its `after`, at most
-- `most` jobs of it. Of each larger queue an estimate is taken.
--
-- Answers, as JSON: the groups [queue, state, reason, task, n, exact, since], and the lanes that have jobs [queue, rank, keyed, number of
-- jobs read, position of the first]. Then the queues that live workers serve.
WITH RECURSIVE gap AS MATERIALIZED (
    SELECT k.name AS queue, lead(k.name) OVER (ORDER BY k.name) AS upto
    FROM (SELECT '' COLLATE "C" AS name UNION SELECT unnest(%(known)s::text[])) AS k
), found (queue, upto, place) AS (
    SELECT g.queue, g.upto, 0 FROM gap g
    UNION ALL
    SELECT CASE WHEN f.upto IS NULL THEN least(
               (SELECT j.queue FROM pgqueue.job_available j WHERE j.queue > f.queue AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
                ORDER BY j.queue, j.rank, j.pos NULLS FIRST LIMIT 1),
               (SELECT j.queue FROM pgqueue.job_available j WHERE j.queue > f.queue AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
                ORDER BY j.queue, j.rank, j.pos NULLS FIRST LIMIT 1))
           ELSE least(
               (SELECT j.queue FROM pgqueue.job_available j
                WHERE j.queue > f.queue AND j.queue < f.upto AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
                ORDER BY j.queue, j.rank, j.pos NULLS FIRST LIMIT 1),
               (SELECT j.queue FROM pgqueue.job_available j
                WHERE j.queue > f.queue AND j.queue < f.upto AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
                ORDER BY j.queue, j.rank, j.pos NULLS FIRST LIMIT 1)) END,
           f.upto, f.place + 1
    FROM found f WHERE f.queue IS NOT NULL AND f.place < 1000
), cursor AS MATERIALIZED (
    SELECT c.queue, c.rank, c.keyed, c.after
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(keyed)s::boolean[], %(afters)s::bigint[]) AS c (queue, rank, keyed, after)
), lane AS MATERIALIZED (
    SELECT name.queue, r.rank::smallint AS rank, kind.keyed, coalesce(cursor.after, -1) AS after
    FROM (SELECT DISTINCT f.queue FROM found f WHERE f.queue <> '' ORDER BY 1 LIMIT 2000) AS name
    CROSS JOIN generate_series(-2, 19) AS r (rank)
    CROSS JOIN (VALUES (false), (true)) AS kind (keyed)
    LEFT JOIN cursor ON cursor.queue = name.queue AND cursor.rank = r.rank AND cursor.keyed = kind.keyed
), walked AS MATERIALIZED (
    -- In the order of the index, so that no plan collects all rows of a lane before it counts the first.
    SELECT lane.queue, lane.rank, lane.keyed, j.task, j.pos, j.since FROM lane CROSS JOIN LATERAL (
        (SELECT j.task, j.pos, {{since}} AS since FROM pgqueue.job_available j
         WHERE NOT lane.keyed AND j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
           AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
         ORDER BY j.pos NULLS FIRST LIMIT %(most)s::integer)
        UNION ALL
        (SELECT j.task, j.pos, {{since}} FROM pgqueue.job_available j
         WHERE lane.keyed AND j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
           AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
         ORDER BY j.pos NULLS FIRST LIMIT %(most)s::integer)
    ) AS j LIMIT 200000
), by_lane AS MATERIALIZED (
    SELECT queue, rank, keyed, count(*) AS n, min(pos) AS first FROM walked GROUP BY queue, rank, keyed
), by_task AS MATERIALIZED (
    SELECT queue, task, count(*) AS n, min(since) AS since FROM walked GROUP BY queue, task
), partial AS MATERIALIZED (
    -- Queues of which not all jobs were read. If the walk had to end before all lanes, that may be any of them.
    SELECT DISTINCT queue FROM by_lane
    WHERE n >= %(most)s::integer OR (SELECT sum(n) FROM by_lane) >= 200000
), share AS MATERIALIZED (
    SELECT least(100, 30000.0 / greatest(1, pg_relation_size('pgqueue.job_available') / current_setting('block_size')::integer))::float8 AS percent
    WHERE EXISTS (SELECT FROM partial)
), sampled AS MATERIALIZED (
    SELECT j.queue, j.n FROM share CROSS JOIN LATERAL (
        SELECT queue, count(*) * 100 / share.percent AS n
        FROM pgqueue.job_available TABLESAMPLE SYSTEM (share.percent) REPEATABLE (1) GROUP BY queue
    ) AS j
), taker AS MATERIALIZED (
    {{takers}}
), grouped AS MATERIALIZED (
    SELECT g.queue, {{waits_for}} AS reason, g.task, g.n, g.since FROM by_task AS g
), known AS (
    SELECT g.queue, min(g.reason) FILTER (WHERE NOT g.by_task) AS reason,
           sum(g.n) FILTER (WHERE NOT g.by_task) AS n, min(g.since) FILTER (WHERE NOT g.by_task) AS since,
           coalesce(sum(g.n) FILTER (WHERE g.by_task), 0) AS apart
    FROM (SELECT *, reason IN ('unknown', 'task_paused') AS by_task FROM grouped) AS g GROUP BY g.queue
), amount AS (
    -- The estimate is of all jobs of a queue. A queue that was not read to its end has more than was read.
    SELECT k.queue, k.reason, '' AS task, partial.queue IS NULL AS exact, k.since,
           CASE WHEN partial.queue IS NULL THEN k.n ELSE greatest(k.n, coalesce(sampled.n, 0) - k.apart) END::bigint AS n
    FROM known k LEFT JOIN partial ON partial.queue = k.queue LEFT JOIN sampled ON sampled.queue = k.queue
    WHERE k.reason IS NOT NULL
    UNION ALL
    SELECT g.queue, g.reason, g.task, partial.queue IS NULL, g.since, g.n
    FROM grouped g LEFT JOIN partial ON partial.queue = g.queue
    WHERE g.reason IN ('unknown', 'task_paused')
)
SELECT coalesce((SELECT json_agg(json_build_array(queue, 'available', reason, task, n, exact, extract(epoch FROM since)::float8)) FROM amount), '[]')::text,
       coalesce((SELECT json_agg(json_build_array(queue, rank, keyed, n, first)) FROM by_lane), '[]')::text,
       ARRAY(SELECT DISTINCT queue FROM taker ORDER BY 1 LIMIT 1000);

-- name: depth_scheduled
-- The scheduled jobs, by time from `after` on (seconds since 1970; NULL: all). Answers the groups as `depth_lanes` does, then the time of
-- the first of these jobs, and the time now.
WITH taker AS MATERIALIZED (
    {{takers}}
), walked AS MATERIALIZED (
    SELECT j.queue, {{scheduled_for}} AS reason, j.task, j.run_at FROM pgqueue.job_scheduled j
    WHERE j.run_at >= coalesce(to_timestamp(%(after)s::float8), '-infinity') ORDER BY j.run_at, j.id LIMIT 10001
), share AS MATERIALIZED (
    SELECT least(100, 30000.0 / greatest(1, pg_relation_size('pgqueue.job_scheduled') / current_setting('block_size')::integer))::float8 AS percent
    WHERE (SELECT count(*) FROM walked) > 10000
), counted AS (
    SELECT g.queue, g.reason, count(*) AS n, {{due_since}} AS since FROM walked AS g GROUP BY g.queue, g.reason
), sampled AS (
    SELECT j.queue, j.reason, j.n FROM share CROSS JOIN LATERAL (
        SELECT j.queue, {{scheduled_for}} AS reason, count(*) * 100 / share.percent AS n
        FROM pgqueue.job_scheduled AS j TABLESAMPLE SYSTEM (share.percent) REPEATABLE (1) GROUP BY 1, 2
    ) AS j
), amount AS (
    SELECT coalesce(c.queue, s.queue) AS queue, coalesce(c.reason, s.reason) AS reason, greatest(c.n, s.n)::bigint AS n, c.since
    FROM counted c FULL JOIN sampled s ON s.queue = c.queue AND s.reason = c.reason
)
SELECT coalesce((SELECT json_agg(json_build_array(
           queue, 'scheduled', reason, '', n, NOT EXISTS (SELECT FROM share), extract(epoch FROM since)::float8)) FROM amount), '[]')::text,
       (SELECT extract(epoch FROM min(run_at))::float8 FROM walked), extract(epoch FROM pgqueue.now())::float8;

-- name: depth_whole
-- Tables may be read from end to end in this transaction: a table of which most rows are dead is read so in a tenth of the time.
SELECT set_config('enable_seqscan', 'on', true);

-- name: depth_others
-- The jobs that are blocked or run, and what history has; up to 10,000 of each are read. Answers the groups as `depth_lanes` does. Of a
-- larger partition a sample says how many there are, and the rows that were read which tasks of them are unknown.
WITH counted AS MATERIALIZED (
    SELECT 'blocked' AS part, 'blocked' AS state, queue, reason, task, count(*) AS n
    FROM (SELECT j.queue, {{blocked_by}} AS reason, j.task FROM pgqueue.job_blocked j LIMIT 10001) AS j GROUP BY queue, reason, task
    UNION ALL
    SELECT 'running', 'running', queue, '', '', count(*) FROM (SELECT queue FROM pgqueue.job_running LIMIT 10001) AS j GROUP BY queue
    UNION ALL
    SELECT 'done', state, '', '', '', count(*) FROM (SELECT state FROM pgqueue.job_done LIMIT 10001) AS j GROUP BY state
    UNION ALL
    SELECT 'dead', state, '', '', '', count(*) FROM (SELECT state FROM pgqueue.job_dead LIMIT 10001) AS j GROUP BY state
), large AS MATERIALIZED (
    SELECT part, least(100, 30000.0 / greatest(1, (
               SELECT sum(pg_relation_size(relid)) / current_setting('block_size')::integer
               FROM pg_partition_tree('pgqueue.job_' || part) WHERE isleaf)))::float8 AS percent
    FROM counted GROUP BY part HAVING sum(n) > 10000
), sampled AS MATERIALIZED (
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'blocked' AS part, 'blocked' AS state, j.queue, {{blocked_by}} AS reason, count(*) * 100 / large.percent AS n
        FROM pgqueue.job_blocked AS j TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY 3, 4
    ) AS j WHERE large.part = 'blocked'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'running', 'running', j.queue, '', count(*) * 100 / large.percent
        FROM pgqueue.job_running AS j TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY 3
    ) AS j WHERE large.part = 'running'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'done', j.state, '', '', count(*) * 100 / large.percent
        FROM pgqueue.job_done AS j TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY 2
    ) AS j WHERE large.part = 'done'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'dead', j.state, '', '', count(*) * 100 / large.percent
        FROM pgqueue.job_dead AS j TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY 2
    ) AS j WHERE large.part = 'dead'
), taker AS MATERIALIZED (
    {{takers}}
), judged AS MATERIALIZED (
    SELECT g.part, g.state, g.queue, g.reason, g.task, g.n,
        g.part = 'blocked' AND g.reason <> 'flow' AND {{is_unknown}} AS unknown, large.part IS NULL AS exact
    FROM counted AS g LEFT JOIN large ON large.part = g.part
), whole AS (
    -- What is counted of a small partition, and estimated of a large one: never less than was read.
    SELECT coalesce(c.state, s.state) AS state, coalesce(c.queue, s.queue) AS queue, coalesce(c.reason, s.reason) AS reason,
           greatest(c.n, s.n - coalesce(c.unknown, 0))::bigint AS n, coalesce(c.exact, false) AS exact
    FROM (SELECT state, queue, reason, exact, sum(n) FILTER (WHERE NOT unknown) AS n, sum(n) FILTER (WHERE unknown) AS unknown
          FROM judged GROUP BY state, queue, reason, exact) AS c
    FULL JOIN sampled s ON s.state = c.state AND s.queue = c.queue AND s.reason = c.reason
), amount AS (
    SELECT state, queue, reason, '' AS task, n, exact FROM whole WHERE n > 0
    UNION ALL
    SELECT state, queue, 'unknown', task, sum(n), bool_and(exact) FROM judged WHERE unknown GROUP BY state, queue, task
    UNION ALL
    SELECT none.state, '', '', '', 0, true
    FROM unnest(ARRAY['completed', 'skipped', 'failed', 'cancelled']) AS none (state) WHERE none.state NOT IN (SELECT w.state FROM whole w)
)
SELECT coalesce((SELECT json_agg(json_build_array(queue, state, reason, task, n, exact, NULL)) FROM amount), '[]')::text;

-- name: depth_blocked
-- Keys that have room while a job waits for them, of the next n keys with waiters after `after`, and of those asked for `again`. As the
-- sweep looks, and independent of it: so it is seen if the sweep does not do its work. Answers, as JSON: [key, id and queue of the first
-- waiter that a live worker would take], and the last key looked at (NULL: the walk is at its end).
WITH RECURSIVE walked (key, place) AS (
    SELECT {{key_after_first}}, 1
    UNION ALL
    SELECT {{key_after}}, w.place + 1
    FROM walked w WHERE w.key IS NOT NULL AND w.place < %(n)s::integer
), looked AS MATERIALIZED (
    SELECT wanted.key, head.id, head.queue,
           CASE WHEN starts_with(wanted.key, 'rate:') THEN speed.depth >= greatest(coalesce(speed.ahead, 0), 0)
                ELSE coalesce(held.n, had.n) < head.most END AS room
    FROM (SELECT w.key, 0 AS after FROM walked w WHERE w.key IS NOT NULL
          UNION SELECT unnest(%(again)s::text[]), 0) AS wanted
    CROSS JOIN LATERAL (
        SELECT b.id, b.queue, CASE WHEN starts_with(wanted.key, 'limit:')
                                   THEN (SELECT l.n FROM pgqueue.key_limit l WHERE l.name = substr(wanted.key, 7))
                                   ELSE greatest(b.lock_limit, 1) END AS most
        FROM pgqueue.job_blocked b
        WHERE b.key = wanted.key AND NOT b.queue = {{paused}} AND {{served}}
        ORDER BY b.rank, b.id LIMIT 1
    ) AS head
    LEFT JOIN LATERAL ({{lock_holders}}) AS held ON starts_with(wanted.key, 'lock:')
    LEFT JOIN LATERAL ({{limit_holders}}) AS had ON starts_with(wanted.key, 'limit:')
    LEFT JOIN LATERAL (
        SELECT r.depth, (SELECT extract(epoch FROM l.next_at - pgqueue.now())::float8
                         FROM pgqueue.limiter l WHERE l.key = asked.key) AS ahead
        FROM (SELECT substr(wanted.key, 6) AS key) AS asked CROSS JOIN LATERAL ({{rate}}) AS r
    ) AS speed ON starts_with(wanted.key, 'rate:')
)
SELECT coalesce((SELECT json_agg(json_build_array(key, id, queue)) FROM looked WHERE room), '[]')::text,
       (SELECT key FROM walked WHERE place = %(n)s::integer);

-- name: depth_write
-- Append a measurement, and delete those before it, from `since` on, and those of a time to come. Times are seconds since 1970. The rows
-- come as a JSON array of the groups, each with the time `longest_blocked` at its end.
WITH measured AS MATERIALIZED (
    SELECT to_timestamp(%(at)s::float8) AS at, to_timestamp(%(next_at)s::float8) AS next_at
), before AS (
    DELETE FROM pgqueue.depth d
    WHERE d.at < (SELECT m.at FROM measured m) AND d.at >= coalesce(to_timestamp(%(since)s::float8), '-infinity') RETURNING d.at
), beyond AS (
    DELETE FROM pgqueue.depth d WHERE d.at > (SELECT m.at FROM measured m) RETURNING d.at
), written AS (
    INSERT INTO pgqueue.depth (at, next_at, queue, state, reason, task, n, exact, oldest, longest_blocked)
    SELECT m.at, m.next_at, g.row ->> 0, g.row ->> 1, g.row ->> 2, g.row ->> 3, (g.row ->> 4)::bigint, (g.row ->> 5)::boolean,
           to_timestamp((g.row ->> 6)::float8), to_timestamp((g.row ->> 7)::float8)
    FROM measured m CROSS JOIN json_array_elements(%(groups)s::text::json) AS g (row)
    ON CONFLICT DO NOTHING
    RETURNING n
)
SELECT count(*) FROM written;

-- Which job starts next under a rate. A row per key of a rate says when that is at rest again (`next_at`). Every transaction that would
-- change the row locks the key first (`unblock_lock`), and reads the row in a later statement. Lock order: keys, our worker's row, blocked
-- rows with SKIP LOCKED. The arithmetic is the fragment `rate`; why so many jobs may start is at the head of rate_limiter.py.

-- name: rates_clock
-- The time at which we begin to wait for keys.
SELECT pgqueue.now();

-- name: rates_move
-- With these keys locked: let waiting jobs in, in (rank, id) order, as the rate of each allows now and as slots are free here; and charge
-- the rate for them. `queues` come with the place of their pool, `slots` by pool. Of a rate so fast that it is no loss if they come too
-- late, `spare` more may come. Which jobs are passed over:
-- 1. Those of paused queues and tasks, of queues of others, and of tasks that are not among `tasks`.
-- 2. Poison jobs of other ranks than `poison`; at most one comes in.
-- 3. All but poison jobs, if not `ordinary`.
-- If a time is beyond what the rate could have set (it was changed, or the clock was), it is cut down. The time before the search decides
-- how many come in. The time after it is charged and answered, so no job is late because the search took long.
-- Answers that time, and a summary, as a JSON object: of each key that has a rate, by its name,
-- * `taken`: how many jobs came in.
-- * `pause`: in how many seconds the next job may.
-- * `late`: after how many seconds these jobs are too late to start.
WITH me AS MATERIALIZED (
    {{live_worker}}
), clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now FROM me
), mine AS MATERIALIZED (
    SELECT m.queue, m.pool, (%(slots)s::integer[])[m.pool] AS slots, (%(spare)s::integer[])[m.pool] AS spare
    FROM unnest(%(queues)s::text[], %(pools)s::integer[]) AS m (queue, pool)
    WHERE NOT m.queue = {{paused}}
), limiter AS MATERIALIZED (
    SELECT asked.key, r.gap, r.depth, r.late, l.worker_id, l.ahead, l.ahead > r.depth + r.gap + 0.001 AS beyond,
           greatest(0, least(%(most)s::integer, floor((r.depth - greatest(coalesce(l.ahead, 0), 0)) / r.gap) + 1))::integer AS room
    FROM (SELECT DISTINCT key FROM clock CROSS JOIN unnest(%(keys)s::text[]) AS k (key)) AS asked
    CROSS JOIN LATERAL ({{rate}}) AS r
    LEFT JOIN LATERAL (
        SELECT l.worker_id, extract(epoch FROM l.next_at - clock.now)::float8 AS ahead
        FROM clock CROSS JOIN pgqueue.limiter l WHERE l.key = asked.key LIMIT 1
    ) AS l ON true
), head AS MATERIALIZED (
    -- By queue, so that jobs that can go are not looked for behind jobs that cannot; poison jobs by themselves for the same reason.
    -- BETWEEN, for of one rank any index on ids has the order that is asked for.
    SELECT limiter.key, limiter.room, limiter.gap < 0.002 AS fast, mine.pool, mine.slots, mine.spare, b.*
    FROM limiter JOIN mine ON mine.slots > 0
    CROSS JOIN LATERAL (
        SELECT * FROM (
            SELECT b.ctid, b.id, b.rank, b.crashes FROM pgqueue.job_blocked b
            WHERE {{of_rate}} AND b.queue = mine.queue AND b.rank >= 0 AND {{known_here}}
            ORDER BY b.rank, b.id
            LIMIT CASE WHEN %(ordinary)s::boolean THEN least(limiter.room, mine.slots + mine.spare) ELSE 0 END
            FOR UPDATE SKIP LOCKED
        ) AS ordinary
        UNION ALL
        SELECT poison_job.* FROM unnest(%(poison)s::integer[]) AS lane (rank) CROSS JOIN LATERAL (
            SELECT b.ctid, b.id, b.rank, b.crashes FROM pgqueue.job_blocked b
            WHERE {{of_rate}} AND b.queue = mine.queue AND b.rank BETWEEN lane.rank AND lane.rank AND {{known_here}}
            ORDER BY b.rank, b.id LIMIT least(limiter.room, 1)
            FOR UPDATE SKIP LOCKED
        ) AS poison_job
    ) AS b
), first AS MATERIALIZED (
    SELECT * FROM (SELECT head.*, row_number() OVER (PARTITION BY key ORDER BY rank, id) AS turn FROM head) AS numbered
    WHERE turn <= room
), fitting AS MATERIALIZED (
    SELECT numbered.* FROM (
        SELECT first.*, row_number() OVER (PARTITION BY pool ORDER BY rank, id) AS place,
               row_number() OVER (PARTITION BY crashes > 0 ORDER BY rank, id) AS nth
        FROM first
    ) AS numbered
    WHERE place <= slots + CASE WHEN fast AND crashes = 0 THEN spare ELSE 0 END AND (crashes = 0 OR nth = 1)
), unblocked AS MATERIALIZED (
    -- No job comes in beside one that must run alone.
    SELECT f.ctid, f.id, f.key FROM fitting f
    WHERE f.crashes > 1 OR NOT EXISTS (SELECT FROM fitting g WHERE g.crashes > 1)
), moment AS MATERIALIZED (
    SELECT CASE WHEN found.n >= 0 THEN pgqueue.now() END AS now FROM clock CROSS JOIN (SELECT count(*) AS n FROM unblocked) AS found
), charge AS MATERIALIZED (
    SELECT limiter.*, moment.now, (SELECT count(*) FROM unblocked WHERE unblocked.key = limiter.key) AS taken,
           greatest(0, least(limiter.depth + limiter.gap,
               coalesce(limiter.ahead - extract(epoch FROM moment.now - clock.now)::float8, 0))) AS base
    FROM limiter CROSS JOIN clock CROSS JOIN moment
), charged AS (
    INSERT INTO pgqueue.limiter AS l (key, next_at, worker_id)
    SELECT c.key, c.now + make_interval(secs => ceil((c.base + c.taken * c.gap) * 1000000) / 1000000),
           CASE WHEN c.taken > 0 THEN %(worker_id)s::bigint ELSE c.worker_id END
    FROM charge c WHERE c.taken > 0 OR c.beyond
    ON CONFLICT (key) DO UPDATE SET next_at = excluded.next_at, worker_id = excluded.worker_id
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM unblocked)) RETURNING {{job}}, {{attempts}}
), running AS (
    {{start}}
    RETURNING id
)
SELECT (SELECT now FROM moment), CASE
    WHEN (SELECT count(*) FROM unblocked) <> (SELECT count(*) FROM running)
    THEN pgqueue.refuse('a rate let jobs in that it did not move')::text
    ELSE (SELECT coalesce(json_object_agg(c.key, json_build_object(
              'taken', c.taken, 'pause', greatest(c.base + c.taken * c.gap - c.depth, 0), 'late', c.late)), '{}') FROM charge c)::text
    END AS summary;

-- name: rates_outlook
-- Behind `rates_move`, when that is committed: what is left to wait for these keys, so when to ask for them next. Locks nothing, decides
-- nothing. Answers a JSON object: of each key, by its name,
-- * `remains`: whether an ordinary job is left that we could take, or a poison job of the ranks `poison`.
-- * `elsewhere`: whether the first that is left is one that only another worker takes. It is looked for among the first 100 of each
--   queue, not behind all of ours: it only says that other workers should be told.
-- * `last`: the worker that let in last, if it could have taken the first of ours that is left.
-- * `poison`: whether poison jobs of our queues and tasks are left.
WITH mine AS MATERIALIZED (
    SELECT m.queue FROM unnest(%(queues)s::text[]) AS m (queue) WHERE NOT m.queue = {{paused}}
), open_queue AS MATERIALIZED (
    SELECT DISTINCT each.name FROM pgqueue.worker w CROSS JOIN unnest(w.queues) AS each (name)
    WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND NOT each.name = {{paused}}
)
SELECT coalesce(json_object_agg(limiter.key, json_build_object(
    'remains', ours.id IS NOT NULL,
    'elsewhere', theirs.id IS NOT NULL AND (ours.id IS NULL OR (theirs.rank, theirs.id) < (ours.rank, ours.id)),
    'last', (SELECT l.worker_id FROM pgqueue.limiter l JOIN pgqueue.worker w ON w.id = l.worker_id
             WHERE l.key = limiter.key AND ours.queue = ANY (w.queues) AND ours.task = ANY (w.tasks)
             LIMIT 1),
    'poison', EXISTS (
        SELECT FROM mine CROSS JOIN LATERAL (
            SELECT FROM pgqueue.job_blocked b WHERE {{of_rate}} AND b.queue = mine.queue AND b.rank < 0 AND {{known_here}}
            ORDER BY b.rank, b.id LIMIT 1
        ) AS b))), '{}')::text AS summary
FROM (SELECT DISTINCT k.key FROM unnest(%(keys)s::text[]) AS k (key)) AS limiter
LEFT JOIN LATERAL (
    SELECT b.rank, b.id, mine.queue, b.task FROM mine CROSS JOIN unnest(%(poison)s::integer[] || 0) AS lane (rank)
    CROSS JOIN LATERAL (
        SELECT b.id, b.rank, b.task FROM pgqueue.job_blocked b
        WHERE {{of_rate}} AND b.queue = mine.queue AND {{known_here}}
          AND b.rank BETWEEN lane.rank AND CASE lane.rank WHEN 0 THEN 32767 ELSE lane.rank END
        ORDER BY b.rank, b.id LIMIT 1
    ) AS b
    ORDER BY b.rank, b.id LIMIT 1
) AS ours ON true
LEFT JOIN LATERAL (
    SELECT b.* FROM open_queue CROSS JOIN LATERAL (
        SELECT b.rank, b.id, b.queue, b.task FROM pgqueue.job_blocked b WHERE {{of_rate}} AND b.queue = open_queue.name
        ORDER BY b.rank, b.id LIMIT 100
    ) AS b
    WHERE NOT (b.queue = ANY (%(queues)s::text[]) AND {{known_here}}) AND {{served}}
    ORDER BY b.rank, b.id LIMIT 1
) AS theirs ON true;

-- name: rates_read
-- The jobs that were let in by this claim. In a transaction of its own: however large the payloads are, no worker waits for a rate while
-- they travel.
{{read_claim}};

-- name: rates_overdue
-- Of these keys those that could have let a job in for longer than so many seconds, or whose time is beyond what the rate could have set.
-- A job must wait whose queue is open, and whose task a live worker of the queue knows. Then whether the first of these jobs is a poison
-- job, or not of our queues and tasks: another worker may be free for it. Locks nothing, decides nothing.
WITH open_queue AS MATERIALIZED (
    SELECT DISTINCT known.queue AS name FROM pgqueue.served() AS known WHERE NOT known.queue = {{paused}}
)
SELECT asked.key, b.crashes > 0 OR NOT (b.queue = ANY (%(queues)s::text[]) AND {{known_here}})
FROM unnest(%(keys)s::text[]) AS asked (key)
CROSS JOIN LATERAL ({{rate}}) AS r
LEFT JOIN LATERAL (
    SELECT extract(epoch FROM l.next_at - pgqueue.now())::float8 AS ahead FROM pgqueue.limiter l WHERE l.key = asked.key LIMIT 1
) AS l ON true
CROSS JOIN LATERAL (SELECT asked.key) AS limiter
CROSS JOIN LATERAL (
    SELECT b.* FROM open_queue CROSS JOIN LATERAL (
        SELECT b.rank, b.id, b.queue, b.task, b.crashes FROM pgqueue.job_blocked b
        WHERE {{of_rate}} AND b.queue = open_queue.name AND {{served}}
        ORDER BY b.rank, b.id LIMIT 1
    ) AS b
    ORDER BY b.rank, b.id LIMIT 1
) AS b
WHERE coalesce(l.ahead <= r.depth - %(seconds)s::float8 OR l.ahead > r.depth + r.gap + 0.001, true);

-- name: rates_hand_on
-- Tell all workers that jobs wait for these keys which this worker cannot take: a JSON array of them, up to 7,900 bytes.
SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:control', 'rates ' || %(keys)s::text)::text END
WHERE %(notify)s::boolean;

-- name: rates_clock
-- The time at which we begin to wait for keys.
SELECT pgqueue.now();

-- name: rates_lock
-- Lock these keys of rates, at most 64, for this transaction: in the order of their hashes, so that no two can wait for each other.
-- It is a short one, of pgqueue's own, and durable: of what it lets in some start before it is flushed, and if the server lost the
-- charge for them, others would start in their time.
SELECT count(pg_catalog.pg_advisory_xact_lock(hashed.hash)::pg_catalog.text)
FROM (
    SELECT DISTINCT pg_catalog.hashtextextended('pgqueue.rate:' || asked.key, 7) AS hash
    FROM unnest(%(keys)s::text[]) AS asked (key) ORDER BY hash LIMIT 64
) AS hashed
CROSS JOIN (SELECT pg_catalog.set_config('lock_timeout', '1s', true) OFFSET 0) AS settings;

-- name: rates_move
-- With these keys locked: let in as many of those that wait for each, in (rank, id) order, as its rate allows now and as there are
-- free slots here (`queues` with the place of their pool, `slots` by pool; with `spare` more of a rate so fast that it is no loss if
-- they come too late), and charge the rate for them. Jobs of paused queues, of others' queues and of tasks that are not among `tasks` are passed over; so are
-- poison jobs of other ranks than `poison`, of which at most one is let in, and all but poison jobs if not `ordinary`. A time beyond
-- what the rate could have set (it was changed, or the clock was) is cut down. The time before the search decides how many, the time
-- after it is charged and answered.
-- One row: that time; and as JSON for each key that has a rate [key, how many were let in, seconds until the next may be,
-- seconds after which they are too late to start, whether a job is left that we could take, whether the first that is left is
-- one that only another worker takes, which worker had let in last if it could have taken the first of ours that is left, whether
-- poison jobs of our queues and tasks are left].
WITH me AS MATERIALIZED (
    SELECT w.id FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE
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
    CROSS JOIN LATERAL (
        SELECT t.late, t.gap, (p.burst - 1) * t.gap + t.early AS depth
        FROM pgqueue.key_rate p
        CROSS JOIN LATERAL (SELECT least(0.2::float8, p.period / 20) AS late, least(0.05::float8, p.period / 40) AS early) AS e
        CROSS JOIN LATERAL (SELECT e.late, e.early, (p.period + e.late + e.early) / p.count AS gap) AS t
        WHERE p.name = split_part(asked.key, ':', 1)
    ) AS r
    LEFT JOIN LATERAL (
        SELECT l.worker_id, extract(epoch FROM l.next_at - clock.now)::float8 AS ahead
        FROM clock CROSS JOIN pgqueue.limiter l WHERE l.key = asked.key LIMIT 1
    ) AS l ON true
), head AS MATERIALIZED (
    -- By queue, so that those who can go are not looked for behind those who cannot; poison jobs by themselves for the same reason
    -- (BETWEEN: of one rank, any index on ids has the order that is asked for).
    SELECT limiter.key, limiter.room, limiter.gap < 0.002 AS fast, mine.pool, mine.slots, mine.spare, b.*
    FROM limiter JOIN mine ON mine.slots > 0
    CROSS JOIN LATERAL (
        SELECT * FROM (
            SELECT b.ctid, b.id, b.rank, b.crashes FROM pgqueue.job_blocked b
            WHERE substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:' AND b.queue = mine.queue AND b.rank >= 0
              AND {{known_here}}
            ORDER BY b.rank, b.id
            LIMIT CASE WHEN %(ordinary)s::boolean THEN least(limiter.room, mine.slots + mine.spare) ELSE 0 END
            FOR UPDATE SKIP LOCKED
        ) AS ordinary
        UNION ALL
        SELECT poison_job.* FROM unnest(%(poison)s::integer[]) AS lane (rank) CROSS JOIN LATERAL (
            SELECT b.ctid, b.id, b.rank, b.crashes FROM pgqueue.job_blocked b
            WHERE substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:' AND b.queue = mine.queue
              AND b.rank BETWEEN lane.rank AND lane.rank AND {{known_here}}
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
    -- Beside one that must run alone there is nobody.
    SELECT f.ctid, f.id, f.key FROM fitting f
    WHERE f.crashes > 1 OR NOT EXISTS (SELECT FROM fitting g WHERE g.crashes > 1)
), others AS MATERIALIZED (
    SELECT DISTINCT served.queue FROM pgqueue.worker w CROSS JOIN unnest(w.queues) AS served (queue)
    WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
      AND NOT served.queue = {{paused}}
), rest AS MATERIALIZED (
    -- IS NOT TRUE: so the ids of those let in are hashed, not compared one by one with each that is left.
    SELECT limiter.key, (SELECT count(*) FROM unblocked a WHERE a.key = limiter.key) AS taken,
           ours.id IS NOT NULL AS remains,
           theirs.id IS NOT NULL AND (ours.id IS NULL OR (theirs.rank, theirs.id) < (ours.rank, ours.id)) AS elsewhere,
           CASE WHEN EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = limiter.worker_id AND ours.queue = ANY (w.queues)
                                                            AND coalesce(ours.task = ANY (w.tasks), w.tasks IS NULL))
                THEN limiter.worker_id END AS rival,
           EXISTS (
               SELECT FROM mine CROSS JOIN LATERAL (
                   SELECT FROM pgqueue.job_blocked b
                   WHERE substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:' AND b.queue = mine.queue AND b.rank < 0
                     AND {{known_here}}
                     AND (b.id IN (SELECT id FROM unblocked)) IS NOT TRUE
                   ORDER BY b.rank, b.id LIMIT 1
               ) AS b
           ) AS poison
    FROM limiter
    LEFT JOIN LATERAL (
        SELECT b.rank, b.id, mine.queue, b.task FROM mine CROSS JOIN unnest(%(poison)s::integer[] || 0) AS lane (rank)
        CROSS JOIN LATERAL (
            SELECT b.id, b.rank, b.task FROM pgqueue.job_blocked b
            WHERE substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:' AND b.queue = mine.queue AND {{known_here}}
              AND b.rank BETWEEN lane.rank AND CASE lane.rank WHEN 0 THEN 32767 ELSE lane.rank END
              AND (b.id IN (SELECT id FROM unblocked)) IS NOT TRUE
            ORDER BY b.rank, b.id LIMIT 1
        ) AS b
        ORDER BY b.rank, b.id LIMIT 1
    ) AS ours ON true
    LEFT JOIN LATERAL (
        -- Among the first 100 of each queue: it only says that others should be told, and not behind all of ours.
        SELECT b.* FROM others AS other (name) CROSS JOIN LATERAL (
            SELECT b.rank, b.id, b.queue, b.task FROM pgqueue.job_blocked b
            WHERE substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:' AND b.queue = other.name
            ORDER BY b.rank, b.id LIMIT 100
        ) AS b
        WHERE NOT (b.queue = ANY (%(queues)s::text[]) AND {{known_here}})
          AND {{served}}
        ORDER BY b.rank, b.id LIMIT 1
    ) AS theirs ON true
), moment AS MATERIALIZED (
    -- Looked at when all is found: however long that took, nobody is late for it.
    SELECT CASE WHEN found.n >= 0 THEN pgqueue.now() END AS now FROM clock CROSS JOIN (SELECT count(*) AS n FROM rest) AS found
), charge AS MATERIALIZED (
    SELECT limiter.*, moment.now, rest.taken, rest.remains, rest.elsewhere, rest.rival, rest.poison,
           greatest(0, least(limiter.depth + limiter.gap,
               coalesce(limiter.ahead - extract(epoch FROM moment.now - clock.now)::float8, 0))) AS base
    FROM limiter JOIN rest ON rest.key = limiter.key CROSS JOIN clock CROSS JOIN moment
), charged AS (
    INSERT INTO pgqueue.limiter AS l (key, next_at, worker_id)
    SELECT c.key, c.now + make_interval(secs => ceil((c.base + c.taken * c.gap) * 1000000) / 1000000),
           CASE WHEN c.taken > 0 THEN %(worker_id)s::bigint ELSE c.worker_id END
    FROM charge c WHERE c.taken > 0 OR c.beyond
    ON CONFLICT (key) DO UPDATE SET next_at = excluded.next_at, worker_id = excluded.worker_id
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM unblocked))
    RETURNING {{job}}, {{attempts}}
), running AS (
    {{start}}
    RETURNING id
)
SELECT CASE WHEN (SELECT count(*) FROM unblocked) <> (SELECT count(*) FROM running)
            THEN to_timestamp(pgqueue.refuse('a rate let jobs in that it did not move'))
            ELSE (SELECT now FROM moment) END,
       (SELECT coalesce(json_agg(json_build_array(c.key, c.taken, greatest(c.base + c.taken * c.gap - c.depth, 0), c.late, c.remains,
            c.elsewhere, c.rival, c.poison)), '[]')::text FROM charge c);

-- name: rates_read
-- The jobs that were let in by this claim, in the columns of a claim, the most urgent and oldest first. In a transaction of its own:
-- however large the payloads are, nobody waits for a rate while they travel.
SELECT r.id, 0::bigint, r.rank, r.queue, r.task, r.args::text, r.attempt, r.priority, r.max_attempts, r.crashes, r.snoozes,
       r.enqueued_at, r.run_at, CASE WHEN r.deadline <= pgqueue.now() THEN '-infinity' ELSE r.deadline END, r.headers::text,
       r.lock_key, CASE WHEN coalesce(r.unique_key, r.idempotency_key) IS NOT NULL
                        THEN json_build_array(r.unique_key, r.idempotency_key)::text END, r.limit_key, r.rate_key
FROM pgqueue.job_running r
WHERE r.worker_id = %(worker_id)s::bigint AND r.claim = %(claim)s::integer
ORDER BY r.rank, r.id;

-- name: rates_overdue
-- Of these keys those that could have let somebody in for longer than so many seconds, or whose time is beyond what the rate could have
-- set, and that a job waits for whose queue is open and whose task a live worker of it knows; and whether the first of them is not of our queues and tasks, or a poison job, which
-- other workers may be free for. Locks nothing, decides nothing.
WITH served AS MATERIALIZED (
    SELECT DISTINCT known.queue FROM pgqueue.served() AS known
    WHERE NOT known.queue = {{paused}}
)
SELECT asked.key, head.crashes > 0 OR NOT (head.queue = ANY (%(queues)s::text[]) AND (head.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE)
FROM unnest(%(keys)s::text[]) AS asked (key)
CROSS JOIN LATERAL (
    SELECT t.gap, (p.burst - 1) * t.gap + t.early AS depth
    FROM pgqueue.key_rate p
    CROSS JOIN LATERAL (SELECT least(0.2::float8, p.period / 20) AS late, least(0.05::float8, p.period / 40) AS early) AS e
    CROSS JOIN LATERAL (SELECT e.early, (p.period + e.late + e.early) / p.count AS gap) AS t
    WHERE p.name = split_part(asked.key, ':', 1)
) AS r
LEFT JOIN LATERAL (
    SELECT extract(epoch FROM l.next_at - pgqueue.now())::float8 AS ahead FROM pgqueue.limiter l WHERE l.key = asked.key LIMIT 1
) AS l ON true
CROSS JOIN LATERAL (
    SELECT b.* FROM served CROSS JOIN LATERAL (
        SELECT b.rank, b.id, b.queue, b.task, b.crashes FROM pgqueue.job_blocked b
        WHERE substr(b.key, 6) = asked.key AND left(b.key, 5) = 'rate:' AND b.queue = served.queue
          AND {{served}}
        ORDER BY b.rank, b.id LIMIT 1
    ) AS b
    ORDER BY b.rank, b.id LIMIT 1
) AS head
WHERE coalesce(l.ahead <= r.depth - %(seconds)s::float8 OR l.ahead > r.depth + r.gap + 0.001, true);

-- name: rates_hand_on
-- Tell all workers that somebody waits for these keys whom we cannot take: a JSON array of them, up to 7,900 bytes.
SELECT pg_notify('pgqueue.:control', 'rates ' || %(keys)s::text)::text;

-- name: rates_refuse_doubles
-- After a rate met an id that is running already (rows restored or inserted by hand): put the blocked row aside as failed, so that it
-- harms only itself. Answers their ids.
WITH double AS (
    DELETE FROM pgqueue.job_blocked b WHERE b.id = ANY (ARRAY(SELECT id FROM pgqueue.job_running)) RETURNING b.*
)
{{put_aside}};

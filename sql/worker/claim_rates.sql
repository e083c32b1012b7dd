-- Jobs under a rate that is far from its limit pass with the claim: it takes them as it takes plain ones, and they are charged after it,
-- in its transaction. `claim_rates_lock`, `claim_rates_room`, the claim, `claim_rates_charge`: each is a statement of its own, for what reads the limiter must
-- have a snapshot from after the locks. Between them they talk in settings of the transaction: `pgqueue.rates` has the keys that are
-- locked, then what there is to say of each; `pgqueue.passed` how many were taken from lines; `pgqueue.passing` how many the
-- claim has taken of each key. Which numbers a rate is reckoned with: sql/rates.sql.

-- name: claim_rates_lock
-- Lock the keys of fast rates that the next n available jobs of these lanes need, at most 64, those that can be had without waiting: so it
-- may lock in any order. Answers the time, and those keys, locked or not.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.place
    FROM unnest(%(lanes)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[])
         WITH ORDINALITY AS l (queue, rank, after, place)
    WHERE l.rank >= 0 AND NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
    ORDER BY l.place
), seen AS MATERIALIZED (
    SELECT available.rate_key
    FROM lane CROSS JOIN LATERAL (
        SELECT CASE WHEN j.holds OR coalesce(j.lock_key, j.limit_key) IS NULL THEN j.rate_key END AS rate_key
        FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
        ORDER BY j.pos
        LIMIT %(n)s::integer
    ) available
    LIMIT %(n)s::integer
), wanted AS MATERIALIZED (
    SELECT asked.rate_key AS key
    FROM (SELECT DISTINCT rate_key COLLATE "C" AS rate_key FROM seen WHERE rate_key IS NOT NULL) AS asked
    CROSS JOIN LATERAL (
        SELECT (p.period + least(0.2::float8, p.period / 20) + least(0.05::float8, p.period / 40)) / p.count AS gap
        FROM pgqueue.key_rate p WHERE p.name = split_part(asked.rate_key, ':', 1) LIMIT 1
    ) AS r
    WHERE r.gap < 0.002
    LIMIT 64
), tried AS MATERIALIZED (
    SELECT key, pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('pgqueue.rate:' || key, 7)) AS locked FROM wanted
)
SELECT pgqueue.now(), coalesce(json_agg(key), '[]')::text,
       pg_catalog.set_config('pgqueue.rates', coalesce(json_agg(key) FILTER (WHERE locked), '[]')::pg_catalog.text, true)
FROM tried;

-- name: claim_rates_room
-- With these keys locked: how many each allows now. First those who wait in its line, in (rank, id) order, up to three quarters of n (so
-- that others are claimed beside a long line), are moved here and now; and if nobody is left in it who could be taken by us or
-- another worker, the claim may take as many as it still allows. A line with suspects in it, or a time beyond what the rate could
-- have set, is for `rates_move`. Whoever sends this sends `claim_rates_charge` after the claim.
-- The first row has no id, and says nothing. Then those who were moved, in the columns of a claim.
WITH me AS MATERIALIZED (
    SELECT w.id FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE
), clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now FROM me
), closed AS MATERIALIZED (
    SELECT array_agg(q.name) AS names FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL
), limiter AS MATERIALIZED (
    SELECT locked.key, r.gap, r.depth, r.late, l.ahead,
           greatest(0, least(%(n)s::integer, floor((r.depth - greatest(coalesce(l.ahead, 0), 0)) / r.gap) + 1))::integer AS room
    FROM clock CROSS JOIN jsonb_array_elements_text(current_setting('pgqueue.rates')::jsonb) AS locked (key)
    CROSS JOIN LATERAL (
        SELECT t.late, t.gap, (p.burst - 1) * t.gap + t.early AS depth
        FROM pgqueue.key_rate p
        CROSS JOIN LATERAL (SELECT least(0.2::float8, p.period / 20) AS late, least(0.05::float8, p.period / 40) AS early) AS e
        CROSS JOIN LATERAL (SELECT e.late, e.early, (p.period + e.late + e.early) / p.count AS gap) AS t
        WHERE p.name = split_part(locked.key, ':', 1)
    ) AS r
    LEFT JOIN LATERAL (
        SELECT extract(epoch FROM l.next_at - clock.now)::float8 AS ahead FROM pgqueue.limiter l WHERE l.key = locked.key LIMIT 1
    ) AS l ON true
    WHERE coalesce(l.ahead <= r.depth + r.gap + 0.001, true)
), known AS MATERIALIZED (
    -- Only where somebody waits at all is it asked who could take him.
    SELECT DISTINCT served.queue, served.queue = ANY (%(queues)s::text[]) AS ours
    FROM (SELECT FROM limiter CROSS JOIN LATERAL (
              SELECT FROM pgqueue.job_blocked b WHERE substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:' LIMIT 1
          ) AS b LIMIT 1) AS anybody
    CROSS JOIN LATERAL (
        SELECT unnest(w.queues) AS queue FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
        UNION ALL SELECT unnest(%(queues)s::text[])
    ) AS served
    WHERE NOT served.queue = ANY (coalesce((SELECT names FROM closed), '{}'))
), ordinary AS MATERIALIZED (
    SELECT limiter.* FROM limiter
    WHERE NOT EXISTS (
        SELECT FROM known CROSS JOIN LATERAL (
            SELECT FROM pgqueue.job_blocked b
            WHERE substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:' AND b.queue = known.queue AND b.rank < 0 LIMIT 1
        ) AS suspect)
), head AS MATERIALIZED (
    SELECT ordinary.key AS line, ordinary.room, b.*
    FROM ordinary CROSS JOIN known
    CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.rank FROM pgqueue.job_blocked b
        WHERE substr(b.key, 6) = ordinary.key AND left(b.key, 5) = 'rate:' AND b.queue = known.queue AND b.rank >= 0
        ORDER BY b.rank, b.id
        LIMIT least(ordinary.room, %(n)s::integer - greatest(1, %(n)s::integer / 4))
        FOR UPDATE SKIP LOCKED
    ) AS b
    WHERE known.ours
), first AS MATERIALIZED (
    SELECT * FROM (
        SELECT head.*, row_number() OVER (PARTITION BY line ORDER BY rank, id) AS turn, row_number() OVER (ORDER BY rank, id) AS place
        FROM head
    ) AS numbered
    WHERE turn <= room AND place <= %(n)s::integer - greatest(1, %(n)s::integer / 4)
), rest AS MATERIALIZED (
    SELECT ordinary.*, came.n AS came, CASE WHEN EXISTS (
               SELECT FROM known CROSS JOIN LATERAL (
                   SELECT FROM pgqueue.job_blocked b
                   WHERE substr(b.key, 6) = ordinary.key AND left(b.key, 5) = 'rate:' AND b.queue = known.queue
                     AND NOT b.id = ANY (ARRAY(SELECT id FROM first))
                   ORDER BY b.rank, b.id LIMIT 1
               ) AS b
           ) THEN 0 ELSE ordinary.room - came.n END AS room_left
    FROM ordinary CROSS JOIN LATERAL (SELECT count(*) AS n FROM first WHERE first.line = ordinary.key) AS came
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM first))
    RETURNING id, queue, priority, rank, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes, snoozes,
        deadline, lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key
), running AS (
    INSERT INTO pgqueue.job_running (
        state, worker_id, claim, started_at, attempt, rank, holds,
        id, queue, priority, task, args, headers, run_at, enqueued_at, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key)
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), least(attempt + 1, 32767), rank, true,
        id, queue, priority, task, args, headers, run_at, enqueued_at, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key
    FROM taken
    RETURNING id
)
SELECT NULL::bigint, NULL::bigint,
       CASE WHEN (SELECT count(*) FROM first) <> (SELECT count(*) FROM running)
            THEN pgqueue.refuse('a rate let jobs in that it did not move') END::smallint,
       set_config('pgqueue.rates', (SELECT coalesce(json_object_agg(key, json_build_array(room_left, came, room, gap, depth, late)), '{}')
                                    FROM rest)::text, true),
       set_config('pgqueue.passed', (SELECT count(*) FROM first)::text, true),
       set_config('pgqueue.passing', '{}', true),
       NULL::smallint, NULL::smallint, NULL::smallint, NULL::smallint, NULL::smallint,
       NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::text, NULL::text, NULL::text, NULL::text, NULL::text
UNION ALL
SELECT id, 0, rank, queue, task, args::text, least(attempt + 1, 32767)::smallint, priority, max_attempts, crashes, snoozes,
       enqueued_at, run_at, CASE WHEN deadline <= pgqueue.now() THEN '-infinity' ELSE deadline END, headers::text, lock_key,
       CASE WHEN coalesce(unique_key, idempotency_key) IS NOT NULL THEN json_build_array(unique_key, idempotency_key)::text END,
       limit_key, rate_key
FROM taken;

-- name: claim_rates_charge
-- Charge these keys for those whom the claim has taken, and who were taken from their lines before it. The time at which they are charged
-- is looked at here, when all are found: however long that took, nobody is late for it. If there are any, the commit is durable: some
-- may start before it is flushed, and if the server lost the charge, others would start in their time.
-- One row: that time; as JSON for each key that may have let somebody pass [key, how many, seconds after which they are too late to
-- start, whether it would have allowed more].
WITH clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now
), went AS MATERIALIZED (
    SELECT allowed.key, said.gap, said.depth, said.late, said.moved + claimed.n AS taken,
           CASE WHEN said.room_left > 0 THEN claimed.n < said.room_left ELSE said.moved BETWEEN 1 AND said.room - 1 END AS more
    FROM jsonb_each(current_setting('pgqueue.rates')::jsonb) AS allowed
    CROSS JOIN LATERAL (
        SELECT (allowed.value ->> 0)::integer AS room_left, (allowed.value ->> 1)::integer AS moved, (allowed.value ->> 2)::integer AS room,
               (allowed.value ->> 3)::float8 AS gap, (allowed.value ->> 4)::float8 AS depth, (allowed.value ->> 5)::float8 AS late
    ) AS said
    CROSS JOIN LATERAL (
        SELECT coalesce((nullif(current_setting('pgqueue.passing', true), '')::jsonb ->> allowed.key)::integer, 0) AS n
    ) AS claimed
), charged AS (
    INSERT INTO pgqueue.limiter AS l (key, next_at, worker_id)
    SELECT went.key, clock.now + make_interval(secs => ceil((
               greatest(0, coalesce(extract(epoch FROM before.next_at - clock.now)::float8, 0)) + went.taken * went.gap) * 1000000) / 1000000),
           %(worker_id)s::bigint
    FROM went CROSS JOIN clock
    LEFT JOIN LATERAL (SELECT l.next_at FROM pgqueue.limiter l WHERE l.key = went.key LIMIT 1) AS before ON true
    WHERE went.taken > 0
    ON CONFLICT (key) DO UPDATE SET next_at = excluded.next_at, worker_id = excluded.worker_id
    RETURNING key
)
SELECT clock.now, (SELECT coalesce(json_agg(json_build_array(key, taken, late, more)), '[]') FROM went)::text,
       CASE WHEN EXISTS (SELECT FROM charged) THEN set_config('synchronous_commit', NULL, true) END
FROM clock;

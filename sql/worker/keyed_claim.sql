-- name: keyed_claim_reading
-- What the watermark needs to know before a claim of jobs with keys, in this order: the statement's snapshot is taken first, then the head
-- of the position sequence is read, then this transaction takes its own id. Then the most urgent of these lanes, `beyond` a rank,
-- of plain jobs that has one of these `tasks` behind its cursor: its rank, its place (from 1), and the position of the first of them; NULL if
-- none has. The claim asks no lane of a lower priority. Last the paused queues. The settings are for this transaction only.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(others)s::bigint[]) WITH ORDINALITY AS l (queue, rank, after, place)
    WHERE l.rank > %(beyond)s::integer
      AND NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
    ORDER BY l.place
), other AS MATERIALIZED (
    SELECT lane.rank, lane.place, waiting.pos FROM lane CROSS JOIN LATERAL (
        SELECT j.pos FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
          AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
          AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
        ORDER BY j.pos NULLS FIRST LIMIT 1
    ) AS waiting LIMIT 1
)
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0), pg_current_xact_id()::text::int8,
       pg_current_snapshot()::text, other.rank, other.place, other.pos,
       set_config('pgqueue.before', coalesce((other.rank | 1)::text, ''), true), -- both ranks of its priority
       set_config('synchronous_commit', 'off', true), ARRAY(SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL)
FROM (SELECT 1) AS always LEFT JOIN other ON true;

-- name: keyed_claim_lock
-- Ahead of a claim in the same transaction: lock the keys that the next n available jobs of these `tasks` and lanes need, and leave the
-- first job of each to the claim, in a setting of this transaction, unless it has a limit or a rate, too. A key that another
-- session has locked is left out: this waits for no lock, so it may lock in any order. All `workers` together take an eighth of the
-- server's lock table at the most: answers how many entries that is. It must be a statement of its own, before the claim: `free`
-- counts in a snapshot from after these locks.
WITH table_of_locks AS MATERIALIZED (
    SELECT current_setting('max_locks_per_transaction')::bigint * current_setting('max_connections')::bigint / 8 AS eighth
), lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.upto, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(uptos)s::bigint[])
         WITH ORDINALITY AS l (queue, rank, after, upto, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
      AND l.rank <= coalesce(nullif(current_setting('pgqueue.before', true), '')::integer, 32767)
    ORDER BY l.place
), seen AS MATERIALIZED (
    SELECT available.*
    FROM lane CROSS JOIN LATERAL (
        SELECT j.id, j.rank, CASE WHEN NOT j.holds THEN j.lock_key END AS lock_key,
               coalesce(j.limit_key, j.rate_key) IS NULL AS alone
        FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after AND j.pos <= lane.upto
          AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
          AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
        ORDER BY j.pos NULLS FIRST
        LIMIT %(n)s::integer
    ) available
    LIMIT %(n)s::integer
), first AS MATERIALIZED (
    SELECT DISTINCT ON (lock_key COLLATE "C") lock_key, id, alone FROM seen WHERE lock_key IS NOT NULL
    ORDER BY lock_key COLLATE "C", rank, id
    LIMIT greatest(1, (SELECT eighth FROM table_of_locks) / %(workers)s::integer)
)
SELECT (SELECT eighth FROM table_of_locks),
       -- not the text itself: the worker does not read it
       pg_catalog.set_config('pgqueue.locked', coalesce(pg_catalog.array_agg(id)::pg_catalog.text, ''), true) IS NOT NULL
FROM first WHERE alone AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('pgqueue.lock:' || lock_key, 7));

-- name: keyed_claim_block
-- Block those of the next n available jobs of these `tasks` and lanes that need a key, ahead of a claim in the same transaction: so that
-- many of them in a row cost few fetches, and do not count against a claim's n. Locks no other job, and leaves the rest
-- where it is. One row if there were any: how many, their keys with those ids that may be skipped, the keys of which one has a
-- limit above 1, and the lowest rank and the lowest id of any, as a JSON object.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.upto, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(uptos)s::bigint[])
         WITH ORDINALITY AS l (queue, rank, after, upto, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
      AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE)
      AND l.rank <= coalesce(nullif(current_setting('pgqueue.before', true), '')::integer, 32767)
    ORDER BY l.place
), seen AS MATERIALIZED (
    SELECT available.ctid, available.keyed
    FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid, j.rate_key IS NOT NULL OR NOT j.holds AND coalesce(j.lock_key, j.limit_key) IS NOT NULL AS keyed
        FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after AND j.pos <= lane.upto
          AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
          AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
        ORDER BY j.pos NULLS FIRST
        LIMIT %(n)s::integer
    ) available
    LIMIT %(n)s::integer
), picked AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM seen WHERE keyed)) FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), blocked AS (
    INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'blocked',
        CASE WHEN lock_key IS NOT NULL AND NOT holds THEN 'lock:' || lock_key WHEN limit_key IS NOT NULL AND NOT holds THEN 'limit:' || limit_key ELSE 'rate:' || rate_key END,
        holds, CASE WHEN holds THEN nextval('pgqueue.job_hold_seq') END, rank, {{attempts}}, {{job}}
    FROM taken
    RETURNING id, rank, key, on_locked, lock_limit
)
SELECT json_build_object(
    'n', sum(n), 'keys', json_object_agg(key, coalesce(ids, '{}')), 'several', json_agg(key) FILTER (WHERE several),
    'lowest', json_build_array(min(lowest_rank), min(lowest_id)))::text
FROM (SELECT key, array_agg(id) FILTER (WHERE on_locked <> 'wait' AND starts_with(key, 'lock:')) AS ids, count(*) AS n,
             bool_or(lock_limit > 1) AS several, min(rank) AS lowest_rank, min(id) AS lowest_id
      FROM blocked GROUP BY key) AS keys
HAVING count(*) > 0;

-- name: keyed_claim_move
-- Move up to n available jobs with keys, of these `tasks`, of the open lanes, most urgent lane first: to this worker, or, those that need a key that they do
-- not hold and that is not `free`, to job_blocked, where they wait until `admit` lets them in: for the first they lack of lock,
-- limit and rate. A job that `holds` has lock and limit; a rate is never held, only passed, so each job under one waits for it.
-- The holders of a lock are read behind the hold_pos that `starts`, a JSON object, has for its key (see holder_cursors.py),
-- its line behind the [rank, id] that `lines` has (see waiter_cursors.py).
-- The first row has no id. Its pos is the lowest hold_pos of those that have a lock, its queue the locks that came with the job,
-- as a JSON array. Its args hold the places (from 1) of the lanes that were open; its headers, if jobs were blocked,
-- what each lane gave of them [queue, rank, how many, highest pos], their keys with those ids that may be skipped, the keys of
-- which one has a limit above 1, and the lowest rank and the lowest id of any. Every condition stands in `lane` and `picked`: what is picked is deleted,
-- and what is deleted is inserted, or the statement raises.
-- The ORDER BY in `lane` must be there: a hashed anti-join turns the lanes round.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.upto, l.most, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(uptos)s::bigint[], %(mosts)s::integer[])
         WITH ORDINALITY AS l (queue, rank, after, upto, most, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
      AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE)
      AND l.rank <= coalesce(nullif(current_setting('pgqueue.before', true), '')::integer, 32767)
    ORDER BY l.place
), picked AS MATERIALIZED (
    SELECT available.*
    FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid, j.id,
               CASE WHEN NOT j.holds AND coalesce(j.limit_key, j.rate_key) IS NULL THEN j.lock_key END AS lock_key
        FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after AND j.pos <= lane.upto
          AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
          AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
        ORDER BY j.pos NULLS FIRST
        LIMIT lane.most
        FOR UPDATE SKIP LOCKED
    ) available
    LIMIT %(n)s::integer
), free AS MATERIALIZED (
    -- Jobs whose keys `keyed_claim_lock` has locked, and that no job holds or waits for: they need not be blocked. Each key is looked up
    -- by itself (OFFSET 0), and so is each id (IS TRUE): joined, a planner may read all of job_blocked, or compare each with each.
    SELECT j.id
    FROM picked AS j
    WHERE j.lock_key IS NOT NULL
      AND (j.id IN (SELECT unnest(nullif(current_setting('pgqueue.locked', true), '')::bigint[]))) IS TRUE
      AND NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.lock_key = j.lock_key
                      AND coalesce(r.hold_pos, 9223372036854775807)
                          > coalesce(((SELECT %(starts)s::text::jsonb) ->> j.lock_key)::bigint, 0) OFFSET 0)
      AND NOT EXISTS (SELECT FROM pgqueue.job_blocked b WHERE b.key = 'lock:' || j.lock_key
                      AND (b.rank, b.id) > (coalesce(((SELECT %(lines)s::text::jsonb) -> j.lock_key ->> 0)::smallint, -32768),
                                            coalesce(((SELECT %(lines)s::text::jsonb) -> j.lock_key ->> 1)::bigint, 0)) OFFSET 0)
      AND NOT EXISTS (SELECT FROM pgqueue.job_blocked b WHERE b.lock_key = j.lock_key AND b.holds
                      AND coalesce(b.hold_pos, 9223372036854775807)
                          > coalesce(((SELECT %(starts)s::text::jsonb) ->> j.lock_key)::bigint, 0) OFFSET 0)
      AND NOT EXISTS (SELECT FROM pgqueue.job_available a WHERE a.lock_key = j.lock_key AND a.holds
                      AND coalesce(a.hold_pos, 9223372036854775807)
                          > coalesce(((SELECT %(starts)s::text::jsonb) ->> j.lock_key)::bigint, 0) OFFSET 0)
      AND NOT EXISTS (SELECT FROM pgqueue.job_scheduled s WHERE s.lock_key = j.lock_key AND s.holds
                      AND coalesce(s.hold_pos, 9223372036854775807)
                          > coalesce(((SELECT %(starts)s::text::jsonb) ->> j.lock_key)::bigint, 0) OFFSET 0)
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked))
    RETURNING {{job}}, {{attempts}}, pos, rank, holds, rate_key IS NULL AND holds OR id IN (SELECT id FROM free) AS runs
), running AS (
    INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, attempt, hold_pos, rank, run_at, crashes, snoozes,
        holds, {{job}})
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), least(attempt + 1, 32767),
        nextval('pgqueue.job_hold_seq'), rank, run_at, crashes, snoozes, true, {{job}}
    FROM taken WHERE runs
    RETURNING hold_pos
), blocked AS (
    INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'blocked',
        CASE WHEN lock_key IS NOT NULL AND NOT holds THEN 'lock:' || lock_key WHEN limit_key IS NOT NULL AND NOT holds THEN 'limit:' || limit_key ELSE 'rate:' || rate_key END,
        holds, CASE WHEN holds THEN nextval('pgqueue.job_hold_seq') END, rank, {{attempts}}, {{job}}
    FROM taken WHERE NOT runs
    RETURNING id, rank, key, on_locked, lock_limit
)
SELECT NULL::bigint, started.hold_pos, NULL::smallint,
       (SELECT json_agg(lock_key) FROM taken WHERE holds AND lock_key IS NOT NULL AND runs)::text, NULL::text,
       (SELECT coalesce(json_agg(place), '[]') FROM lane)::text,
       CASE WHEN (SELECT count(*) FROM picked) <> started.n + (SELECT count(*) FROM blocked)
            THEN pgqueue.refuse('a claim deleted jobs it did not start') END::smallint,
       NULL::smallint, NULL::smallint, NULL::smallint, NULL::smallint,
       NULL::timestamptz, NULL::timestamptz, NULL::timestamptz,
       CASE WHEN EXISTS (SELECT FROM blocked) THEN json_build_object(
            'lanes', (SELECT json_agg(json_build_array(queue, rank, n, pos)) FROM (
                SELECT queue, rank, count(*) AS n, max(pos) AS pos FROM taken WHERE NOT runs GROUP BY queue, rank) AS lanes),
            'keys', (SELECT json_object_agg(key, coalesce(ids, '{}')) FROM (
                SELECT key, array_agg(id) FILTER (WHERE on_locked <> 'wait' AND starts_with(key, 'lock:')) AS ids
                FROM blocked GROUP BY key) AS keys),
            'several', (SELECT json_agg(DISTINCT key) FROM blocked WHERE lock_limit > 1),
            'lowest', (SELECT json_build_array(min(rank), min(id)) FROM blocked))::text END,
       NULL::text, NULL::text, NULL::text, NULL::text
FROM (SELECT count(*) AS n, min(hold_pos) AS hold_pos FROM running) AS started
UNION ALL
SELECT id, pos, rank, queue, task, args::text, least(attempt + 1, 32767)::smallint, priority, max_attempts, crashes, snoozes,
       enqueued_at, run_at, CASE WHEN deadline <= pgqueue.now() THEN '-infinity' ELSE deadline END, headers::text, lock_key,
       CASE WHEN coalesce(unique_key, idempotency_key) IS NOT NULL THEN json_build_array(unique_key, idempotency_key)::text END,
       limit_key, rate_key
FROM taken WHERE runs;

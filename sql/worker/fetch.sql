-- name: fetch_reading
-- What the watermark needs to know before a claim, in this order: the statement's snapshot is taken first, then the
-- head of the position sequence is read, then this transaction takes its own id. Also, for this transaction only: a lost
-- claim is simply available again, so it need not be durable.
-- Promises no I/O beyond the sequence's page.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0), pg_current_xact_id()::text::int8,
       pg_current_snapshot()::text, set_config('synchronous_commit', 'off', true);

-- name: fetch_claim
-- Move up to n available jobs of the open lanes, most urgent lane first: to this worker, or, those that need a key that they do
-- not hold and that is not `free`, to job_blocked, where they wait until `admit` lets them in: for the first they lack of lock,
-- limit and rate. Who `holds` has lock and limit; a rate is never held, only passed, so each job under one waits for it.
-- With a `reach`, those that need a key are passed over, and no lane is looked at further than that from its first row: rows are left
-- behind then, and no cursor may rise.
-- The holders of a lock are read behind the hold_pos that `starts`, a JSON object, has for its key (see holder_cursors.py), its line
-- behind the [rank, id] that `lines` has (see waiter_cursors.py).
-- The first row has no id. Its pos is the lowest hold_pos of those that have a lock, its queue the locks that came with the job,
-- as a JSON array. Its args hold the places (from 1) of the lanes that were open; its headers, if jobs were parked,
-- what each lane gave of them [queue, rank, how many, highest pos], their keys with those ids that may be skipped, the keys of
-- which one has a limit above 1, and the lowest rank and the lowest id of any; its
-- priority says whether any of the jobs holds a key. Every condition stands in `lane` and `picked`: what is picked is deleted,
-- and what is deleted is inserted, or the statement raises.
-- The ORDER BY in `lane` must be there: a hashed anti-join turns the lanes round.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.most, l.place,
           CASE WHEN %(reach)s::bigint IS NULL THEN 9223372036854775807
                ELSE %(reach)s::bigint + (
                    SELECT a.pos FROM pgqueue.job_available a WHERE a.queue = l.queue AND a.rank = l.rank AND a.pos > l.after
                    ORDER BY a.pos LIMIT 1) END AS upto
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(mosts)s::integer[])
         WITH ORDINALITY AS l (queue, rank, after, most, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
      AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE)
    ORDER BY l.place
), picked AS MATERIALIZED (
    SELECT available.*
    FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid, j.id,
               CASE WHEN NOT j.holds AND coalesce(j.limit_key, j.rate_key) IS NULL THEN j.lock_key END AS lock_key
        FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
          AND j.pos <= lane.upto
          AND (%(reach)s::bigint IS NULL OR j.rate_key IS NULL AND (j.holds OR coalesce(j.lock_key, j.limit_key) IS NULL))
        ORDER BY j.pos
        LIMIT lane.most
        FOR UPDATE SKIP LOCKED
    ) available
    LIMIT %(n)s::integer
), free AS MATERIALIZED (
    -- Jobs whose keys `claim_locks_take` has locked, nobody holds, and nobody waits for: they need not be parked. Each key is looked up
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
    RETURNING id, pos, rank, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes,
        snoozes, deadline, lock_key, lock_limit, on_locked, limit_key, rate_key, holds, unique_key, idempotency_key,
        rate_key IS NULL AND (holds OR coalesce(lock_key, limit_key) IS NULL) OR id IN (SELECT id FROM free) AS runs
), running AS (
    INSERT INTO pgqueue.job_running (
        state, worker_id, claim, started_at, attempt, hold_pos,
        id, rank, queue, priority, task, args, headers, run_at, enqueued_at, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, rate_key, holds, unique_key, idempotency_key)
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), least(attempt + 1, 32767),
        CASE WHEN coalesce(lock_key, limit_key) IS NOT NULL THEN nextval('pgqueue.job_hold_seq') END,
        id, rank, queue, priority, task, args, headers, run_at, enqueued_at, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, rate_key, holds OR lock_key IS NOT NULL, unique_key, idempotency_key
    FROM taken WHERE runs
    RETURNING coalesce(lock_key, limit_key) AS held, hold_pos
), parked AS (
    INSERT INTO pgqueue.job_blocked (
        state, key, holds, hold_pos,
        id, rank, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes, snoozes,
        deadline, lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key)
    SELECT 'blocked', CASE WHEN lock_key IS NOT NULL AND NOT holds THEN 'lock:' || lock_key
                           WHEN limit_key IS NOT NULL AND NOT holds THEN 'limit:' || limit_key ELSE 'rate:' || rate_key END,
        holds, CASE WHEN holds THEN nextval('pgqueue.job_hold_seq') END,
        id, rank, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes, snoozes,
        deadline, lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key
    FROM taken WHERE NOT runs
    RETURNING id, rank, key, on_locked, lock_limit
)
SELECT NULL::bigint, started.hold_pos, NULL::smallint,
       (SELECT json_agg(lock_key) FROM taken WHERE holds AND lock_key IS NOT NULL AND runs)::text, NULL::text,
       (SELECT coalesce(json_agg(place), '[]') FROM lane)::text,
       CASE WHEN (SELECT count(*) FROM picked) <> started.n + (SELECT count(*) FROM parked)
            THEN pgqueue.refuse('a claim deleted jobs it did not start') END::smallint,
       (started.keyed > 0)::integer::smallint, NULL::smallint, NULL::smallint, NULL::smallint,
       NULL::timestamptz, NULL::timestamptz, NULL::timestamptz,
       CASE WHEN EXISTS (SELECT FROM parked) THEN json_build_object(
            'lanes', (SELECT json_agg(json_build_array(queue, rank, n, pos)) FROM (
                SELECT queue, rank, count(*) AS n, max(pos) AS pos FROM taken WHERE NOT runs GROUP BY queue, rank) AS lanes),
            'keys', (SELECT json_object_agg(key, coalesce(ids, '{}')) FROM (
                SELECT key, array_agg(id) FILTER (WHERE on_locked <> 'wait' AND starts_with(key, 'lock:')) AS ids
                FROM parked GROUP BY key) AS keys),
            'several', (SELECT json_agg(DISTINCT key) FROM parked WHERE lock_limit > 1),
            'lowest', (SELECT json_build_array(min(rank), min(id)) FROM parked))::text END,
       NULL::text, NULL::text, NULL::text, NULL::text
FROM (SELECT count(*) AS n, count(held) AS keyed, min(hold_pos) AS hold_pos FROM running) AS started
UNION ALL
SELECT id, pos, rank, queue, task, args::text, least(attempt + 1, 32767)::smallint, priority, max_attempts, crashes, snoozes,
       enqueued_at, run_at, CASE WHEN deadline <= pgqueue.now() THEN '-infinity' ELSE deadline END, headers::text, lock_key,
       CASE WHEN coalesce(unique_key, idempotency_key) IS NOT NULL THEN json_build_array(unique_key, idempotency_key)::text END,
       limit_key, rate_key
FROM taken WHERE runs;

-- name: fetch_probe
-- Has anything happened since the last fetch? Read-only, takes no id, touches no job: the head of the position sequence,
-- the snapshot, and the paused queues.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0),
       pg_current_snapshot()::text,
       ARRAY(SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL);

-- name: fetch_refuse_doubles
-- After a claim met an id that is running or parked already (rows restored or inserted with ids of their own): put the second
-- row aside as failed, so that it harms only itself. Answers their ids.
WITH double AS (
    DELETE FROM pgqueue.job_available a
    WHERE a.id = ANY (ARRAY(SELECT id FROM pgqueue.job_running UNION ALL SELECT id FROM pgqueue.job_blocked))
    RETURNING a.*
)
INSERT INTO pgqueue.job_dead (
    state, finished_at, bin, reason, id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts,
    crashes, snoozes, deadline, lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key)
SELECT 'failed', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), 'refused',
    id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts,
    crashes, snoozes, deadline, lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key
FROM double
RETURNING id;

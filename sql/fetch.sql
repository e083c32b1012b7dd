-- name: fetch_reading
-- What the watermark needs to know before a claim, in this order: the statement's snapshot is taken first, then the
-- head of the position sequence is read, then this transaction takes its own id. Also, for this transaction only: a lost
-- claim is simply available again, so it need not be durable; and the claim must walk its index, whatever statistics say.
-- Promises no I/O beyond the sequence's page.
SELECT coalesce(pg_catalog.pg_sequence_last_value('pgqueue.job_pos_seq'), 0),
       pg_catalog.pg_current_xact_id()::pg_catalog.text::pg_catalog.int8,
       pg_catalog.pg_current_snapshot()::pg_catalog.text,
       pg_catalog.set_config('synchronous_commit', 'off', true),
       pg_catalog.set_config('enable_seqscan', 'off', true),
       pg_catalog.set_config('enable_bitmapscan', 'off', true),
       -- and the settings of every worker's transaction (session.sql), here to save a message
       pg_catalog.set_config('search_path', '', true),
       pg_catalog.set_config('lock_timeout', '2s', true),
       pg_catalog.set_config('statement_timeout', '30s', true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true),
       pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true),
       pg_catalog.set_config('enable_indexscan', 'on', true);

-- name: fetch_claim
-- Move up to n available jobs of the open lanes, most urgent lane first, to this worker.
-- The first row has no id; its args hold the places (from 1) of the lanes that were open. Every condition stands in
-- `lane` and `picked`: what is picked is deleted, and what is deleted is inserted, or the statement raises.
-- The ORDER BY in `lane` must be there: a hashed anti-join turns the lanes round.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.most, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(mosts)s::integer[])
         WITH ORDINALITY AS l (queue, rank, after, most, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
      AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE)
    ORDER BY l.place
), picked AS MATERIALIZED (
    SELECT available.ctid
    FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
        ORDER BY j.pos
        LIMIT lane.most
        FOR UPDATE SKIP LOCKED
    ) available
    LIMIT %(n)s::integer
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked))
    RETURNING id, pos, rank, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes,
        snoozes, deadline, lock_key, lock_limit, on_locked, limit_key, holds, unique_key, idempotency_key
), running AS (
    INSERT INTO pgqueue.job_running (
        state, worker_id, claim, started_at, attempt,
        id, rank, queue, priority, task, args, headers, run_at, enqueued_at, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, holds, unique_key, idempotency_key)
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), least(attempt + 1, 32767),
        id, rank, queue, priority, task, args, headers, run_at, enqueued_at, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, holds, unique_key, idempotency_key
    FROM taken
    RETURNING 1
)
SELECT NULL::bigint, NULL::bigint, NULL::smallint, NULL::text, NULL::text,
       (SELECT coalesce(json_agg(place), '[]') FROM lane)::text,
       CASE WHEN (SELECT count(*) FROM picked) <> (SELECT count(*) FROM running)
            THEN pgqueue.refuse('a claim deleted jobs it did not start') END::smallint,
       NULL::smallint, NULL::smallint, NULL::smallint, NULL::smallint,
       NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::text, NULL::text, NULL::text
UNION ALL
SELECT id, pos, rank, queue, task, args::text, least(attempt + 1, 32767)::smallint, priority, max_attempts, crashes, snoozes,
       enqueued_at, run_at, CASE WHEN deadline <= pgqueue.now() THEN '-infinity' ELSE deadline END, headers::text, lock_key,
       idempotency_key
FROM taken;

-- name: fetch_probe
-- Has anything happened since the last fetch? Read-only, takes no id, touches no job: the head of the position sequence,
-- the snapshot, and the paused queues.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0),
       pg_current_snapshot()::text,
       ARRAY(SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL);

-- name: fetch_held
-- The jobs this worker has in job_running, with their claims: to compare with what it knows after a lost answer.
SELECT id, claim FROM pgqueue.job_running WHERE worker_id = %(worker_id)s::bigint;

-- name: fetch_refuse_doubles
-- After a claim met an id that is running already (rows restored or inserted with ids of their own): put the second row
-- aside as failed, so that it harms only itself. Answers their ids.
WITH double AS (
    DELETE FROM pgqueue.job_available a USING pgqueue.job_running r WHERE a.id = r.id RETURNING a.*
)
INSERT INTO pgqueue.job_dead (
    state, finished_at, bin, reason, id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts,
    crashes, snoozes, deadline, lock_key, limit_key, unique_key, idempotency_key)
SELECT 'failed', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), 'refused',
    id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts,
    crashes, snoozes, deadline, lock_key, limit_key, unique_key, idempotency_key
FROM double
RETURNING id;

-- name: fetch_reading
-- What the watermark needs to know before a claim of plain jobs, in this order: the statement's snapshot is taken first, then the head
-- of the position sequence is read, then this transaction takes its own id. Then the most urgent of these lanes, `beyond` a rank,
-- of jobs with keys that has one of these `tasks` behind its cursor: its rank, its place (from 1), and the position of the first of them; NULL if
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
          AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
          AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
        ORDER BY j.pos NULLS FIRST LIMIT 1
    ) AS waiting LIMIT 1
)
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0), pg_current_xact_id()::text::int8,
       pg_current_snapshot()::text, other.rank, other.place, other.pos,
       set_config('pgqueue.before', coalesce((other.rank | 1)::text, ''), true), -- both ranks of its priority
       set_config('synchronous_commit', 'off', true), ARRAY(SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL)
FROM (SELECT 1) AS always LEFT JOIN other ON true;

-- name: fetch_claim
-- Move up to n available plain jobs of these `tasks` in the open lanes to this worker, most urgent lane first. The first row has no id; its args hold
-- the places (from 1) of the lanes that were open. Every condition stands in `lane` and `picked`: what is picked is deleted, and what
-- is deleted is inserted, or the statement raises. The ORDER BY in `lane` must be there: a hashed anti-join turns the lanes round.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.upto, l.most, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(uptos)s::bigint[], %(mosts)s::integer[])
         WITH ORDINALITY AS l (queue, rank, after, upto, most, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
      AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE)
      AND l.rank <= coalesce(nullif(current_setting('pgqueue.before', true), '')::integer, 32767)
    ORDER BY l.place
), picked AS MATERIALIZED (
    SELECT available.ctid FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after AND j.pos <= lane.upto
          AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
          AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
        ORDER BY j.pos NULLS FIRST LIMIT lane.most FOR UPDATE SKIP LOCKED
    ) AS available LIMIT %(n)s::integer
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked))
    RETURNING pos, rank, run_at, least(attempt + 1, 32767)::smallint AS attempt, crashes, snoozes, {{job}}
), running AS (
    INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), NULL, rank, {{attempts}}, {{job}}
    FROM taken
    RETURNING id
)
SELECT NULL::bigint, NULL::bigint, NULL::smallint, NULL::text, NULL::text,
       (SELECT coalesce(json_agg(place), '[]') FROM lane)::text,
       CASE WHEN (SELECT count(*) FROM picked) <> (SELECT count(*) FROM running)
            THEN pgqueue.refuse('a claim deleted jobs it did not start') END::smallint,
       NULL::smallint, NULL::smallint, NULL::smallint, NULL::smallint, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz,
       NULL::text, NULL::text, NULL::text, NULL::text, NULL::text
UNION ALL
SELECT id, pos, rank, queue, task, args::text, attempt, priority, max_attempts, crashes, snoozes,
       enqueued_at, run_at, CASE WHEN deadline <= pgqueue.now() THEN '-infinity' ELSE deadline END, headers::text, NULL,
       CASE WHEN coalesce(unique_key, idempotency_key) IS NOT NULL THEN json_build_array(unique_key, idempotency_key)::text END,
       NULL, NULL
FROM taken;

-- name: fetch_probe
-- Has anything happened since the last fetch? Read-only, takes no id, touches no job: the head of the position sequence,
-- the snapshot, and the paused queues.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0),
       pg_current_snapshot()::text,
       ARRAY(SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL);

-- name: fetch_refuse_doubles
-- After a claim met an id that is running or blocked already (rows restored or inserted with ids of their own): put the second
-- row aside as failed, so that it harms only itself. Answers their ids.
WITH double AS (
    DELETE FROM pgqueue.job_available a
    WHERE a.id = ANY (ARRAY(SELECT id FROM pgqueue.job_running UNION ALL SELECT id FROM pgqueue.job_blocked))
    RETURNING a.*
)
{{put_aside}};

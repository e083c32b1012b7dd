-- name: claim_locks_take
-- Ahead of a claim in the same transaction: lock the keys that the next n available jobs of these lanes need, and leave the
-- first job of each to the claim, in a setting of this transaction, unless it has a limit or a rate, too. A key that somebody
-- has locked is left out: this waits for nobody, so it may lock in any order. All `workers` together take an eighth of the
-- server's lock table at the most: answers how many entries that is. It must be a statement of its own, before the claim: `free`
-- counts in a snapshot from after these locks.
WITH table_of_locks AS MATERIALIZED (
    SELECT current_setting('max_locks_per_transaction')::bigint * current_setting('max_connections')::bigint / 8 AS eighth
), lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[])
         WITH ORDINALITY AS l (queue, rank, after, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
    ORDER BY l.place
), seen AS MATERIALIZED (
    SELECT available.*
    FROM lane CROSS JOIN LATERAL (
        SELECT j.id, j.rank, CASE WHEN NOT j.holds THEN j.lock_key END AS lock_key,
               coalesce(j.limit_key, j.rate_key) IS NULL AS alone
        FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
        ORDER BY j.pos
        LIMIT %(n)s::integer
    ) available
    LIMIT %(n)s::integer
), first AS MATERIALIZED (
    SELECT DISTINCT ON (lock_key COLLATE "C") lock_key, id, alone FROM seen WHERE lock_key IS NOT NULL
    ORDER BY lock_key COLLATE "C", rank, id
    LIMIT greatest(1, (SELECT eighth FROM table_of_locks) / %(workers)s::integer)
)
SELECT (SELECT eighth FROM table_of_locks),
       -- not the text itself: nobody reads it on the other side
       pg_catalog.set_config('pgqueue.locked', coalesce(pg_catalog.array_agg(id)::pg_catalog.text, ''), true) IS NOT NULL
FROM first WHERE alone AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('pgqueue.lock:' || lock_key, 7));

-- name: claim_locks_park
-- Park those of the next n available jobs of these lanes that need a key, ahead of a claim in the same transaction: so that
-- many of them in a row cost few fetches, and do not count against a claim's n. Locks no other job, and leaves the rest
-- where it is. One row if there were any: how many, their keys with those ids that may be skipped, the keys of which one has a
-- limit above 1, and the lowest rank and the lowest id of any, as a JSON object.
WITH lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[])
         WITH ORDINALITY AS l (queue, rank, after, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
      AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE)
    ORDER BY l.place
), seen AS MATERIALIZED (
    SELECT available.ctid, available.keyed
    FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid, j.rate_key IS NOT NULL OR NOT j.holds AND coalesce(j.lock_key, j.limit_key) IS NOT NULL AS keyed
        FROM pgqueue.job_available j
        WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after
        ORDER BY j.pos
        LIMIT %(n)s::integer
    ) available
    LIMIT %(n)s::integer
), picked AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM seen WHERE keyed)) FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
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
    FROM taken
    RETURNING id, rank, key, on_locked, lock_limit
)
SELECT json_build_object(
    'n', sum(n), 'keys', json_object_agg(key, coalesce(ids, '{}')), 'several', json_agg(key) FILTER (WHERE several),
    'lowest', json_build_array(min(lowest_rank), min(lowest_id)))::text
FROM (SELECT key, array_agg(id) FILTER (WHERE on_locked <> 'wait' AND starts_with(key, 'lock:')) AS ids, count(*) AS n,
             bool_or(lock_limit > 1) AS several, min(rank) AS lowest_rank, min(id) AS lowest_id
      FROM parked GROUP BY key) AS keys
HAVING count(*) > 0;

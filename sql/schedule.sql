-- name: schedule_promote
-- Move up to n due jobs from scheduled to available, earliest first, and wake the workers of their queues. Answers how
-- many were moved. `after` keeps the walk out of what was promoted long ago; the caller moves it only when nothing was left.
WITH picked AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_scheduled
    WHERE run_at <= pgqueue.now() AND run_at >= %(after)s::text::timestamptz
    ORDER BY run_at, id
    LIMIT %(n)s::integer
    FOR UPDATE SKIP LOCKED
), due AS (
    DELETE FROM pgqueue.job_scheduled WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), available AS (
    INSERT INTO pgqueue.job_available (
        state, rank, id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes,
        snoozes, deadline, lock_key, lock_limit, on_locked, limit_key, holds, unique_key, idempotency_key)
    SELECT 'available', CASE crashes WHEN 0 THEN 2 * priority + 1 WHEN 1 THEN -2 ELSE -1 END,
        id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts,
        crashes, snoozes, deadline, lock_key, lock_limit, on_locked, limit_key, holds, unique_key, idempotency_key
    FROM due ORDER BY run_at, id
    RETURNING queue
), told AS (
    SELECT pg_notify('pgqueue.' || queue, '')::text AS done
    FROM (SELECT DISTINCT queue FROM available WHERE %(notify)s::boolean) AS q
)
SELECT (SELECT count(*) FROM available), (SELECT count(done) FROM told);

-- name: schedule_next
-- Seconds until the earliest scheduled job is due (negative when it is late), NULL when there is none; and the time the
-- next walk may start from: a minute before now, for transactions that commit late.
SELECT extract(epoch FROM (SELECT run_at FROM pgqueue.job_scheduled WHERE run_at >= %(after)s::text::timestamptz
                           ORDER BY run_at, id LIMIT 1) - pgqueue.now())::float8,
       (pgqueue.now() - interval '60 seconds')::text;

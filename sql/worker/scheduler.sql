-- name: scheduler_promote
-- Move up to n due jobs from scheduled to available, earliest first, and wake the workers of their queues. Answers how
-- many were moved. `after` keeps the walk out of jobs promoted long ago; the caller moves it only when no due job was
-- left. The jobs in `passed` were refused just now, and are left for a later walk.
WITH {{impatience}}, picked AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_scheduled
    -- (SELECT ...): a volatile function is no bound of an index scan, which would then walk all that is not due yet.
    WHERE run_at <= (SELECT pgqueue.now()) AND run_at >= %(after)s::text::timestamptz AND id <> ALL (%(passed)s::text::bigint[])
    ORDER BY run_at, id
    LIMIT %(n)s::integer
    FOR UPDATE SKIP LOCKED
), due AS (
    DELETE FROM pgqueue.job_scheduled WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), available AS (
    INSERT INTO pgqueue.job_available (state, rank, hold_pos, run_at, attempt, crashes, snoozes, holds, {{job}})
    SELECT 'available', CASE crashes WHEN 0 THEN 2 * priority + 1 WHEN 1 THEN -2 ELSE -1 END,
        CASE WHEN holds THEN nextval('pgqueue.job_hold_seq') END,
        {{due}}, attempt, crashes, snoozes, holds, {{job}}
    FROM due ORDER BY run_at, id
    RETURNING queue
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || queue, '')::text END AS done
    FROM (SELECT DISTINCT queue FROM available WHERE %(notify)s::boolean) AS q
)
SELECT count(*), (SELECT count(done) FROM told), {{patient}} FROM available;

-- name: scheduler_first
-- The job that a walk would move first: its id and task. No row: none is due.
SELECT id, task FROM pgqueue.job_scheduled
WHERE run_at <= (SELECT pgqueue.now()) AND run_at >= %(after)s::text::timestamptz AND id <> ALL (%(passed)s::text::bigint[])
ORDER BY run_at, id
LIMIT 1
FOR UPDATE SKIP LOCKED;

-- name: scheduler_next
-- Three answers.
--
-- 1. Whether a due job is left, but for those in `passed`: its row is locked, or it became due just now.
-- 2. Seconds until the earliest job that is not due; NULL if there is none.
-- 3. The time the next walk may start from: a minute ago, for transactions that commit late.
WITH clock AS MATERIALIZED (SELECT pgqueue.now() AS now)
SELECT EXISTS (SELECT FROM pgqueue.job_scheduled
               WHERE run_at >= %(after)s::text::timestamptz AND run_at <= clock.now
                     AND id <> ALL (%(passed)s::text::bigint[])),
       extract(epoch FROM (SELECT run_at FROM pgqueue.job_scheduled WHERE run_at > clock.now
                           ORDER BY run_at LIMIT 1) - clock.now)::float8,
       (clock.now - interval '60 seconds')::text
FROM clock;

-- name: scheduler_due
-- Whether a job is due, at or after the time from which the next walk starts.
SELECT EXISTS (SELECT FROM pgqueue.job_scheduled
               WHERE run_at >= %(after)s::text::timestamptz AND run_at <= (SELECT pgqueue.now()));

-- What pgqueue.testing asks beside the statements of the worker, in the transaction of a test.

-- name: drain_queues
-- The queues that have available jobs of these tasks, as one array; and whether the most urgent job that can be had has keys. Locks that
-- job, as the claim after it does: both pass over a job that another session has locked.
WITH first AS MATERIALIZED (
    SELECT coalesce(a.lock_key, a.limit_key, a.rate_key) IS NOT NULL AS keyed
    FROM pgqueue.job_available a
    WHERE (a.task IN ({{open_tasks}})) IS TRUE
      AND NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = a.queue AND q.paused_at IS NOT NULL)
    ORDER BY a.rank, a.pos LIMIT 1 FOR UPDATE OF a SKIP LOCKED
)
SELECT coalesce(array_agg(DISTINCT queue::text), '{}'), (SELECT keyed FROM first) FROM pgqueue.job_available;

-- name: drain_unknown
-- The tasks of available and blocked jobs that are none of these, in open queues. It is not the turn yet of a job that waits for its
-- release.
SELECT coalesce(array_agg(DISTINCT j.task::text), '{}')
FROM pgqueue.job j
WHERE j.state IN ('available', 'blocked') AND (j.node < 0) IS NOT TRUE AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS NOT TRUE
  AND NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = j.queue AND q.paused_at IS NOT NULL);

-- name: drain_due
-- When the first of these scheduled jobs is due, in microseconds since 1970; NULL when none of them is scheduled.
SELECT (extract(epoch FROM min(run_at)) * 1000000)::bigint
FROM pgqueue.job_scheduled WHERE id = ANY (%(ids)s::bigint[]);

-- name: drain_blocked
-- The locks that jobs wait for, 64 at most; the queues of all jobs that wait for a key; and how many these are.
SELECT coalesce((SELECT array_agg(key) FROM (SELECT DISTINCT key FROM pgqueue.job_blocked WHERE starts_with(key, 'lock:')
                                             ORDER BY key LIMIT 64) AS keys), '{}'),
       coalesce(array_agg(DISTINCT queue::text), '{}'), count(*)
FROM pgqueue.job_blocked WHERE NOT starts_with(key, 'node:');

-- name: drain_pass
-- Take the most urgent of the jobs of these tasks that wait for a limit or a rate, whatever these allow: one job at a time is below any
-- limit.
WITH picked AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_blocked b
    WHERE NOT starts_with(b.key, 'lock:') AND NOT starts_with(b.key, 'node:') AND {{known_here}}
      AND NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = b.queue AND q.paused_at IS NOT NULL)
    ORDER BY b.rank, b.id LIMIT 1
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
)
{{start}};

-- name: drain_lock
-- As `unblock_lock`, without a change of settings: the transaction is a test's.
{{lock_keys}};

-- name: drain_claimed
-- The job of this claim, in the columns of a claim. Times are microseconds since 2000, as a worker's connections read them:
-- the drivers of applications make datetimes of times, and some fail for infinity.
SELECT id, 0, rank, queue, task, CASE WHEN {{readable}} THEN args_text END, attempt, priority, max_attempts, crashes, snoozes,
       CASE WHEN isfinite(enqueued_at) THEN (extract(epoch FROM enqueued_at) * 1000000)::bigint - 946684800000000 ELSE 0 END,
       CASE WHEN isfinite(run_at) THEN (extract(epoch FROM run_at) * 1000000)::bigint - 946684800000000 END,
       CASE WHEN deadline <= pgqueue.now() THEN -9223372036854775808
            WHEN isfinite(deadline) THEN (extract(epoch FROM deadline) * 1000000)::bigint - 946684800000000 END,
       {{claimed_rest}}
FROM (
    SELECT *, {{texts}} FROM pgqueue.job_running WHERE worker_id = %(worker_id)s::bigint AND claim = %(claim)s::integer OFFSET 0
) AS r;

-- Requests to running jobs. The worker that runs a job reads them; if one came too late, any worker carries it out.

-- name: cancellation_read
-- The requests to jobs that this worker runs. Goes from the few requests to the jobs, never through all that the worker
-- runs.
SELECT s.job_id, r.claim, left(s.reason, 10000)
FROM pgqueue.job_signal s
CROSS JOIN LATERAL (
    SELECT j.claim FROM pgqueue.job_running j
    WHERE j.id = s.job_id AND s.enqueued_at = j.enqueued_at AND j.worker_id + 0 = %(worker_id)s::bigint OFFSET 0
) AS r
WHERE s.kind = 'cancel'
ORDER BY s.job_id, s.created_at;

-- name: cancellation_settle
-- Carry out up to n requests to jobs that run no longer. A job may wait because its attempt failed, or its worker died,
-- before the request was read. Then it is cancelled. If a job has ended, its request is deleted.
--
-- In one snapshot a job is in one table or has ended. The request to a job that is being moved stays for the next time.
-- Answers how many jobs were cancelled, and how many requests deleted.
WITH late AS MATERIALIZED (
    SELECT s.ctid, s.job_id, s.enqueued_at, s.reason FROM pgqueue.job_signal s
    WHERE NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.id = s.job_id AND s.enqueued_at = r.enqueued_at OFFSET 0)
    ORDER BY s.job_id LIMIT %(n)s::integer
    FOR UPDATE OF s SKIP LOCKED
), asked AS MATERIALIZED (
    SELECT DISTINCT job_id AS id, enqueued_at FROM late ORDER BY id
), available AS MATERIALIZED (
    SELECT j.ctid FROM asked CROSS JOIN LATERAL (
        SELECT j.ctid FROM pgqueue.job_available j
        WHERE j.id = asked.id AND asked.enqueued_at = j.enqueued_at LIMIT 1 FOR UPDATE SKIP LOCKED) AS j
), scheduled AS MATERIALIZED (
    SELECT j.ctid FROM asked CROSS JOIN LATERAL (
        SELECT j.ctid FROM pgqueue.job_scheduled j
        WHERE j.id = asked.id AND asked.enqueued_at = j.enqueued_at LIMIT 1 FOR UPDATE SKIP LOCKED) AS j
), blocked AS MATERIALIZED (
    SELECT j.ctid FROM asked CROSS JOIN LATERAL (
        SELECT j.ctid FROM pgqueue.job_blocked j
        WHERE j.id = asked.id AND asked.enqueued_at = j.enqueued_at LIMIT 1 FOR UPDATE SKIP LOCKED) AS j
), from_available AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM available))
    RETURNING {{job}}, {{attempts}}
), from_scheduled AS (
    DELETE FROM pgqueue.job_scheduled WHERE ctid = ANY (ARRAY(SELECT ctid FROM scheduled))
    RETURNING {{job}}, {{attempts}}
), from_blocked AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM blocked))
    RETURNING {{job}}, {{attempts}}
), gone AS MATERIALIZED (
    TABLE from_available UNION ALL TABLE from_scheduled UNION ALL TABLE from_blocked
), happened AS MATERIALIZED (
    SELECT queue, task, 'cancelled' AS what FROM gone
), counted AS (
    {{count_happened}}
), cancelled AS (
    INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, {{attempts}}, {{job}})
    SELECT 'cancelled', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'),
        (SELECT min(late.reason) FROM late WHERE late.job_id = gone.id AND late.enqueued_at = gone.enqueued_at), {{attempts}}, {{job}}
    FROM gone
    RETURNING id, enqueued_at, node
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (SELECT ':ended.' || w.job_id AS channel, '' AS what FROM pgqueue.job_waiter w WHERE w.job_id = ANY (ARRAY(SELECT id FROM cancelled))
          UNION (SELECT DISTINCT ':control', 'node:' || abs(node) FROM cancelled WHERE node IS NOT NULL LIMIT 100)) AS news
    WHERE %(notify)s::boolean
), deleted AS (
    DELETE FROM pgqueue.job_signal WHERE ctid = ANY (ARRAY(
        SELECT late.ctid FROM late
        LEFT JOIN cancelled ON cancelled.id = late.job_id AND late.enqueued_at = cancelled.enqueued_at
        WHERE cancelled.id IS NOT NULL OR NOT (
            EXISTS (SELECT FROM pgqueue.job_available j
                    WHERE j.id = late.job_id AND late.enqueued_at = j.enqueued_at OFFSET 0)
            OR EXISTS (SELECT FROM pgqueue.job_scheduled j
                       WHERE j.id = late.job_id AND late.enqueued_at = j.enqueued_at OFFSET 0)
            OR EXISTS (SELECT FROM pgqueue.job_blocked j
                       WHERE j.id = late.job_id AND late.enqueued_at = j.enqueued_at OFFSET 0))))
    RETURNING 1
)
SELECT (SELECT count(*) FROM cancelled), (SELECT count(*) FROM deleted), (SELECT count(done) FROM told);

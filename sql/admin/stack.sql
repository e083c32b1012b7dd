-- The stack of a running job, asked of its worker.

-- name: stack_ask
-- Ask for the stack of a running job. Requests that are older than a minute are deleted. One row: the request, and the worker; no row: the
-- job does not run.
WITH old AS (
    DELETE FROM pgqueue.stack_request WHERE ctid = ANY (ARRAY(
        SELECT o.ctid FROM pgqueue.stack_request o WHERE o.asked_at < pgqueue.now() - interval '1 minute' LIMIT 1000))
), run AS MATERIALIZED (
    SELECT r.id, r.worker_id FROM pgqueue.job_running r WHERE r.id = %(id)s::bigint LIMIT 1
), asked AS (
    INSERT INTO pgqueue.stack_request (job_id) SELECT run.id FROM run RETURNING id
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:control', 'stack')::text END AS done
    FROM asked WHERE %(notify)s::boolean
)
SELECT asked.id, w.id, w.host, w.pid, extract(epoch FROM w.lease)::float8, extract(epoch FROM pgqueue.now() - w.beat_at)::float8,
       (SELECT count(done) FROM told)
FROM asked CROSS JOIN run LEFT JOIN pgqueue.worker w ON w.id = run.worker_id;

-- name: stack_read
-- The answer to a request, as JSON; NULL: there is none yet. Whether the job still runs.
SELECT s.answer, EXISTS (SELECT FROM pgqueue.job_running r WHERE r.id = s.job_id)
FROM pgqueue.stack_request s WHERE s.id = %(request)s::bigint;

-- name: stack_forget
-- Delete a request with its answer.
DELETE FROM pgqueue.stack_request WHERE id = %(request)s::bigint RETURNING id;

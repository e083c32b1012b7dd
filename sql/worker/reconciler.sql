-- name: reconciler_held
-- The jobs this worker has in job_running, with their claims: to compare with what it knows after a lost answer.
SELECT id, claim FROM pgqueue.job_running WHERE worker_id = %(worker_id)s::bigint;

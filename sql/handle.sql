-- What a JobHandle asks about its job.

-- name: handle_state
-- The state of the job, wherever it is: one snapshot, so a job on the move is seen in exactly one partition. No row: no job.
SELECT state FROM pgqueue.job WHERE id = %(id)s::bigint;

-- name: handle_outcome
-- How the job stands: state, result, reason, and of a failed one what its last attempt said. No row: no job.
SELECT j.state, j.result::text, j.reason,
       (SELECT json_build_object('error_type', a.error_type, 'message', a.message, 'traceback', a.traceback)::text
        FROM pgqueue.attempt a WHERE a.job_id = j.id AND j.state = 'failed'
        ORDER BY a.finished_at DESC LIMIT 1)
FROM pgqueue.job j
WHERE j.id = %(id)s::bigint
ORDER BY j.state IN ('available', 'scheduled', 'blocked', 'running') DESC, j.finished_at DESC
LIMIT 1;

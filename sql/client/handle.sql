-- What a JobHandle asks about its job at once.

-- name: handle_state
-- The state of the job, wherever it is: one snapshot, so a job on the move is seen in exactly one partition. No row: no job.
SELECT state FROM pgqueue.job_states(ARRAY[%(id)s::bigint]);

-- A wait for the end of a job: it looks how the job stands, and says that it waits.

-- name: wait_outcome
-- How the job stands: state, result, reason, and of a failed one what its last attempt said. No row: no job.
SELECT j.state, j.result::text, j.reason,
       CASE WHEN j.state = 'failed' THEN (
           SELECT json_build_object('error_type', a.error_type, 'message', a.message, 'traceback', a.traceback)::text
           FROM pgqueue.attempt_rows(j.id) AS a WHERE a.enqueued_at = j.enqueued_at
           ORDER BY a.finished_at DESC LIMIT 1) END
FROM pgqueue.job_rows(ARRAY[%(id)s::bigint]) AS j
ORDER BY j.state IN ('available', 'scheduled', 'blocked', 'running') DESC, j.finished_at DESC
LIMIT 1;

-- name: wait_hears
-- Whether LISTEN is of use here: no pooler between us (it makes up the pid that it tells its clients), a session that may
-- write, and the right to say that we wait.
SELECT pg_backend_pid() = %(pid)s::integer AND current_setting('transaction_read_only') = 'off'
       AND coalesce(has_function_privilege(to_regprocedure('pgqueue.begin_wait(bigint)'), 'EXECUTE')
                    AND has_function_privilege(to_regprocedure('pgqueue.leave_wait(bigint)'), 'EXECUTE'), false);

-- name: wait_only_reads
-- Whether the server only reads. A standby may not have heard of the job yet.
SELECT current_setting('transaction_read_only') = 'on';

-- name: wait_begin
-- Say that a wait for the end of the job has begun: a statement that ends it, and sees this row, will tell.
-- Answers the number of the row. Not worth a flush to disk: without the row the waiter finds out by looking.
SELECT pgqueue.begin_wait(%(id)s::bigint), set_config('synchronous_commit', 'off', true);

-- name: wait_leave
-- The wait is over. Loses nothing if it is lost: the sweep finds the row.
SELECT pgqueue.leave_wait(%(waiter)s::bigint)::text, set_config('synchronous_commit', 'off', true);

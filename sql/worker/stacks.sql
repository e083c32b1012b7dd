-- The stacks of running jobs, which their workers answer. Sent by the heartbeat's thread, each as a message of its own.

-- name: stacks_wanted
-- The requests of the last minute for jobs that this worker runs, without an answer; 10 at most.
SELECT s.id, s.job_id, r.claim
FROM (SELECT w.id, w.job_id FROM pgqueue.stack_request w
      WHERE w.answered_at IS NULL AND w.asked_at > pgqueue.now() - interval '1 minute' ORDER BY w.id LIMIT 100) AS s
CROSS JOIN LATERAL (
    SELECT j.claim FROM pgqueue.job_running j WHERE j.id = s.job_id AND j.worker_id + 0 = %(worker_id)s::bigint LIMIT 1
) AS r
ORDER BY s.id LIMIT 10;

-- name: stacks_answer
-- The answer to a request, as a JSON object. The session that asked may have deleted it, or be about to: nothing is waited for.
UPDATE pgqueue.stack_request SET answer = %(answer)s::text, answered_at = pgqueue.now()
WHERE ctid = ANY (ARRAY(
    SELECT s.ctid FROM pgqueue.stack_request s WHERE s.id = %(id)s::bigint AND s.answered_at IS NULL FOR UPDATE SKIP LOCKED));

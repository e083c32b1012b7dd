-- The durable steps of jobs. The proof is at the head of pgqueue/worker/transactions/durable_steps.py.

-- name: durable_steps_read
-- What the steps of this job, enqueued at `since`, have answered in any attempt. An earlier job may have had the id.
SELECT name, result::text FROM pgqueue.step_rows(%(id)s::bigint, %(since)s::text::timestamptz);

-- name: durable_steps_append
-- The end of a step, in its transaction: lock the running row by this run's fence until the COMMIT, and append the answer. If the
-- job is not this run's any more, or the worker has not begun this transaction, the statement raises, and nothing is kept.
WITH mine AS MATERIALIZED (
    SELECT id, enqueued_at FROM pgqueue.lock_running({{my_fence}})
), appended AS (
    INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result)
    SELECT id, enqueued_at, %(step)s::text, %(result)s::text::jsonb FROM mine
    RETURNING job_id
)
SELECT CASE WHEN count(*) = 0 THEN pgqueue.refuse_lost(%(id)s::bigint)
            WHEN {{not_marked}} THEN pgqueue.refuse_ended(%(id)s::bigint) END FROM appended;

-- name: durable_steps_appended
-- Whether this step was committed, after the answer to its COMMIT was lost.
SELECT %(step)s::text WHERE pgqueue.step_is_recorded(%(id)s::bigint, %(since)s::text::timestamptz, %(step)s::text);

-- name: durable_steps_sweep
-- Delete the steps of up to n jobs after this id that history has forgotten. A job is in one partition in every snapshot, so a job
-- that is in none is gone for good. Answers the last id it has looked at, NULL at the end.
WITH RECURSIVE known AS (
    SELECT min(job_id) AS job_id FROM pgqueue.job_step WHERE job_id > %(after)s::bigint
    UNION ALL
    SELECT (SELECT min(s.job_id) FROM pgqueue.job_step s WHERE s.job_id > known.job_id)
    FROM known WHERE known.job_id IS NOT NULL
), page AS MATERIALIZED (
    SELECT job_id FROM known WHERE job_id IS NOT NULL LIMIT %(n)s::integer
), thrown AS (
    DELETE FROM pgqueue.job_step s
    WHERE s.job_id = ANY (ARRAY(SELECT job_id FROM page))
      AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.id = s.job_id AND s.enqueued_at = j.enqueued_at OFFSET 0)
)
SELECT CASE WHEN count(*) = %(n)s::integer THEN max(job_id) END FROM page;

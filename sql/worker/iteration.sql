-- Where jobs that iterate go on. The proof is at the head of pgqueue/worker/transactions/iteration.py.

-- name: iteration_last
-- The last batch that was committed, by any run of this job: its number and cursor. One step into the primary key.
SELECT n, cursor::text FROM pgqueue.job_cursor WHERE job_id = %(id)s::bigint ORDER BY n DESC LIMIT 1;

-- name: iteration_append
-- The end of a batch, in its transaction: lock the running row by this run's fence until the COMMIT, and append the
-- cursor. If the job is not this run's any more, the statement raises. Then nothing of the batch can be committed,
-- whatever the client does. Every hundredth batch deletes the rows before the last, so a long iteration does not pile
-- them up.
WITH mine AS MATERIALIZED (
    SELECT id FROM pgqueue.lock_running({{my_fence}})
), appended AS (
    INSERT INTO pgqueue.job_cursor (job_id, n, cursor)
    SELECT id, %(n)s::integer, %(cursor)s::text::jsonb FROM mine
    RETURNING job_id
), thrown AS MATERIALIZED (
    SELECT pgqueue.drop_cursors(id, %(n)s::integer - 1)::text AS done FROM mine WHERE %(n)s::integer %% 100 = 0
)
SELECT CASE WHEN count(*) = 0 THEN pgqueue.refuse_lost(%(id)s::bigint) END, (SELECT count(done) FROM thrown) FROM appended;

-- name: iteration_appended
-- Whether this batch was committed, after the answer to its COMMIT was lost.
SELECT n FROM pgqueue.job_cursor WHERE job_id = %(id)s::bigint AND n = %(n)s::integer;

-- name: iteration_forget
-- Delete the cursors of these jobs if they have completed. A failed or cancelled job keeps them for a retry by hand. A
-- job that waits for another attempt keeps them, too.
DELETE FROM pgqueue.job_cursor
WHERE job_id = ANY (ARRAY(
    SELECT j.id FROM pgqueue.job j
    WHERE j.state IN ('completed', 'skipped') AND j.id = ANY (%(ids)s::bigint[])))
RETURNING job_id;

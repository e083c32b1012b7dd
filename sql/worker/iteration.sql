-- Where jobs that iterate go on. The proof is at the head of pgqueue/worker/transactions/iteration.py.

-- name: iteration_last
-- Where this run goes on: the highest number of a batch, and the cursor of the last batch that was committed, by any run of
-- this job, enqueued at `since` (NULL: none). An earlier job may have had the id: its numbers are not used again, and its
-- cursor is not read.
SELECT n, cursor::text FROM pgqueue.last_batch(%(id)s::bigint, %(since)s::text::timestamptz);

-- name: iteration_append
-- The end of a batch, in its transaction: lock the running row by this run's fence until the COMMIT, and append the
-- cursor. If the job is not this run's any more, or the worker has not begun this transaction, the statement raises. Then
-- nothing of the batch can be committed, whatever the client does. Every hundredth batch deletes the rows before the
-- last, so a long iteration does not pile them up.
WITH mine AS MATERIALIZED (
    SELECT id, enqueued_at FROM pgqueue.lock_running({{my_fence}})
), appended AS (
    INSERT INTO pgqueue.job_cursor (job_id, enqueued_at, n, cursor)
    SELECT id, enqueued_at, %(n)s::integer, %(cursor)s::text::jsonb FROM mine
    RETURNING job_id
), thrown AS MATERIALIZED (
    SELECT pgqueue.drop_cursors(id, enqueued_at, %(n)s::integer - 1)::text AS done FROM mine WHERE %(n)s::integer %% 100 = 0
)
SELECT CASE WHEN count(*) = 0 THEN pgqueue.refuse_lost(%(id)s::bigint) WHEN {{not_marked}} THEN pgqueue.refuse_ended(%(id)s::bigint) END,
    (SELECT count(done) FROM thrown) FROM appended;

-- name: iteration_appended
-- Whether this batch was committed, after the answer to its COMMIT was lost.
SELECT n FROM pgqueue.last_batch(%(id)s::bigint, %(since)s::text::timestamptz) WHERE n = %(n)s::integer;

-- name: iteration_forget
-- Delete the cursors of these jobs if they have completed. A failed or cancelled job keeps them for a retry by hand. A
-- job that waits for another attempt keeps them, too.
DELETE FROM pgqueue.job_cursor c
WHERE c.job_id = ANY (%(ids)s::bigint[])
  AND EXISTS (SELECT FROM pgqueue.job j
              WHERE j.id = c.job_id AND c.enqueued_at = j.enqueued_at AND j.state IN ('completed', 'skipped')
              OFFSET 0)
RETURNING c.job_id;

-- Where jobs that iterate go on. The proof is at the head of pgqueue/iterate.py.

-- name: iterate_last
-- The last batch that was committed, by any run of this job: its number and cursor. One step into the primary key.
SELECT n, cursor::text FROM pgqueue.job_cursor WHERE job_id = %(id)s::bigint ORDER BY n DESC LIMIT 1;

-- name: iterate_append
-- The end of a batch, in its transaction: lock the running row by this run's fence until the COMMIT, and append the cursor.
-- If the job is not this run's any more the statement raises: whatever the client does then, nothing of the batch can be
-- committed. Every hundredth throws away those before the last, so that a long iteration does not pile them up.
WITH mine AS MATERIALIZED (
    SELECT id FROM pgqueue.job_running
    WHERE id = %(id)s::bigint AND claim + 0 = %(claim)s::integer AND worker_id + 0 = %(worker_id)s::bigint
    FOR UPDATE
), appended AS (
    INSERT INTO pgqueue.job_cursor (job_id, n, cursor)
    SELECT id, %(n)s::integer, %(cursor)s::text::jsonb FROM mine
    RETURNING job_id
), thrown AS (
    DELETE FROM pgqueue.job_cursor
    WHERE %(n)s::integer %% 100 = 0 AND job_id = (SELECT id FROM mine) AND n < %(n)s::integer - 1
)
SELECT CASE WHEN count(*) = 0 THEN pgqueue.refuse_lost(%(id)s::bigint) END FROM appended;

-- name: iterate_appended
-- Whether this batch was committed, after the answer to its COMMIT was lost.
SELECT n FROM pgqueue.job_cursor WHERE job_id = %(id)s::bigint AND n = %(n)s::integer;

-- name: iterate_forget
-- Throw away the cursors of these jobs if they have completed; a dead job keeps them for a retry by hand, one that waits
-- for another attempt anyway.
DELETE FROM pgqueue.job_cursor
WHERE job_id = ANY (ARRAY(
    SELECT j.id FROM pgqueue.job j
    WHERE j.state IN ('completed', 'skipped') AND j.id = ANY (%(ids)s::bigint[])))
RETURNING job_id;

-- name: iterate_sweep
-- The same for up to n jobs after this id, whoever ran them; and for those that history has forgotten. A job is in one
-- partition in every snapshot, so one that is nowhere is gone for good. Answers the last id it has looked at, NULL at the end.
WITH RECURSIVE known AS (
    SELECT min(job_id) AS job_id FROM pgqueue.job_cursor WHERE job_id > %(after)s::bigint
    UNION ALL
    SELECT (SELECT min(c.job_id) FROM pgqueue.job_cursor c WHERE c.job_id > known.job_id)
    FROM known WHERE known.job_id IS NOT NULL
), page AS MATERIALIZED (
    SELECT job_id FROM known WHERE job_id IS NOT NULL LIMIT %(n)s::integer
), thrown AS (
    DELETE FROM pgqueue.job_cursor
    WHERE job_id = ANY (ARRAY(
        SELECT job_id FROM page
        WHERE NOT EXISTS (SELECT FROM pgqueue.job j
                          WHERE j.id = page.job_id AND j.state NOT IN ('completed', 'skipped') OFFSET 0)))
)
SELECT CASE WHEN count(*) = %(n)s::integer THEN max(job_id) END FROM page;

-- The progress of running jobs: `job_progress`, one row per job while it runs.

-- name: progress_write
-- Write the last progress of jobs of this worker, by their fence: a job that is not ours any more writes nothing. Locks
-- no job.
INSERT INTO pgqueue.job_progress (job_id, done, total)
SELECT r.id, mine.done, mine.total
FROM unnest(%(ids)s::bigint[], %(claims)s::integer[], %(dones)s::float8[], %(totals)s::float8[])
     AS mine (id, claim, done, total)
CROSS JOIN LATERAL (
    SELECT r.id FROM pgqueue.job_running r
    WHERE r.id = mine.id AND r.claim + 0 = mine.claim AND r.worker_id + 0 = %(worker_id)s::bigint
    LIMIT 1
) AS r
ORDER BY r.id
ON CONFLICT (job_id) DO UPDATE SET done = excluded.done, total = excluded.total, updated_at = pgqueue.now();

-- name: progress_forget
-- Delete the progress of these jobs. If a job runs again, its worker does that.
DELETE FROM pgqueue.job_progress p
WHERE p.job_id = ANY (%(ids)s::bigint[])
  AND NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.id = p.job_id OFFSET 0);

-- name: progress_sweep
-- Delete the rows that dead workers have left: at most n rows that were not touched for a minute.
DELETE FROM pgqueue.job_progress
WHERE job_id = ANY (ARRAY(
    SELECT p.job_id FROM pgqueue.job_progress p
    WHERE p.updated_at < (SELECT pgqueue.now()) - interval '1 minute'
      AND NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.id = p.job_id OFFSET 0)
    LIMIT %(n)s::integer));

-- name: progress_sweep_cursors
-- Delete the cursors of up to n jobs after this id, whichever worker ran them, if they have completed or history has
-- forgotten them. A job is in one partition in every snapshot, so a job that is in none is gone for good. Answers the
-- last id it has looked at, NULL at the end.
WITH RECURSIVE known AS (
    SELECT min(job_id) AS job_id FROM pgqueue.job_cursor WHERE job_id > %(after)s::bigint
    UNION ALL
    SELECT (SELECT min(c.job_id) FROM pgqueue.job_cursor c WHERE c.job_id > known.job_id)
    FROM known WHERE known.job_id IS NOT NULL
), page AS MATERIALIZED (
    SELECT job_id FROM known WHERE job_id IS NOT NULL LIMIT %(n)s::integer
), thrown AS (
    DELETE FROM pgqueue.job_cursor c
    WHERE c.job_id = ANY (ARRAY(SELECT job_id FROM page))
      AND NOT EXISTS (SELECT FROM pgqueue.job j
                      WHERE j.id = c.job_id AND c.enqueued_at = j.enqueued_at
                        AND j.state NOT IN ('completed', 'skipped') OFFSET 0)
)
SELECT CASE WHEN count(*) = %(n)s::integer THEN max(job_id) END FROM page;

-- name: serialization_retries_note
-- Append that the database aborted this run and that it is to be made again: if the job is ours still, and has fewer than
-- `most` such rows. Answers how many it had before; no row means that the job is not ours any more.
WITH mine AS MATERIALIZED (
    SELECT r.id, r.enqueued_at, r.attempt, r.worker_id, r.claim, r.started_at FROM pgqueue.job_running r
    WHERE r.id = %(id)s::bigint AND r.claim + 0 = %(claim)s::integer AND r.worker_id + 0 = %(worker_id)s::bigint
), before AS MATERIALIZED (
    SELECT count(*) AS n, max(a.finished_at) AS latest FROM pgqueue.attempt a
    WHERE a.job_id = %(id)s::bigint AND a.outcome = 'aborted'
      AND a.enqueued_at = (SELECT mine.enqueued_at FROM mine)
), noted AS (
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome,
                                 error_type, message, traceback, version_tag)
    SELECT id, enqueued_at, attempt, worker_id, claim, greatest(started_at, latest), pgqueue.now(),
           (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'), 'aborted', %(error_type)s::text, %(message)s::text,
           %(traceback)s::text, %(version_tag)s::text
    FROM mine, before WHERE n < %(most)s::integer
)
SELECT n::integer FROM mine, before;

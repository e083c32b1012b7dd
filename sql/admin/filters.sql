-- name: filters_matching
-- The ids of jobs that fit, among the next `most` of these states after the id `after`; and the last id looked at (NULL: there
-- was none). The walk has no condition on rows, so that its LIMIT is a limit of the work.
WITH walked AS MATERIALIZED (
    SELECT id, queue, task FROM pgqueue.jobs_after(%(states)s::text[], %(after)s::bigint, %(most)s::integer)
)
SELECT coalesce(json_agg(id ORDER BY id) FILTER (
           WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
             AND (%(task)s::text IS NULL OR task = %(task)s::text)), '[]')::text,
       max(id)
FROM walked;

-- name: filters_ended
-- As `filters_matching`, and only jobs that ended more than `older` seconds ago.
WITH walked AS MATERIALIZED (
    SELECT id, queue, task FROM pgqueue.jobs_after(%(states)s::text[], %(after)s::bigint, %(most)s::integer)
), fitting AS MATERIALIZED (
    SELECT DISTINCT j.id
    FROM pgqueue.job_states(ARRAY(
        SELECT id FROM walked
        WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
          AND (%(task)s::text IS NULL OR task = %(task)s::text))) AS j
    WHERE j.finished_at < (SELECT pgqueue.now()) - make_interval(secs => %(older)s::float8)
)
SELECT (SELECT coalesce(json_agg(id ORDER BY id), '[]')::text FROM fitting), (SELECT max(id) FROM walked);

-- name: filters_retrying
-- As `filters_matching`, but of the scheduled jobs only those that wait for another attempt.
WITH walked AS MATERIALIZED (
    SELECT id, queue, task FROM pgqueue.jobs_after(%(states)s::text[], %(after)s::bigint, %(most)s::integer)
), fitting AS MATERIALIZED (
    SELECT DISTINCT j.id
    FROM pgqueue.job_rows(ARRAY(
        SELECT id FROM walked
        WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
          AND (%(task)s::text IS NULL OR task = %(task)s::text))) AS j
    WHERE j.state = ANY (%(states)s::text[]) AND (j.state <> 'scheduled' OR {{awaits_attempt}})
)
SELECT (SELECT coalesce(json_agg(id ORDER BY id), '[]')::text FROM fitting), (SELECT max(id) FROM walked);

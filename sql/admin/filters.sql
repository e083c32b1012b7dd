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

-- What the newest job of a cause says of it.

-- name: cause_errors_list
-- These jobs, each with the first line of what its last attempt said that has failed so: with this class, else this outcome. As JSON;
-- without those that are not there, or have no such attempt.
SELECT coalesce(json_agg(json_build_object(
    'error_type', asked.error_type, 'message', left(split_part(ltrim(a.message, E' \n\r\t'), E'\n', 1), 500),
    'job', (SELECT to_json(shown) FROM (SELECT {{shown}}) AS shown))), '[]')::text
FROM (
    SELECT *, true AS has_room, {{shown_sizes}} FROM pgqueue.job_rows(%(ids)s::bigint[]) OFFSET 0
) AS job
JOIN unnest(%(ids)s::bigint[], %(types)s::text[]) AS asked (job_id, error_type) ON asked.job_id = job.id
CROSS JOIN LATERAL (
    SELECT a.message FROM pgqueue.attempt_rows(job.id) AS a
    WHERE a.enqueued_at = job.enqueued_at AND coalesce(a.error_type, a.outcome) = asked.error_type AND a.message IS NOT NULL
    ORDER BY a.finished_at DESC, a.claim DESC LIMIT 1
) AS a;

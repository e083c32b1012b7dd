-- What the newest job of a cause says of it.

-- name: cause_errors_list
-- These jobs, each with what its last attempt said that has failed so: with this class, else this outcome. As JSON; without those that are
-- not there, or have no such attempt. The text is not cut to its first line here: first it is hidden as a whole.
-- The arguments, headers and results take `room` bytes at most, and the steps as many: those that have none say so.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::bigint[], %(types)s::text[]) AS asked (job_id, error_type)
), found AS MATERIALIZED (
    SELECT * FROM pgqueue.job_rows(%(ids)s::bigint[])
), erred AS MATERIALIZED (
    SELECT found.id, found.enqueued_at, asked.error_type, a.message
    FROM found
    JOIN asked ON asked.job_id = found.id
    CROSS JOIN LATERAL (
        SELECT left(a.message, 10000) AS message FROM pgqueue.attempt_rows(found.id) AS a
        WHERE a.enqueued_at = found.enqueued_at AND coalesce(a.error_type, a.outcome) = asked.error_type AND a.message IS NOT NULL
        ORDER BY a.finished_at DESC, a.claim DESC LIMIT 1
    ) AS a
), stepped AS MATERIALIZED (
    {{erred_steps}}
)
SELECT coalesce(json_agg(json_build_object(
    'error_type', erred.error_type, 'message', erred.message, 'job', to_json(shown), 'steps', coalesce(stepped.steps, '[]'))), '[]')::text
FROM erred
JOIN (
    {{found_shown}}
) AS shown ON shown.id = erred.id
LEFT JOIN stepped ON stepped.id = erred.id;

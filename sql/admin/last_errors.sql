-- name: last_errors_list
-- The last attempt that has failed of each of these jobs, which were enqueued at these times: its class of error, else its outcome, and its
-- text; and the steps of the job. As JSON. The text is not cut to its first line here: first it is hidden as a whole.
WITH erred AS MATERIALIZED (
    SELECT asked.id, asked.since AS enqueued_at, left(coalesce(a.error_type, a.outcome), 200) AS error_type,
           left(a.message, 10000) AS message
    FROM unnest(%(ids)s::bigint[], %(since)s::text[]::timestamptz[]) AS asked (id, since)
    CROSS JOIN LATERAL (
        SELECT a.* FROM pgqueue.attempt_rows(asked.id) AS a
        WHERE a.enqueued_at = asked.since AND a.outcome <> ALL (%(quiet)s::text[])
        ORDER BY a.finished_at DESC, a.claim DESC LIMIT 1
    ) AS a
), stepped AS MATERIALIZED (
    {{erred_steps}}
)
SELECT coalesce(json_agg(json_build_object(
    'id', erred.id, 'error_type', erred.error_type, 'message', erred.message, 'steps', coalesce(stepped.steps, '[]'))), '[]')::text
FROM erred LEFT JOIN stepped ON stepped.id = erred.id;

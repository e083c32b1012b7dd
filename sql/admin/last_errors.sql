-- name: last_errors_list
-- The last attempt that has failed of each of these jobs, which were enqueued at these times: its class of error, else its outcome, and the
-- first line of its text. As JSON.
SELECT coalesce(json_agg(json_build_object(
    'id', asked.id, 'error_type', left(coalesce(a.error_type, a.outcome), 200),
    'message', left(split_part(ltrim(a.message, E' \n\r\t'), E'\n', 1), 500))), '[]')::text
FROM unnest(%(ids)s::bigint[], %(since)s::text[]::timestamptz[]) AS asked (id, since)
CROSS JOIN LATERAL (
    SELECT a.* FROM pgqueue.attempt_rows(asked.id) AS a
    WHERE a.enqueued_at = asked.since AND a.outcome <> ALL (%(quiet)s::text[])
    ORDER BY a.finished_at DESC, a.claim DESC LIMIT 1
) AS a;

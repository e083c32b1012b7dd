-- What people see of the record, and how it is kept short.

-- name: audit_list
-- The newest rows that fit, `n` at most, among the next `most` rows before (`at`, `id`): a JSON array. Then the place of the last row
-- looked at; NULL if no row is left, or none that is as young as `since`. The walk has no other condition, so that its LIMIT is a limit of
-- the work.
WITH walked AS MATERIALIZED (
    SELECT a.* FROM pgqueue.audit a
    WHERE (a.at, a.id) < (coalesce(%(at)s::text::timestamptz, 'infinity'), coalesce(%(id)s::bigint, 0))
      AND a.at >= coalesce(%(since)s::text::timestamptz, '-infinity')
    ORDER BY a.at DESC, a.id DESC LIMIT %(most)s::integer
), fitting AS MATERIALIZED (
    SELECT {{audit_row}} FROM walked AS a
    WHERE (%(by)s::text IS NULL OR a.actor = %(by)s::text) AND (%(action)s::text IS NULL OR a.action = %(action)s::text)
    ORDER BY a.at DESC, a.id DESC LIMIT %(n)s::integer
)
SELECT (SELECT coalesce(json_agg(to_json(fitting) ORDER BY fitting.at DESC, fitting.id DESC), '[]') FROM fitting)::text,
       last.at::text, last.id
FROM (SELECT 1) AS always LEFT JOIN (
    SELECT walked.at, walked.id FROM walked
    WHERE (SELECT count(*) FROM walked) = %(most)s::integer ORDER BY walked.at, walked.id LIMIT 1
) AS last ON true;

-- name: audit_of_job
-- The newest `n` rows that changed this job, as a JSON array. An operation by filter is among them if it is one of the newest `most`, and the
-- job is among the first of its reason: these are known. Each operation is looked up by its key.
SELECT coalesce(json_agg(to_json(found) ORDER BY found.at DESC, found.id DESC), '[]')::text
FROM (
    SELECT {{audit_row}} FROM (
        {{audit_with_job}}
    ) AS a ORDER BY a.at DESC, a.id DESC LIMIT %(n)s::integer
) AS found;

-- name: error_groups_list
-- The groups of failures that fit, the one that occurred last first, n at most. As JSON.
SELECT coalesce(json_agg(each), '[]')::text
FROM (SELECT fingerprint, queue, task, error_type, place, message, extract(epoch FROM first_at)::float8 AS first_at,
             extract(epoch FROM last_at)::float8 AS last_at, count, job_ids, version_tag, first_version
      FROM pgqueue.error_group g
      WHERE (%(queue)s::text IS NULL OR g.queue = %(queue)s::text) AND (%(task)s::text IS NULL OR g.task = %(task)s::text)
        AND (%(since)s::text IS NULL OR g.last_at >= %(since)s::text::timestamptz)
      ORDER BY g.last_at DESC, g.fingerprint LIMIT %(n)s::integer) AS each;

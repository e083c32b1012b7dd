-- What people ask about the jobs that a job has enqueued with its end.

-- name: successors_list
-- The successors of this job, which ended at that time: 100 at most, as a JSON array, the first ones first.
SELECT coalesce(json_agg(to_json(s) ORDER BY s.id), '[]')::text
FROM pgqueue.successors(%(id)s::bigint, %(ended)s::text::timestamptz) AS s;

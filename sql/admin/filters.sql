-- name: filters_matching
-- The ids of jobs that fit, among the next `most` of the partitions of these states after the id `after`; and the last id looked at
-- (NULL: there was none). The walk has no condition on rows, so that its LIMIT is a limit of the work.
WITH b AS MATERIALIZED (
    SELECT {{filter}}
), walked AS MATERIALIZED (
    SELECT w.id, {{bulk_fits}} AS fits
    FROM b CROSS JOIN LATERAL pgqueue.jobs_after(b.states, NULL, %(after)s::bigint, 9223372036854775807, %(most)s::integer) AS w
)
SELECT coalesce(json_agg(DISTINCT id ORDER BY id) FILTER (WHERE fits), '[]')::text, max(id) FROM walked;

-- name: filters_of_flow
-- The ids of the jobs of a flow that fit; and NULL, as there is no more to look at.
WITH b AS MATERIALIZED (
    SELECT {{filter}}
)
SELECT coalesce(json_agg(DISTINCT w.id ORDER BY w.id) FILTER (WHERE {{bulk_fits}}), '[]')::text, NULL::bigint
FROM b CROSS JOIN LATERAL (
    SELECT j.id, j.state, j.queue, j.task, j.finished_at, {{awaits_attempt}} AS retrying
    FROM pgqueue.flow_rows(%(flow)s::bigint, NULL, NULL, NULL) AS j
) AS w;

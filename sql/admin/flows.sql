-- Flows as people see them. Only reads. Counted by the rows of jobs, which are found by the index of each table.

-- name: flows_list
-- The n newest flows below the id `before`, with how many jobs are in each state, among `most` of each sign. As JSON. If there are more, a
-- state that decides that of the flow counts 1 at least.
SELECT coalesce(json_agg(each ORDER BY each.id DESC), '[]')::text
FROM (
    SELECT f.id, left(f.name, 1000) AS name, extract(epoch FROM f.enqueued_at)::float8 AS enqueued_at,
        CASE WHEN NOT counted.lives THEN counted.finished_at END AS finished_at, coalesce(counted.jobs, '{}') AS jobs,
        coalesce(counted.n < %(most)s::integer, true) AS exact
    FROM (SELECT f.id, f.name, f.enqueued_at FROM pgqueue.flow f WHERE f.id < %(before)s::bigint ORDER BY f.id DESC LIMIT %(n)s::integer) AS f
    CROSS JOIN LATERAL (
        WITH found AS MATERIALIZED (
            SELECT j.state, count(*) AS n, max(j.finished_at) AS finished_at
            FROM pgqueue.flow_rows(f.id, NULL, NULL, %(most)s::integer) AS j GROUP BY j.state
        ), total AS MATERIALIZED (
            SELECT sum(found.n) AS n FROM found
        )
        SELECT json_object_agg(s.state, s.n) AS jobs, (SELECT total.n FROM total) AS n, extract(epoch FROM max(s.finished_at))::float8 AS finished_at,
            bool_or(s.state IN ('available', 'scheduled', 'blocked', 'running')) AS lives
        FROM (
            SELECT * FROM found
            UNION ALL
            SELECT other.state, 1, NULL
            FROM total CROSS JOIN LATERAL pgqueue.flow_states(CASE WHEN total.n >= %(most)s::integer THEN f.id END, %(most)s::integer) AS other (state)
            WHERE other.state NOT IN (SELECT found.state FROM found)
        ) AS s
    ) AS counted
) AS each;

-- name: flows_get
-- One flow, with its first n nodes, as JSON. No row: there is none.
WITH counted AS MATERIALIZED (
    SELECT abs(j.node) AS node, j.state, count(*) AS n, count(*) FILTER (WHERE j.node < 0 AND j.state = 'blocked') AS waiting,
        min(j.task) AS task, max(j.finished_at) AS finished_at
    FROM pgqueue.flow_rows(%(flow)s::bigint, NULL, NULL, NULL) AS j GROUP BY 1, 2
), known AS MATERIALIZED (
    SELECT n.* FROM pgqueue.node n WHERE n.id BETWEEN %(flow)s::bigint << 20 AND (%(flow)s::bigint << 20 | 1048575)
), numbered AS MATERIALIZED (
    SELECT counted.node FROM counted UNION SELECT known.id FROM known
), summed AS MATERIALIZED (
    -- All at once: a look at all counts for each node would take the square of their number.
    SELECT c.node, min(c.task) AS task, json_object_agg(c.state, c.n) AS jobs, sum(c.waiting) AS waiting FROM counted c GROUP BY c.node
), shown AS MATERIALIZED (
    SELECT numbered.node & 1048575 AS number, left(known.name, 1000) AS name, summed.task, coalesce(summed.jobs, '{}') AS jobs,
        coalesce(summed.waiting, 0) AS waiting,
        ARRAY(SELECT a & 1048575 FROM unnest(known.after) AS a) AS after,
        ARRAY(SELECT a & 1048575 FROM unnest(known.after_end) AS a) AS after_end,
        ARRAY(SELECT a & 1048575 FROM unnest(known.after_failure) AS a) AS after_failure
    FROM (SELECT numbered.node FROM numbered ORDER BY numbered.node LIMIT %(n)s::integer) AS numbered
    LEFT JOIN known ON known.id = numbered.node
    LEFT JOIN summed ON summed.node = numbered.node
)
SELECT json_build_object(
    'flow', json_build_object(
        'id', f.id, 'name', left(f.name, 1000), 'enqueued_at', extract(epoch FROM f.enqueued_at)::float8,
        'finished_at', (SELECT CASE WHEN bool_or(c.state IN ('available', 'scheduled', 'blocked', 'running')) THEN NULL
                                    ELSE extract(epoch FROM max(c.finished_at))::float8 END FROM counted c),
        'jobs', (SELECT coalesce(json_object_agg(s.state, s.n), '{}')
                 FROM (SELECT c.state, sum(c.n) AS n FROM counted c GROUP BY c.state) AS s)),
    'nodes', (SELECT coalesce(json_agg(shown ORDER BY shown.number), '[]') FROM shown),
    'nodes_count', (SELECT count(*) FROM numbered),
    'forgotten', (SELECT count(*) FROM (
        SELECT FROM pgqueue.flow_kept k WHERE k.node BETWEEN %(flow)s::bigint << 20 AND (%(flow)s::bigint << 20 | 1048575) LIMIT %(most)s::integer) AS kept),
    'kept_for', (SELECT extract(epoch FROM min(r.retention))::float8 FROM pgqueue.ring r
                 WHERE r.kind IN ('dead', 'done') AND f.enqueued_at < (SELECT pgqueue.now()) - r.retention)
)::text
FROM pgqueue.flow f WHERE f.id = %(flow)s::bigint;

-- name: flows_counts
-- How many jobs of a flow are in each of these states, among `most` of each. As JSON.
SELECT coalesce(json_object_agg(c.state, c.n), '{}')::text FROM pgqueue.flow_counts(%(flow)s::bigint, %(states)s::text[], %(most)s::integer) AS c;

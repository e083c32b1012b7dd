-- What a handler reads of the results of its flow (pgqueue/worker/run/node_results.py).

-- name: node_results_named
-- The node of this name in the flow, and NULL. If there is none: NULL, and as JSON the first names that there are, in their order.
WITH named AS MATERIALIZED (
    SELECT min(each.id) AS id FROM (
        SELECT n.id FROM pgqueue.node n
        WHERE n.id >> 20 = %(flow)s::bigint AND left(n.name, 200) COLLATE "C" = left(%(name)s::text, 200) AND n.name = %(name)s::text OFFSET 0
    ) AS each
)
SELECT named.id, CASE WHEN named.id IS NULL THEN (
    SELECT coalesce(json_agg(each.name), '[]')::text
    FROM (SELECT left(n.name, 200) AS name FROM pgqueue.node n WHERE n.id >> 20 = %(flow)s::bigint AND n.name IS NOT NULL
          ORDER BY left(n.name, 200) COLLATE "C" LIMIT %(n)s::integer) AS each) END
FROM named;

-- name: node_results_page
-- The results of the next jobs of a node behind an id, with their ids. No row: there is none.
SELECT r.id, r.result FROM pgqueue.node_page(%(node)s::bigint, %(after)s::bigint, %(n)s::integer, %(most)s::integer) AS r;

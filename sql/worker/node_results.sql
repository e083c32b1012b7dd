-- What a handler reads of the results of its flow (pgqueue/worker/run/node_results.py).

-- name: node_results_named
-- The node of this name in the flow; NULL if there is none. And as JSON the first names that there are.
SELECT (SELECT n.id FROM pgqueue.node n WHERE n.id BETWEEN %(flow)s::bigint << 20 AND (%(flow)s::bigint << 20 | 1048575) AND n.name = %(name)s::text
        ORDER BY n.id LIMIT 1),
    (SELECT coalesce(json_agg(each.name), '[]')::text
     FROM (SELECT left(n.name, 200) AS name FROM pgqueue.node n
           WHERE n.id BETWEEN %(flow)s::bigint << 20 AND (%(flow)s::bigint << 20 | 1048575) AND n.name IS NOT NULL
           ORDER BY n.id LIMIT %(n)s::integer) AS each);

-- name: node_results_page
-- The results of the next jobs of a node behind an id, with their ids. No row: there is none.
SELECT r.id, r.result FROM pgqueue.node_page(%(node)s::bigint, %(after)s::bigint, %(n)s::integer, %(most)s::integer) AS r;

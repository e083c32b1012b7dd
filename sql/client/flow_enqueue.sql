-- A flow: all of its jobs and nodes, in the transaction of the application (pgqueue/client/flow_enqueue.py).

-- name: flow_enqueue
-- The jobs of a flow, in the columns of `unique_enqueue`, with the number of the node of each; and the nodes that have a name or wait, as a
-- JSON array. One row: the flow's id and the ids of the jobs in their order; or, if nothing was written because another job has a key: the
-- place of the job that wants it, the key, and that other job. The releaser is told of `never`, numbers of nodes without jobs that jobs wait
-- for: none of them will end, so nothing else would have these jobs looked at before the sweep.
WITH put AS MATERIALIZED (
    SELECT * FROM pgqueue.enqueue_flow(%(flow_name)s::text, %(nodes)s::text::jsonb, %(numbers)s::text::integer[], {{keyed_jobs}})
), added AS (
    SELECT unnest(put.heard) AS heard FROM put
)
SELECT put.flow, put.ids, put.place, put.key, put.holder, {{tell_channels}},
    (SELECT count(CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:control', 'node:' || (put.flow << 20 | node.number)) END)
     FROM unnest(%(never)s::text::bigint[]) AS node (number) WHERE %(notify)s::boolean AND put.flow IS NOT NULL)
FROM put

-- name: flow_enqueue_empty
-- A flow without jobs, as when there was nothing to do. One row as above.
SELECT put.flow, put.ids, put.place, put.key, put.holder
FROM pgqueue.enqueue_flow(%(flow_name)s::text, %(nodes)s::text::jsonb, '{}', '{}') AS put

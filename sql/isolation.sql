-- name: isolation_waiting
-- The suspect of two crashes or more that has waited longest in these queues. One index entry per queue, no lock.
SELECT waiting.id
FROM unnest(%(queues)s::text[]) AS queue (name)
CROSS JOIN LATERAL (
    SELECT a.id, a.pos FROM pgqueue.job_available a WHERE a.queue = queue.name AND a.rank = -1 ORDER BY a.pos LIMIT 1
) AS waiting
WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = queue.name AND q.paused_at IS NOT NULL)
ORDER BY waiting.pos
LIMIT 1;

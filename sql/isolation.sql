-- name: isolation_waiting
-- The suspect of two crashes or more that has waited longest in these queues, and the rate it waits for, if it does (those that are
-- available come first). One index entry or two per queue, no lock.
SELECT waiting.id, waiting.key
FROM unnest(%(queues)s::text[]) AS queue (name)
CROSS JOIN LATERAL (
    (SELECT a.id, a.pos, NULL AS key FROM pgqueue.job_available a WHERE a.queue = queue.name AND a.rank = -1 ORDER BY a.pos LIMIT 1)
    UNION ALL
    (SELECT b.id, NULL, b.key FROM pgqueue.job_blocked b
     WHERE b.queue = queue.name AND b.crashes > 1 AND starts_with(b.key, 'rate:') ORDER BY b.id LIMIT 1)
) AS waiting
WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = queue.name AND q.paused_at IS NOT NULL)
ORDER BY waiting.pos NULLS LAST, waiting.id
LIMIT 1;

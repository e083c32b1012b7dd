-- name: poison_jobs_waiting
-- The poison job of two crashes or more, of these `tasks`, that has waited longest in these queues. Available jobs come
-- first. Answers its id, and the rate it waits for, if it does.
--
-- A job that waits for a rate counts only if the rate is declared and may start a job within `seconds`. Reads two index
-- entries per queue, and one for each poison job that waits for another rate; takes no lock.
SELECT waiting.id, waiting.key
FROM unnest(%(queues)s::text[]) AS queue (name)
CROSS JOIN LATERAL (
    (SELECT a.id, a.pos, NULL AS key FROM pgqueue.job_available a
     WHERE a.queue = queue.name AND a.rank = -1 AND coalesce(a.lock_key, a.limit_key, a.rate_key) IS NULL
       AND (a.task IN ({{open_tasks}})) IS TRUE
     ORDER BY a.pos NULLS FIRST LIMIT 1)
    UNION ALL
    (SELECT a.id, a.pos, NULL FROM pgqueue.job_available a
     WHERE a.queue = queue.name AND a.rank = -1 AND coalesce(a.lock_key, a.limit_key, a.rate_key) IS NOT NULL
       AND (a.task IN ({{open_tasks}})) IS TRUE
     ORDER BY a.pos NULLS FIRST LIMIT 1)
    UNION ALL
    (SELECT b.id, NULL, b.key FROM pgqueue.job_blocked b
     CROSS JOIN LATERAL (SELECT substr(b.key, 6)) AS asked (key)
     CROSS JOIN LATERAL ({{rate}}) AS r
     WHERE b.queue = queue.name AND b.crashes > 1 AND starts_with(b.key, 'rate:') AND {{known_here}}
       AND NOT EXISTS (SELECT FROM pgqueue.limiter l
                       WHERE l.key = asked.key AND l.next_at > pgqueue.now() + make_interval(secs => r.depth + %(seconds)s::float8))
     ORDER BY b.id LIMIT 1)
) AS waiting
WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = queue.name AND q.paused_at IS NOT NULL)
ORDER BY waiting.pos NULLS LAST, waiting.id
LIMIT 1;

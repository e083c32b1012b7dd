-- name: tasks_list
-- The tasks that live workers know, that jobs have, or that are paused, as a JSON array: how many workers know each, how many jobs wait or run, in which
-- queues, and whether some of these queues have live workers of which none knows the task. Of each state the first 10,000 jobs are looked
-- at; beyond that numbers are at least so many.
WITH live AS MATERIALIZED (
    SELECT w.queues, w.tasks FROM pgqueue.worker w
    WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND w.beat_at >= (SELECT pgqueue.now()) - 3 * w.lease
    ORDER BY w.id DESC LIMIT 1000
), known AS (
    SELECT t.task, count(*) AS workers FROM live CROSS JOIN unnest(live.tasks) AS t (task) GROUP BY t.task
), taken AS MATERIALIZED (
    SELECT DISTINCT q.queue, t.task
    FROM live CROSS JOIN unnest(live.queues) AS q (queue) CROSS JOIN unnest(live.tasks) AS t (task)
), walked AS MATERIALIZED (
    (SELECT 1 AS part, j.queue, j.task FROM pgqueue.job_available j LIMIT 10001)
    UNION ALL
    (SELECT 2, j.queue, j.task FROM pgqueue.job_scheduled j LIMIT 10001)
    UNION ALL
    (SELECT 3, j.queue, j.task FROM pgqueue.job_blocked j LIMIT 10001)
    UNION ALL
    (SELECT 4, j.queue, j.task FROM pgqueue.job_running j LIMIT 10001)
), counted AS (
    SELECT walked.queue, walked.task, count(*) AS n,
        EXISTS (SELECT FROM taken WHERE taken.queue = walked.queue)
            AND NOT EXISTS (SELECT FROM taken WHERE taken.queue = walked.queue AND taken.task = walked.task) AS unknown
    FROM walked GROUP BY walked.queue, walked.task
), held AS (
    SELECT counted.task, sum(counted.n)::bigint AS n, bool_or(counted.unknown) AS unknown,
        json_agg(counted.queue ORDER BY counted.queue) AS queues
    FROM counted GROUP BY counted.task
), named AS (
    SELECT known.task FROM known UNION SELECT held.task FROM held UNION SELECT p.name FROM pgqueue.paused_task p
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY shown.name), '[]')::text
FROM (
    SELECT named.task AS name, coalesce(known.workers, 0) AS workers,
        json_build_object('n', coalesce(held.n, 0), 'exact', NOT EXISTS (
            SELECT FROM walked GROUP BY walked.part HAVING count(*) > 10000)) AS jobs,
        coalesce(held.queues, '[]') AS queues, coalesce(held.unknown, false) AS unknown,
        p.paused_at, left(p.paused_by, 200) AS paused_by
    FROM named LEFT JOIN known ON known.task = named.task LEFT JOIN held ON held.task = named.task
    LEFT JOIN pgqueue.paused_task p ON p.name = named.task
    ORDER BY 1 LIMIT 10000
) AS shown;

-- name: tasks_taken
-- The pairs of a queue and a task that live workers take jobs of.
SELECT s.queue, s.task FROM pgqueue.served() AS s;

-- name: tasks_may_look
-- Whether this role may see which tasks live workers take. One that only enqueues may not.
SELECT coalesce(
    has_function_privilege(to_regprocedure('pgqueue.served()'), 'EXECUTE')
    AND has_table_privilege(to_regclass('pgqueue.worker'), 'SELECT'), false);

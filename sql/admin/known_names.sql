-- name: known_names_list
-- Names to choose from, as JSON: the queues and tasks of live workers, and the classes of errors and their tasks, the newest first; n of each
-- at most.
WITH live AS MATERIALIZED (
    SELECT w.queues, w.tasks FROM (SELECT * FROM pgqueue.worker ORDER BY id DESC LIMIT 100) AS w
    WHERE w.dead_at IS NULL AND w.beat_at >= (SELECT pgqueue.now()) - 3 * w.lease
), failing AS MATERIALIZED (
    SELECT g.task, g.error_type FROM (SELECT * FROM pgqueue.error_group ORDER BY last_at DESC LIMIT 100) AS g
)
SELECT json_build_object(
    'queues', ARRAY(SELECT DISTINCT q.name FROM live CROSS JOIN unnest(live.queues) AS q (name) ORDER BY 1 LIMIT %(n)s::integer),
    'tasks', ARRAY(SELECT t.name FROM (
        SELECT t.name FROM live CROSS JOIN unnest(live.tasks) AS t (name) UNION SELECT f.task FROM failing AS f) AS t
        ORDER BY 1 LIMIT %(n)s::integer),
    'errors', ARRAY(SELECT DISTINCT f.error_type FROM failing AS f ORDER BY 1 LIMIT %(n)s::integer)
)::text;

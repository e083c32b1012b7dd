-- What each task did in a time, for people: the rows of the history, added up by task.

-- name: task_history_minutes
-- A row for each task that did something in the minutes from `since` on and before `until`, in all queues or in `queue`, of all tasks or of `tasks`; and the tasks that are paused. As JSON.
WITH asked AS MATERIALIZED (
    SELECT m.* FROM pgqueue.history_minute m WHERE m.at >= %(since)s::text::timestamptz AND m.at < coalesce(%(until)s::text::timestamptz, 'infinity') AND m.state IS NULL
      AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text) AND (%(tasks)s::text[] IS NULL OR m.task = ANY (%(tasks)s::text[]))
), {{task_history}}
{{task_history_answer}};

-- name: task_history_hours
-- The same of hours. One that is not over yet is added up from its minutes, as in `history_hours`.
WITH asked AS MATERIALIZED (
    SELECT m.* FROM (
        SELECT {{history_columns}}, state FROM pgqueue.history_hour h
        UNION ALL
        SELECT date_bin('1 hour', m.at, '2000-01-01 00:00:00+00') AS at, m.queue, m.task, {{happenings}}, wait_seconds, run_seconds, wait, run, state
        FROM pgqueue.history_minute m WHERE m.at >= coalesce((SELECT d.done_at FROM pgqueue.duty d WHERE d.name = 'history'), '-infinity')
    ) AS m
    WHERE m.at >= %(since)s::text::timestamptz AND m.at < coalesce(%(until)s::text::timestamptz, 'infinity') AND m.state IS NULL
      AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text) AND (%(tasks)s::text[] IS NULL OR m.task = ANY (%(tasks)s::text[]))
), {{task_history}}
{{task_history_answer}};

-- name: task_history_paused
-- Whether this task is paused.
SELECT EXISTS (SELECT FROM pgqueue.paused_task p WHERE p.name = %(task)s::text);

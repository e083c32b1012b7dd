-- Everything that puts new jobs in. Each statement is one round trip and takes no lock; the NOTIFY is part of it, so it
-- reaches the workers with the COMMIT or not at all. What it is given has been checked: the server has no reason to refuse.

-- name: enqueue_now
-- One job that may run at once, straight into its partition. Its queue hears of it, with the rank of its lane: a worker that is idle looks
-- there alone (pgqueue/worker/fetch/glance.py). One row: id.
INSERT INTO pgqueue.job_available (task, args, queue, priority, rank, headers, max_attempts)
VALUES (
    %(task)s::text, %(args)s::text::jsonb, %(queue)s::text, %(priority)s::smallint, 2 * %(priority)s::smallint + 1,
    %(headers)s::text::jsonb, %(max_attempts)s::smallint
)
RETURNING id,
    CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.' || queue, (2 * %(priority)s::smallint + 1)::text) END

-- name: enqueue_later
-- One job with a time to start (available if that has come, or there is none), a deadline or a key. If the job has to wait, the
-- scheduler hears of it. One row: id.
INSERT INTO pgqueue.job (state, rank, {{new_job}})
SELECT {{first_state}}, 2 * %(priority)s::smallint + 1,
    %(task)s::text, %(args)s::text::jsonb, %(queue)s::text, %(priority)s::smallint, %(headers)s::text::jsonb,
    %(max_attempts)s::smallint, run_at,
    coalesce(%(deadline)s::text::timestamptz, pgqueue.now() + make_interval(secs => %(deadline_seconds)s::float8)),
    %(lock_key)s::text, %(lock_limit)s::integer, %(on_locked)s::text, %(limit_key)s::text, %(rate_key)s::text
FROM (
    SELECT coalesce(%(run_at)s::text::timestamptz, pgqueue.now() + make_interval(secs => %(delay)s::float8))
) AS asked (run_at)
RETURNING id, CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.' || {{channel}}, '') END

-- name: enqueue_many_now
-- A batch of jobs that may run at once. Each parameter is a column: its values as lines (no value has a line break), or
-- one line that holds for all; an empty line is NULL. `heard` are the queues to notify. One row: the ids, in the lines' order.
WITH added AS (
    INSERT INTO pgqueue.job_available (task, args, queue, priority, rank, headers, max_attempts)
    SELECT
        coalesce(line.task, %(task)s::text),
        line.args::jsonb,
        coalesce(line.queue, %(queue)s::text),
        coalesce(line.priority, %(priority)s::text)::smallint,
        2 * coalesce(line.priority, %(priority)s::text)::smallint + 1,
        nullif(coalesce(line.headers, %(headers)s::text), '')::jsonb,
        nullif(coalesce(line.max_attempts, %(max_attempts)s::text), '')::smallint
    FROM ROWS FROM (
        string_to_table(%(task)s::text, E'\n'), string_to_table(%(args)s::text, E'\n'),
        string_to_table(%(queue)s::text, E'\n'), string_to_table(%(priority)s::text, E'\n'),
        string_to_table(%(headers)s::text, E'\n'), string_to_table(%(max_attempts)s::text, E'\n')
    ) AS line (task, args, queue, priority, headers, max_attempts)
    RETURNING id
)
SELECT
    array_agg(id),
    (SELECT count(CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || heard.queue, '') END)
     FROM string_to_table(%(heard)s::text, E'\n') AS heard (queue))
FROM added

-- name: enqueue_added
-- As `enqueue_many_later`, for jobs that a running job adds to its own node of a flow, in the transaction of its end.
WITH added AS (
    INSERT INTO pgqueue.job (state, rank, node, {{new_job}})
    SELECT {{first_state}}, 2 * priority + 1, %(node)s::bigint, {{new_job}}
    FROM (SELECT {{line_values}} FROM ROWS FROM ({{lines}}) AS line ({{line_names}})) AS asked
    RETURNING id, {{channel}} AS heard
)
SELECT array_agg(id), {{tell_channels}} FROM added

-- name: enqueue_many_later
-- The same for a batch in which some jobs have a time to start, a deadline or a key (as JSON: it may have line breaks). A job is
-- available if its time has come, or if it has none.
WITH added AS (
    INSERT INTO pgqueue.job (state, rank, {{new_job}})
    SELECT {{first_state}}, 2 * priority + 1, {{new_job}}
    FROM (SELECT {{line_values}} FROM ROWS FROM ({{lines}}) AS line ({{line_names}})) AS asked
    RETURNING id, {{channel}} AS heard
)
SELECT array_agg(id), {{tell_channels}} FROM added

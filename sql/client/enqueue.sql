-- Everything that puts new jobs in. Each statement is one round trip and takes no lock; the NOTIFY is part of it, so it
-- reaches the workers with the COMMIT or not at all. What it is given has been checked: the server has no reason to refuse.

-- name: enqueue_now
-- One job that may run at once, straight into its partition; its queue hears of it. One row: id.
INSERT INTO pgqueue.job_available (task, args, queue, priority, rank, headers, max_attempts)
VALUES (
    %(task)s::text, %(args)s::text::jsonb, %(queue)s::text, %(priority)s::smallint, 2 * %(priority)s::smallint + 1,
    %(headers)s::text::jsonb, %(max_attempts)s::smallint
)
RETURNING id, CASE WHEN %(notify)s::boolean THEN pg_notify('pgqueue.' || queue, '') END

-- name: enqueue_later
-- One job with a time to start (available if that or none has come), a deadline or a lock. The scheduler hears of one that has to wait. One row: id.
INSERT INTO pgqueue.job (
    state, task, args, queue, priority, rank, headers, max_attempts, run_at, deadline, lock_key, lock_limit, on_locked,
    limit_key, rate_key)
SELECT
    CASE WHEN asked.run_at > pgqueue.now() THEN 'scheduled' ELSE 'available' END,
    %(task)s::text, %(args)s::text::jsonb, %(queue)s::text, %(priority)s::smallint, 2 * %(priority)s::smallint + 1,
    %(headers)s::text::jsonb, %(max_attempts)s::smallint, asked.run_at,
    coalesce(%(deadline)s::text::timestamptz, pgqueue.now() + make_interval(secs => %(deadline_seconds)s::float8)),
    %(lock_key)s::text, %(lock_limit)s::integer, %(on_locked)s::text,
    %(limit_key)s::text, %(rate_key)s::text
FROM (
    SELECT coalesce(%(run_at)s::text::timestamptz, pgqueue.now() + make_interval(secs => %(delay)s::float8))
) AS asked (run_at)
RETURNING id, CASE WHEN %(notify)s::boolean THEN
    pg_notify('pgqueue.' || CASE state WHEN 'available' THEN queue ELSE ':scheduled' END, '')
END

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
    (SELECT count(pg_notify('pgqueue.' || heard.queue, '')) FROM string_to_table(%(heard)s::text, E'\n') AS heard (queue))
FROM added

-- name: enqueue_many_later
-- The same for a batch in which some have a time to start, a deadline or a lock (its key as JSON: it may have line breaks): those with a time that has come, or with none, are available.
WITH added AS (
    INSERT INTO pgqueue.job (
        state, task, args, queue, priority, rank, headers, max_attempts, run_at, deadline, lock_key, lock_limit, on_locked,
        limit_key, rate_key)
    SELECT
        CASE WHEN asked.run_at > pgqueue.now() THEN 'scheduled' ELSE 'available' END,
        asked.task, asked.args, asked.queue, asked.priority, 2 * asked.priority + 1, asked.headers, asked.max_attempts, asked.run_at,
        asked.deadline, asked.lock_key, asked.lock_limit, asked.on_locked, asked.limit_key, asked.rate_key
    FROM (
        SELECT
            coalesce(line.task, %(task)s::text) AS task,
            line.args::jsonb AS args,
            coalesce(line.queue, %(queue)s::text) AS queue,
            coalesce(line.priority, %(priority)s::text)::smallint AS priority,
            nullif(coalesce(line.headers, %(headers)s::text), '')::jsonb AS headers,
            nullif(coalesce(line.max_attempts, %(max_attempts)s::text), '')::smallint AS max_attempts,
            coalesce(
                nullif(coalesce(line.run_at, %(run_at)s::text), '')::timestamptz,
                pgqueue.now() + make_interval(secs => nullif(coalesce(line.delay, %(delay)s::text), '')::float8)
            ) AS run_at,
            coalesce(
                nullif(coalesce(line.deadline, %(deadline)s::text), '')::timestamptz,
                pgqueue.now() + make_interval(
                    secs => nullif(coalesce(line.deadline_seconds, %(deadline_seconds)s::text), '')::float8)
            ) AS deadline,
            nullif(coalesce(line.lock_key, %(lock_key)s::text), '')::jsonb #>> '{}' AS lock_key,
            nullif(coalesce(line.lock_limit, %(lock_limit)s::text), '')::integer AS lock_limit,
            nullif(coalesce(line.on_locked, %(on_locked)s::text), '') AS on_locked,
            nullif(coalesce(line.limit_key, %(limit_key)s::text), '')::jsonb #>> '{}' AS limit_key,
            nullif(coalesce(line.rate_key, %(rate_key)s::text), '')::jsonb #>> '{}' AS rate_key
        FROM ROWS FROM (
            string_to_table(%(task)s::text, E'\n'), string_to_table(%(args)s::text, E'\n'),
            string_to_table(%(queue)s::text, E'\n'), string_to_table(%(priority)s::text, E'\n'),
            string_to_table(%(headers)s::text, E'\n'), string_to_table(%(max_attempts)s::text, E'\n'),
            string_to_table(%(run_at)s::text, E'\n'), string_to_table(%(delay)s::text, E'\n'),
            string_to_table(%(deadline)s::text, E'\n'), string_to_table(%(deadline_seconds)s::text, E'\n'),
            string_to_table(%(lock_key)s::text, E'\n'), string_to_table(%(lock_limit)s::text, E'\n'),
            string_to_table(%(on_locked)s::text, E'\n'),
            string_to_table(%(limit_key)s::text, E'\n'), string_to_table(%(rate_key)s::text, E'\n')
        ) AS line (task, args, queue, priority, headers, max_attempts, run_at, delay, deadline, deadline_seconds, lock_key,
                   lock_limit, on_locked, limit_key, rate_key)
    ) AS asked
    RETURNING id, CASE state WHEN 'available' THEN queue ELSE ':scheduled' END AS heard
)
SELECT
    array_agg(id),
    (
        SELECT count(pg_notify('pgqueue.' || channel.heard, ''))
        FROM (SELECT DISTINCT heard FROM added WHERE %(notify)s::boolean) AS channel
    )
FROM added

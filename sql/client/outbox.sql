-- name: outbox_stage
-- Jobs to be delivered by a relay; part of the application's transaction, in its own database. Each parameter is a column: its values as
-- lines (no value has a line break), or one line that holds for all; an empty line is NULL. `order_key` holds for all. One row: the ids,
-- in the lines' order.
WITH added AS (
    INSERT INTO pgqueue.outbox (task, args, options, order_key)
    SELECT coalesce(line.task, %(task)s::text), line.args::jsonb, nullif(coalesce(line.options, %(options)s::text), '')::jsonb,
        %(order_key)s::text
    FROM ROWS FROM (
        string_to_table(%(task)s::text, E'\n'), string_to_table(%(args)s::text, E'\n'), string_to_table(%(options)s::text, E'\n')
    ) AS line (task, args, options)
    RETURNING id
)
SELECT array_agg(id), CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:outbox', '') END
FROM added

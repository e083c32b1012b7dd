-- Supervisors: their rows, the orders they get, and the workers that died under them.

-- name: orders_register
-- A new supervisor process.
INSERT INTO pgqueue.supervisor (host, pid, size, active, state)
VALUES (%(host)s::text, %(pid)s::integer, %(size)s::integer, %(active)s::integer, %(state)s::text)
RETURNING id;

-- name: orders_heartbeat
-- How a supervisor stands, and which workers are its own. No row: it was forgotten, and registers anew.
WITH mine AS (
    UPDATE pgqueue.supervisor
    SET size = %(size)s::integer, active = %(active)s::integer, state = %(state)s::text, problem = %(problem)s::text,
        beat_at = pgqueue.now()
    WHERE id = %(id)s::bigint
    RETURNING id
), workers AS (
    UPDATE pgqueue.worker SET supervisor_id = %(id)s::bigint
    WHERE id = ANY (%(workers)s::bigint[]) AND supervisor_id IS DISTINCT FROM %(id)s::bigint
)
SELECT id FROM mine;

-- name: orders_read
-- What this supervisor was told, is not done, and is not among what it knows already. What it knows counts and not what it
-- was sent: an answer may be lost.
UPDATE pgqueue.supervisor_order SET seen_at = coalesce(seen_at, pgqueue.now())
WHERE supervisor_id = %(id)s::bigint AND done_at IS NULL AND id <> ALL (%(known)s::bigint[])
RETURNING id, kind, size;

-- name: orders_done
-- This order is carried out, or cannot be (`problem`). Says so on `:ordered` to sessions that listen there.
WITH done AS (
    UPDATE pgqueue.supervisor_order SET done_at = pgqueue.now(), problem = %(problem)s::text
    WHERE id = %(id)s::bigint AND done_at IS NULL
    RETURNING id
)
SELECT count(CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:ordered', '')::text END) FROM done WHERE %(notify)s::boolean;

-- name: orders_leave
-- A supervisor that ended in order takes its row with it, and what it was told last.
WITH gone AS (
    DELETE FROM pgqueue.supervisor WHERE id = %(id)s::bigint
)
DELETE FROM pgqueue.supervisor_order WHERE supervisor_id = %(id)s::bigint AND done_at IS NULL;

-- name: orders_forget
-- Rows of supervisors that have not beaten for an hour, and orders of yesterday. Answers what `forget_rows` does of each.
SELECT * FROM pgqueue.forget_rows('pgqueue.supervisor', ARRAY(
    SELECT ctid FROM pgqueue.supervisor WHERE pgqueue.now() - beat_at > interval '1 hour' FOR UPDATE SKIP LOCKED))
UNION ALL
SELECT * FROM pgqueue.forget_rows('pgqueue.supervisor_order', ARRAY(
    SELECT ctid FROM pgqueue.supervisor_order WHERE pgqueue.now() - created_at > interval '1 day' FOR UPDATE SKIP LOCKED));

-- name: orders_dead
-- Of these workers (their processes have ended): those that are not rescued yet, with the last beat of each.
SELECT id, beat FROM pgqueue.worker WHERE id = ANY (%(workers)s::bigint[]) AND dead_at IS NULL ORDER BY id;

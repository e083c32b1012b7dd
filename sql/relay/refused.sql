-- name: refused_list
-- The rows that were put aside, the oldest first.
SELECT r.id, r.task, r.uid::text, r.staged_at, r.refused_at, r.reason
FROM pgqueue.outbox_refused r ORDER BY r.refused_at, r.id LIMIT %(most)s::integer

-- name: refused_retry
-- Back into the outbox with these, of all if NULL. They keep their uids, and get other ids: the cursor of a relay has passed theirs. The
-- relay hears of it. With an order key a row keeps its id, too: it is before others; a relay finds it within a minute. One row: how many.
WITH back AS (
    DELETE FROM pgqueue.outbox_refused r WHERE %(ids)s::bigint[] IS NULL OR r.id = ANY (%(ids)s::bigint[])
    RETURNING r.*
), added AS (
    INSERT INTO pgqueue.outbox (id, task, args, options, format, order_key, uid, staged_at)
    SELECT CASE WHEN order_key IS NOT NULL THEN id WHEN pg_current_xact_id() IS NOT NULL THEN nextval('pgqueue.outbox_id_seq') END, task, args, options, format, order_key, uid, staged_at FROM back ORDER BY id
    RETURNING id
)
SELECT count(*), CASE WHEN count(*) > 0 AND %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:outbox', '') END
FROM added

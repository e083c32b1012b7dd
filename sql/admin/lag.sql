-- name: lag_visible
-- Whether there is an outbox here whose rows this role may read.
SELECT coalesce(has_table_privilege(to_regclass('pgqueue.outbox'), 'SELECT')
    AND has_table_privilege(to_regclass('pgqueue.outbox_refused'), 'SELECT'), false)

-- name: lag_relays_visible
-- Whether this role may read what relays have reported here; not, if its grants are older than the schema.
SELECT has_table_privilege('pgqueue.relay_fence', 'SELECT')

-- name: lag_relays
-- For each outbox whose jobs come here, what its relay has reported last, for how many seconds it has not reported, and why it delivers
-- nothing. Not for one that goes on under another name.
SELECT source::text, name, waiting, oldest, refused, extract(epoch FROM pgqueue.now() - reported_at)::float8, stopped
FROM pgqueue.relay_fence WHERE reported_at IS NOT NULL AND heir IS NULL ORDER BY name, source

-- name: lag_held
-- The outboxes whose fence a session has held for so many seconds, which session, its role, and for how long. If this role may not see since
-- when: if the relay has not reported for 150 s.
SELECT source, name, pid, role, seconds
FROM (
    SELECT f.source::text, coalesce(f.name, '') AS name, a.pid, coalesce(a.usename::text, 'unknown') AS role,
        extract(epoch FROM pgqueue.now() - coalesce(a.xact_start, f.reported_at))::float8 AS seconds, a.xact_start IS NULL AS hidden
    FROM pgqueue.relay_fence f
    JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = f.xmax
    JOIN pg_stat_activity a ON a.pid = l.pid
) AS held
WHERE seconds >= CASE WHEN hidden THEN 150 ELSE %(seconds)s::float8 END ORDER BY name, source

-- name: lag_outbox
-- How many staged jobs wait for a relay, and for how many seconds the oldest of them; how many were refused. No more than 10,001 rows of
-- each are looked at, the first ones.
SELECT count(*), {{staged_for}},
    (SELECT count(*) FROM (SELECT FROM pgqueue.outbox_refused LIMIT 10001) AS refused)
FROM (SELECT staged_at FROM pgqueue.outbox ORDER BY id LIMIT 10001) AS waiting
CROSS JOIN (SELECT pgqueue.outbox_now() AS now OFFSET 0) AS clock

-- name: lag_visible
-- Whether there is an outbox here whose rows this role may read.
SELECT coalesce(has_table_privilege(to_regclass('pgqueue.outbox'), 'SELECT')
    AND has_table_privilege(to_regclass('pgqueue.outbox_refused'), 'SELECT'), false)

-- name: lag_relays_visible
-- Whether this role may read what relays have reported here; not, if its rights were granted before relays reported.
SELECT has_table_privilege('pgqueue.relay_fence', 'SELECT')

-- name: lag_relays
-- For each outbox whose jobs come here, what its relay has reported last, for how many seconds it has not reported, and why it delivers
-- nothing. Not for one that goes on under another name.
SELECT source::text, name, waiting, oldest, refused, extract(epoch FROM pgqueue.now() - reported_at)::float8, stopped
FROM pgqueue.relay_fence WHERE reported_at IS NOT NULL AND heir IS NULL ORDER BY name, source

-- name: lag_outbox
-- How many staged jobs wait for a relay, and for how many seconds the oldest of them; how many were refused. No more than 10,001 rows of
-- each are looked at, the first ones.
SELECT count(*), {{staged_for}},
    (SELECT count(*) FROM (SELECT FROM pgqueue.outbox_refused LIMIT 10001) AS refused)
FROM (SELECT staged_at FROM pgqueue.outbox ORDER BY id LIMIT 10001) AS waiting
CROSS JOIN (SELECT pgqueue.outbox_now() AS now OFFSET 0) AS clock

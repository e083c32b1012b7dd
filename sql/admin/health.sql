-- name: health_read
-- Whether a worker of this host has given a sign of life within its lease (where all were told to be quiet, their
-- supervisor's counts, too), and whether one of these takes jobs. Only signs of the last `since` seconds count (NULL: all). And whether
-- the database is read only by order: then none does. That is asked as in the fragment `read_only`: a probe reads one file.
WITH ordered AS MATERIALIZED (
    SELECT (current_setting('default_transaction_read_only') = 'on' AND (
        (SELECT s.source NOT IN ('user', 'database user', 'client', 'session') FROM pg_settings s WHERE s.name = 'default_transaction_read_only')
        OR EXISTS (
            SELECT FROM pg_db_role_setting r CROSS JOIN LATERAL unnest(r.setconfig) AS own (setting)
            WHERE r.setrole = 0 AND r.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
              AND own.setting IN ('default_transaction_read_only=on', 'default_transaction_read_only=true')))) AS read_only
)
SELECT count(*) > 0
    OR EXISTS (SELECT FROM pgqueue.supervisor s
               WHERE s.host = %(host)s::text AND s.state IN ('quiet', 'stopping')
                 AND pgqueue.now() - s.beat_at < least(interval '15 seconds', make_interval(secs => %(since)s::float8))),
       count(*) FILTER (WHERE w.state = 'running') > 0 AND NOT (SELECT read_only FROM ordered),
       (SELECT read_only FROM ordered)
FROM pgqueue.worker w
WHERE w.host = %(host)s::text AND w.dead_at IS NULL
  AND pgqueue.now() - w.beat_at < least(w.lease, make_interval(secs => %(since)s::float8));

-- name: health_read
-- Whether a worker of this host has given a sign of life within its lease (where all were told to be quiet, their
-- supervisor's counts, too), and whether one of these takes jobs. Only signs of the last `since` seconds count (NULL: all). And whether
-- the database is read only by order: then none does.
SELECT count(*) > 0
    OR EXISTS (SELECT FROM pgqueue.supervisor s
               WHERE s.host = %(host)s::text AND s.state IN ('quiet', 'stopping')
                 AND pgqueue.now() - s.beat_at < least(interval '15 seconds', make_interval(secs => %(since)s::float8))),
       count(*) FILTER (WHERE w.state = 'running') > 0 AND NOT {{read_only}},
       {{read_only}}
FROM pgqueue.worker w
WHERE w.host = %(host)s::text AND w.dead_at IS NULL
  AND pgqueue.now() - w.beat_at < least(w.lease, make_interval(secs => %(since)s::float8));

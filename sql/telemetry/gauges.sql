-- What the gauges say of the database beside the depth of queues. Cheap at any size: one row of each worker and session, and statistics that
-- the server keeps anyway.

-- name: gauges_read
-- As one JSON object. `workers`: how many live workers take jobs, or are about to. `snapshot`: for how many seconds the oldest transaction has
-- been open that keeps dead rows, 0 if there is none; of sessions that this role may not see, only that they are there is known, and they are
-- left out. `notify`: the share of the NOTIFY queue in use. `dead`: our dead rows by table, the leaves of the histories and others together.
-- `duties`: what has become of each duty of the leader.
SELECT json_build_object(
    'workers', (SELECT count(*)
                FROM (SELECT w.state, w.dead_at, w.beat_at, w.lease FROM pgqueue.worker w ORDER BY w.id DESC LIMIT 10000) AS w
                WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND w.beat_at >= (SELECT pgqueue.now()) - 3 * w.lease),
    'snapshot', coalesce(extract(epoch FROM pgqueue.now() - least(
        (SELECT min(a.xact_start) FROM pg_stat_activity a
         WHERE (a.datname = current_database() OR a.backend_type = 'walsender') AND a.pid <> pg_backend_pid()
           AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.backend_type <> 'autovacuum worker'),
        (SELECT min(p.prepared) FROM pg_prepared_xacts p WHERE p.database = current_database())))::float8, 0),
    'notify', pg_notification_queue_usage(),
    'dead', (SELECT json_object_agg(t.name, t.dead) FROM (
        SELECT CASE WHEN s.relname IN ('job_available', 'job_scheduled', 'job_blocked', 'job_running') THEN s.relname::text
                    ELSE 'other tables' END AS name, sum(s.n_dead_tup) AS dead
        FROM pg_stat_user_tables s WHERE s.schemaname = 'pgqueue' GROUP BY 1) AS t),
    'duties', (SELECT coalesce(json_agg(d ORDER BY d.name), '[]') FROM ({{duties}}) AS d)
)::text;

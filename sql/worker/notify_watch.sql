-- How full the server's NOTIFY queue is, and which session holds it back (see notify_watch.py).

-- name: notify_watch_usage
-- The share of the queue that is in use, from 0 to 1.
SELECT pg_notification_queue_usage();

-- name: notify_watch_holder
-- This session; with no `pid` the one whose transaction is the oldest: its pid, database, role and application, what it does, and for how
-- many seconds its transaction has lasted. NULL is what this role may not see.
SELECT a.pid, a.datname::text, a.usename::text, a.application_name, a.state,
       extract(epoch FROM pgqueue.now() - a.xact_start)::float8
FROM pg_stat_activity a
WHERE CASE WHEN %(pid)s::integer IS NULL THEN a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL
           ELSE a.pid = %(pid)s::integer END
ORDER BY a.xact_start LIMIT 1;

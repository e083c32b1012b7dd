-- name: prune_advance
-- As `pruner_advance`, by hand: if the ring is advanced, that is a row of the record.
WITH tried AS MATERIALIZED (
    SELECT pgqueue.advance_ring(%(kind)s::text, %(forced)s::boolean) AS done
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, details)
    SELECT {{actor}}, 'prune', jsonb_build_object('history', %(kind)s::text), jsonb_build_object('forced', %(forced)s::boolean)
    FROM tried WHERE done
)
SELECT done FROM tried;

-- name: prune_readers
-- The sessions that hold a lock on the leaf which a ring would empty next: what to wait for, or to end.
SELECT a.pid, coalesce(nullif(a.application_name, ''), 'unnamed'), a.usename::text, coalesce(a.state, 'unknown'),
       extract(epoch FROM pgqueue.now() - a.xact_start)::float8
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.granted AND a.pid <> pg_backend_pid() AND l.relation = (
    SELECT ('pgqueue.' || CASE WHEN kind = 'attempt' THEN 'attempt_' WHEN kind IN ('minute', 'hour') THEN 'history_' || kind || '_'
                               ELSE 'job_' || kind || '_' END || mod(bin + 1, leaves))::regclass
    FROM pgqueue.ring WHERE kind = %(kind)s::text)
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
ORDER BY a.xact_start;

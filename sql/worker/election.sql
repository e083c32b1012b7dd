-- name: election_try
-- Take the leader's lock of this schema if it is free. It belongs to the session and goes with it.
SELECT pg_try_advisory_lock(hashtextextended('pgqueue.leader', 7));

-- name: election_keep
-- A ping of the session that holds the lock.
SELECT true;

-- name: election_free
-- Whether no session holds the leader's lock. Holds it itself for no longer than this line, and shared: sessions that ask at the
-- same time are not in each other's way.
SELECT CASE WHEN pg_try_advisory_lock_shared(hashtextextended('pgqueue.leader', 7))
            THEN pg_advisory_unlock_shared(hashtextextended('pgqueue.leader', 7)) ELSE false END;

-- name: election_strangers
-- The sessions that hold the leader's lock and are no worker's: no live worker has listed them, and they have not the name of a worker's
-- session. Behind a pooler in session mode a worker lists none.
SELECT DISTINCT l.pid
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('pgqueue.leader', 7)
  AND a.application_name NOT LIKE 'pgqueue %%'
  AND NOT EXISTS (
      SELECT FROM pgqueue.worker w CROSS JOIN LATERAL jsonb_to_recordset(w.sessions) AS s (pid integer)
      WHERE w.dead_at IS NULL AND s.pid = l.pid)
ORDER BY l.pid;

-- name: election_echo
-- Notify the channel of the listener's test. False if it did not: a NOTIFY could fail now.
SELECT CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:echo', %(token)s::text)::text END IS NOT NULL;

-- name: leader_try
-- Take the leader's lock of this schema if it is free. It belongs to the session and goes with it.
SELECT pg_try_advisory_lock(hashtextextended('pgqueue.leader', 7));

-- name: leader_keep
-- A ping of the session that holds the lock.
SELECT true;

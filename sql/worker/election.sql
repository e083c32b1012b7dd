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

-- name: election_echo
-- Notify the channel of the listener's test. False if the queue of notifications is nearly full: then a NOTIFY could fail.
SELECT pg_notification_queue_usage() < 0.9
       AND CASE WHEN pg_notification_queue_usage() < 0.9
                THEN pg_notify('pgqueue.:echo', %(token)s::text)::text END IS NOT NULL;

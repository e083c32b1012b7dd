-- name: maintenance_advance
-- Advance one ring if its time has come (or when forced): truncates the next leaf and moves to it, in one transaction, or
-- does neither. False: not due, or somebody else is at it. NULL: a reader holds the leaf; the next round tries again.
SELECT pgqueue.advance_ring(%(kind)s::text, %(forced)s::boolean);

-- name: maintenance_rings
-- The rings with their retention in seconds and the age of the leaf being written.
SELECT kind, leaves, bin, extract(epoch FROM retention)::float8, extract(epoch FROM pgqueue.now() - since)::float8,
       since < pgqueue.now() - retention / (leaves - 2)
FROM pgqueue.ring ORDER BY kind;

-- name: maintenance_waiters
-- Forget those who have waited for a job for more than an hour: most died without a word; one who lives goes on by looking.
DELETE FROM pgqueue.job_waiter WHERE created_at < (SELECT pgqueue.now()) - interval '1 hour' RETURNING waiter;

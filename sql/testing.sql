-- What pgqueue.testing asks beside the statements of the worker, in the transaction of a test.

-- name: testing_queues
-- The queues that have available jobs, as one array.
SELECT coalesce(array_agg(DISTINCT queue::text), '{}') FROM pgqueue.job_available;

-- name: testing_due
-- When the first of these scheduled jobs is due, in microseconds since 1970; NULL when none of them is scheduled.
SELECT (extract(epoch FROM min(run_at)) * 1000000)::bigint
FROM pgqueue.job_scheduled WHERE id = ANY (%(ids)s::bigint[]);

-- name: testing_clock
-- The time by pgqueue.now(), in microseconds since 1970, and the definition of that function, to put it back.
SELECT (extract(epoch FROM pgqueue.now()) * 1000000)::bigint, pg_get_functiondef('pgqueue.now()'::regprocedure);

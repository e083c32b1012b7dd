-- name: clock_install
-- The time by pgqueue.now(), in microseconds since 1970, and the definition of that function, to put it back.
SELECT (extract(epoch FROM pgqueue.now()) * 1000000)::bigint, pg_get_functiondef('pgqueue.now()'::regprocedure);

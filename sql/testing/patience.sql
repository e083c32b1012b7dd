-- For `pgqueue.testing.wait`.

-- name: patience_pause
-- Nothing, after a pause.
SELECT pg_sleep(%(seconds)s::float8)::text;

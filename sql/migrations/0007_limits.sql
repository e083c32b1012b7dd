-- breaking: no
--
-- Limits: so many jobs at once of all that name the same limit, over all workers. The column `limit_key` and most indexes are there
-- since 0001; here is what a limit allows, what a row under one must look like, and the column for the rates that come after.

-- What each limit allows now. `declared`: what the code of the last worker that has declared it said (NULL: only set by hand);
-- `set_at`: somebody has set `n` by hand, and no declaration changes it any more. Never removed: jobs that wait name it.
CREATE TABLE pgqueue.key_limit (
    name        text        COLLATE "C" PRIMARY KEY,
    n           integer     NOT NULL,
    declared    integer,
    declared_at timestamptz,
    set_at      timestamptz,
    CONSTRAINT key_limit_can_be CHECK (
        octet_length(name) BETWEEN 1 AND 200 AND n >= 0 AND declared >= 1 IS NOT FALSE
        AND (set_at IS NOT NULL OR n = declared IS TRUE))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.key_limit IS 'How many jobs of each limit may run at once, over all workers.';

-- The rendered name of the limiter a job is under.
ALTER TABLE pgqueue.job ADD COLUMN rate_key text;

-- A job with a key runs only if it was let in: whoever would start one without asking is refused by the table itself, a worker of
-- an older version, too. So replace the workers before the first job with a limit is enqueued. NOT VALID, here and below: no
-- row there has such a key yet.
ALTER TABLE pgqueue.job_running
    DROP CONSTRAINT job_running_is_held,
    ADD CONSTRAINT job_running_is_held CHECK (
        finished_at IS NULL AND (coalesce(lock_key, limit_key, rate_key) IS NULL OR holds)) NOT VALID;

-- Still one constraint per table, for each is paid anew by every statement.
ALTER TABLE pgqueue.job_available
    DROP CONSTRAINT job_available_is_ready,
    ADD CONSTRAINT job_available_is_ready CHECK (
        priority BETWEEN 0 AND 9 AND (rank < 0 OR rank / 2 = priority) AND run_at <= pgqueue.now() IS NOT FALSE
        AND pos > 0 AND octet_length(queue) BETWEEN 1 AND 40
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND (lock_key IS NULL OR octet_length(lock_key) BETWEEN 1 AND 500 AND lock_limit >= 1 IS NOT FALSE
             AND on_locked IN ('wait', 'skip', 'once') IS NOT FALSE)
        AND octet_length(limit_key) BETWEEN 1 AND 200 IS NOT FALSE
        AND octet_length(rate_key) BETWEEN 1 AND 500 IS NOT FALSE) NOT VALID;
ALTER TABLE pgqueue.job_scheduled
    DROP CONSTRAINT job_scheduled_is_waiting,
    ADD CONSTRAINT job_scheduled_is_waiting CHECK (
        priority BETWEEN 0 AND 9 AND octet_length(queue) BETWEEN 1 AND 40 AND isfinite(run_at)
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND (lock_key IS NULL OR octet_length(lock_key) BETWEEN 1 AND 500 AND lock_limit >= 1 IS NOT FALSE
             AND on_locked IN ('wait', 'skip', 'once') IS NOT FALSE)
        AND octet_length(limit_key) BETWEEN 1 AND 200 IS NOT FALSE
        AND octet_length(rate_key) BETWEEN 1 AND 500 IS NOT FALSE) NOT VALID;

-- The order is lock, limit, rate: who waits for a lock holds nothing, and who holds something waits for what comes after it.
ALTER TABLE pgqueue.job_blocked
    DROP CONSTRAINT job_blocked_is_not_taken,
    ADD CONSTRAINT job_blocked_is_not_taken CHECK (
        worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND NOT (holds AND starts_with(key, 'lock:'))) NOT VALID;

-- Who waits under `limit:` and holds has a lock, and not yet the limit: only who waits for a rate has that. Their own index, for
-- there may be very many of the former. And the queues of those that hold something: to find those whose queue was paused.
DROP INDEX pgqueue.job_blocked_limit_holds, pgqueue.job_blocked_id;
CREATE INDEX job_blocked_limit_holds ON pgqueue.job_blocked (limit_key)
    WHERE holds AND limit_key IS NOT NULL AND starts_with(key, 'rate:');
CREATE INDEX job_blocked_queue_holds ON pgqueue.job_blocked (queue) WHERE holds;
CREATE UNIQUE INDEX job_blocked_id   ON pgqueue.job_blocked (id);

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (7, 'limits', false);

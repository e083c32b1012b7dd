-- breaking: no
--
-- Locks: one job per key, or as many as its limit. The columns and the indexes are there since 0001; here the tables learn
-- what a keyed row must look like, and workers get a place to agree on who sweeps.

-- A keyed job runs only if it holds its key: whoever would start one without asking `admit` is refused by the table itself,
-- a worker of an older version, too. So replace the workers before the first job with a lock is enqueued.
ALTER TABLE pgqueue.job_running
    DROP CONSTRAINT job_running_is_not_finished,
    ADD CONSTRAINT job_running_is_held CHECK (finished_at IS NULL AND (lock_key IS NULL OR holds));

-- Keys are checked where rows enter: a longer one would fit into no index, and would stop every claim that meets it.
-- Still one constraint per table, for each is paid anew by every statement. NOT VALID: what is there has no key.
ALTER TABLE pgqueue.job_available
    DROP CONSTRAINT job_available_is_ready,
    ADD CONSTRAINT job_available_is_ready CHECK (
        priority BETWEEN 0 AND 9 AND (rank < 0 OR rank / 2 = priority) AND run_at <= pgqueue.now() IS NOT FALSE
        AND pos > 0 AND octet_length(queue) BETWEEN 1 AND 40
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND (lock_key IS NULL OR octet_length(lock_key) BETWEEN 1 AND 500 AND lock_limit >= 1 IS NOT FALSE
             AND on_locked IN ('wait', 'skip', 'once') IS NOT FALSE)) NOT VALID;
ALTER TABLE pgqueue.job_scheduled
    DROP CONSTRAINT job_scheduled_is_waiting,
    ADD CONSTRAINT job_scheduled_is_waiting CHECK (
        priority BETWEEN 0 AND 9 AND octet_length(queue) BETWEEN 1 AND 40 AND isfinite(run_at)
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND (lock_key IS NULL OR octet_length(lock_key) BETWEEN 1 AND 500 AND lock_limit >= 1 IS NOT FALSE
             AND on_locked IN ('wait', 'skip', 'once') IS NOT FALSE)) NOT VALID;

-- A planner that knows nothing yet of a table takes the newest of the indexes that would do: so that it never walks all holders
-- for one key, or all that wait for one id, the indexes on holders say which key they have, and the one on ids comes last.
DROP INDEX pgqueue.job_available_lock_holds, pgqueue.job_available_limit_holds, pgqueue.job_scheduled_lock_holds,
    pgqueue.job_scheduled_limit_holds, pgqueue.job_blocked_lock_holds, pgqueue.job_blocked_limit_holds, pgqueue.job_blocked_id;
CREATE INDEX job_available_lock_holds  ON pgqueue.job_available (lock_key)  WHERE holds AND lock_key  IS NOT NULL;
CREATE INDEX job_available_limit_holds ON pgqueue.job_available (limit_key) WHERE holds AND limit_key IS NOT NULL;
CREATE INDEX job_scheduled_lock_holds  ON pgqueue.job_scheduled (lock_key)  WHERE holds AND lock_key  IS NOT NULL;
CREATE INDEX job_scheduled_limit_holds ON pgqueue.job_scheduled (limit_key) WHERE holds AND limit_key IS NOT NULL;
CREATE INDEX job_blocked_lock_holds    ON pgqueue.job_blocked   (lock_key)  WHERE holds AND lock_key  IS NOT NULL;
CREATE INDEX job_blocked_limit_holds   ON pgqueue.job_blocked   (limit_key) WHERE holds AND limit_key IS NOT NULL;
CREATE UNIQUE INDEX job_blocked_id     ON pgqueue.job_blocked   (id);

-- What any worker does now and then, and when it was done last: whoever finds it overdue and changes the row does it.
CREATE TABLE pgqueue.duty (
    name    text        PRIMARY KEY,
    done_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.duty IS 'What any worker does now and then, and when it was done last.';
INSERT INTO pgqueue.duty (name, done_at) VALUES ('sweep', '-infinity');

-- The same function with one more parameter, at the end.
DROP FUNCTION pgqueue.enqueue(text, jsonb, text, integer, timestamptz, jsonb, timestamptz);
CREATE FUNCTION pgqueue.enqueue(
    task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL, deadline timestamptz DEFAULT NULL,
    lock_key text DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = '' AS $$
DECLARE
    new_id bigint;
    due boolean := enqueue.run_at IS NULL OR enqueue.run_at <= pgqueue.now();
BEGIN
    IF enqueue.task IS NULL OR enqueue.task !~ '^[^[:space:][:cntrl:]]{1,200}$' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: task % is not a task name', quote_nullable(left(enqueue.task, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 200 characters without spaces, such as billing.charge.';
    END IF;
    IF enqueue.queue !~ '^[A-Za-z0-9_.-]{1,40}$' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: queue % is not a queue name', quote_nullable(left(enqueue.queue, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 40 letters, digits, _ . or -.';
    END IF;
    IF enqueue.priority NOT BETWEEN 0 AND 9 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: priority % is outside 0 (first) to 9', enqueue.priority
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT isfinite(enqueue.run_at) THEN
        RAISE EXCEPTION 'pgqueue.enqueue: run_at is %, no time', enqueue.run_at USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.args IS NULL OR jsonb_typeof(enqueue.args) <> 'object' OR jsonb_typeof(enqueue.headers) <> 'object' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args and headers are JSON objects, by parameter name'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(enqueue.args::text) > 1048576 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args have % bytes, the limit is 1048576', octet_length(enqueue.args::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store the data in a table and pass its key.';
    END IF;
    IF octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: lock_key has % bytes, use 1 to 500', octet_length(enqueue.lock_key)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key)
    VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
            coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
            enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key)
    RETURNING id INTO new_id;

    IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' THEN
        PERFORM pg_notify('pgqueue.' || CASE WHEN due THEN coalesce(enqueue.queue, 'default') ELSE ':scheduled' END, '');
    END IF;
    RETURN new_id;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue IS
    'Enqueue a job from any language, in the caller''s transaction. Returns its id. SET pgqueue.notify = off for two-phase commit.';

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (3, 'locks', false);

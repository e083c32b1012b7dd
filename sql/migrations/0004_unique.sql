-- breaking: no
--
-- Unique keys: once per request, or one at a time. The columns of jobs are there since 0001; here is the table whose primary key
-- is what makes a key unique, and the functions for who cannot ask twice: SQL, completions, retries by hand.

-- Who has a key. Written in the statement that inserts the job, never changed but for `expires_at`. Whether it still holds is
-- judged by the job it names (`key_state`), so no move of a job has to touch this table: a row that does not hold is a leftover,
-- which the next one who wants the key removes, or the sweep. The key itself is the primary key, not a hash of it: no two keys
-- can be taken for each other. Compared by bytes: everybody who takes several takes them in the same order.
CREATE TABLE pgqueue.unique_key (
    key        text COLLATE "C" PRIMARY KEY,
    job_id     bigint           NOT NULL,
    -- How long it holds: while its job waits to start, while it lives, or so many seconds after its end.
    hold       text             NOT NULL,
    seconds    double precision NOT NULL DEFAULT 0,
    -- Written once its job has ended, for history does not stay for ever.
    expires_at timestamptz,
    CONSTRAINT unique_key_can_be CHECK (
        octet_length(key) BETWEEN 1 AND 520 AND hold IN ('pending', 'live', 'after') AND seconds >= 0)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE pgqueue.unique_key IS 'Which job has which unique key. A row whose job has ended may be a leftover.';

-- What a key is to who wants it, in one snapshot: `waiting` (its job has never started, and holds it), `held`, or `free`. A job
-- that is in no partition has ended so long ago that history has forgotten it, or was never made: its key row was written
-- by an enqueue that did not get all of its keys.
CREATE FUNCTION pgqueue.key_state(k pgqueue.unique_key) RETURNS text LANGUAGE sql STABLE
    RETURN CASE (SELECT j.state <> 'running' AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
                 FROM pgqueue.job j
                 WHERE j.id = k.job_id AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1)
        WHEN true THEN 'waiting'
        WHEN false THEN CASE k.hold WHEN 'pending' THEN 'free' ELSE 'held' END
        ELSE CASE WHEN k.hold = 'after' AND coalesce(k.expires_at, (
                      SELECT max(j.finished_at) + make_interval(secs => k.seconds) FROM pgqueue.job j
                      WHERE j.id = k.job_id AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))) > pgqueue.now()
                  THEN 'held' ELSE 'free' END END;

-- Take one or both of these keys for a job that is about to be inserted by this transaction, or neither. Answers the job that has
-- them: `for_job`, or the holder. `hold` NULL: as this job held it before, else while it lives. A key that was taken for one of
-- `others`, which this statement is about to insert or to move, is not free. Waits for a transaction that is just taking the same
-- key, 5 s at most if the session has no lock_timeout.
CREATE FUNCTION pgqueue.take_keys(
    idempotency_key text, unique_key text, hold text, seconds double precision, for_job bigint, others bigint[] DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = '' AS $$
DECLARE
    wanted text;
    keeps text;
    afterwards double precision;
    holder record;
    answer bigint := for_job;
    had boolean := false;
    had_until timestamptz;
    patience text := current_setting('lock_timeout');
BEGIN
    IF patience = '0' THEN
        PERFORM set_config('lock_timeout', '5s', true);
    END IF;
    <<keys>>
    FOREACH wanted IN ARRAY array_remove(ARRAY['idempotency:' || idempotency_key, 'unique:' || unique_key], NULL) LOOP
        IF wanted LIKE 'idempotency:%' THEN
            keeps := 'after';
            afterwards := 86400;
        ELSIF take_keys.hold IS NOT NULL THEN
            keeps := take_keys.hold;
            afterwards := coalesce(take_keys.seconds, 0);
        ELSE
            SELECT coalesce(max(k.hold), 'live'), coalesce(max(k.seconds), 0) INTO keeps, afterwards
            FROM pgqueue.unique_key k WHERE k.key = wanted AND k.job_id = for_job;
        END IF;
        LOOP
            INSERT INTO pgqueue.unique_key AS k (key, job_id, hold, seconds)
            VALUES (wanted, for_job, keeps, afterwards) ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;
            -- A statement of its own: it sees what has been committed while the one before waited.
            SELECT k.job_id, k.expires_at, k.hold, k.xmin AS version, pgqueue.key_state(k) AS state INTO holder
            FROM pgqueue.unique_key k WHERE k.key = wanted;
            IF holder.job_id = for_job THEN
                -- Its own from before, kept as it is but for its end; written, so that nobody removes it as a leftover.
                UPDATE pgqueue.unique_key k SET expires_at = NULL WHERE k.key = wanted AND k.xmin = holder.version;
                CONTINUE WHEN NOT FOUND;
                IF wanted LIKE 'idempotency:%' THEN
                    had := true;
                    had_until := holder.expires_at;
                END IF;
                EXIT;
            END IF;
            IF holder.job_id = ANY (others) OR holder.state IN ('waiting', 'held') THEN
                IF holder.state = 'waiting' AND holder.hold = 'pending' THEN
                    -- It must not start before we commit: it is to see what we have written.
                    PERFORM FROM pgqueue.job j WHERE j.id = holder.job_id AND j.state IN ('available', 'scheduled', 'blocked')
                    FOR KEY SHARE;
                    CONTINUE WHEN NOT FOUND;
                END IF;
                -- Neither of them, then: the first is as it was.
                IF had THEN
                    UPDATE pgqueue.unique_key k SET expires_at = had_until
                    WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job;
                ELSE
                    DELETE FROM pgqueue.unique_key k
                    WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job AND k.key <> wanted;
                END IF;
                answer := holder.job_id;
                EXIT keys;
            END IF;
            DELETE FROM pgqueue.unique_key k WHERE k.key = wanted AND k.xmin = holder.version;
        END LOOP;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);
    RETURN answer;
END $$;

-- The same function with two more parameters, at the end.
DROP FUNCTION pgqueue.enqueue(text, jsonb, text, integer, timestamptz, jsonb, timestamptz, text);
CREATE FUNCTION pgqueue.enqueue(
    task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL, deadline timestamptz DEFAULT NULL,
    lock_key text DEFAULT NULL, unique_key text DEFAULT NULL, idempotency_key text DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = '' AS $$
DECLARE
    new_id bigint;
    holder bigint;
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
    IF octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 OR octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500
        OR octet_length(enqueue.idempotency_key) NOT BETWEEN 1 AND 500 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: % has % bytes, use 1 to 500',
            CASE WHEN octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 THEN 'lock_key'
                 WHEN octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500 THEN 'unique_key' ELSE 'idempotency_key' END,
            CASE WHEN octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 THEN octet_length(enqueue.lock_key)
                 WHEN octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500 THEN octet_length(enqueue.unique_key)
                 ELSE octet_length(enqueue.idempotency_key) END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    IF enqueue.unique_key IS NULL AND enqueue.idempotency_key IS NULL THEN
        INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key)
        VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key)
        RETURNING id INTO new_id;
    ELSE
        new_id := nextval('pgqueue.job_id_seq');
        holder := pgqueue.take_keys(enqueue.idempotency_key, enqueue.unique_key, 'live', 0, new_id);
        IF holder <> new_id THEN
            RETURN holder;
        END IF;
        INSERT INTO pgqueue.job (id, state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key, unique_key,
                                 idempotency_key)
        VALUES (new_id, CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key, enqueue.unique_key,
                enqueue.idempotency_key);
    END IF;

    IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' THEN
        PERFORM pg_notify('pgqueue.' || CASE WHEN due THEN coalesce(enqueue.queue, 'default') ELSE ':scheduled' END, '');
    END IF;
    RETURN new_id;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue IS
    'Enqueue a job from any language, in the caller''s transaction. Returns its id, or that of the job that has its key. SET pgqueue.notify = off for two-phase commit.';

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (4, 'unique', false);

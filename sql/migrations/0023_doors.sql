-- breaking: no
--
-- What a role that only enqueues may write: no id, no time, no position, no hold, and no other lane than the one of its priority. It takes
-- unique keys by a function that inserts the jobs with them, and has no right on the table of keys.
--
-- - Roles keep the rights that they have: applications of the version before name these columns. `pgqueue grants` gives fewer from now
--   on; docs/operations.md says how to take the others back.
-- - What workers and applications of the version before call is there as before.


-- The lane of a job ------------------------------------------------------------------------------------------------------------------

-- Whether a job may have this rank, which is not that of its priority. The front, and the lanes of poison jobs, are for jobs that had been
-- taken, or hold a key. No column tells a job that was given back before it started: there it counts whether the inserting role may say
-- what a job holds, as only workers and operators may. 11 is the default; `put_in_lane` sees to it.
--
-- A check has the search_path of the session that inserts. So each operator and function has its full name.
CREATE FUNCTION pgqueue.rank_can_be(
    rank smallint, priority smallint, attempt smallint, crashes smallint, snoozes smallint, holds boolean
) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN rank OPERATOR(pg_catalog.=) 11
        OR (rank OPERATOR(pg_catalog.<) 0 OR rank OPERATOR(pg_catalog./) 2 OPERATOR(pg_catalog.=) priority)
        AND (holds OR attempt OPERATOR(pg_catalog.>) 0 OR crashes OPERATOR(pg_catalog.>) 0 OR snoozes OPERATOR(pg_catalog.>) 0
             OR pg_catalog.has_column_privilege(
                 'pgqueue.job_available'::pg_catalog.text, 'holds'::pg_catalog.text, 'INSERT'::pg_catalog.text));
END $$;
COMMENT ON FUNCTION pgqueue.rank_can_be IS 'For checks: a lane beside that of the priority is for jobs that had been taken.';

-- NOT VALID: what is there was let in by the same rules, or wider ones.
ALTER TABLE pgqueue.job_available
    DROP CONSTRAINT job_available_is_ready,
    ADD CONSTRAINT job_available_is_ready CHECK (
        priority BETWEEN 0 AND 9 AND pos > 0 AND octet_length(queue) BETWEEN 1 AND 40
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND (rank = 2 * priority + 1 OR pgqueue.rank_can_be(rank, priority, attempt, crashes, snoozes, holds))
        AND (run_at IS NULL OR pgqueue.is_due(run_at))
        AND (lock_key IS NULL AND limit_key IS NULL AND rate_key IS NULL
             OR pgqueue.keys_can_be(lock_key, lock_limit, on_locked, limit_key, rate_key))) NOT VALID;

-- A plain INSERT names a priority, and knows nothing of lanes. Its row is written once more, in its lane, by the same transaction and with
-- the same position. A scheduled job needs none of this: its lane is worked out when it is due.
--
-- The condition of the trigger holds for no row of our own statements. AFTER: a trigger before the insert would take the batches of COPY.
CREATE FUNCTION pgqueue.put_in_lane() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF TG_RELID <> 'pgqueue.job_available'::regclass THEN
        RAISE EXCEPTION 'pgqueue: put_in_lane is the trigger of pgqueue.job_available, and of no other table'
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    DELETE FROM pgqueue.job_available j WHERE j.id = NEW.id AND j.rank = NEW.rank;
    IF FOUND THEN
        NEW.rank := 2 * NEW.priority + 1;
        INSERT INTO pgqueue.job_available VALUES (NEW.*);
    END IF;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION pgqueue.put_in_lane IS 'The lane of a job whose INSERT named a priority and no rank.';
CREATE TRIGGER put_in_lane AFTER INSERT ON pgqueue.job_available
    FOR EACH ROW WHEN (NEW.rank = 11 AND NEW.priority <> 5) EXECUTE FUNCTION pgqueue.put_in_lane();


-- Unique keys ------------------------------------------------------------------------------------------------------------------------
--
-- A role that enqueues has no right on the table of keys. One function takes the keys and inserts the jobs, as the owner of the schema.
-- One that could write a key without a job could keep a job of others from being enqueued for ever.
--
-- What runs as the owner must run nothing of its caller's:
-- - The search_path ends in pg_temp. With '' PostgreSQL looks into pg_temp first, and a domain there runs the caller's code as the owner.
-- - What it calls has the same path, its own or by being called from here.
-- - A trigger of the application on a table of jobs runs as the owner, too, with this path. Only the owner can have made it.

-- A job to be, as an application says it. Statements of the version before name the attributes that there are, so there can be no further
-- ones: another column takes another type.
CREATE TYPE pgqueue.keyed_job AS (
    task            text,
    args            jsonb,
    queue           text,
    priority        smallint,
    headers         jsonb,
    max_attempts    smallint,
    run_at          timestamptz,
    deadline        timestamptz,
    lock_key        text,
    lock_limit      integer,
    on_locked       text,
    limit_key       text,
    rate_key        text,
    unique_key      text,
    idempotency_key text,
    -- For the unique key: `pending`, `live` or `after`, and then for so many seconds.
    hold            text,
    hold_seconds    double precision,
    -- Whether the job that has the key is to be written anew, if it has never started.
    replaces        boolean
);
COMMENT ON TYPE pgqueue.keyed_job IS 'A new job of which some have unique keys: for enqueue_keyed.';

-- Insert those of these jobs that get all of their unique keys, or have none. A row for each job, in their order: its id and the channel
-- that is to hear of it; or, without these, a key that another job has, that job, when it was enqueued, and whether it has never started.
--
-- The keys name the id and the time of a job, so both are made here, before the keys are taken. See `take_all_keys` for the order of locks.
CREATE FUNCTION pgqueue.put_keyed(jobs pgqueue.keyed_job[]) RETURNS TABLE (
    place bigint, task text, id bigint, heard text, key text, holder bigint, holder_since timestamptz, waits boolean
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    job pgqueue.keyed_job;
    job_id bigint;
    since timestamptz;
BEGIN
    IF cardinality(jobs) = 1 THEN -- the usual call; a batch of one would cost a third more
        job := jobs[1];
        job_id := nextval('pgqueue.job_id_seq');
        since := pgqueue.now();
        place := 1;
        task := job.task;
        IF job.unique_key IS NOT NULL OR job.idempotency_key IS NOT NULL THEN
            SELECT taken.key, taken.holder, taken.holder_since, taken.waits INTO key, holder, holder_since, waits
            FROM pgqueue.take_all_keys(ARRAY[job.idempotency_key], ARRAY[job.unique_key], ARRAY[job.hold], ARRAY[job.hold_seconds],
                                       ARRAY[job_id], ARRAY[since], ARRAY[job.replaces]) AS taken;
        END IF;
        IF holder IS NULL THEN
            INSERT INTO pgqueue.job (
                id, enqueued_at, state, rank, task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit,
                on_locked, limit_key, rate_key, unique_key, idempotency_key)
            VALUES (job_id, since, CASE WHEN job.run_at > since THEN 'scheduled' ELSE 'available' END, 2 * job.priority + 1,
                job.task, job.args, job.queue, job.priority, job.headers, job.max_attempts, job.run_at, job.deadline, job.lock_key,
                job.lock_limit, job.on_locked, job.limit_key, job.rate_key, job.unique_key, job.idempotency_key)
            RETURNING id, CASE state WHEN 'available' THEN queue::text ELSE ':scheduled' END INTO id, heard;
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT job.*, nextval('pgqueue.job_id_seq') AS id, pgqueue.now() AS enqueued_at
        FROM unnest(jobs) WITH ORDINALITY AS job (
            task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit, on_locked, limit_key, rate_key,
            unique_key, idempotency_key, hold, hold_seconds, replaces, place)
    ), keyed AS MATERIALIZED (
        SELECT array_agg(a.idempotency_key) AS idempotency_keys, array_agg(a.unique_key) AS unique_keys, array_agg(a.hold) AS holds,
            array_agg(a.hold_seconds) AS seconds, array_agg(a.id) AS ids, array_agg(a.enqueued_at) AS since, array_agg(a.replaces) AS replaces
        FROM asked a WHERE a.unique_key IS NOT NULL OR a.idempotency_key IS NOT NULL
    ), lost AS MATERIALIZED (
        SELECT taken.* FROM keyed k CROSS JOIN LATERAL pgqueue.take_all_keys(
            k.idempotency_keys, k.unique_keys, k.holds, k.seconds, k.ids, k.since, k.replaces) AS taken
    ), judged AS MATERIALIZED (
        SELECT a.*, lost.key AS lost_key, lost.holder, lost.holder_since, lost.waits
        FROM asked a LEFT JOIN lost ON lost.job_id = a.id
    ), added AS (
        INSERT INTO pgqueue.job (
            id, enqueued_at, state, rank, task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit,
            on_locked, limit_key, rate_key, unique_key, idempotency_key)
        SELECT j.id, j.enqueued_at, CASE WHEN j.run_at > pgqueue.now() THEN 'scheduled' ELSE 'available' END, 2 * j.priority + 1,
            j.task, j.args, j.queue, j.priority, j.headers, j.max_attempts, j.run_at, j.deadline, j.lock_key, j.lock_limit,
            j.on_locked, j.limit_key, j.rate_key, j.unique_key, j.idempotency_key
        FROM judged j WHERE j.holder IS NULL ORDER BY j.place
        RETURNING id, CASE state WHEN 'available' THEN queue::text ELSE ':scheduled' END AS heard
    )
    SELECT j.place, j.task, CASE WHEN j.holder IS NULL THEN j.id END, added.heard, j.lost_key, j.holder, j.holder_since, j.waits
    FROM judged j LEFT JOIN added ON added.id = j.id
    ORDER BY j.place;
END $$;
COMMENT ON FUNCTION pgqueue.put_keyed IS 'The body of enqueue_keyed and enqueue_replacing: for no other caller.';

-- The door for unique keys: `put_keyed` as the owner, for roles that have no right on the table of keys. What it is given comes from
-- a stranger. It checks what no table does.
CREATE FUNCTION pgqueue.enqueue_keyed(jobs pgqueue.keyed_job[]) RETURNS TABLE (
    place bigint, task text, id bigint, heard text, key text, holder bigint, holder_since timestamptz, waits boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM unnest(jobs) AS job WHERE job.replaces) THEN
        RAISE EXCEPTION 'pgqueue.enqueue_keyed replaces no job' USING ERRCODE = 'insufficient_privilege',
            HINT = 'A role that may replace jobs calls pgqueue.enqueue_replacing; see `pgqueue grants --for operate`.';
    END IF;
    PERFORM pgqueue.check_keys(jobs);
    RETURN QUERY SELECT * FROM pgqueue.put_keyed(jobs);
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_keyed IS
    'Enqueue jobs with unique keys: part of an enqueue of pgqueue''s own. From SQL call pgqueue.enqueue.';

-- The same for roles that may move jobs that wait: a job that is to be replaced is locked, so that it does not start meanwhile.
CREATE FUNCTION pgqueue.enqueue_replacing(jobs pgqueue.keyed_job[]) RETURNS TABLE (
    place bigint, task text, id bigint, heard text, key text, holder bigint, holder_since timestamptz, waits boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pgqueue.check_keys(jobs);
    RETURN QUERY SELECT * FROM pgqueue.put_keyed(jobs);
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_replacing IS
    'Enqueue jobs with unique keys that replace jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Raise if a job has a unique key that cannot be, or would hold it for longer than a time can be.
CREATE FUNCTION pgqueue.check_keys(jobs pgqueue.keyed_job[]) RETURNS void LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wrong record;
BEGIN
    SELECT job.unique_key, job.idempotency_key, job.hold, job.hold_seconds INTO wrong FROM unnest(jobs) AS job
    WHERE octet_length(job.unique_key) NOT BETWEEN 1 AND 500 OR octet_length(job.idempotency_key) NOT BETWEEN 1 AND 500
       OR job.unique_key IS NOT NULL AND (
           job.hold IN ('pending', 'live', 'after') IS NOT TRUE OR job.hold_seconds BETWEEN 0 AND 3153600000 IS FALSE)
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'pgqueue: a unique key has 1 to 500 bytes; it is held pending, live, or after its job for 0 seconds to 100 years'
            USING ERRCODE = 'invalid_parameter_value',
                  DETAIL = format('The keys have %s and %s bytes; hold is %L, for %s seconds.', octet_length(wrong.unique_key),
                                  octet_length(wrong.idempotency_key), left(wrong.hold, 80), wrong.hold_seconds);
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.check_keys IS 'What enqueue_keyed is given: part of an enqueue of pgqueue''s own, not to be called by others.';

-- What they call resolves its names alike. Until now pg_temp came first.
ALTER FUNCTION pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, boolean, bigint[])
    SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION pgqueue.take_keys(text, text, text, double precision, bigint, bigint[]) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION pgqueue.take_many_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[])
    SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION pgqueue.key_states(text[]) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION pgqueue.keep_waiting(bigint[], timestamptz[], boolean[], text) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION pgqueue.judge_keys(text[], text[]) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION pgqueue.take_back(bigint[]) SET search_path = pg_catalog, pg_temp;
-- The SQL function of 0018. It does all with the rights of its caller, but for unique keys.
CREATE OR REPLACE FUNCTION pgqueue.enqueue(
    task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL, deadline timestamptz DEFAULT NULL,
    lock_key text DEFAULT NULL, unique_key text DEFAULT NULL, idempotency_key text DEFAULT NULL,
    lock_limit integer DEFAULT NULL, on_locked text DEFAULT NULL, limit_key text DEFAULT NULL, rate_key text DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    new_id bigint;
    holder bigint;
    due boolean := enqueue.run_at IS NULL OR enqueue.run_at <= pgqueue.now();
    heard text := CASE WHEN due THEN coalesce(enqueue.queue, 'default') ELSE ':scheduled' END;
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
    IF octet_length(enqueue.args::text) > 1048576 OR octet_length(enqueue.headers::text) > 1048576 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args have % bytes and headers %, the limit is 1048576 each', octet_length(enqueue.args::text),
            coalesce(octet_length(enqueue.headers::text), 0)
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

    IF enqueue.lock_limit < 1 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: lock_limit % lets no job run, use 1 or more', enqueue.lock_limit
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.on_locked NOT IN ('wait', 'skip', 'once') THEN
        RAISE EXCEPTION 'pgqueue.enqueue: on_locked is %, use wait, skip or once', quote_literal(left(enqueue.on_locked, 80))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.limit_key !~ '^[^[:space:][:cntrl:]]+$' OR octet_length(enqueue.limit_key) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: limit_key % is not the name of a limit', quote_literal(left(enqueue.limit_key, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 200 bytes without spaces, such as warehouse.';
    END IF;
    -- Up to the first colon it is a name; behind that whatever a key may be, but not nothing.
    IF split_part(enqueue.rate_key, ':', 1) !~ '^[^[:space:][:cntrl:]]+$'
        OR octet_length(split_part(enqueue.rate_key, ':', 1)) > 200 OR strpos(enqueue.rate_key, ':') = length(enqueue.rate_key)
        OR octet_length(enqueue.rate_key) > 500 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: rate_key % is not the name of a rate, with or without a key',
            quote_literal(left(enqueue.rate_key, 80))
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Use a name of 1 to 200 bytes without spaces, such as mail, or name:key, such as crm:customer:7, of up to 500.';
    END IF;

    IF enqueue.unique_key IS NOT NULL OR enqueue.idempotency_key IS NOT NULL THEN
        SELECT put.id, put.holder, put.heard INTO new_id, holder, heard
        FROM pgqueue.enqueue_keyed(ARRAY[ROW(
            enqueue.task, enqueue.args, coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), enqueue.headers, NULL,
            enqueue.run_at, enqueue.deadline, enqueue.lock_key, CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.lock_limit END,
            CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.on_locked END, enqueue.limit_key, enqueue.rate_key,
            enqueue.unique_key, enqueue.idempotency_key, 'live', 0, false)::pgqueue.keyed_job]) AS put;
        IF holder IS NOT NULL THEN
            RETURN holder;
        END IF;
    -- A column that is named in an INSERT needs its right: a role that was granted before there were limits enqueues as ever.
    ELSIF enqueue.limit_key IS NOT NULL OR enqueue.rate_key IS NOT NULL
        OR enqueue.lock_key IS NOT NULL AND (enqueue.lock_limit IS NOT NULL OR enqueue.on_locked IS NOT NULL) THEN
        INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key, lock_limit, on_locked,
                                 limit_key, rate_key)
        VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.lock_limit END,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.on_locked END, enqueue.limit_key, enqueue.rate_key)
        RETURNING id INTO new_id;
    ELSE
        INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key)
        VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key)
        RETURNING id INTO new_id;
    END IF;

    -- If the server's NOTIFY queue is full, a transaction that notifies fails at its COMMIT, the application's too (see `may_notify`).
    IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' AND pg_notification_queue_usage() < 0.9 THEN
        PERFORM pg_notify('pgqueue.' || heard, '');
    END IF;
    RETURN new_id;
END $$;


-- Waiters ----------------------------------------------------------------------------------------------------------------------------
--
-- A role that enqueues may say that it waits for a job, and take that back. It cannot end the waits of others.

-- No default: no row is rewritten. NULL: a wait of the version before.
ALTER TABLE pgqueue.job_waiter ADD COLUMN pid integer;

-- This session waits for the end of the job. Answers the number of its row.
CREATE FUNCTION pgqueue.begin_wait(job_id bigint) RETURNS bigint LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO pgqueue.job_waiter (job_id, pid) VALUES (begin_wait.job_id, pg_backend_pid()) RETURNING waiter
$$;
COMMENT ON FUNCTION pgqueue.begin_wait IS 'Part of a wait for the end of a job: for no other caller.';

-- This session no longer waits, or one that has ended: a wait goes on with another session when its own breaks. The row of another session
-- stays.
CREATE FUNCTION pgqueue.leave_wait(waiter bigint) RETURNS void LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM pgqueue.job_waiter w
    WHERE w.waiter = leave_wait.waiter AND (w.pid = pg_backend_pid() OR NOT EXISTS (SELECT FROM pg_stat_get_activity(w.pid)))
$$;
COMMENT ON FUNCTION pgqueue.leave_wait IS 'Part of a wait for the end of a job: for no other caller.';


-- Rights -----------------------------------------------------------------------------------------------------------------------------

-- Owned by the owner of the tables, whichever role applies this. A check runs as the role that inserts, so each role that enqueues, works
-- or operates needs its function. No role but the owner may make a trigger of `put_in_lane`: it does what it does as the owner.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    model regprocedure := 'pgqueue.is_due(timestamptz)';
    checks regprocedure := 'pgqueue.rank_can_be(smallint, smallint, smallint, smallint, smallint, boolean)';
    made regprocedure;
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', checks, tables);
    EXECUTE format('ALTER FUNCTION pgqueue.put_in_lane() OWNER TO %I', tables);
    REVOKE ALL ON FUNCTION pgqueue.put_in_lane() FROM PUBLIC;
    IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = model) THEN
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', checks);
    END IF;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        WHERE p.oid = model AND a.grantee <> p.proowner GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', checks, allowed.role, allowed.too);
    END LOOP;

    -- Unique keys: the doors act as the owner, so they are for roles that could take keys so far, and not for PUBLIC. The body and what it
    -- is given are the owner's.
    EXECUTE format('ALTER TYPE pgqueue.keyed_job OWNER TO %I', tables);
    FOREACH made IN ARRAY ARRAY[
        'pgqueue.put_keyed(pgqueue.keyed_job[])', 'pgqueue.check_keys(pgqueue.keyed_job[])',
        'pgqueue.enqueue_keyed(pgqueue.keyed_job[])', 'pgqueue.enqueue_replacing(pgqueue.keyed_job[])']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, tables);
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
    FOR allowed IN
        SELECT quote_ident(pg_get_userbyid(a.grantee)) AS role, CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM (
            SELECT a.* FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a WHERE c.oid = 'pgqueue.job'::regclass
            UNION ALL
            SELECT a.* FROM pg_attribute c CROSS JOIN LATERAL aclexplode(c.attacl) AS a
            WHERE c.attrelid = 'pgqueue.job'::regclass AND c.attname = 'unique_key'
        ) AS a
        WHERE a.privilege_type = 'INSERT' AND a.grantee NOT IN (0, (SELECT relowner FROM pg_class WHERE oid = 'pgqueue.job'::regclass))
        GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT USAGE ON TYPE pgqueue.keyed_job TO %s %s', allowed.role, allowed.too);
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.enqueue_keyed(pgqueue.keyed_job[]), '
                       'pgqueue.enqueue_replacing(pgqueue.keyed_job[]) TO %s %s', allowed.role, allowed.too);
    END LOOP;

    -- What a worker calls before its first claim acts as the owner, too: for workers only.
    REVOKE ALL ON FUNCTION pgqueue.restore_settings() FROM PUBLIC;
    FOR allowed IN
        SELECT quote_ident(pg_get_userbyid(a.grantee)) AS role, CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.worker'::regclass AND a.privilege_type = 'INSERT' AND a.grantee NOT IN (0, c.relowner) GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.restore_settings() TO %s %s', allowed.role, allowed.too);
    END LOOP;

    -- Waits: for roles that could write such rows so far.
    FOREACH made IN ARRAY ARRAY['pgqueue.begin_wait(bigint)', 'pgqueue.leave_wait(bigint)']::regprocedure[] LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, tables);
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
        FOR allowed IN
            SELECT quote_ident(pg_get_userbyid(a.grantee)) AS role,
                   CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
            FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
            WHERE c.oid = 'pgqueue.job_waiter'::regclass AND a.privilege_type = 'INSERT' AND a.grantee NOT IN (0, c.relowner)
            GROUP BY a.grantee
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', made, allowed.role, allowed.too);
        END LOOP;
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (23, 'doors', false);

-- breaking: no
--
-- An id is not an identity for ever. After TRUNCATE … RESTART IDENTITY, a restored dump or a switchover to a server whose sequences
-- lag, an id is given again. So a job is named by its id and the time it was enqueued: a row of a table beside `job` that names a
-- job belongs to it only if both agree. A row without a time was written by the version before; its id decides.
--
-- The order of locks, for every statement that waits for one:
--
-- 1. unique keys, in the order of their bytes;
-- 2. then jobs that wait or have ended, in the order of their ids, whatever partition they are in.
--
-- Two transactions that lock in this order cannot wait for each other. A few statements do not: docs/design/database.md names them. What
-- workers do waits for no job: it passes over a locked row.

-- New columns without a default: no table is rewritten or read.
ALTER TABLE pgqueue.job_cursor ADD COLUMN enqueued_at timestamptz;
ALTER TABLE pgqueue.job_signal ADD COLUMN enqueued_at timestamptz;
ALTER TABLE pgqueue.job_waiter ADD COLUMN enqueued_at timestamptz;
ALTER TABLE pgqueue.unique_key ADD COLUMN enqueued_at timestamptz;
-- A snooze spends no attempt. So (job, attempt, worker) names no single run, and (job, worker, claim) does.
ALTER TABLE pgqueue.attempt ADD COLUMN enqueued_at timestamptz, ADD COLUMN claim integer;


-- Unique keys --------------------------------------------------------------------------------------------------------

-- What a key is to a job that wants it (see 0004); the job that has it is found by id and time.
CREATE OR REPLACE FUNCTION pgqueue.key_state(k pgqueue.unique_key) RETURNS text LANGUAGE sql STABLE
    RETURN CASE (SELECT j.state <> 'running' AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
                 FROM pgqueue.job j
                 WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at IS NOT FALSE
                   AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1)
        WHEN true THEN 'waiting'
        WHEN false THEN CASE k.hold WHEN 'pending' THEN 'free' ELSE 'held' END
        ELSE CASE WHEN k.hold = 'after' AND coalesce(k.expires_at, (
                      SELECT max(j.finished_at) + make_interval(secs => k.seconds) FROM pgqueue.job j
                      WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at IS NOT FALSE
                        AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))) > pgqueue.now()
                  THEN 'held' ELSE 'free' END END;

-- Take one or both of these keys for a job that is about to be inserted by this transaction, or neither. The job is `for_job`, enqueued at
-- `since`. Answers the job that has the keys: `for_job`, or the holder.
--
-- `hold` NULL: as this job held it before, else while it lives. A key that was taken for one of `others`, which this statement is about to
-- insert or to move, is not free. `keep`: if a job has the key only until it starts, lock that job, so that it starts after our COMMIT.
-- Waits for a transaction that is just taking the same key, 5 s at most if the session has no lock_timeout.
CREATE FUNCTION pgqueue.take_keys(
    idempotency_key text, unique_key text, hold text, seconds double precision, for_job bigint, since timestamptz,
    others bigint[] DEFAULT NULL, others_since timestamptz[] DEFAULT NULL, keep boolean DEFAULT true
) RETURNS bigint LANGUAGE plpgsql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
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
            FROM pgqueue.unique_key k WHERE k.key = wanted AND k.job_id = for_job AND k.enqueued_at = since IS NOT FALSE;
        END IF;
        LOOP
            INSERT INTO pgqueue.unique_key AS k (key, job_id, hold, seconds, enqueued_at)
            VALUES (wanted, for_job, keeps, afterwards, since) ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;
            -- A statement of its own: it sees what has been committed while the one before waited.
            SELECT k.job_id, k.enqueued_at, k.expires_at, k.hold, k.xmin AS version, pgqueue.key_state(k) AS state INTO holder
            FROM pgqueue.unique_key k WHERE k.key = wanted;
            IF holder.job_id = for_job AND holder.enqueued_at = since IS NOT FALSE THEN
                -- Its own from before, kept as it is but for its end; written, so that it is not removed as a leftover.
                UPDATE pgqueue.unique_key k SET expires_at = NULL WHERE k.key = wanted AND k.xmin = holder.version;
                CONTINUE WHEN NOT FOUND;
                IF wanted LIKE 'idempotency:%' THEN
                    had := true;
                    had_until := holder.expires_at;
                END IF;
                EXIT;
            END IF;
            IF holder.state IN ('waiting', 'held') OR EXISTS (
                SELECT FROM unnest(others, others_since) AS o (id, since)
                WHERE o.id = holder.job_id AND o.since = holder.enqueued_at IS NOT FALSE
            ) THEN
                IF keep AND holder.state = 'waiting' AND holder.hold = 'pending' THEN
                    -- It must not start before we commit: it is to see what we have written.
                    PERFORM FROM pgqueue.job j
                    WHERE j.id = holder.job_id AND holder.enqueued_at = j.enqueued_at IS NOT FALSE
                      AND j.state IN ('available', 'scheduled', 'blocked')
                    FOR KEY SHARE;
                    CONTINUE WHEN NOT FOUND;
                END IF;
                -- Neither of them, then: the first is as it was.
                IF had THEN
                    UPDATE pgqueue.unique_key k SET expires_at = had_until
                    WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job;
                ELSE
                    DELETE FROM pgqueue.unique_key k
                    WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job
                      AND k.enqueued_at = since IS NOT FALSE AND k.key <> wanted;
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
COMMENT ON FUNCTION pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, bigint[], timestamptz[], boolean) IS
    'Take the unique keys of one job: part of an enqueue of pgqueue''s own, not to be called by others.';

-- As called by the version before, which knows no time of its job.
CREATE OR REPLACE FUNCTION pgqueue.take_keys(
    idempotency_key text, unique_key text, hold text, seconds double precision, for_job bigint, others bigint[] DEFAULT NULL
) RETURNS bigint LANGUAGE sql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
    SELECT pgqueue.take_keys(idempotency_key, unique_key, hold, seconds, for_job, NULL::timestamptz, others)
$$;

-- Take the keys of many jobs that are about to be inserted by this transaction, as `take_keys` does for one; of jobs without a
-- key none. Answers for each job which has its keys: itself, or the holder. First all keys are taken, in their order. Then the jobs that
-- must not start before our COMMIT are locked, in the order of their ids. If one of these has moved meanwhile, all begins anew.
CREATE FUNCTION pgqueue.take_all_keys(
    idempotency_keys text[], unique_keys text[], holds text[], seconds double precision[], ids bigint[], since timestamptz[]
) RETURNS TABLE (job_id bigint, holder bigint) LANGUAGE plpgsql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    places integer[] := ARRAY(SELECT generate_subscripts(ids, 1));
    holders bigint[] := ids;
    place integer;
    moved bigint;
BEGIN
    WHILE cardinality(places) > 0 LOOP
        <<attempt>>
        BEGIN
            FOR place IN
                SELECT p.place FROM unnest(places) AS p (place)
                ORDER BY coalesce('idempotency:' || idempotency_keys[p.place], 'unique:' || unique_keys[p.place]) COLLATE "C", p.place
            LOOP
                holders[place] := pgqueue.take_keys(
                    idempotency_keys[place], unique_keys[place], holds[place], seconds[place], ids[place], since[place], ids, since, false);
            END LOOP;
            WITH lost AS MATERIALIZED (
                -- Of the key on which a job lost, the first in their order: its holder may have another one, as a leftover.
                SELECT p.place, k.job_id AS id, k.enqueued_at
                FROM unnest(places) AS p (place) CROSS JOIN LATERAL (
                    SELECT k.job_id, k.enqueued_at, k.hold FROM pgqueue.unique_key k
                    WHERE k.key IN ('idempotency:' || idempotency_keys[p.place], 'unique:' || unique_keys[p.place])
                      AND k.job_id = holders[p.place]
                      AND NOT EXISTS (SELECT FROM unnest(ids, since) AS o (id, since)
                                      WHERE o.id = k.job_id AND o.since = k.enqueued_at IS NOT FALSE)
                    ORDER BY k.key COLLATE "C" LIMIT 1
                ) AS k
                WHERE k.hold = 'pending'
            ), kept AS MATERIALIZED (
                SELECT j.id FROM (SELECT DISTINCT lost.id, lost.enqueued_at FROM lost ORDER BY lost.id, lost.enqueued_at) AS asked
                CROSS JOIN LATERAL (
                    SELECT j.id FROM pgqueue.job j
                    WHERE j.id = asked.id AND asked.enqueued_at = j.enqueued_at IS NOT FALSE
                      AND j.state IN ('available', 'scheduled', 'blocked')
                    LIMIT 1 FOR KEY SHARE
                ) AS j
            )
            SELECT count(*) INTO moved FROM lost WHERE lost.id <> ALL (ARRAY(SELECT kept.id FROM kept));
            EXIT WHEN moved = 0;
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            NULL;  -- With this block its keys and its locks are gone (see `key_holders`): all begins anew, in order.
        END attempt;
    END LOOP;
    RETURN QUERY SELECT * FROM unnest(ids, holders);
END $$;
COMMENT ON FUNCTION pgqueue.take_all_keys IS
    'Take the unique keys of many jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Of keys that were not free: which job holds each, in the snapshot of one statement; a leftover is removed. As a JSON array, for each that
-- is held: the key, the job, when that was enqueued, and whether it has never started.
--
-- A job that is to be replaced is locked for that. One that has the key only until it starts is kept from starting until this
-- transaction ends, for it is to see what this transaction has written. All of these are locked in one walk: if one was being moved,
-- the locks are given up, and all begins anew. Waits for a transaction that is just taking the same key, 5 s at most if the session has
-- no lock_timeout.
CREATE FUNCTION pgqueue.key_holders(keys text[], replaced text[]) RETURNS text LANGUAGE plpgsql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    patience text := current_setting('lock_timeout');
    answer text;
    moved bigint;
BEGIN
    LOOP
        <<attempt>>
        BEGIN
            -- Set by the statement itself: a wait for a table (for DDL, say) comes before it, and is no longer than the session has said.
            WITH patient AS MATERIALIZED (
                SELECT set_config('lock_timeout', CASE patience WHEN '0' THEN '5s' ELSE patience END, true)
            ), seen AS MATERIALIZED (
                -- What `key_state` says, without a call for each: 10,000 duplicates in 0.2 s instead of 2.6.
                SELECT k.key, k.job_id, coalesce(j.enqueued_at, k.enqueued_at) AS enqueued_at, k.hold, k.version,
                    k.key = ANY (key_holders.replaced) AS replaced,
                    CASE
                        WHEN j.fresh THEN 'waiting'
                        WHEN NOT j.fresh THEN CASE k.hold WHEN 'pending' THEN 'free' ELSE 'held' END
                        WHEN k.hold = 'after' AND coalesce(k.expires_at, (
                                 SELECT max(j.finished_at) + make_interval(secs => k.seconds) FROM pgqueue.job j
                                 WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at IS NOT FALSE
                                   AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))) > pgqueue.now()
                             THEN 'held'
                        ELSE 'free' END AS state
                FROM patient CROSS JOIN (SELECT DISTINCT a.key FROM unnest(key_holders.keys) AS a (key)) AS asked
                CROSS JOIN LATERAL (
                    SELECT k.key, k.job_id, k.enqueued_at, k.hold, k.seconds, k.expires_at, k.xmin AS version
                    FROM pgqueue.unique_key k WHERE k.key = asked.key LIMIT 1
                ) AS k
                LEFT JOIN LATERAL (
                    SELECT j.enqueued_at, j.state <> 'running' AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0 AS fresh
                    FROM pgqueue.job j
                    WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at IS NOT FALSE
                      AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1
                ) AS j ON true
            ), leftover AS MATERIALIZED (
                -- Locked in the order of the keys; one that was written anew meanwhile is no leftover.
                SELECT k.ctid FROM (SELECT seen.key, seen.version FROM seen WHERE seen.state = 'free' ORDER BY seen.key COLLATE "C") AS free
                CROSS JOIN LATERAL (
                    SELECT k.ctid FROM pgqueue.unique_key k WHERE k.key = free.key AND k.xmin = free.version LIMIT 1 FOR UPDATE
                ) AS k
            ), removed AS (
                DELETE FROM pgqueue.unique_key k WHERE k.ctid = ANY (ARRAY(SELECT leftover.ctid FROM leftover))
            ), wanted AS MATERIALIZED (
                SELECT seen.job_id, seen.enqueued_at, bool_or(seen.replaced) AS replaced
                FROM (SELECT count(*) FROM leftover) AS first CROSS JOIN seen
                WHERE seen.state = 'waiting' AND (seen.hold = 'pending' OR seen.replaced)
                GROUP BY seen.job_id, seen.enqueued_at ORDER BY seen.job_id
            ), kept AS MATERIALIZED (
                -- After the keys, in the order of the ids, each as strongly as is needed: a lock that is made stronger later can deadlock.
                SELECT j.id FROM wanted AS asked
                CROSS JOIN LATERAL (
                    SELECT l.id FROM (
                        SELECT j.id FROM pgqueue.job j
                        WHERE asked.replaced AND j.id = asked.job_id AND j.enqueued_at = asked.enqueued_at
                          AND j.state IN ('available', 'scheduled', 'blocked')
                        LIMIT 1 FOR UPDATE
                    ) AS l
                    UNION ALL
                    SELECT l.id FROM (
                        SELECT j.id FROM pgqueue.job j
                        WHERE NOT asked.replaced AND j.id = asked.job_id AND j.enqueued_at = asked.enqueued_at
                          AND j.state IN ('available', 'scheduled', 'blocked')
                        LIMIT 1 FOR KEY SHARE
                    ) AS l
                ) AS j
            )
            SELECT coalesce(json_agg(json_build_array(seen.key, seen.job_id, seen.enqueued_at, seen.state = 'waiting')), '[]'),
                (SELECT count(*) FROM wanted) - (SELECT count(*) FROM kept)
            INTO answer, moved
            FROM seen WHERE seen.state IN ('held', 'waiting');
            EXIT WHEN moved = 0;
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            NULL;  -- With this block its locks are gone. So no lock of a lower id follows one of a higher id.
        END attempt;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);
    RETURN answer;
END $$;
COMMENT ON FUNCTION pgqueue.key_holders IS
    'Which jobs hold these unique keys: part of an enqueue of pgqueue''s own, not to be called by others.';

-- As called by the version before, which hears of no time.
CREATE OR REPLACE FUNCTION pgqueue.judge_keys(keys text[], replaced text[]) RETURNS text LANGUAGE sql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
    SELECT coalesce(json_agg(json_build_array(held -> 0, held -> 1, held -> 3)), '[]')::text
    FROM json_array_elements(pgqueue.key_holders(keys, replaced)::json) AS held
$$;

-- Take back those of these jobs that have never started, so that this transaction may write them anew. `since`: when each was
-- enqueued; NULL stands for any time. Waits for a transaction that has locked one, as `key_holders` does; locks in the order of the ids.
-- `was_due`: its time had come. Others are on the move, or have started.
CREATE FUNCTION pgqueue.take_back(ids bigint[], since timestamptz[]) RETURNS TABLE (
    id bigint, enqueued_at timestamptz, unique_key text, idempotency_key text, holds boolean, was_due boolean
) LANGUAGE plpgsql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    patience text := current_setting('lock_timeout');
BEGIN
    RETURN QUERY
    WITH patient AS MATERIALIZED (
        SELECT set_config('lock_timeout', CASE patience WHEN '0' THEN '5s' ELSE patience END, true)
    ), asked AS MATERIALIZED (
        SELECT DISTINCT a.id, a.since FROM patient CROSS JOIN unnest(take_back.ids, take_back.since) AS a (id, since)
        ORDER BY a.id, a.since
    ), found AS MATERIALIZED (
        SELECT j.part, j.ctid FROM asked CROSS JOIN LATERAL (
            SELECT j.tableoid AS part, j.ctid FROM pgqueue.job j
            WHERE j.id = asked.id AND asked.since = j.enqueued_at IS NOT FALSE
              AND j.state IN ('available', 'scheduled', 'blocked') AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
            LIMIT 1 FOR UPDATE) AS j
    ), from_available AS (
        DELETE FROM pgqueue.job_available j
        WHERE j.ctid = ANY (ARRAY(SELECT found.ctid FROM found WHERE found.part = 'pgqueue.job_available'::regclass))
        RETURNING j.id, j.enqueued_at, j.unique_key, j.idempotency_key, j.holds, true
    ), from_scheduled AS (
        DELETE FROM pgqueue.job_scheduled j
        WHERE j.ctid = ANY (ARRAY(SELECT found.ctid FROM found WHERE found.part = 'pgqueue.job_scheduled'::regclass))
        RETURNING j.id, j.enqueued_at, j.unique_key, j.idempotency_key, j.holds, false
    ), from_blocked AS (
        DELETE FROM pgqueue.job_blocked j
        WHERE j.ctid = ANY (ARRAY(SELECT found.ctid FROM found WHERE found.part = 'pgqueue.job_blocked'::regclass))
        RETURNING j.id, j.enqueued_at, j.unique_key, j.idempotency_key, j.holds, true
    )
    TABLE from_available UNION ALL TABLE from_blocked UNION ALL TABLE from_scheduled;
    PERFORM set_config('lock_timeout', patience, true);
END $$;
COMMENT ON FUNCTION pgqueue.take_back(bigint[], timestamptz[]) IS
    'Take back jobs that a duplicate replaces: part of an enqueue of pgqueue''s own, not to be called by others.';

-- As called by the version before.
CREATE OR REPLACE FUNCTION pgqueue.take_back(ids bigint[]) RETURNS TABLE (
    id bigint, enqueued_at timestamptz, unique_key text, idempotency_key text, holds boolean, was_due boolean
) LANGUAGE sql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
    SELECT * FROM pgqueue.take_back(ids, NULL)
$$;

-- The SQL function of 0009; a job with a unique key gets its time before it takes the key.
CREATE OR REPLACE FUNCTION pgqueue.enqueue(
    task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL, deadline timestamptz DEFAULT NULL,
    lock_key text DEFAULT NULL, unique_key text DEFAULT NULL, idempotency_key text DEFAULT NULL,
    lock_limit integer DEFAULT NULL, on_locked text DEFAULT NULL, limit_key text DEFAULT NULL, rate_key text DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = '' AS $$
DECLARE
    new_id bigint;
    holder bigint;
    since timestamptz := pgqueue.now();
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
        new_id := nextval('pgqueue.job_id_seq');
        holder := pgqueue.take_keys(enqueue.idempotency_key, enqueue.unique_key, 'live', 0, new_id, since);
        IF holder <> new_id THEN
            RETURN holder;
        END IF;
    END IF;
    -- A column that is named in an INSERT needs its right: a role that was granted before there were limits enqueues as ever.
    IF enqueue.limit_key IS NOT NULL OR enqueue.rate_key IS NOT NULL
        OR enqueue.lock_key IS NOT NULL AND (enqueue.lock_limit IS NOT NULL OR enqueue.on_locked IS NOT NULL) THEN
        new_id := coalesce(new_id, nextval('pgqueue.job_id_seq'));
        INSERT INTO pgqueue.job (id, enqueued_at, state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key,
                                 lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key)
        VALUES (new_id, since, CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.lock_limit END,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.on_locked END,
                enqueue.limit_key, enqueue.rate_key, enqueue.unique_key, enqueue.idempotency_key);
    ELSIF new_id IS NOT NULL THEN
        INSERT INTO pgqueue.job (id, enqueued_at, state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key,
                                 unique_key, idempotency_key)
        VALUES (new_id, since, CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key,
                enqueue.unique_key, enqueue.idempotency_key);
    ELSE
        INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key)
        VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key)
        RETURNING id INTO new_id;
    END IF;

    -- If the server's NOTIFY queue is full, a transaction that notifies fails at its COMMIT, the application's too (see `may_notify`).
    IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' AND pg_notification_queue_usage() < 0.9 THEN
        PERFORM pg_notify('pgqueue.' || CASE WHEN due THEN coalesce(enqueue.queue, 'default') ELSE ':scheduled' END, '');
    END IF;
    RETURN new_id;
END $$;


-- Sequences ----------------------------------------------------------------------------------------------------------

-- How high the numbers are that the tables have, beside what each sequence has given. Every maximum is a few steps into an index, but for
-- the holders of keys, of which there are few, and for unique keys: these are read, if `whole`.
--
-- - Positions: an index has them by queue and rank, so each of these is asked for its last.
-- - A number of 2^62 or more was never given: a row that was made by hand counts for nothing here.
CREATE FUNCTION pgqueue.lagging_sequences(whole boolean) RETURNS TABLE (sequence regclass, given bigint, highest bigint) LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    keyed bigint;
    most constant bigint := 4611686018427387904;
BEGIN
    IF whole THEN
        -- No index of unique keys has the ids; reading along the one on keys would visit the table at random.
        PERFORM set_config('enable_seqscan', 'on', true);
        keyed := (SELECT max(k.job_id) FROM pgqueue.unique_key k WHERE k.job_id < most);
        PERFORM set_config('enable_seqscan', 'off', true);
    END IF;
    RETURN QUERY
    WITH RECURSIVE lane (queue) AS (
        (SELECT j.queue FROM pgqueue.job_available j ORDER BY j.queue LIMIT 1)
        UNION ALL
        SELECT (SELECT j.queue FROM pgqueue.job_available j WHERE j.queue > lane.queue ORDER BY j.queue LIMIT 1)
        FROM lane WHERE lane.queue IS NOT NULL
    ), mark (sequence, highest) AS (
        VALUES ('pgqueue.job_id_seq', greatest(
            (SELECT max(j.id) FROM pgqueue.job_available j WHERE j.id < most),
            (SELECT max(j.id) FROM pgqueue.job_scheduled j WHERE j.id < most),
            (SELECT max(j.id) FROM pgqueue.job_blocked j WHERE j.id < most),
            (SELECT max(j.id) FROM pgqueue.job_running j WHERE j.id < most),
            (SELECT max(j.id) FROM pgqueue.job_done j WHERE j.id < most), (SELECT max(j.id) FROM pgqueue.job_dead j WHERE j.id < most),
            (SELECT max(c.job_id) FROM pgqueue.job_cursor c WHERE c.job_id < most),
            (SELECT max(s.job_id) FROM pgqueue.job_signal s WHERE s.job_id < most),
            (SELECT max(p.job_id) FROM pgqueue.job_progress p WHERE p.job_id < most),
            (SELECT max(w.job_id) FROM pgqueue.job_waiter w WHERE w.job_id < most),
            (SELECT max(a.job_id) FROM pgqueue.attempt a WHERE a.job_id < most), keyed)),
        ('pgqueue.job_pos_seq', (
            SELECT max(last.pos) FROM lane CROSS JOIN generate_series(-2, 19) AS r (rank) CROSS JOIN LATERAL (
                SELECT j.pos FROM pgqueue.job_available j
                WHERE j.queue = lane.queue AND j.rank = r.rank::smallint AND j.pos < most ORDER BY j.pos DESC LIMIT 1
            ) AS last)),
        ('pgqueue.job_hold_seq', greatest(
            (SELECT max(j.hold_pos) FROM pgqueue.job_running j WHERE j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_running j WHERE j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_available j WHERE j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_available j WHERE j.holds AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_scheduled j WHERE j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_scheduled j WHERE j.holds AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_blocked j WHERE j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_blocked j
             WHERE j.holds AND j.limit_key IS NOT NULL AND (substr(j.key, 1, 5) = 'rate:') IS TRUE))),
        ('pgqueue.worker_id_seq', greatest(
            (SELECT max(w.id) FROM pgqueue.worker w), (SELECT max(j.worker_id) FROM pgqueue.job_running j WHERE j.worker_id < most),
            (SELECT max(d.worker_id) FROM pgqueue.declaration d))),
        ('pgqueue.supervisor_id_seq', greatest(
            (SELECT max(s.id) FROM pgqueue.supervisor s), (SELECT max(w.supervisor_id) FROM pgqueue.worker w),
            (SELECT max(o.supervisor_id) FROM pgqueue.supervisor_order o))),
        ('pgqueue.supervisor_order_id_seq', (SELECT max(o.id) FROM pgqueue.supervisor_order o)),
        ('pgqueue.job_waiter_waiter_seq', (SELECT max(w.waiter) FROM pgqueue.job_waiter w))
    )
    SELECT each.sequence, each.given, each.highest FROM (
        SELECT m.sequence::regclass AS sequence, coalesce(pg_sequence_last_value(m.sequence::regclass), 0) AS given, m.highest FROM mark m
    ) AS each
    WHERE each.given < each.highest;
END $$;
COMMENT ON FUNCTION pgqueue.lagging_sequences IS 'Which sequences have given less than the tables have: after a restore, or a switchover.';

-- Advance the sequences that lag, well beyond the highest number, so that what is being enqueued meanwhile stays below. Answers which these
-- were. Any number of callers may do so at once: under one lock each looks again. A caller that set what it had read before would
-- set back what another one had advanced, and numbers would be given twice.
CREATE FUNCTION pgqueue.advance_sequences(whole boolean) RETURNS TABLE (sequence text, given bigint, highest bigint, advanced_to bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one record;
BEGIN
    IF NOT EXISTS (SELECT FROM pgqueue.lagging_sequences(whole)) THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('pgqueue.sequences', 7));
    FOR one IN SELECT * FROM pgqueue.lagging_sequences(whole) LOOP
        sequence := one.sequence;
        given := one.given;
        highest := one.highest;
        advanced_to := setval(one.sequence, one.highest + 1048576);
        RETURN NEXT;
    END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.advance_sequences IS
    'Advance the sequences that lag behind the tables. Called by `pgqueue migrate` and by each worker.';


-- Rights -------------------------------------------------------------------------------------------------------------

-- Owned by the owner of the tables, whichever role applies this. Roles that could enqueue, replace or work so far may do so now.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    model regprocedure := 'pgqueue.take_keys(text, text, text, double precision, bigint, bigint[])';
    made regprocedure;
    allowed record;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, bigint[], timestamptz[], boolean)',
        'pgqueue.take_all_keys(text[], text[], text[], double precision[], bigint[], timestamptz[])',
        'pgqueue.key_holders(text[], text[])', 'pgqueue.take_back(bigint[], timestamptz[])']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, tables);
        IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = model) THEN
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
        END IF;
        FOR allowed IN
            SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
                   CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
            FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
            WHERE p.oid = model AND a.grantee <> p.proowner GROUP BY a.grantee
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', made, allowed.role, allowed.too);
        END LOOP;
    END LOOP;

    -- Sequences: workers only.
    EXECUTE format('ALTER FUNCTION pgqueue.lagging_sequences(boolean) OWNER TO %I', tables);
    EXECUTE format('ALTER FUNCTION pgqueue.advance_sequences(boolean) OWNER TO %I', tables);
    REVOKE ALL ON FUNCTION pgqueue.lagging_sequences(boolean), pgqueue.advance_sequences(boolean) FROM PUBLIC;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.worker'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'INSERT' GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.advance_sequences(boolean) TO %s %s', allowed.role, allowed.too);
    END LOOP;

    -- The time of a job with a unique key is written with it, and read where the key is judged.
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too,
               c.attname = 'unique_key' AS writes
        FROM pg_attribute c CROSS JOIN LATERAL aclexplode(c.attacl) AS a
        WHERE c.attrelid = 'pgqueue.job'::regclass
          AND (c.attname = 'unique_key' AND a.privilege_type = 'INSERT' OR c.attname = 'finished_at' AND a.privilege_type = 'SELECT')
        GROUP BY a.grantee, c.attname
    LOOP
        EXECUTE format('GRANT %s (enqueued_at) ON pgqueue.job TO %s %s', CASE WHEN allowed.writes THEN 'INSERT' ELSE 'SELECT' END,
                       allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (18, 'identity', false);

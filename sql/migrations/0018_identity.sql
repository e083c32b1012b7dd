-- breaking: no
--
-- An id is not an identity for ever. After TRUNCATE … RESTART IDENTITY, a restored dump or a switchover to a server whose sequences
-- lag, an id is given again. So a job is named by its id and the time it was enqueued: a row of a table beside `job` that names a
-- job belongs to it only if both agree. A row without a time was written by the version before; its id decides.
--
-- The order of locks, for every statement that waits for one:
--
-- 1. unique keys, in the order of their bytes;
-- 2. then jobs that wait, in the order of their ids, whatever partition they are in.
--
-- Two transactions that lock in this order cannot wait for each other. What is found out of order is given back (see `take_many_keys`;
-- docs/design/database.md has more). What workers do waits for no job: it passes over a locked row.

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

-- What each of these keys is to a job that wants it, in the snapshot of the statement that calls this; a row for each, in the order
-- given. `state` is that of `key_state`, without a call for each key: 10,000 duplicates in 0.2 s instead of 2.6. NULL: the key has no row.
--
-- `version` names the row that was judged. If that says `free`, this version of the row never holds again: a retry writes the row anew.
-- This and `keep_waiting` have the settings of the functions that call them.
CREATE FUNCTION pgqueue.key_states(keys text[]) RETURNS TABLE (
    n integer, key text, job_id bigint, enqueued_at timestamptz, hold text, expires_at timestamptz, version xid, state text
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT asked.n::integer, asked.key, k.job_id, coalesce(j.enqueued_at, k.enqueued_at), k.hold, k.expires_at, k.version,
        CASE
            WHEN k.job_id IS NULL THEN NULL
            WHEN j.fresh THEN 'waiting'
            WHEN NOT j.fresh THEN CASE k.hold WHEN 'pending' THEN 'free' ELSE 'held' END
            WHEN k.hold = 'after' AND coalesce(k.expires_at, (
                     SELECT max(j.finished_at) + make_interval(secs => k.seconds) FROM pgqueue.job j
                     WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at IS NOT FALSE
                       AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))) > pgqueue.now()
                 THEN 'held'
            ELSE 'free' END
    FROM unnest(key_states.keys) WITH ORDINALITY AS asked (key, n)
    LEFT JOIN LATERAL (
        SELECT k.job_id, k.enqueued_at, k.hold, k.seconds, k.expires_at, k.xmin AS version
        FROM pgqueue.unique_key k WHERE k.key = asked.key LIMIT 1
    ) AS k ON true
    LEFT JOIN LATERAL (
        SELECT j.enqueued_at, j.state <> 'running' AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0 AS fresh
        FROM pgqueue.job j
        WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at IS NOT FALSE
          AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1
    ) AS j ON true
    ORDER BY asked.n;
END $$;
COMMENT ON FUNCTION pgqueue.key_states IS
    'What unique keys are to a job that wants them: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Lock those of these jobs that wait and have never started: a replaced one so that this transaction may write it anew, another one so
-- that it does not start before this transaction ends. Answers how many of them have moved.
--
-- In the order of their ids, whatever partition they are in, and each as strongly as is needed: a lock that is made stronger later can
-- deadlock. `patience` is for these waits: set by the statement itself, so that a wait for a table (for DDL, say) comes before it.
CREATE FUNCTION pgqueue.keep_waiting(ids bigint[], since timestamptz[], replaced boolean[], patience text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    before text := current_setting('lock_timeout');
    moved bigint;
BEGIN
    WITH patient AS MATERIALIZED (
        SELECT set_config('lock_timeout', keep_waiting.patience, true)
    ), asked AS MATERIALIZED (
        SELECT a.id, a.since, bool_or(a.replaced) AS replaced
        FROM patient CROSS JOIN unnest(keep_waiting.ids, keep_waiting.since, keep_waiting.replaced) AS a (id, since, replaced)
        GROUP BY a.id, a.since ORDER BY a.id, a.since
    ), kept AS MATERIALIZED (
        SELECT j.id FROM asked CROSS JOIN LATERAL (
            SELECT l.id FROM (
                SELECT j.id FROM pgqueue.job j
                WHERE asked.replaced AND j.id = asked.id AND asked.since = j.enqueued_at IS NOT FALSE
                  AND j.state IN ('available', 'scheduled', 'blocked') AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
                LIMIT 1 FOR UPDATE
            ) AS l
            UNION ALL
            SELECT l.id FROM (
                SELECT j.id FROM pgqueue.job j
                WHERE NOT asked.replaced AND j.id = asked.id AND asked.since = j.enqueued_at IS NOT FALSE
                  AND j.state IN ('available', 'scheduled', 'blocked') AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
                LIMIT 1 FOR KEY SHARE
            ) AS l
        ) AS j
    )
    SELECT (SELECT count(*) FROM asked) - (SELECT count(*) FROM kept) INTO moved;
    PERFORM set_config('lock_timeout', before, true);
    RETURN moved;
END $$;
COMMENT ON FUNCTION pgqueue.keep_waiting IS
    'Keep jobs from starting until COMMIT: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Take one or both of these keys for the job `for_job`, enqueued at `since`, which is about to be inserted by this transaction; or
-- neither. If a key is held: that key, the job that has it, when that was enqueued, and whether it has never started. Else all NULL.
--
-- `hold` NULL: as this job held it before, else while it lives. `replaces`: a holder that has never started is to be written anew.
-- A key that was taken for one of `others`, which this statement is about to insert or to move, is not free.
-- Waits for a transaction that is just taking the same key, 5 s at most if the session has no lock_timeout.
--
-- The order of locks is kept without giving any back: the keys come in their order, a free one is taken before the next is asked for, and
-- a job is locked only when no further key is.
CREATE FUNCTION pgqueue.take_keys(
    idempotency_key text, unique_key text, hold text, seconds double precision, for_job bigint, since timestamptz, replaces boolean,
    others bigint[], OUT key text, OUT holder bigint, OUT holder_since timestamptz, OUT waits boolean
) LANGUAGE plpgsql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    before text := current_setting('lock_timeout');
    patience text := CASE before WHEN '0' THEN '5s' ELSE before END;
    ignored text;
    wanted text;
    idempotency boolean;
    inserted boolean;
    seen record;
    had boolean := false;
    had_until timestamptz;
BEGIN
    FOREACH wanted IN ARRAY array_remove(ARRAY['idempotency:' || take_keys.idempotency_key, 'unique:' || take_keys.unique_key], NULL) LOOP
        idempotency := wanted LIKE 'idempotency:%';
        LOOP
            WITH patient AS MATERIALIZED (SELECT set_config('lock_timeout', patience, true))
            INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
            SELECT wanted, for_job, take_keys.since, CASE WHEN idempotency THEN 'after' ELSE coalesce(take_keys.hold, 'live') END,
                CASE WHEN idempotency THEN 86400 ELSE coalesce(take_keys.seconds, 0) END
            FROM patient ON CONFLICT DO NOTHING;
            inserted := FOUND;
            ignored := set_config('lock_timeout', before, true);
            EXIT WHEN inserted;
            -- A statement of its own: it sees what has been committed while the one before waited.
            SELECT * INTO seen FROM pgqueue.key_states(ARRAY[wanted]);
            CONTINUE WHEN seen.state IS NULL;
            IF seen.job_id = for_job AND take_keys.since = seen.enqueued_at IS NOT FALSE THEN
                -- Its own from before, kept as it is but for its end; written, so that it is not removed as a leftover.
                ignored := set_config('lock_timeout', patience, true);
                UPDATE pgqueue.unique_key k SET expires_at = NULL WHERE k.key = wanted AND k.xmin = seen.version;
                inserted := FOUND;
                ignored := set_config('lock_timeout', before, true);
                CONTINUE WHEN NOT inserted;
                had := had OR idempotency;
                had_until := CASE WHEN idempotency THEN seen.expires_at ELSE had_until END;
                EXIT;
            END IF;
            IF seen.state = 'free' AND (seen.job_id = ANY (others)) IS NOT TRUE THEN
                ignored := set_config('lock_timeout', patience, true);
                DELETE FROM pgqueue.unique_key k WHERE k.key = wanted AND k.xmin = seen.version;
                ignored := set_config('lock_timeout', before, true);
                CONTINUE;
            END IF;
            IF seen.state = 'waiting' AND (seen.hold = 'pending' OR replaces) THEN
                CONTINUE WHEN pgqueue.keep_waiting(ARRAY[seen.job_id], ARRAY[seen.enqueued_at], ARRAY[replaces], patience) > 0;
            END IF;
            -- Neither of them, then: the first is as it was.
            IF had THEN
                UPDATE pgqueue.unique_key k SET expires_at = had_until
                WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job;
            ELSIF NOT idempotency THEN
                DELETE FROM pgqueue.unique_key k
                WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job
                  AND take_keys.since = k.enqueued_at IS NOT FALSE;
            END IF;
            key := wanted;
            holder := seen.job_id;
            holder_since := seen.enqueued_at;
            waits := seen.state = 'waiting';
            RETURN;
        END LOOP;
    END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, boolean, bigint[]) IS
    'Take the unique keys of one job: part of an enqueue of pgqueue''s own, not to be called by others.';

-- As called by the version before, which knows no time of its job. Answers the job that has the keys.
CREATE OR REPLACE FUNCTION pgqueue.take_keys(
    idempotency_key text, unique_key text, hold text, seconds double precision, for_job bigint, others bigint[] DEFAULT NULL
) RETURNS bigint LANGUAGE sql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
    SELECT coalesce(taken.holder, for_job)
    FROM pgqueue.take_keys(idempotency_key, unique_key, hold, seconds, for_job, NULL::timestamptz, false, others) AS taken
$$;

-- Take the keys of many jobs that are about to be inserted or moved by this transaction, each with one key or two. In the order given, a
-- job gets both of its keys or none. Answers the jobs that did not get theirs, as `take_keys` does.
--
-- The order of locks is kept by giving locks back. A block with an exception handler is a savepoint:
--
-- 1. All keys are inserted, in the order of their bytes, whichever job they are for.
-- 2. Where a key did not go in, its row is judged. If it is held, nothing more is to be locked for it.
-- 3. If one is free, it would have to be removed and inserted, after later keys. So the block is undone. The next round goes key by key, and
--    removes the row of this key when its turn comes. The same holds for a row of a job that is retried.
-- 4. When all keys are taken or held, the holders that must not start before our COMMIT are locked, in the order of their ids. If one has
--    moved, its key may be free. So the block is undone here, too.
-- 5. What is done afterwards touches our own rows only: a job that lost one key gives the other one back, or to the next job that wants it.
CREATE FUNCTION pgqueue.take_many_keys(
    idempotency_keys text[], unique_keys text[], holds text[], seconds double precision[], ids bigint[], since timestamptz[],
    replaces boolean[]
) RETURNS TABLE (job_id bigint, key text, holder bigint, holder_since timestamptz, waits boolean) LANGUAGE plpgsql ROWS 1
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    before text := current_setting('lock_timeout');
    patience text := CASE before WHEN '0' THEN '5s' ELSE before END;
    ignored text;
    -- Of each key, in the order of their bytes: the first job that wants it, and whether some job is to replace the holder.
    keys text[];
    firsts integer[];
    replaced boolean[];
    inserted integer;
    -- What a round found of a key that has to be written in its turn: the version of its row, and the place of the job it is of, if that is ours.
    versions xid[] := '{}';
    owners integer[] := '{}';
    -- Whether the key is still held by that job of ours, which has ended: then no other job of the batch gets it.
    owner_holds boolean[] := '{}';
    until timestamptz[] := '{}';
    one_by_one boolean := holds IS NULL;
    written boolean;
    -- The keys that a round did not get, and what their rows are.
    lost integer[];
    lost_keys text[];
    states text[];
    holders bigint[];
    holders_since timestamptz[];
    found_holds text[];
    found_versions xid[];
    found_until timestamptz[];
    again boolean;
    moved bigint;
    -- Which of the keys each job wants, and which job gets each. A job that lost did so on the key beside it.
    first_keys integer[];
    second_keys integer[];
    lost_at integer[];
    winners integer[];
    losers integer[] := '{}';
    loser_keys integer[] := '{}';
    place integer;
    first integer;
    second integer;
    n integer;
    m integer;
BEGIN
    LOOP
        <<round>>
        BEGIN
            lost := '{}';
            IF NOT one_by_one THEN
                -- Set by the statement itself: a wait for a table (for DDL, say) comes before it.
                WITH patient AS MATERIALIZED (SELECT set_config('lock_timeout', patience, true))
                INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
                SELECT w.key COLLATE "C", w.id, w.since, w.hold, w.seconds
                FROM patient CROSS JOIN LATERAL (
                    SELECT 'unique:' || u.key AS key, u.id, u.since, u.hold, coalesce(u.seconds, 0) AS seconds, u.place
                    FROM unnest(unique_keys, ids, since, holds, seconds) WITH ORDINALITY AS u (key, id, since, hold, seconds, place)
                    WHERE u.key IS NOT NULL
                    UNION ALL
                    SELECT 'idempotency:' || i.key, i.id, i.since, 'after', 86400, i.place
                    FROM unnest(idempotency_keys, ids, since) WITH ORDINALITY AS i (key, id, since, place) WHERE i.key IS NOT NULL
                ) AS w
                ORDER BY w.key COLLATE "C", w.place
                ON CONFLICT DO NOTHING;
                GET DIAGNOSTICS inserted = ROW_COUNT;
                ignored := set_config('lock_timeout', before, true);
                IF inserted = cardinality(array_remove(unique_keys, NULL)) + cardinality(array_remove(idempotency_keys, NULL)) THEN
                    RETURN;  -- Each job has its keys.
                END IF;
            END IF;
            IF keys IS NULL THEN
                SELECT array_agg(w.key), array_agg(w.first), array_agg(w.replaced) INTO keys, firsts, replaced
                FROM (
                    SELECT a.key COLLATE "C" AS key, min(a.place)::integer AS first, bool_or(a.replaces) IS TRUE AS replaced
                    FROM (
                        SELECT 'idempotency:' || i.key AS key, i.place, i.replaces
                        FROM unnest(idempotency_keys, replaces) WITH ORDINALITY AS i (key, replaces, place) WHERE i.key IS NOT NULL
                        UNION ALL
                        SELECT 'unique:' || u.key, u.place, u.replaces
                        FROM unnest(unique_keys, replaces) WITH ORDINALITY AS u (key, replaces, place) WHERE u.key IS NOT NULL
                    ) AS a
                    GROUP BY a.key COLLATE "C" ORDER BY a.key COLLATE "C"
                ) AS w;
            END IF;
            IF one_by_one THEN
                ignored := set_config('lock_timeout', patience, true);
                FOR n IN 1 .. cardinality(keys) LOOP
                    written := false;
                    IF owners[n] IS NOT NULL THEN
                        -- Its own from before, kept as it is but for its end; written, so that it is not removed as a leftover.
                        UPDATE pgqueue.unique_key k SET expires_at = NULL WHERE k.key = keys[n] AND k.xmin = versions[n];
                        written := FOUND;
                    ELSIF versions[n] IS NOT NULL THEN
                        DELETE FROM pgqueue.unique_key k WHERE k.key = keys[n] AND k.xmin = versions[n];
                    END IF;
                    IF NOT written THEN
                        owners[n] := NULL;
                        INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
                        SELECT keys[n], ids[firsts[n]], since[firsts[n]],
                            CASE WHEN keys[n] LIKE 'idempotency:%' THEN 'after' ELSE coalesce(holds[firsts[n]], 'live') END,
                            CASE WHEN keys[n] LIKE 'idempotency:%' THEN 86400 ELSE coalesce(seconds[firsts[n]], 0) END
                        ON CONFLICT DO NOTHING;
                        written := FOUND;
                    END IF;
                    IF NOT written THEN
                        lost := array_append(lost, n);
                    END IF;
                END LOOP;
                ignored := set_config('lock_timeout', before, true);
            ELSIF inserted = 0 THEN
                lost := ARRAY(SELECT generate_subscripts(keys, 1));
            ELSIF inserted < cardinality(keys) THEN
                -- The ids are new: a row that names one of them was inserted here.
                lost := ARRAY(
                    SELECT w.n FROM unnest(keys, firsts) WITH ORDINALITY AS w (key, first, n)
                    WHERE NOT EXISTS (
                        SELECT FROM pgqueue.unique_key k
                        WHERE k.key = w.key AND k.job_id = ids[w.first] AND k.enqueued_at = since[w.first])
                    ORDER BY w.n);
            END IF;
            EXIT WHEN cardinality(lost) = 0;

            lost_keys := ARRAY(SELECT keys[l.n] FROM unnest(lost) WITH ORDINALITY AS l (n, place) ORDER BY l.place);
            SELECT array_agg(s.state), array_agg(s.job_id), array_agg(s.enqueued_at), array_agg(s.hold), array_agg(s.version),
                array_agg(s.expires_at), bool_or(s.state IN ('held', 'waiting') IS NOT TRUE)
            INTO states, holders, holders_since, found_holds, found_versions, found_until, again
            FROM pgqueue.key_states(lost_keys) AS s;
            IF holds IS NULL THEN
                -- A retry: the row may be of a job of ours, whatever it is to others.
                FOR m IN 1 .. cardinality(lost) LOOP
                    place := array_position(ids, holders[m]);
                    IF (since[place] = holders_since[m] IS NOT FALSE) AND place IS NOT NULL THEN
                        owner_holds[lost[m]] := states[m] = 'held';
                        states[m] := 'own';
                        owners[lost[m]] := place;
                        again := true;
                    END IF;
                END LOOP;
            END IF;
            IF NOT again THEN
                moved := 0;
                IF 'pending' = ANY (found_holds) OR true = ANY (replaced) THEN
                    SELECT pgqueue.keep_waiting(array_agg(s.id), array_agg(s.since), array_agg(replaced[s.n]), patience) INTO moved
                    FROM unnest(lost, states, holders, holders_since, found_holds) AS s (n, state, id, since, hold)
                    WHERE s.state = 'waiting' AND (s.hold = 'pending' OR replaced[s.n]);
                END IF;
                EXIT WHEN moved = 0;
            ELSE
                FOR m IN 1 .. cardinality(lost) LOOP
                    IF states[m] IN ('held', 'waiting') IS NOT TRUE THEN
                        versions[lost[m]] := found_versions[m];
                        until[lost[m]] := found_until[m];
                    END IF;
                END LOOP;
            END IF;
            one_by_one := true;
            RAISE EXCEPTION 'not in the order of locks' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            NULL;  -- With the block its keys and its locks are gone.
        END round;
    END LOOP;

    WITH wanted AS MATERIALIZED (
        SELECT a.place, dense_rank() OVER (ORDER BY a.key COLLATE "C")::integer AS n
        FROM (
            SELECT 'idempotency:' || i.key AS key, i.place
            FROM unnest(idempotency_keys) WITH ORDINALITY AS i (key, place) WHERE i.key IS NOT NULL
            UNION ALL
            SELECT 'unique:' || u.key, u.place
            FROM unnest(unique_keys) WITH ORDINALITY AS u (key, place) WHERE u.key IS NOT NULL
        ) AS a
    )
    SELECT array_agg(w.first), array_agg(w.second) INTO first_keys, second_keys
    FROM (
        -- A job with one key has it twice here.
        SELECT min(wanted.n) AS first, max(wanted.n) AS second
        FROM wanted GROUP BY wanted.place ORDER BY wanted.place
    ) AS w;
    lost_at := array_fill(NULL::integer, ARRAY[cardinality(keys)]);
    winners := lost_at;
    FOR m IN 1 .. cardinality(lost) LOOP
        lost_at[lost[m]] := m;
    END LOOP;
    FOR place IN 1 .. cardinality(ids) LOOP
        first := first_keys[place];
        second := second_keys[place];
        n := CASE WHEN lost_at[first] IS NOT NULL OR winners[first] IS NOT NULL OR (owner_holds[first] AND owners[first] <> place) THEN first
                  WHEN lost_at[second] IS NOT NULL OR winners[second] IS NOT NULL OR (owner_holds[second] AND owners[second] <> place)
                      THEN second END;
        IF n IS NULL THEN
            winners[first] := place;
            winners[second] := place;
        ELSE
            losers := array_append(losers, place);
            loser_keys := array_append(loser_keys, n);
        END IF;
    END LOOP;
    FOR n IN 1 .. cardinality(keys) LOOP
        CONTINUE WHEN lost_at[n] IS NOT NULL OR winners[n] = coalesce(owners[n], firsts[n]);
        IF winners[n] IS NULL AND owners[n] IS NOT NULL THEN
            UPDATE pgqueue.unique_key k SET expires_at = until[n] WHERE k.key = keys[n];
            CONTINUE;
        END IF;
        DELETE FROM pgqueue.unique_key k WHERE k.key = keys[n];
        IF winners[n] IS NOT NULL THEN
            INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
            SELECT keys[n], ids[winners[n]], since[winners[n]],
                CASE WHEN keys[n] LIKE 'idempotency:%' THEN 'after' ELSE coalesce(holds[winners[n]], 'live') END,
                CASE WHEN keys[n] LIKE 'idempotency:%' THEN 86400 ELSE coalesce(seconds[winners[n]], 0) END;
        END IF;
    END LOOP;
    RETURN QUERY
    SELECT ids[l.place], keys[l.n],
        CASE WHEN lost_at[l.n] IS NULL THEN ids[coalesce(winners[l.n], owners[l.n])] ELSE holders[lost_at[l.n]] END,
        CASE WHEN lost_at[l.n] IS NULL THEN since[coalesce(winners[l.n], owners[l.n])] ELSE holders_since[lost_at[l.n]] END,
        CASE WHEN lost_at[l.n] IS NULL THEN winners[l.n] IS NOT NULL ELSE states[lost_at[l.n]] = 'waiting' END
    FROM unnest(losers, loser_keys) AS l (place, n);
END $$;
COMMENT ON FUNCTION pgqueue.take_many_keys IS
    'Take the unique keys of many jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Take the keys of one job or many, each with one key or two; no array at all stands for no job. Answers the jobs that did not get theirs.
--
-- A single job needs no savepoint. Many enqueues in one transaction would make as many of them, which is slow for all sessions. If it has one
-- key, and that goes in, nothing is read. So this function needs no settings of its own: they cost a tenth of an enqueue.
CREATE FUNCTION pgqueue.take_all_keys(
    idempotency_keys text[], unique_keys text[], holds text[], seconds double precision[], ids bigint[], since timestamptz[],
    replaces boolean[]
) RETURNS TABLE (job_id bigint, key text, holder bigint, holder_since timestamptz, waits boolean) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_column
DECLARE
    before pg_catalog.text;
    inserted pg_catalog.bool;
    ignored pg_catalog.text;
BEGIN
    IF ids IS NULL THEN
        RETURN;
    ELSIF pg_catalog.cardinality(ids) OPERATOR(pg_catalog.>) 1 THEN
        RETURN QUERY
        SELECT * FROM pgqueue.take_many_keys(idempotency_keys, unique_keys, holds, seconds, ids, since, replaces);
        RETURN;
    END IF;
    IF idempotency_keys[1] IS NULL AND holds[1] IS NOT NULL THEN
        before := pg_catalog.current_setting('lock_timeout');
        WITH patient AS MATERIALIZED (
            SELECT pg_catalog.set_config('lock_timeout', CASE WHEN before OPERATOR(pg_catalog.=) '0'::pg_catalog.text THEN '5s' ELSE before END, true)
        )
        INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
        SELECT 'unique:'::pg_catalog.text OPERATOR(pg_catalog.||) unique_keys[1], ids[1], since[1], holds[1], coalesce(seconds[1], 0) FROM patient
        ON CONFLICT DO NOTHING;
        inserted := FOUND;
        ignored := pg_catalog.set_config('lock_timeout', before, true);
        IF inserted THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY
    SELECT ids[1], taken.key, taken.holder, taken.holder_since, taken.waits
    FROM pgqueue.take_keys(
        idempotency_keys[1], unique_keys[1], holds[1], seconds[1], ids[1], since[1], coalesce(replaces[1], false), NULL) AS taken
    WHERE taken.holder IS NOT NULL;
END $$;
COMMENT ON FUNCTION pgqueue.take_all_keys IS
    'Take the unique keys of jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- As called by the version before, whose enqueue inserts all keys, has the rows of free ones removed here, and inserts these keys again. As a
-- JSON array, for each key that is held: the key, the job, and whether it has never started.
CREATE OR REPLACE FUNCTION pgqueue.judge_keys(keys text[], replaced text[]) RETURNS text LANGUAGE plpgsql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    before text := current_setting('lock_timeout');
    patience text := CASE before WHEN '0' THEN '5s' ELSE before END;
    ignored text;
    seen record;
    answer json[];
    ids bigint[];
    since timestamptz[];
    changed boolean[];
BEGIN
    LOOP
        <<round>>
        BEGIN
            answer := '{}';
            ids := '{}';
            since := '{}';
            changed := '{}';
            FOR seen IN
                SELECT s.* FROM pgqueue.key_states(ARRAY(SELECT DISTINCT a.key COLLATE "C" FROM unnest(judge_keys.keys) AS a (key) ORDER BY 1)) AS s
            LOOP
                IF seen.state = 'free' THEN
                    ignored := set_config('lock_timeout', patience, true);
                    DELETE FROM pgqueue.unique_key k WHERE k.key = seen.key AND k.xmin = seen.version;
                    ignored := set_config('lock_timeout', before, true);
                ELSIF seen.state IS NOT NULL THEN
                    answer := array_append(answer, json_build_array(seen.key, seen.job_id, seen.state = 'waiting'));
                    IF seen.state = 'waiting' AND (seen.hold = 'pending' OR seen.key = ANY (judge_keys.replaced)) THEN
                        ids := array_append(ids, seen.job_id);
                        since := array_append(since, seen.enqueued_at);
                        changed := array_append(changed, seen.key = ANY (judge_keys.replaced));
                    END IF;
                END IF;
            END LOOP;
            EXIT WHEN pgqueue.keep_waiting(ids, since, changed, patience) = 0;
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            NULL;  -- With the block its locks are gone: no lock of a lower id follows one of a higher id.
        END round;
    END LOOP;
    RETURN to_json(answer)::text;
END $$;

-- Take back those of these jobs that have never started, so that this transaction may write them anew. `since`: when each was
-- enqueued; NULL stands for any time. Waits for a transaction that has locked one, as `keep_waiting` does; locks in the order of the ids.
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
        SELECT taken.holder INTO holder
        FROM pgqueue.take_keys(enqueue.idempotency_key, enqueue.unique_key, 'live', 0, new_id, since, false, NULL) AS taken;
        IF holder IS NOT NULL THEN
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
        'pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, boolean, bigint[])',
        'pgqueue.take_many_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[])',
        'pgqueue.take_all_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[])',
        'pgqueue.key_states(text[])', 'pgqueue.keep_waiting(bigint[], timestamptz[], boolean[], text)',
        'pgqueue.take_back(bigint[], timestamptz[])']::regprocedure[]
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

-- breaking: no
--
-- A discard leaves no text of a unique key. A key that holds on after its job was discarded is kept as a hash, in a table of its own, and the
-- functions that take keys look there, too. And a discard finds its jobs by an index, whatever its session had planned.
--
-- What applications and workers of the version before call has its name, and looks there as well. A discard of the version before
-- keeps the text.

-- Keys that hold on after their job was discarded. Nearly always empty.
CREATE TABLE pgqueue.discarded_key (
    -- Of the key as `unique_key` has it, with its kind.
    hash        bytea PRIMARY KEY,
    job_id      bigint      NOT NULL,
    enqueued_at timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    CONSTRAINT discarded_key_can_be CHECK (pg_catalog.octet_length(hash) OPERATOR(pg_catalog.=) 32)
);
COMMENT ON TABLE pgqueue.discarded_key IS 'Unique keys that hold on after their job was discarded, as hashes.';

CREATE FUNCTION pgqueue.key_hash(key text) RETURNS bytea LANGUAGE sql STABLE
    RETURN pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8'::pg_catalog.name));
COMMENT ON FUNCTION pgqueue.key_hash IS 'What discarded_key keeps of a unique key.';

-- Which of these keys are held by jobs that were discarded, in the snapshot of the statement that calls this. A row for each of them: its
-- place among the keys, the job, and when that was enqueued. It has the settings of the functions that call it.
--
-- Why no key is had by two jobs:
-- 1. A discard locks the row of the key. In one transaction it deletes that row, and inserts the hash.
-- 2. An enqueue inserts the row of the key, and looks for the hash afterwards, in a statement of its own. The insert waits for a discard
--    that has the row. So in READ COMMITTED the look sees the hash of each discard that has made way for the insert.
-- 3. In a transaction with an older snapshot (REPEATABLE READ, SERIALIZABLE) it may not be seen. There `meet_discards` inserts the hash
--    itself, and the primary key raises a serialization failure.
-- 4. A hash is removed only when it has expired.
-- 5. Locks of hashes make no circle: a session that locks one has locked the row of its key before.
CREATE FUNCTION pgqueue.discarded_holders(keys text[]) RETURNS TABLE (n integer, job_id bigint, enqueued_at timestamptz)
LANGUAGE plpgsql STABLE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (SELECT FROM pgqueue.discarded_key) THEN
        RETURN QUERY
        SELECT asked.n::integer, d.job_id, d.enqueued_at
        FROM unnest(discarded_holders.keys) WITH ORDINALITY AS asked (key, n)
        CROSS JOIN LATERAL (
            SELECT d.job_id, d.enqueued_at FROM pgqueue.discarded_key d
            WHERE d.hash = pgqueue.key_hash(asked.key) AND d.expires_at > pgqueue.now() LIMIT 1
        ) AS d;
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.discarded_holders IS
    'Which unique keys are held by discarded jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- In a transaction that keeps its snapshot: raise a serialization failure if one of these keys was discarded after the snapshot.
CREATE FUNCTION pgqueue.meet_discards(keys text[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        INSERT INTO pgqueue.discarded_key (hash, job_id, enqueued_at, expires_at)
        SELECT pgqueue.key_hash(asked.key), 0, '-infinity', '-infinity' FROM unnest(meet_discards.keys) AS asked (key) ORDER BY 1
        ON CONFLICT DO NOTHING;
        DELETE FROM pgqueue.discarded_key d
        WHERE d.hash = ANY (ARRAY(SELECT pgqueue.key_hash(asked.key) FROM unnest(meet_discards.keys) AS asked (key))) AND d.job_id = 0;
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.meet_discards IS 'Part of an enqueue of pgqueue''s own, not to be called by others.';

-- As in 0018, and a key of a discarded job is held.
CREATE OR REPLACE FUNCTION pgqueue.take_keys(
    idempotency_key text, unique_key text, hold text, seconds double precision, for_job bigint, since timestamptz, replaces boolean,
    others bigint[], OUT key text, OUT holder bigint, OUT holder_since timestamptz, OUT waits boolean
) LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    before text := current_setting('lock_timeout');
    patience text := CASE before WHEN '0' THEN '5s' ELSE before END;
    ignored text;
    wanted text;
    idempotency boolean;
    inserted boolean;
    discarded boolean;
    seen record;
    had boolean := false;
    had_until timestamptz;
BEGIN
    FOREACH wanted IN ARRAY array_remove(ARRAY['idempotency:' || take_keys.idempotency_key, 'unique:' || take_keys.unique_key], NULL) LOOP
        idempotency := wanted LIKE 'idempotency:%';
        LOOP
            -- Looked up before the insert, so that a duplicate of a discarded job locks nothing.
            SELECT d.job_id, d.enqueued_at, 'held' AS state, 'after' AS hold INTO seen FROM pgqueue.discarded_holders(ARRAY[wanted]) AS d;
            IF NOT FOUND THEN
                WITH patient AS MATERIALIZED (SELECT set_config('lock_timeout', patience, true))
                INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
                SELECT wanted, for_job, take_keys.since, CASE WHEN idempotency THEN 'after' ELSE coalesce(take_keys.hold, 'live') END,
                    CASE WHEN idempotency THEN 86400 ELSE coalesce(take_keys.seconds, 0) END
                FROM patient ON CONFLICT DO NOTHING;
                inserted := FOUND;
                ignored := set_config('lock_timeout', before, true);
                IF inserted THEN
                    -- And after it: the insert may have waited for the discard.
                    PERFORM pgqueue.meet_discards(ARRAY[wanted]);
                    SELECT d.job_id, d.enqueued_at, 'held' AS state, 'after' AS hold INTO seen FROM pgqueue.discarded_holders(ARRAY[wanted]) AS d;
                    EXIT WHEN NOT FOUND;
                    discarded := true;
                ELSE
                    -- A statement of its own: it sees what has been committed while the one before waited.
                    SELECT * INTO seen FROM pgqueue.key_states(ARRAY[wanted]);
                    CONTINUE WHEN seen.state IS NULL;
                    discarded := false;
                END IF;
            ELSE
                discarded := true;
            END IF;
            IF discarded THEN
                -- The row that this job may have is one that was inserted a moment ago.
                DELETE FROM pgqueue.unique_key k
                WHERE k.key = wanted AND k.job_id = for_job AND take_keys.since = k.enqueued_at IS NOT FALSE;
            END IF;
            IF seen.job_id = for_job AND take_keys.since = seen.enqueued_at IS NOT FALSE THEN
                -- Its own from before, kept as it is but for its end; written, so that it is not removed as a leftover.
                ignored := set_config('lock_timeout', patience, true);
                UPDATE pgqueue.unique_key k SET expires_at = NULL WHERE k.key = wanted AND k.xmin = seen.version;
                inserted := FOUND;
                ignored := set_config('lock_timeout', before, true);
                CONTINUE WHEN NOT inserted;
                had := had OR idempotency;
                had_until := CASE WHEN idempotency THEN seen.expires_at ELSE had_until END;
                PERFORM pgqueue.meet_discards(ARRAY[wanted]);
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

CREATE OR REPLACE FUNCTION pgqueue.take_many_keys(
    idempotency_keys text[], unique_keys text[], holds text[], seconds double precision[], ids bigint[], since timestamptz[],
    replaces boolean[]
) RETURNS TABLE (job_id bigint, key text, holder bigint, holder_since timestamptz, waits boolean) LANGUAGE plpgsql ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
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
    -- Whether a job that was discarded may hold a key, and the keys of ours that one holds: no row is inserted for these.
    discards boolean;
    discarded integer[] := '{}';
    met integer[];
    all_in boolean;
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
            all_in := false;
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
                all_in := inserted = cardinality(array_remove(unique_keys, NULL)) + cardinality(array_remove(idempotency_keys, NULL));
                -- A statement of its own: it sees a discard that was committed while the one before waited.
                discards := EXISTS (SELECT FROM pgqueue.discarded_key) OR current_setting('transaction_isolation') <> 'read committed';
                IF all_in AND NOT discards THEN
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
                    IF n = ANY (discarded) THEN
                        lost := array_append(lost, n);
                        CONTINUE;
                    END IF;
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
                discards := EXISTS (SELECT FROM pgqueue.discarded_key) OR current_setting('transaction_isolation') <> 'read committed';
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
            IF discards THEN
                PERFORM pgqueue.meet_discards(keys);
                met := ARRAY(SELECT d.n FROM pgqueue.discarded_holders(keys) AS d WHERE d.n <> ALL (discarded) ORDER BY d.n);
                IF cardinality(met) > 0 THEN
                    discarded := discarded || met;
                    one_by_one := true;
                    RAISE EXCEPTION 'not in the order of locks' USING ERRCODE = 'PGQ02';
                END IF;
                IF all_in THEN
                    RETURN;
                END IF;
            END IF;
            EXIT WHEN cardinality(lost) = 0;

            lost_keys := ARRAY(SELECT keys[l.n] FROM unnest(lost) WITH ORDINALITY AS l (n, place) ORDER BY l.place);
            SELECT array_agg(s.state), array_agg(s.job_id), array_agg(s.enqueued_at), array_agg(s.hold), array_agg(s.version),
                array_agg(s.expires_at), bool_or(s.state IN ('held', 'waiting') IS NOT TRUE)
            INTO states, holders, holders_since, found_holds, found_versions, found_until, again
            FROM pgqueue.key_states(lost_keys) AS s;
            IF cardinality(discarded) > 0 THEN
                discarded := '{}';  -- One may have expired meanwhile.
                FOR m, holder, holder_since IN SELECT d.n, d.job_id, d.enqueued_at FROM pgqueue.discarded_holders(lost_keys) AS d LOOP
                    discarded := array_append(discarded, lost[m]);
                    states[m] := 'held';
                    holders[m] := holder;
                    holders_since[m] := holder_since;
                    found_holds[m] := 'after';
                END LOOP;
                again := (SELECT bool_or(s.state IN ('held', 'waiting') IS NOT TRUE) FROM unnest(states) AS s (state));
            END IF;
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

CREATE OR REPLACE FUNCTION pgqueue.take_all_keys(
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
        WHERE NOT EXISTS (SELECT FROM pgqueue.discarded_key)
        ON CONFLICT DO NOTHING;
        inserted := FOUND;
        ignored := pg_catalog.set_config('lock_timeout', before, true);
        -- A statement of its own: it sees a discard that was committed while the one before waited. If there is one, `take_keys` finds the
        -- row that was inserted here.
        IF inserted AND pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'::pg_catalog.text
            AND NOT EXISTS (SELECT FROM pgqueue.discarded_key) THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY
    SELECT ids[1], taken.key, taken.holder, taken.holder_since, taken.waits
    FROM pgqueue.take_keys(
        idempotency_keys[1], unique_keys[1], holds[1], seconds[1], ids[1], since[1], coalesce(replaces[1], false), NULL) AS taken
    WHERE taken.holder IS NOT NULL;
END $$;

-- Delete jobs that have ended, with their attempts, cursors and progress. A row for each id: its state as this statement's snapshot had it
-- (NULL: in none), and whether it was deleted. See `actions_discard`.
CREATE FUNCTION pgqueue.discard_ended(ids bigint[]) RETURNS TABLE (id bigint, state text, discarded boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT a.id FROM unnest(discard_ended.ids) AS a (id)
    ), seen AS MATERIALIZED (
        SELECT DISTINCT ON (found.id) found.id, found.state
        FROM pgqueue.job_states(discard_ended.ids) AS found
        ORDER BY found.id, found.state IN ('available', 'scheduled', 'blocked', 'running') DESC, found.finished_at DESC
    ), ended AS MATERIALIZED (
        SELECT j.*
        FROM (
            SELECT seen.id FROM seen WHERE seen.state IN ('completed', 'skipped', 'failed', 'cancelled') ORDER BY seen.id
        ) AS mine
        CROSS JOIN LATERAL (
            SELECT j.id, j.enqueued_at, j.finished_at, j.unique_key, j.idempotency_key, j.tableoid AS part, j.ctid AS place
            FROM pgqueue.job j
            WHERE j.id = mine.id AND j.state IN ('completed', 'skipped', 'failed', 'cancelled')
            FOR UPDATE
        ) AS j
    ), keys AS MATERIALIZED (
        SELECT mine.key, mine.id, mine.enqueued_at, k.place, k.hold = 'after' AND k.until > pgqueue.now() AS holds, k.until
        FROM (
            SELECT named.key, ended.id, ended.enqueued_at, max(ended.finished_at) AS finished_at
            FROM ended CROSS JOIN LATERAL (
                VALUES ('unique:' || ended.unique_key), ('idempotency:' || ended.idempotency_key)
            ) AS named (key)
            WHERE named.key IS NOT NULL
            GROUP BY named.key, ended.id, ended.enqueued_at
            ORDER BY named.key COLLATE "C"
        ) AS mine
        CROSS JOIN LATERAL (
            SELECT k.ctid AS place, k.hold, coalesce(k.expires_at, mine.finished_at + make_interval(secs => k.seconds)) AS until
            FROM pgqueue.unique_key k
            WHERE k.key = mine.key AND k.job_id = mine.id AND k.enqueued_at = mine.enqueued_at IS NOT FALSE
            LIMIT 1 FOR UPDATE
        ) AS k
    ), kept AS (
        INSERT INTO pgqueue.discarded_key (hash, job_id, enqueued_at, expires_at)
        SELECT DISTINCT ON (keys.key) pgqueue.key_hash(keys.key), keys.id, keys.enqueued_at, keys.until
        FROM keys WHERE keys.holds ORDER BY keys.key, keys.until DESC
        ON CONFLICT (hash) DO UPDATE
        SET job_id = excluded.job_id, enqueued_at = excluded.enqueued_at, expires_at = excluded.expires_at
    ), freed AS (
        DELETE FROM pgqueue.unique_key k WHERE k.ctid = ANY (ARRAY(SELECT keys.place FROM keys))
    ), attempts AS (
        DELETE FROM pgqueue.attempt a WHERE a.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), cursors AS (
        DELETE FROM pgqueue.job_cursor c WHERE c.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), progress AS (
        DELETE FROM pgqueue.job_progress p WHERE p.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), signals AS (
        DELETE FROM pgqueue.job_signal s WHERE s.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), done AS (
        DELETE FROM pgqueue.job_done d
        WHERE d.id = ANY (ARRAY(SELECT ended.id FROM ended)) AND (d.tableoid, d.ctid) IN (SELECT ended.part, ended.place FROM ended)
        RETURNING d.id
    ), dead AS (
        DELETE FROM pgqueue.job_dead d
        WHERE d.id = ANY (ARRAY(SELECT ended.id FROM ended)) AND (d.tableoid, d.ctid) IN (SELECT ended.part, ended.place FROM ended)
        RETURNING d.id
    )
    SELECT asked.id, seen.state::text, asked.id IN (SELECT done.id FROM done UNION ALL SELECT dead.id FROM dead)
    FROM asked LEFT JOIN seen ON seen.id = asked.id
    ORDER BY asked.id;
END $$;
COMMENT ON FUNCTION pgqueue.discard_ended IS 'Part of a discard by hand: for no other caller.';

-- Rights: as the table of keys and the functions beside these have them.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    made regprocedure;
    model regprocedure;
    allowed record;
BEGIN
    EXECUTE format('ALTER TABLE pgqueue.discarded_key OWNER TO %I', tables);
    FOR allowed IN
        SELECT quote_ident(pg_get_userbyid(a.grantee)) AS role, CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.unique_key'::regclass AND a.privilege_type = 'INSERT' AND a.grantee NOT IN (0, c.relowner) GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.discarded_key TO %s %s', allowed.role, allowed.too);
    END LOOP;
    FOR made, model IN VALUES
        ('pgqueue.key_hash(text)'::regprocedure, 'pgqueue.key_states(text[])'::regprocedure),
        ('pgqueue.discarded_holders(text[])', 'pgqueue.key_states(text[])'),
        ('pgqueue.meet_discards(text[])', 'pgqueue.key_states(text[])'),
        ('pgqueue.discard_ended(bigint[])', 'pgqueue.take_dead(bigint[], timestamptz[])')
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
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (29, 'discarded_keys', false);

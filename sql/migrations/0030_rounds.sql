-- breaking: no
--
-- Taking unique keys asks at most 1,000 times. Each time another session must have changed the key, or its job, at that very moment. Only
-- what makes the table lie has no end: a trigger on `unique_key` that lets no row in, or a policy that hides rows. Then an enqueue was
-- busy until its statement_timeout, if it had one.

-- As in 0029, with a bound.
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
    rounds integer := 0;
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
            rounds := rounds + 1;
            IF rounds > 1000 THEN
                RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                    MESSAGE = format('pgqueue: unique key %L could neither be taken nor found held, 1,000 times', wanted),
                    HINT = 'Is there a trigger on pgqueue.unique_key that keeps rows out, or a policy that hides rows? Remove it.';
            END IF;
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

-- As in 0029, with a bound.
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
    rounds integer := 0;
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
        rounds := rounds + 1;
        IF rounds > 1000 THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = format('pgqueue: unique key %L could neither be taken nor found held, 1,000 times', coalesce(lost_keys[1], keys[1])),
                HINT = 'Is there a trigger on pgqueue.unique_key that keeps rows out, or a policy that hides rows? Remove it.';
        END IF;
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

-- What a retry by hand calls resolves its names as the functions above do.
ALTER FUNCTION pgqueue.lock_keys(text[]) SET search_path = pg_catalog, pg_temp;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (30, 'rounds', false);

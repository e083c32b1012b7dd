-- breaking: no
--
-- A retry or a discard by hand asked anew for a job that was on the move. By then it had keys of other jobs, and waited for a row: another
-- retry, discard or operation by filter had that row, and waited for one of the keys.

-- Lock those of these jobs that have ended in one of these states, and answer where all of them stand: a row for each that there is, and
-- whether it is `locked` in the state that is answered. While another transaction has one, this waits.
--
-- Locks them in the order of their ids. If one has lived and ended again meanwhile, it would be locked after jobs with higher ids. So the
-- locks are given back, and all begins anew, a hundred times at most.
CREATE FUNCTION pgqueue.lock_ended(ids bigint[], states text[]) RETURNS TABLE (
    id bigint, state text, enqueued_at timestamptz, locked boolean, finished_at timestamptz, unique_key text, idempotency_key text
) LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    held bigint[];
    held_since timestamptz[];
    ends timestamptz[];
    unique_keys text[];
    idempotency_keys text[];
    stand bigint[];
    stand_states text[];
    stand_since timestamptz[];
BEGIN
    FOR times IN 1..100 LOOP
        <<round>>
        BEGIN
            SELECT array_agg(j.id), array_agg(j.enqueued_at), array_agg(j.finished_at), array_agg(j.unique_key), array_agg(j.idempotency_key)
            INTO held, held_since, ends, unique_keys, idempotency_keys
            FROM (
                SELECT found.id FROM pgqueue.job_states(lock_ended.ids) AS found GROUP BY found.id
                HAVING bool_or(found.state = ANY (lock_ended.states))
                   AND NOT bool_or(found.state IN ('available', 'scheduled', 'blocked', 'running'))
                ORDER BY found.id
            ) AS mine
            CROSS JOIN LATERAL (
                SELECT j.id, j.enqueued_at, j.finished_at, j.unique_key, j.idempotency_key FROM pgqueue.job j
                WHERE j.id = mine.id AND j.state IN ('completed', 'skipped', 'failed', 'cancelled') AND j.state = ANY (lock_ended.states)
                FOR UPDATE
            ) AS j;
            -- A statement of its own: it sees what has been committed while the one before waited.
            SELECT array_agg(one.id), array_agg(one.state), array_agg(one.enqueued_at) INTO stand, stand_states, stand_since
            FROM (
                SELECT DISTINCT ON (found.id) found.id, found.state, found.enqueued_at FROM pgqueue.job_states(lock_ended.ids) AS found
                -- A job that lives is not started a second time for a row of its id that was put aside. Else the job that has ended last is meant.
                ORDER BY found.id, found.state IN ('available', 'scheduled', 'blocked', 'running') DESC,
                    found.state = ANY (lock_ended.states) DESC, found.finished_at DESC
            ) AS one;
            EXIT WHEN NOT EXISTS (
                SELECT n.id, n.since FROM unnest(stand, stand_states, stand_since) AS n (id, state, since) WHERE n.state = ANY (lock_ended.states)
                EXCEPT
                SELECT h.id, h.since FROM unnest(held, held_since) AS h (id, since));
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            held := NULL;  -- With the block its locks are gone.
        END round;
    END LOOP;
    RETURN QUERY
    SELECT n.id, n.state, n.since, h.id IS NOT NULL, h.finished_at, h.unique_key, h.idempotency_key
    FROM unnest(stand, stand_states, stand_since) AS n (id, state, since)
    LEFT JOIN unnest(held, held_since, ends, unique_keys, idempotency_keys) AS h (id, since, finished_at, unique_key, idempotency_key)
      ON n.state = ANY (lock_ended.states) AND h.id = n.id AND h.since = n.since;
END $$;
COMMENT ON FUNCTION pgqueue.lock_ended IS 'Part of a retry or a discard by hand: for no other caller.';

-- Owned by the owner of the tables, whichever role applies this. Roles that retry jobs lock them.
DO $$
DECLARE
    made constant regprocedure := 'pgqueue.lock_ended(bigint[], text[])';
    model constant regprocedure := 'pgqueue.lock_dead(bigint[], timestamptz[])';
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
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
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (39, 'lock_ended', false);

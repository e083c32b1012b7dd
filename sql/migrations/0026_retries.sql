-- breaking: no
--
-- What a retry by hand of more jobs than one statement changes calls first, so that it takes all keys in one order of locks.
-- Workers and applications of the version before do not call it.

-- Lock these keys in the order of their bytes, so that no other session takes one of them before this transaction ends. Answers those that
-- are of a job that lives: they are left to it.
--
-- 1. A key that a living job has is not locked, for nothing more is to be done with it.
-- 2. A key with a row that is free, or that is of a job that has ended, is locked by its row. The row stays as it is.
-- 3. A key without a row gets one. It names job 0, which is never there, so the key is free: what takes it writes the row anew. If nothing
--    does, the pruner removes the row.
-- 4. While a lock is waited for, the other transaction may have given the key to a job. So the keys are looked at once more.
--
-- ON CONFLICT DO UPDATE with a condition that is never true locks the row that is there, in its turn, and writes nothing. Waits for a
-- transaction that is just taking one of the keys, 5 s at most if the session has no lock_timeout.
CREATE FUNCTION pgqueue.lock_keys(keys text[]) RETURNS TABLE (key text, holder bigint) LANGUAGE plpgsql
SET search_path = '' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    before text := current_setting('lock_timeout');
    ignored text;
    wanted text[] := ARRAY(SELECT DISTINCT k.key COLLATE "C" FROM unnest(lock_keys.keys) AS k (key) ORDER BY 1);
    lost text[];
    holders bigint[];
BEGIN
    SELECT coalesce(array_agg(s.key), '{}'), coalesce(array_agg(s.job_id), '{}') INTO lost, holders
    FROM pgqueue.key_states(wanted) AS s
    WHERE s.state = 'waiting' OR s.state = 'held' AND s.hold <> 'after';
    -- Set by the statement itself: a wait for a table (for DDL, say) comes before it.
    WITH patient AS MATERIALIZED (
        SELECT set_config('lock_timeout', CASE before WHEN '0' THEN '5s' ELSE before END, true)
    )
    INSERT INTO pgqueue.unique_key AS k (key, job_id, hold, seconds)
    SELECT w.key COLLATE "C", 0, 'live', 0 FROM patient CROSS JOIN unnest(wanted) AS w (key)
    WHERE w.key <> ALL (lost) ORDER BY 1
    ON CONFLICT (key) DO UPDATE SET expires_at = k.expires_at WHERE false;
    ignored := set_config('lock_timeout', before, true);
    RETURN QUERY
    SELECT l.key, l.holder FROM unnest(lost, holders) AS l (key, holder)
    UNION ALL
    SELECT s.key, s.job_id FROM pgqueue.key_states(ARRAY(SELECT w.key FROM unnest(wanted) AS w (key) WHERE w.key <> ALL (lost))) AS s
    WHERE s.state = 'waiting' OR s.state = 'held' AND s.hold <> 'after';
END $$;
COMMENT ON FUNCTION pgqueue.lock_keys IS 'Lock unique keys in one order: part of a retry by hand of many jobs, for no other caller.';

-- Owned by the owner of the tables, whichever role applies this. Roles that may take keys may call it.
DO $$
DECLARE
    made regprocedure := 'pgqueue.lock_keys(text[])';
    model regprocedure := 'pgqueue.take_many_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[])';
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.unique_key'::regclass));
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

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (26, 'retries', false);

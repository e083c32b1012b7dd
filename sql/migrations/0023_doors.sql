-- breaking: no
--
-- What a role that only enqueues may write: no id, no time, no position, no hold, and no other lane than the one of its priority.
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


-- Rights -----------------------------------------------------------------------------------------------------------------------------

-- Owned by the owner of the tables, whichever role applies this. A check runs as the role that inserts, so each role that enqueues, works
-- or operates needs its function. No role but the owner may make a trigger of `put_in_lane`: it does what it does as the owner.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    model regprocedure := 'pgqueue.is_due(timestamptz)';
    checks regprocedure := 'pgqueue.rank_can_be(smallint, smallint, smallint, smallint, smallint, boolean)';
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
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (23, 'doors', false);

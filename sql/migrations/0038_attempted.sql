-- breaking: no
--
-- What a search asks of the attempts of the jobs that it looks at: of 20,000 at once. Looked up job by job, in each of the leaves of
-- `attempt`, they took half a second.

-- Those of these jobs, which were enqueued at these times, that have an attempt which did not complete and fits: made by this worker, of
-- this class of errors (else its outcome), with this text in its error. What is NULL is not asked for.
--
-- Each leaf is read by its index, for the ids alone. What was found is compared with the times afterwards: attempts of a job that had the id
-- before are of another time. The settings keep the first from reading whole leaves, and the second from comparing each with each.
CREATE FUNCTION pgqueue.attempted(ids bigint[], since timestamptz[], worker bigint, error_type text, error text)
RETURNS SETOF bigint LANGUAGE plpgsql STABLE ROWS 100
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_nestloop = off SET enable_hashjoin = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT a.job_id, a.enqueued_at FROM pgqueue.attempt a
        WHERE a.job_id = ANY (attempted.ids) AND (attempted.worker IS NULL OR a.worker_id = attempted.worker)
          AND (attempted.error_type IS NULL OR coalesce(a.error_type, a.outcome) = attempted.error_type)
          AND (attempted.error IS NULL OR position(lower(attempted.error) IN lower(concat_ws(': ', a.error_type, a.message))) > 0)
    )
    SELECT DISTINCT f.job_id FROM found f JOIN unnest(attempted.ids, attempted.since) AS asked (id, since) ON asked.id = f.job_id
    WHERE f.enqueued_at = asked.since IS NOT FALSE;
END $$;
COMMENT ON FUNCTION pgqueue.attempted IS 'Which of these jobs have an attempt that fits a search.';

-- Owned by the owner of the tables, whichever role applies this. Roles that see jobs may ask.
DO $$
DECLARE
    made constant regprocedure := 'pgqueue.attempted(bigint[], timestamptz[], bigint, text, text)';
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = 'pgqueue.now()'::regprocedure) THEN
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END IF;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.worker'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'SELECT' GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', made, allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (38, 'attempted', false);

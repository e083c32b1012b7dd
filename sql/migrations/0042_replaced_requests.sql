-- breaking: no
--
-- A job that was asked to stop while it ran, and was given back unstarted, waits with that request. If an enqueue replaced it then, it was
-- cancelled all the same: what the enqueue had said of it was lost.

-- Forget what was asked of these jobs, which an enqueue has just replaced; each is named by its id and the time of its enqueue. Requests to
-- jobs that run are left alone. Acts as the owner of the tables: a role that replaces jobs may not read or delete requests.
CREATE FUNCTION pgqueue.forget_requests(ids bigint[], since timestamptz[]) RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    forgotten integer;
BEGIN
    DELETE FROM pgqueue.job_signal s
    WHERE s.job_id = ANY (forget_requests.ids)
      AND coalesce((s.job_id, s.enqueued_at) IN (SELECT * FROM unnest(forget_requests.ids, forget_requests.since)), true)
      AND NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.id = s.job_id OFFSET 0);
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END $$;
COMMENT ON FUNCTION pgqueue.forget_requests IS 'Part of an enqueue that replaces jobs: for no other caller.';

-- Owned by the owner of the tables, whichever role applies this. Roles that may move scheduled jobs replace jobs, and call it.
DO $$
DECLARE
    made CONSTANT regprocedure := 'pgqueue.forget_requests(bigint[], timestamptz[])';
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.job_scheduled'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'DELETE'
        GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', made, allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (42, 'replaced_requests', false);

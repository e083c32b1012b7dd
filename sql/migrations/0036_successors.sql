-- breaking: no
--
-- The jobs that a job has enqueued with its end. They name it in a header, `pgqueue:parent`, and no index has that: it would cost each job
-- of every application. So they are looked for among the jobs that were enqueued at that time.

-- The successors of the job `parent` that ended at `ended`: 100 at most, the first ones first.
--
-- Ids are given in the order of time, as far as two seconds go. So the first id of that time is found by halving: each step reads the next
-- jobs behind an id, 500 ids far at most. Where none is left, the ids are taken for older: history goes the oldest first. Then 20,000 ids
-- from there on are looked at, and as many behind the parent: a task that works in batches enqueues successors before its end. No step
-- reads more than a span of ids, however many rows are dead.
CREATE FUNCTION pgqueue.successors(parent bigint, ended timestamptz) RETURNS TABLE (id bigint, state text, queue varchar, task varchar)
LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    low bigint := successors.parent;
    high bigint := successors.parent;
    middle bigint;
    since timestamptz := successors.ended - interval '2 seconds';
    seen timestamptz;
BEGIN
    IF has_sequence_privilege('pgqueue.job_id_seq', 'SELECT') THEN
        high := (SELECT s.last_value FROM pgqueue.job_id_seq s);
    END IF;
    WHILE high - low > 500 LOOP
        middle := low + (high - low) / 2;
        seen := (SELECT min(n.enqueued_at) FROM (
            (SELECT j.enqueued_at FROM pgqueue.job_available j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_scheduled j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_blocked j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_running j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_done j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_dead j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
        ) AS n);
        IF seen >= since THEN
            high := middle;
        ELSE
            low := middle;
        END IF;
    END LOOP;
    RETURN QUERY
    SELECT j.id, j.state, j.queue, j.task
    FROM (SELECT DISTINCT span.first FROM (VALUES (successors.parent), (low)) AS span (first)) AS span
    CROSS JOIN LATERAL (
        SELECT j.id, j.state, j.queue, j.task, j.headers FROM pgqueue.job j WHERE j.id > span.first AND j.id <= span.first + 20000 OFFSET 0
    ) AS j
    WHERE j.headers ->> 'pgqueue:parent' = successors.parent::text AND (span.first = successors.parent OR j.id > successors.parent + 20000)
    ORDER BY j.id LIMIT 100;
END $$;
COMMENT ON FUNCTION pgqueue.successors IS 'The jobs that a job has enqueued with its end, as far as they are found near that time.';

-- Owned by the owner of the tables, whichever role applies this. Roles that see jobs may ask.
DO $$
DECLARE
    made CONSTANT regprocedure := 'pgqueue.successors(bigint, timestamptz)';
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

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (36, 'successors', false);

-- breaking: no
--
-- A cancel by queue or task finds its jobs, and then waits for a transaction that has one of them: as an enqueue that gives the job another
-- queue or task, under its id. Such a job was cancelled, too.

-- As in 0019, and only jobs of this queue and this task (NULL: of any). What is compared is the row that is locked.
--
-- Locks them in the order of their ids, whatever partition they are in (see 0018). If one has moved to another partition meanwhile, it
-- would be locked after jobs with higher ids. So the locks are given back, and all begins anew.
CREATE FUNCTION pgqueue.take_waiting(ids bigint[], since timestamptz[], queue text, task text) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    parts oid[];
    places tid[];
BEGIN
    LOOP
        <<round>>
        BEGIN
            SELECT array_agg(j.part), array_agg(j.place) INTO parts, places
            FROM (SELECT a.id, a.since FROM unnest(take_waiting.ids, take_waiting.since) AS a (id, since) ORDER BY a.id) AS asked
            CROSS JOIN LATERAL (
                SELECT j.tableoid AS part, j.ctid AS place FROM pgqueue.job j
                WHERE j.id = asked.id AND j.enqueued_at = asked.since AND j.state IN ('available', 'scheduled', 'blocked')
                  AND (take_waiting.queue IS NULL OR j.queue = take_waiting.queue)
                  AND (take_waiting.task IS NULL OR j.task = take_waiting.task)
                LIMIT 1 FOR UPDATE
            ) AS j;
            EXIT WHEN coalesce(cardinality(places), 0) = cardinality(take_waiting.ids);
            -- A statement of its own: it sees what has been committed while the one before waited.
            EXIT WHEN coalesce(cardinality(places), 0) >= (
                SELECT count(*) FROM unnest(take_waiting.ids, take_waiting.since) AS asked (id, since)
                CROSS JOIN LATERAL (
                    SELECT FROM pgqueue.job j
                    WHERE j.id = asked.id AND j.enqueued_at = asked.since AND j.state IN ('available', 'scheduled', 'blocked')
                      AND (take_waiting.queue IS NULL OR j.queue = take_waiting.queue)
                      AND (take_waiting.task IS NULL OR j.task = take_waiting.task)
                    LIMIT 1
                ) AS j);
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            NULL;  -- With the block its locks are gone.
        END round;
    END LOOP;
    RETURN QUERY
    WITH waiting AS MATERIALIZED (
        SELECT w.part, w.place FROM unnest(parts, places) AS w (part, place)
    ), from_available AS (
        DELETE FROM pgqueue.job_available j
        WHERE j.ctid = ANY (ARRAY(SELECT w.place FROM waiting w WHERE w.part = 'pgqueue.job_available'::regclass)) RETURNING j.*
    ), from_scheduled AS (
        DELETE FROM pgqueue.job_scheduled j
        WHERE j.ctid = ANY (ARRAY(SELECT w.place FROM waiting w WHERE w.part = 'pgqueue.job_scheduled'::regclass)) RETURNING j.*
    ), from_blocked AS (
        DELETE FROM pgqueue.job_blocked j
        WHERE j.ctid = ANY (ARRAY(SELECT w.place FROM waiting w WHERE w.part = 'pgqueue.job_blocked'::regclass)) RETURNING j.*
    )
    TABLE from_available UNION ALL TABLE from_scheduled UNION ALL TABLE from_blocked;
END $$;
COMMENT ON FUNCTION pgqueue.take_waiting(bigint[], timestamptz[], text, text) IS 'Part of a cancel: for no other caller.';

-- Owned by the owner of the tables, whichever role applies this. Roles that cancel jobs take them.
DO $$
DECLARE
    made CONSTANT regprocedure := 'pgqueue.take_waiting(bigint[], timestamptz[], text, text)';
    model CONSTANT regprocedure := 'pgqueue.take_waiting(bigint[], timestamptz[])';
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

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (41, 'filtered_cancel', false);

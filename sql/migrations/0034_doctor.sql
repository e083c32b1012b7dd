-- breaking: no
--
-- What `pgqueue doctor` needs to know: which sequences lag behind the tables, all of them, and which workers do not listen on purpose.

-- NULL: a worker of a version before this.
ALTER TABLE pgqueue.worker ADD COLUMN listens boolean;

-- As in 0022, for the sequence of the table `bulk` as well. That of `audit` is left out: no uniqueness hangs on its numbers.
CREATE OR REPLACE FUNCTION pgqueue.lagging_sequences(whole boolean) RETURNS TABLE (sequence regclass, given bigint, highest bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
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
            (SELECT max(j.hold_pos) FROM pgqueue.job_running j WHERE j.hold_pos < most AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_running j WHERE j.hold_pos < most AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_available j WHERE j.hold_pos < most AND j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_available j WHERE j.hold_pos < most AND j.holds AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_scheduled j WHERE j.hold_pos < most AND j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_scheduled j WHERE j.hold_pos < most AND j.holds AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_blocked j WHERE j.hold_pos < most AND j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_blocked j
             WHERE j.hold_pos < most AND j.holds AND j.limit_key IS NOT NULL AND (substr(j.key, 1, 5) = 'rate:') IS TRUE))),
        ('pgqueue.worker_id_seq', greatest(
            (SELECT max(w.id) FROM pgqueue.worker w WHERE w.id < most),
            (SELECT max(j.worker_id) FROM pgqueue.job_running j WHERE j.worker_id < most),
            (SELECT max(d.worker_id) FROM pgqueue.declaration d WHERE d.worker_id < most))),
        ('pgqueue.supervisor_id_seq', greatest(
            (SELECT max(s.id) FROM pgqueue.supervisor s WHERE s.id < most),
            (SELECT max(w.supervisor_id) FROM pgqueue.worker w WHERE w.supervisor_id < most),
            (SELECT max(o.supervisor_id) FROM pgqueue.supervisor_order o WHERE o.supervisor_id < most))),
        ('pgqueue.supervisor_order_id_seq', (SELECT max(o.id) FROM pgqueue.supervisor_order o WHERE o.id < most)),
        ('pgqueue.job_waiter_waiter_seq', (SELECT max(w.waiter) FROM pgqueue.job_waiter w WHERE w.waiter < most)),
        ('pgqueue.bulk_id_seq', (SELECT max(b.id) FROM pgqueue.bulk b WHERE b.id < most))
    )
    SELECT each.sequence, each.given, each.highest FROM (
        SELECT m.sequence::regclass AS sequence, coalesce(pg_sequence_last_value(m.sequence::regclass), 0) AS given, m.highest FROM mark m
    ) AS each
    WHERE each.given < each.highest;
END $$;

-- The same for roles that only look, and may not see what a sequence has given.
CREATE FUNCTION pgqueue.sequences_behind() RETURNS TABLE (sequence text, given bigint, highest bigint) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT l.sequence::text, l.given, l.highest FROM pgqueue.lagging_sequences(false) AS l
$$;
COMMENT ON FUNCTION pgqueue.sequences_behind IS 'Which sequences would give a number that a row has already. Read by `pgqueue doctor`.';

-- Owned by the owner of the tables, whichever role applies this. Roles that look at jobs, or work, may look here.
DO $$
DECLARE
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION pgqueue.sequences_behind() OWNER TO %I', (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    REVOKE ALL ON FUNCTION pgqueue.sequences_behind() FROM PUBLIC;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.worker'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'SELECT' GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.sequences_behind() TO %s %s', allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (34, 'doctor', false);

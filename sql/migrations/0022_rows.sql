-- breaking: no
--
-- One row must not stop what others do: the functions of checks mean the same in every session, and a value that has no text is read
-- without an error.


-- Checks -----------------------------------------------------------------------------------------------------------------------------
--
-- The body of a PL/pgSQL function is parsed in the session that inserts. There an operator is looked up by the path of that session, and
-- a role may have put one of its own before ours: `lock_limit -1` got in so, and ended every worker that met it. So these bodies name
-- every operator and every function with its schema. BETWEEN, IN and LIKE cannot be named, so they are not used. No SET search_path:
-- each keyed row of a batch would pay for it.

CREATE OR REPLACE FUNCTION pgqueue.is_due(run_at timestamptz) RETURNS boolean LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
BEGIN
    RETURN run_at OPERATOR(pg_catalog.<=) pgqueue.now();
END $$;

CREATE OR REPLACE FUNCTION pgqueue.keys_can_be(
    lock_key text, lock_limit integer, on_locked text, limit_key text, rate_key text
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN (lock_key IS NULL
            OR (pg_catalog.octet_length(lock_key) OPERATOR(pg_catalog.>=) 1)
            AND (pg_catalog.octet_length(lock_key) OPERATOR(pg_catalog.<=) 500)
            AND (lock_limit OPERATOR(pg_catalog.>=) 1) IS NOT FALSE
            AND (on_locked IS NULL
                 OR (on_locked OPERATOR(pg_catalog.=) 'wait'::pg_catalog.text)
                 OR (on_locked OPERATOR(pg_catalog.=) 'skip'::pg_catalog.text)
                 OR (on_locked OPERATOR(pg_catalog.=) 'once'::pg_catalog.text)))
        AND (pg_catalog.octet_length(limit_key) OPERATOR(pg_catalog.>=) 1) IS NOT FALSE
        AND (pg_catalog.octet_length(limit_key) OPERATOR(pg_catalog.<=) 200) IS NOT FALSE
        AND (pg_catalog.octet_length(rate_key) OPERATOR(pg_catalog.>=) 1) IS NOT FALSE
        AND (pg_catalog.octet_length(rate_key) OPERATOR(pg_catalog.<=) 500) IS NOT FALSE;
END $$;


-- Values that have no text -----------------------------------------------------------------------------------------------------------
--
-- A number such as 1e131000 takes 12 bytes in jsonb and 131,001 as text. So a value of 2 kB may have no text: a text ends at 1 GB. The
-- error was that of the whole statement, and so of every job beside that one.

-- The text of a value; NULL if it is longer than a text may be. That takes the server seconds to find out, and 2 GB of memory. So once
-- it has met such a value, it looks at the numbers of each further value of the same transaction before. That look takes up to ten times
-- as long as an ordinary text, and is therefore not the rule.
CREATE FUNCTION pgqueue.text_of(value jsonb) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    said text;
BEGIN
    IF (pg_catalog.current_setting('pgqueue.long_text', true) OPERATOR(pg_catalog.=) 'met') IS TRUE AND pg_catalog.jsonb_path_exists(
        value, '$.** ? (@ > 1e400 || @ < -1e400 || @ != 0 && @ < 1e-400 && @ > -1e-400)'::pg_catalog.jsonpath)
    THEN
        RETURN NULL;
    END IF;
    <<made>>
    BEGIN
        said := value::pg_catalog.text;
    EXCEPTION WHEN program_limit_exceeded OR statement_too_complex OR internal_error OR out_of_memory THEN
        said := NULL;
    END made;
    IF value IS NOT NULL AND (pg_catalog.octet_length(said) OPERATOR(pg_catalog.<=) 16777216) IS NOT TRUE THEN
        PERFORM pg_catalog.set_config('pgqueue.long_text', 'met', true);
    END IF;
    RETURN said;
END $$;
COMMENT ON FUNCTION pgqueue.text_of IS 'The text of a JSON value; NULL if it is longer than a text may be.';


-- Numbers that no sequence has given ---------------------------------------------------------------------------------------------------
--
-- As in 0018; there only ids and positions had the bound of 2^62. A row that was made by hand with a hold_pos of 2^63 - 1 kept every worker
-- from starting: no sequence can be advanced beyond it.
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
        ('pgqueue.job_waiter_waiter_seq', (SELECT max(w.waiter) FROM pgqueue.job_waiter w WHERE w.waiter < most))
    )
    SELECT each.sequence, each.given, each.highest FROM (
        SELECT m.sequence::regclass AS sequence, coalesce(pg_sequence_last_value(m.sequence::regclass), 0) AS given, m.highest FROM mark m
    ) AS each
    WHERE each.given < each.highest;
END $$;


-- Owned by the owner of the tables, whichever role applies this. Roles that could call `now` may call this.
DO $$
DECLARE
    model regprocedure := 'pgqueue.now()';
    made regprocedure := 'pgqueue.text_of(jsonb)';
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

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (22, 'rows', false);

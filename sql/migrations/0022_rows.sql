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

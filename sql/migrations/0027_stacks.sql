-- breaking: no
--
-- Where a running job stands, and which slots a worker has.

-- A request for the stack of a running job, and the answer of its worker. Rows live for seconds: the session that asks deletes its row, and
-- each new request deletes rows that are older than a minute. Nothing else hangs on them.
CREATE TABLE pgqueue.stack_request (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id      bigint NOT NULL,
    asked_at    timestamptz NOT NULL DEFAULT pgqueue.now(),
    answered_at timestamptz,
    answer      text CHECK (octet_length(answer) <= 131072)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.stack_request IS 'Requests for the stacks of running jobs; a row lives for seconds.';

-- Beside each queue the slots of its own, NULL where it shares the worker's common slots. NULL: a worker of the version before.
ALTER TABLE pgqueue.worker ADD COLUMN slots integer[];

-- Owned by the owner of the tables, whichever role applies this. A role that could ask running jobs to stop asks for their stacks; one that
-- runs workers answers.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    giving record;
    allowed record;
BEGIN
    EXECUTE format('ALTER TABLE pgqueue.stack_request OWNER TO %I', tables);
    FOR giving IN
        SELECT * FROM (VALUES
            ('pgqueue.supervisor_order'::regclass, 'INSERT', 'SELECT, INSERT (job_id), DELETE ON pgqueue.stack_request'),
            ('pgqueue.worker', 'INSERT', 'SELECT, UPDATE (answered_at, answer) ON pgqueue.stack_request')
        ) AS one (like_table, privilege, rights)
    LOOP
        FOR allowed IN
            SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
                   CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
            FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
            WHERE c.oid = giving.like_table AND a.grantee <> c.relowner AND a.privilege_type = giving.privilege
            GROUP BY a.grantee
        LOOP
            EXECUTE format('GRANT %s TO %s %s', giving.rights, allowed.role, allowed.too);
        END LOOP;
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (27, 'stacks', false);

-- breaking: no
--
-- What operators do: tasks that are paused, and a record of every write by hand.

-- Tasks that are paused, in all queues.
CREATE TABLE pgqueue.paused_task (
    name      text COLLATE "C" PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 800),
    paused_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    paused_by text
);
COMMENT ON TABLE pgqueue.paused_task IS 'Tasks that are paused. A task without a row is open.';

ALTER TABLE pgqueue.queue ADD COLUMN paused_by text;

-- The record. `actor` is what the writer says of itself; `role` is the role that was logged in. `jobs` are the jobs that were changed, at
-- most 1,000 in a row. The ids come from a sequence that may go back with a failover, so no uniqueness hangs on them alone.
CREATE TABLE pgqueue.audit (
    id      bigint GENERATED ALWAYS AS IDENTITY,
    at      timestamptz NOT NULL DEFAULT pgqueue.now(),
    actor   text NOT NULL CHECK (octet_length(actor) BETWEEN 1 AND 800),
    role    text NOT NULL DEFAULT session_user,
    action  text NOT NULL CHECK (octet_length(action) BETWEEN 1 AND 40),
    target  jsonb NOT NULL DEFAULT '{}',
    jobs    bigint[] NOT NULL DEFAULT '{}',
    count   bigint NOT NULL DEFAULT 1,
    details jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (at, id)
);
COMMENT ON TABLE pgqueue.audit IS 'Every write by hand: by which actor, what, on what, how many.';
-- Which write changed this job. Rows are only added, and taken from the old end.
CREATE INDEX audit_jobs ON pgqueue.audit USING gin (jobs);

-- Owned by the owner of the tables, whichever role applies this. A role that could see what is paused sees paused tasks and the record; one
-- that could pause queues pauses tasks. Whichever may write by hand, by a row of one of these tables, writes the record; it cannot say
-- when, or as which role. A role that could delete old rows of a worker's duties deletes old rows of the record.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    giving record;
    allowed record;
BEGIN
    EXECUTE format('ALTER TABLE pgqueue.paused_task OWNER TO %I', tables);
    EXECUTE format('ALTER TABLE pgqueue.audit OWNER TO %I', tables);
    FOR giving IN
        SELECT * FROM (VALUES
            ('pgqueue.queue'::regclass, 'SELECT', 'SELECT ON pgqueue.paused_task'),
            ('pgqueue.queue', 'INSERT', 'INSERT, DELETE ON pgqueue.paused_task'),
            ('pgqueue.supervisor_order', 'SELECT', 'SELECT ON pgqueue.audit'),
            ('pgqueue.supervisor_order', 'INSERT', 'INSERT (actor, action, target, jobs, count, details) ON pgqueue.audit'),
            ('pgqueue.job_signal', 'INSERT', 'INSERT (actor, action, target, jobs, count, details) ON pgqueue.audit'),
            ('pgqueue.schedule', 'INSERT', 'INSERT (actor, action, target, jobs, count, details) ON pgqueue.audit'),
            ('pgqueue.key_limit', 'INSERT', 'INSERT (actor, action, target, jobs, count, details) ON pgqueue.audit'),
            ('pgqueue.unknown_task', 'DELETE', 'DELETE ON pgqueue.audit')
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

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (24, 'operators', false);

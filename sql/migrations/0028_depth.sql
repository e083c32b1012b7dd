-- breaking: no
--
-- How many jobs there are in each queue and state, as the leader has measured last. Whatever shows numbers reads this, for counting takes
-- seconds where people need the numbers most: a long backlog, and a snapshot that is held.

-- A measurement is the rows of one `at`; `next_at` is when the leader measures again. It is appended, and those before it are deleted
-- (see worker/leader/depth.py). `reason` says why the jobs wait. A queue '' is the whole of a history. `oldest` is since when the first of
-- the jobs could run, and `longest_blocked` since when a blocked job could have gone on.
CREATE TABLE pgqueue.depth (
    at              timestamptz NOT NULL,
    next_at         timestamptz NOT NULL,
    queue           text        COLLATE "C" NOT NULL,
    state           text        COLLATE "C" NOT NULL,
    reason          text        COLLATE "C" NOT NULL DEFAULT '',
    task            text        COLLATE "C" NOT NULL DEFAULT '',
    n               bigint      NOT NULL,
    exact           boolean     NOT NULL,
    oldest          timestamptz,
    longest_blocked timestamptz,
    PRIMARY KEY (at, queue, state, reason, task)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.depth IS 'How many jobs each queue has in each state, and why they wait, as the leader has measured last.';

-- Owned by the owner of the tables, whichever role applies this. Roles that could look so far may look here, and workers write.
DO $$
DECLARE
    allowed record;
BEGIN
    EXECUTE format('ALTER TABLE pgqueue.depth OWNER TO %I', (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role, a.privilege_type AS may,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.worker'::regclass AND a.grantee <> c.relowner AND a.privilege_type IN ('SELECT', 'INSERT', 'DELETE')
        GROUP BY a.grantee, a.privilege_type
    LOOP
        EXECUTE format('GRANT %s ON pgqueue.depth TO %s %s', allowed.may, allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (28, 'depth', false);

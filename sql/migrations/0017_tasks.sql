-- breaking: no
--
-- A worker claims only jobs of tasks that it knows. Its row says which these are, so that the other workers can judge what a
-- job waits for: a task that no worker knows, or a slot.

-- The names of its tasks, aliases too. NULL: a worker of the version before; it claims jobs of every task, and puts back those that it
-- does not know.
ALTER TABLE pgqueue.worker ADD COLUMN tasks text[];

-- The pairs of a queue and a task that a live worker takes jobs of. The task '' stands for every task of that queue. Few rows, for
-- most workers serve the same: a condition `(queue, task) IN (…)` on this is hashed, and read only when a row needs it.
CREATE FUNCTION pgqueue.served() RETURNS TABLE (queue text, task text) LANGUAGE sql STABLE ROWS 100 AS $$
    SELECT DISTINCT q.queue, t.task
    FROM (
        SELECT DISTINCT w.queues, w.tasks FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
    ) AS alike
    CROSS JOIN unnest(alike.queues) AS q (queue)
    CROSS JOIN unnest(coalesce(alike.tasks, ARRAY[''])) AS t (task)
$$;
COMMENT ON FUNCTION pgqueue.served IS 'The queues and tasks that live workers take jobs of; the task '''' is every task of its queue.';

-- The queues and tasks of blocked jobs that hold something: to find those that cannot go on.
DROP INDEX pgqueue.job_blocked_queue_holds;
CREATE INDEX job_blocked_queue_holds ON pgqueue.job_blocked (queue, task) WHERE holds AND queue <> '';

-- Tasks that have jobs and that no live worker of their queue knows: `since` when, and when they were seen last.
CREATE TABLE pgqueue.unknown_task (
    queue   varchar(40)  COLLATE "C" NOT NULL,
    task    varchar(200) NOT NULL,
    since   timestamptz  NOT NULL DEFAULT pgqueue.now(),
    seen_at timestamptz  NOT NULL DEFAULT pgqueue.now(),
    PRIMARY KEY (queue, task)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.unknown_task IS 'Tasks that have jobs and that no live worker knows, and since when.';

-- Owned by the owner of the tables, whichever role applies this. Roles that could work so far may work now.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION pgqueue.served() OWNER TO %I', tables);
    EXECUTE format('ALTER TABLE pgqueue.unknown_task OWNER TO %I', tables);
    IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = 'pgqueue.now()'::regprocedure) THEN
        REVOKE ALL ON FUNCTION pgqueue.served() FROM PUBLIC;
    END IF;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        WHERE p.oid = 'pgqueue.now()'::regprocedure AND a.grantee <> p.proowner GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.served() TO %s %s', allowed.role, allowed.too);
    END LOOP;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.worker'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'INSERT' GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.unknown_task TO %s %s', allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (17, 'tasks', false);

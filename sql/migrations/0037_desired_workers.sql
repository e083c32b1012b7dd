-- breaking: no
--
-- How many workers there should be, for autoscalers: one number, within milliseconds however many jobs wait.
--
-- It counts jobs that are available or run. Those of paused queues and tasks are left out until they are resumed. Jobs whose task no live
-- worker knows count: their workers may have been scaled to nothing.
--
-- 1. While the tables of jobs are small (512 kB each, dead rows and all), all is counted now.
-- 2. Else the number is the one that the leading worker has measured last, 5 to 120 seconds ago.
-- 3. If that is overdue, no worker leads, and perhaps none is there. Then up to 100 workers' jobs are counted now. Jobs that run are known
--    from the heartbeats of workers.
--
-- Where no worker leads, nothing promotes jobs that have become due: these are counted, too. Blocked jobs start when a key is free. No
-- further worker helps them, but one must be there: if there are any, the answer is at least 1.
--
-- In the settings of this function, so that it reads along the indexes in any session: `pgqueue.why_waiting` has the same.
CREATE FUNCTION pgqueue.desired_workers(queue text, per_worker integer) RETURNS integer LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    wanted constant text := $1;
    moment constant timestamptz := pgqueue.now();
    paused_queues constant text[] := ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL);
    paused_tasks constant text[] := ARRAY(SELECT p.name FROM pgqueue.paused_task p);
    small constant boolean := greatest(pg_relation_size('pgqueue.job_available'), pg_relation_size('pgqueue.job_scheduled'),
                                       pg_relation_size('pgqueue.job_blocked'), pg_relation_size('pgqueue.job_running')) <= 524288;
    most bigint;
    last timestamptz;
    fresh boolean;
    jobs bigint;
    waits boolean;
BEGIN
    IF (per_worker >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'desired_workers: per_worker is %, and must be at least 1', coalesce(per_worker::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is how many jobs a worker runs at once.';
    END IF;
    SELECT d.at, d.next_at >= moment - interval '10 seconds' AND d.at <= moment + interval '1 second' INTO last, fresh
    FROM pgqueue.depth d ORDER BY d.at DESC LIMIT 1;
    IF fresh AND NOT small THEN
        SELECT coalesce(sum(d.n) FILTER (WHERE d.state = 'running' OR d.state = 'available' AND d.queue <> ALL (paused_queues)
                                               AND NOT (d.reason = 'task_paused' AND d.task = ANY (paused_tasks))), 0)
        INTO jobs FROM pgqueue.depth d WHERE d.at = last AND d.queue <> '' AND (wanted IS NULL OR d.queue = wanted);
    ELSE
        most := CASE WHEN small THEN 1000000 ELSE 100 * per_worker::bigint END;
        IF wanted IS NULL THEN
            jobs := (SELECT count(*) FROM (SELECT FROM pgqueue.job_available j
                     WHERE j.queue <> ALL (paused_queues) AND j.task <> ALL (paused_tasks) LIMIT most) AS available);
        ELSIF wanted <> ALL (paused_queues) THEN
            jobs := (SELECT count(*) FROM (SELECT FROM pgqueue.job_available j
                     WHERE j.queue = wanted AND j.task <> ALL (paused_tasks) ORDER BY j.queue, j.rank, j.pos LIMIT most) AS available);
        END IF;
        jobs := coalesce(jobs, 0) + (
            SELECT count(*) FROM (SELECT FROM pgqueue.job_scheduled j
            WHERE j.run_at <= moment AND (wanted IS NULL OR j.queue = wanted) AND j.queue <> ALL (paused_queues)
              AND j.task <> ALL (paused_tasks) ORDER BY j.run_at LIMIT most) AS due);
        IF small THEN
            jobs := jobs + (SELECT count(*) FROM pgqueue.job_running j WHERE wanted IS NULL OR j.queue = wanted);
        ELSE
            jobs := jobs + (
                SELECT coalesce(sum(cardinality(w.running)), 0)
                FROM (SELECT w.queues, w.running, w.dead_at, w.beat_at, w.lease FROM pgqueue.worker w ORDER BY w.id DESC LIMIT 1000) AS w
                WHERE w.dead_at IS NULL AND w.beat_at >= moment - 3 * w.lease AND (wanted IS NULL OR wanted = ANY (w.queues)));
        END IF;
    END IF;
    IF jobs = 0 THEN
        waits := CASE WHEN small THEN EXISTS (SELECT FROM pgqueue.job_blocked j WHERE (wanted IS NULL OR j.queue = wanted)
                                              AND j.queue <> ALL (paused_queues))
                      ELSE EXISTS (SELECT FROM pgqueue.depth d WHERE d.at = last AND d.state = 'blocked' AND d.n > 0
                                   AND (wanted IS NULL OR d.queue = wanted) AND d.queue <> ALL (paused_queues)) END;
    END IF;
    RETURN CASE WHEN waits THEN 1 ELSE least(ceil(jobs::numeric / per_worker), 2147483647) END;
END $$;
COMMENT ON FUNCTION pgqueue.desired_workers IS 'How many workers the jobs of this queue need that each run so many at once, for autoscalers; NULL: of all queues.';

-- Owned by the owner of the tables, whichever role applies this. Roles that see workers may ask.
DO $$
DECLARE
    made constant regprocedure := 'pgqueue.desired_workers(text, integer)';
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

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (37, 'desired_workers', false);

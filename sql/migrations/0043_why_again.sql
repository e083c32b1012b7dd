-- breaking: no
--
-- `pgqueue why` named what does not hold a job, and left out what does. These functions read more, or leave out more, than those of 0035.

-- * A worker whose jobs were not all read says how many it runs (`running`); `whole`: all jobs of the workers that were `looked` at were read.
CREATE OR REPLACE FUNCTION pgqueue.why_waiting(id bigint, queue text, task text) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH few_dead AS MATERIALIZED (
        SELECT pg_stat_get_dead_tuples('pgqueue.job_running'::regclass) < 50000 AS yes
    ), serving AS MATERIALIZED (
        SELECT w.id, w.host, w.pid, w.state, w.concurrency, w.lost, w.version_tag, w.running,
               extract(epoch FROM pgqueue.now() - w.beat_at)::float8 AS beat_age, extract(epoch FROM w.lease)::float8 AS lease,
               w.tasks IS NULL OR why_waiting.task = ANY (w.tasks) AS knows,
               w.slots[array_position(w.queues, why_waiting.queue)] AS slots,
               ARRAY(SELECT own.queue FROM unnest(w.queues, w.slots) AS own (queue, slots) WHERE own.slots IS NOT NULL) AS apart
        FROM pgqueue.worker w
        WHERE w.dead_at IS NULL AND why_waiting.queue = ANY (w.queues)
        ORDER BY w.id DESC LIMIT 1000
    ), able AS MATERIALIZED (
        SELECT id, running FROM serving WHERE knows AND state IN ('starting', 'running') ORDER BY id LIMIT 50
    ), held AS MATERIALIZED (
        SELECT * FROM (
            SELECT r.* FROM able CROSS JOIN LATERAL (
                SELECT r.id, r.task, r.queue, r.worker_id, r.crashes, r.started_at AS since FROM pgqueue.job_running r
                WHERE (SELECT yes FROM few_dead) AND r.worker_id = able.id ORDER BY r.claim DESC LIMIT 1000
            ) AS r
            UNION ALL
            SELECT r.* FROM able CROSS JOIN LATERAL unnest(able.running) AS ran (id) CROSS JOIN LATERAL (
                SELECT r.id, r.task, r.queue, r.worker_id, r.crashes, r.started_at AS since FROM pgqueue.job_running r
                WHERE NOT (SELECT yes FROM few_dead) AND r.id = ran.id AND r.worker_id + 0 = able.id LIMIT 1
            ) AS r
        ) AS found LIMIT 5000
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'place', (SELECT to_json(place) FROM (
            SELECT a.state, a.rank, a.pos, a.holds, a.crashes, a.lock_limit FROM pgqueue.job_available a WHERE a.id = why_waiting.id
            UNION ALL
            SELECT s.state, s.rank, s.pos, s.holds, s.crashes, s.lock_limit FROM pgqueue.job_scheduled s WHERE s.id = why_waiting.id
            UNION ALL
            SELECT b.state, b.rank, b.pos, b.holds, b.crashes, b.lock_limit FROM pgqueue.job_blocked b WHERE b.id = why_waiting.id
            LIMIT 1) AS place),
        'queue_paused', (SELECT json_build_object('at', q.paused_at, 'by', q.paused_by) FROM pgqueue.queue q
                         WHERE q.name = why_waiting.queue AND q.paused_at IS NOT NULL),
        'task_paused', (SELECT json_build_object('at', t.paused_at, 'by', t.paused_by) FROM pgqueue.paused_task t
                        WHERE t.name = why_waiting.task),
        'workers', (SELECT coalesce(json_agg(json_build_object(
            'id', s.id, 'host', s.host, 'pid', s.pid, 'state', s.state, 'concurrency', s.concurrency, 'lost', s.lost,
            'beat_age', s.beat_age, 'lease', s.lease, 'knows', s.knows, 'slots', s.slots, 'apart', s.apart,
            'running', cardinality(s.running), 'looked', s.id IN (SELECT able.id FROM able)) ORDER BY s.id), '[]') FROM serving s),
        'whole', (SELECT count(*) < 5000 FROM held),
        'held', (SELECT coalesce(json_agg(to_json(held) ORDER BY held.since, held.id), '[]') FROM held)
    )::text;
END $$;

-- * `before`: jobs that are passed over are left out: those of other paused queues and tasks, and those that no live worker takes.
-- * `holders` of a limit that was set lower: all of them, up to 100 more than may hold it.
-- * `rate`: after a rate was changed, or the clock was, no job waits for longer than from one start to the next (see `rates_move`).
CREATE OR REPLACE FUNCTION pgqueue.why_key(id bigint, rank integer, key text, lock_limit integer) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT why_key.key AS whole, split_part(why_key.key, ':', 1) AS kind, substr(why_key.key, strpos(why_key.key, ':') + 1) AS key,
               pg_stat_get_dead_tuples('pgqueue.job_running'::regclass) < 50000 AS few_run,
               pg_stat_get_dead_tuples('pgqueue.job_blocked'::regclass) < 50000 AS few_wait
    ), alike AS MATERIALIZED (
        SELECT DISTINCT w.queues, w.tasks FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
    ), me AS MATERIALIZED (
        SELECT mine.queue, mine.task, EXISTS (SELECT FROM alike WHERE mine.queue = ANY (alike.queues)) AS served FROM (
            (SELECT b.queue, b.task FROM pgqueue.job_blocked b WHERE b.id = why_key.id LIMIT 1)
            UNION ALL
            (SELECT a.queue, a.task FROM pgqueue.job_available a WHERE a.id = why_key.id LIMIT 1)
        ) AS mine LIMIT 1
    ), most AS MATERIALIZED (
        SELECT CASE asked.kind WHEN 'lock' THEN why_key.lock_limit
                               WHEN 'limit' THEN (SELECT l.n FROM pgqueue.key_limit l WHERE l.name = asked.key) END AS n
        FROM asked
    ), counted AS MATERIALIZED (
        SELECT least(greatest(coalesce(most.n, 1), 1), 1000) AS n,
               least(greatest(coalesce(most.n, 1), 1), 1000) + CASE WHEN asked.few_run THEN 100 ELSE 0 END AS running
        FROM most CROSS JOIN asked
    ), holding AS MATERIALIZED (
        SELECT of_lock.* FROM asked CROSS JOIN counted CROSS JOIN LATERAL (
            (SELECT r.id, r.task, r.queue, r.state, r.worker_id, r.started_at, r.rank, r.holds, r.key FROM pgqueue.job_running r
             WHERE asked.kind = 'lock' AND r.lock_key = asked.key
             ORDER BY coalesce(r.hold_pos, 9223372036854775807) DESC LIMIT counted.running)
            UNION ALL
            (SELECT a.id, a.task, a.queue, a.state, NULL, NULL, a.rank, a.holds, NULL FROM pgqueue.job_available a
             WHERE asked.kind = 'lock' AND a.lock_key = asked.key AND a.holds
             ORDER BY coalesce(a.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT s.id, s.task, s.queue, s.state, NULL, NULL, s.rank, s.holds, NULL FROM pgqueue.job_scheduled s
             WHERE asked.kind = 'lock' AND s.lock_key = asked.key AND s.holds
             ORDER BY coalesce(s.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT b.id, b.task, b.queue, b.state, NULL, NULL, b.rank, b.holds, NULL FROM pgqueue.job_blocked b
             WHERE asked.kind = 'lock' AND b.lock_key = asked.key AND b.holds
             ORDER BY coalesce(b.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
        ) AS of_lock
        UNION ALL
        SELECT of_limit.* FROM asked CROSS JOIN counted CROSS JOIN LATERAL (
            (SELECT r.id, r.task, r.queue, r.state, r.worker_id, r.started_at, r.rank, r.holds, NULL AS key FROM pgqueue.job_running r
             WHERE asked.kind = 'limit' AND r.limit_key = asked.key
             ORDER BY coalesce(r.hold_pos, 9223372036854775807) DESC LIMIT counted.running)
            UNION ALL
            (SELECT a.id, a.task, a.queue, a.state, NULL, NULL, a.rank, a.holds, NULL FROM pgqueue.job_available a
             WHERE asked.kind = 'limit' AND a.limit_key = asked.key AND a.holds
             ORDER BY coalesce(a.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT s.id, s.task, s.queue, s.state, NULL, NULL, s.rank, s.holds, NULL FROM pgqueue.job_scheduled s
             WHERE asked.kind = 'limit' AND s.limit_key = asked.key AND s.holds
             ORDER BY coalesce(s.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT b.id, b.task, b.queue, b.state, NULL, NULL, b.rank, b.holds, NULL FROM pgqueue.job_blocked b
             WHERE asked.kind = 'limit' AND b.limit_key = asked.key AND b.holds AND (substr(b.key, 1, 5) = 'rate:') IS TRUE
             ORDER BY coalesce(b.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
        ) AS of_limit
    ), holder AS (
        SELECT h.id, h.task, h.queue, h.state, h.worker_id AS worker, w.host, w.pid, h.started_at AS since
        FROM (SELECT *, key IS NOT NULL AND row_number() OVER (PARTITION BY worker_id ORDER BY holds DESC, rank, id) > 1 AS behind
              FROM holding) AS h
        LEFT JOIN pgqueue.worker w ON w.id = h.worker_id
        WHERE NOT h.behind AND h.id <> why_key.id
        ORDER BY h.started_at, h.id LIMIT 1000
    ), line AS MATERIALIZED (
        SELECT waiting.* FROM asked CROSS JOIN generate_series(-2, why_key.rank) AS lane (rank) CROSS JOIN LATERAL (
            SELECT b.queue, b.task FROM pgqueue.job_blocked b
            WHERE b.key = asked.whole
              AND (b.rank, b.id) > (lane.rank::smallint, CASE WHEN asked.few_wait THEN 0 ELSE why_key.id - 10000 END)
              AND (b.rank, b.id) < (lane.rank::smallint, CASE WHEN lane.rank = why_key.rank THEN why_key.id
                                                              ELSE 9223372036854775807 END)
            ORDER BY b.rank DESC, b.id DESC LIMIT 2000
        ) AS waiting LIMIT 2000
    ), before AS MATERIALIZED (
        SELECT line.n FROM (SELECT l.queue, l.task, count(*) AS n FROM line l GROUP BY l.queue, l.task) AS line CROSS JOIN me
        WHERE (line.queue = me.queue OR line.queue <> ALL (ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL)))
          AND (line.task = me.task OR line.task <> ALL (ARRAY(SELECT p.name FROM pgqueue.paused_task p)))
          AND (line.queue = me.queue AND (line.task = me.task OR NOT me.served)
               OR EXISTS (SELECT FROM alike WHERE line.queue = ANY (alike.queues) AND coalesce(line.task = ANY (alike.tasks), true)))
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'most', (SELECT n FROM most),
        'holders', (SELECT coalesce(json_agg(to_json(holder) ORDER BY holder.since, holder.id), '[]') FROM holder),
        'before', (SELECT least(coalesce(sum(n), 0), 1001) FROM before),
        'whole', (SELECT few_wait FROM asked) AND (SELECT count(*) < 2000 FROM line),
        'rate', (SELECT to_json(rate) FROM (
            SELECT k.count, k.period, k.burst, r.gap, l.next_at,
                   least(greatest(coalesce(extract(epoch FROM l.next_at - pgqueue.now())::float8, 0) - r.depth, 0), r.gap) AS pause
            FROM asked
            CROSS JOIN LATERAL (SELECT t.late, t.gap, least((p.burst - 1) * t.gap + t.early, 1e11) AS depth
            FROM pgqueue.key_rate p
            CROSS JOIN LATERAL (SELECT least(greatest(0.2::float8, least(5, p.period / p.count / 100)), p.period / 20) AS late,
                                       least(0.05::float8, p.period / 40) AS early) AS e
            CROSS JOIN LATERAL (SELECT e.late, e.early, (p.period + e.late + e.early) / p.count AS gap) AS t
            WHERE p.name = split_part(asked.key, ':', 1)) AS r
            CROSS JOIN LATERAL (SELECT k.* FROM pgqueue.key_rate k WHERE k.name = split_part(asked.key, ':', 1)) AS k
            LEFT JOIN LATERAL (SELECT l.next_at FROM pgqueue.limiter l WHERE l.key = asked.key LIMIT 1) AS l ON true
            WHERE asked.kind = 'rate') AS rate)
    )::text;
END $$;

-- * `sessions`: which session keeps another one waiting may be seen of any session, what it waits for may not.
CREATE OR REPLACE FUNCTION pgqueue.why_running(id bigint) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH run AS MATERIALIZED (
        SELECT r.id, r.claim, r.task, r.started_at, r.worker_id, r.rank, r.holds, r.key, r.lock_key, r.enqueued_at
        FROM pgqueue.job_running r WHERE r.id = why_running.id LIMIT 1
    ), worker AS MATERIALIZED (
        SELECT w.id, w.host, w.pid, w.state, w.dead_at, w.version_tag, w.beat_at, extract(epoch FROM pgqueue.now() - w.beat_at)::float8 AS beat_age,
               extract(epoch FROM w.lease)::float8 AS lease, w.sessions,
               CASE WHEN run.id = ANY (w.running) THEN true WHEN run.started_at < w.beat_at THEN false END AS begun
        FROM run JOIN pgqueue.worker w ON w.id = run.worker_id
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'started_at', run.started_at,
        'p95', pgqueue.run_quantile(run.task, 0.95),
        'worker', (SELECT to_json(shown) FROM (
            SELECT id, host, pid, state, dead_at, version_tag, beat_at, beat_age, lease, begun FROM worker) AS shown),
        'behind', CASE WHEN run.key IS NOT NULL AND NOT run.holds THEN (
            SELECT json_build_object('id', first.id, 'task', first.task, 'queue', first.queue, 'state', 'running', 'worker', first.worker_id,
                                     'host', w.host, 'pid', w.pid, 'since', first.started_at)
            FROM (
                SELECT c.id, c.task, c.queue, c.worker_id, c.started_at, c.holds, c.rank FROM pgqueue.job_running c
                WHERE c.lock_key = run.lock_key AND c.worker_id + 0 = run.worker_id
                ORDER BY coalesce(c.hold_pos, 9223372036854775807) DESC LIMIT 200
            ) AS first LEFT JOIN worker w ON w.id = first.worker_id
            WHERE first.holds OR (first.rank, first.id) < (run.rank, run.id)
            ORDER BY first.holds DESC, first.rank, first.id LIMIT 1) END,
        'requests', (SELECT coalesce(json_agg(json_build_object('reason', left(s.reason, 10000), 'at', s.created_at) ORDER BY s.created_at), '[]')
                     FROM pgqueue.job_signal s
                     WHERE s.job_id = run.id AND s.kind = 'cancel' AND s.enqueued_at = run.enqueued_at IS NOT FALSE),
        'sessions', (
            SELECT coalesce(json_agg(json_build_object(
                'pid', a.pid, 'application', a.application_name, 'state', a.state, 'since', a.xact_start, 'wait_type', a.wait_event_type,
                'wait', a.wait_event,
                'blocked_by', (
                    SELECT coalesce(json_agg(json_build_object(
                        'pid', blocking.pid, 'application', b.application_name, 'state', b.state, 'since', b.xact_start)
                        ORDER BY blocking.pid), '[]')
                    FROM (SELECT DISTINCT each.pid FROM unnest(
                              CASE WHEN a.wait_event_type = 'Lock' OR a.state IS NULL THEN pg_blocking_pids(a.pid) ELSE '{}' END) AS each (pid)) AS blocking
                    LEFT JOIN pg_stat_activity b ON b.pid = blocking.pid)
                ) ORDER BY a.pid), '[]')
            FROM worker
            CROSS JOIN LATERAL jsonb_to_recordset(worker.sessions) AS s (pid integer, backend_start timestamptz, job bigint)
            JOIN pg_stat_activity a ON a.pid = s.pid AND coalesce(a.backend_start = s.backend_start, true)
            WHERE s.job = run.id)
    )::text
    FROM run;
END $$;

-- How many available jobs a claim takes before this job, counted to 1,001: `jobs` of its queue, and `urgent` ones of other queues whose jobs
-- fill the same slots. Jobs of paused tasks are left out, and those of tasks that the worker does not know. Of several workers it is the one
-- that takes this job first. And how many jobs of the queue have started in a second, in those of the last five minutes in which any did
-- (NULL: none did, or the history does not know them yet). Where there are many dead rows, only the last 10,000 positions before it, and
-- before the head, are looked at: then not `whole`. Nor is it if 2,000 jobs were read and there may be more. One row always; if the job is not
-- available, `whole` is NULL.
DROP FUNCTION pgqueue.why_lane(bigint);
CREATE FUNCTION pgqueue.why_lane(id bigint) RETURNS TABLE (jobs bigint, whole boolean, pace float8, urgent bigint) LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH me AS MATERIALIZED (
        SELECT a.queue, a.rank, a.pos, a.task, few.yes AS whole,
               CASE WHEN few.yes THEN 0 ELSE a.pos - 10000 END AS low,
               CASE WHEN few.yes THEN 0 ELSE coalesce(head.pos, a.pos) - 10000 END AS higher_low,
               ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL) AS paused
        FROM pgqueue.job_available a
        CROSS JOIN (SELECT pg_stat_get_dead_tuples('pgqueue.job_available'::regclass) < 50000 AS yes) AS few
        CROSS JOIN (SELECT CASE WHEN has_sequence_privilege('pgqueue.job_pos_seq', 'USAGE, SELECT')
                                THEN pg_sequence_last_value('pgqueue.job_pos_seq') END AS pos) AS head
        WHERE a.id = why_lane.id
    ), able AS MATERIALIZED (
        -- Workers that may take the job, those that are alike once: their tasks, and the other open queues that share the slots.
        SELECT alike.tasks, alike.beside, row_number() OVER () AS place FROM (
            SELECT w.tasks, ARRAY(
                SELECT own.queue FROM unnest(w.queues, w.slots) AS own (queue, slots)
                WHERE own.queue <> me.queue AND own.slots IS NULL AND w.slots[array_position(w.queues, me.queue)] IS NULL
                  AND own.queue <> ALL (me.paused) ORDER BY own.queue LIMIT 20) AS beside
            FROM me CROSS JOIN LATERAL (
                SELECT DISTINCT w.queues, w.slots, w.tasks FROM pgqueue.worker w
                WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND me.queue = ANY (w.queues)
                  AND w.beat_at > (SELECT pgqueue.now()) - w.lease AND (w.tasks IS NULL OR me.task = ANY (w.tasks)) LIMIT 50
            ) AS w
        ) AS alike
    ), lane AS MATERIALIZED (
        SELECT true AS own, me.queue, r.rank::smallint AS rank, CASE WHEN r.rank = me.rank THEN me.low ELSE me.higher_low END AS low,
               CASE WHEN r.rank = me.rank THEN me.pos ELSE 9223372036854775807 END AS upto
        FROM me CROSS JOIN generate_series(-2, me.rank) AS r (rank)
        UNION ALL
        SELECT false, other.queue, r.rank::smallint, me.higher_low, 9223372036854775807
        FROM me CROSS JOIN (SELECT DISTINCT unnest(able.beside) AS queue FROM able LIMIT 20) AS other
        CROSS JOIN generate_series(-2, me.rank - 1) AS r (rank)
    ), walked AS MATERIALIZED (
        SELECT found.* FROM (VALUES (true), (false)) AS kind (own) CROSS JOIN LATERAL (
            SELECT lane.own, lane.queue, j.task FROM lane CROSS JOIN LATERAL (
                (SELECT j.task FROM pgqueue.job_available j
                 WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos < lane.upto AND j.pos > lane.low
                   AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
                 ORDER BY j.pos DESC NULLS LAST LIMIT 2000)
                UNION ALL
                (SELECT j.task FROM pgqueue.job_available j
                 WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos < lane.upto AND j.pos > lane.low
                   AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
                 ORDER BY j.pos DESC NULLS LAST LIMIT 2000)
            ) AS j WHERE lane.own = kind.own LIMIT 2000
        ) AS found
    ), by_task AS MATERIALIZED (
        SELECT walked.own, walked.queue, walked.task, count(*) AS n FROM walked CROSS JOIN me
        WHERE walked.task = me.task OR walked.task <> ALL (ARRAY(SELECT p.name FROM pgqueue.paused_task p))
        GROUP BY 1, 2, 3
    ), ahead AS MATERIALIZED (
        -- Before the job are those that come before it wherever it comes first.
        SELECT coalesce(sum(t.n) FILTER (WHERE t.own), 0)::bigint AS jobs, coalesce(sum(t.n) FILTER (WHERE NOT t.own), 0)::bigint AS urgent
        FROM (SELECT able.place, able.tasks, able.beside FROM able
              UNION ALL SELECT 0, NULL, '{}' WHERE NOT EXISTS (SELECT FROM able)) AS worker
        LEFT JOIN by_task t ON (worker.tasks IS NULL OR t.task = ANY (worker.tasks)) AND (t.own OR t.queue = ANY (worker.beside))
        GROUP BY worker.place ORDER BY coalesce(sum(t.n), 0) LIMIT 1
    )
    SELECT least(ahead.jobs, 1001), me.whole AND NOT EXISTS (SELECT FROM walked GROUP BY walked.own HAVING count(*) >= 2000), (
        SELECT (sum(m.started) / (60.0 * count(DISTINCT m.at)))::float8
        FROM pgqueue.history_minute m
        WHERE m.queue = me.queue AND m.at >= pgqueue.now() - interval '6 minutes' AND m.started > 0), least(ahead.urgent, 1001)
    FROM ahead LEFT JOIN me ON true;
END $$;

-- Owned by the owner of the tables, whichever role applies this. Roles that may ask `why` may ask this, too.
DO $$
DECLARE
    made CONSTANT regprocedure := 'pgqueue.why_lane(bigint)';
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = 'pgqueue.why_waiting(bigint, text, text)'::regprocedure) THEN
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END IF;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        WHERE p.oid = 'pgqueue.why_waiting(bigint, text, text)'::regprocedure AND a.grantee <> p.proowner GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', made, allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (43, 'why_again', false);

-- breaking: no
--
-- What `pgqueue why` reads, in functions with settings of their own. Each part looks up an index, and reads no more of it than a LIMIT or a
-- span of numbers allows. An application's session plans as it likes: with what it knew of the tables when they were empty, or with
-- indexes off. We change no setting of it (see 0015 and 0019).
--
-- Where a table has many dead rows (`few_dead`), only the span is left: while an old snapshot is held, a scan from the head of a lane would
-- walk over every row that was ever taken from there.

-- What decides whether a waiting job may be claimed, as one JSON object:
-- * `place`: where the job is now. NULL: it waits no more.
-- * `queue_paused`, `task_paused`: since when and by which operator; NULL: open.
-- * `workers`: those of the queue that are not known to be dead, the newest 1,000.
-- * `held`: what those of them hold that know the task, up to 1,000 jobs of each of 50 workers, and 5,000 in all.
CREATE FUNCTION pgqueue.why_waiting(id bigint, queue text, task text) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
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
            'beat_age', s.beat_age, 'lease', s.lease, 'knows', s.knows, 'slots', s.slots, 'apart', s.apart) ORDER BY s.id), '[]') FROM serving s),
        'held', (SELECT coalesce(json_agg(to_json(held) ORDER BY held.since, held.id), '[]') FROM held)
    )::text;
END $$;

-- How many available jobs a claim of this queue takes before this job, counted to 1,001: those of more urgent lanes, and those before it in
-- its own. And how many jobs of the queue have started in a second, in those of the last five minutes in which any did (NULL: none did, or
-- the history does not know them yet). Where there are many dead rows, only the last 10,000 positions before it, and before the head, are
-- looked at: then not `whole`.
CREATE FUNCTION pgqueue.why_lane(id bigint) RETURNS TABLE (jobs bigint, whole boolean, pace float8) LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH me AS MATERIALIZED (
        SELECT a.queue, a.rank, a.pos, few.yes AS whole,
               CASE WHEN few.yes THEN 0 ELSE a.pos - 10000 END AS low,
               CASE WHEN few.yes THEN 0 ELSE coalesce(head.pos, a.pos) - 10000 END AS higher_low
        FROM pgqueue.job_available a
        CROSS JOIN (SELECT pg_stat_get_dead_tuples('pgqueue.job_available'::regclass) < 50000 AS yes) AS few
        CROSS JOIN (SELECT CASE WHEN has_sequence_privilege('pgqueue.job_pos_seq', 'USAGE, SELECT')
                                THEN pg_sequence_last_value('pgqueue.job_pos_seq') END AS pos) AS head
        WHERE a.id = why_lane.id
    )
    SELECT count(*), (SELECT whole FROM me), (
        SELECT (sum(m.started) / (60.0 * count(DISTINCT m.at)))::float8 FROM me
        JOIN pgqueue.history_minute m ON m.queue = me.queue
        WHERE m.at >= pgqueue.now() - interval '6 minutes' AND m.started > 0)
    FROM (
        SELECT FROM me CROSS JOIN LATERAL (
            (SELECT FROM pgqueue.job_available j
             WHERE j.queue = me.queue AND j.rank = me.rank AND j.pos < me.pos AND j.pos > me.low
               AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
             ORDER BY j.pos DESC NULLS LAST LIMIT 1001)
            UNION ALL
            (SELECT FROM pgqueue.job_available j
             WHERE j.queue = me.queue AND j.rank = me.rank AND j.pos < me.pos AND j.pos > me.low
               AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
             ORDER BY j.pos DESC NULLS LAST LIMIT 1001)
        ) AS before
        UNION ALL
        SELECT FROM me CROSS JOIN generate_series(-2, 18) AS lane (rank) CROSS JOIN LATERAL (
            (SELECT FROM pgqueue.job_available j
             WHERE lane.rank < me.rank AND j.queue = me.queue AND j.rank = lane.rank::smallint AND j.pos > me.higher_low
               AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
             ORDER BY j.pos DESC NULLS LAST LIMIT 1001)
            UNION ALL
            (SELECT FROM pgqueue.job_available j
             WHERE lane.rank < me.rank AND j.queue = me.queue AND j.rank = lane.rank::smallint AND j.pos > me.higher_low
               AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
             ORDER BY j.pos DESC NULLS LAST LIMIT 1001)
        ) AS above
        LIMIT 1001
    ) AS ahead;
END $$;

-- What a job with this rank and id waits for, of this key (`lock:…`, `limit:…`, `rate:…`), as one JSON object:
-- * `most`: how many jobs may hold a limit. NULL: it is not declared, or it is no limit.
-- * `holders`: the jobs that hold a lock or a limit, up to as many as may, the oldest first. Of a chain (see chains.py) only the first.
-- * `before`: how many jobs wait for the key before it, counted to 1,001; `whole`: none was left out for many dead rows.
-- * `rate`: what is declared of a rate; in how many seconds its next job may start (`pause`), and the seconds from one start to the next.
CREATE FUNCTION pgqueue.why_key(id bigint, rank integer, key text, lock_limit integer) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT why_key.key AS whole, split_part(why_key.key, ':', 1) AS kind, substr(why_key.key, strpos(why_key.key, ':') + 1) AS key,
               pg_stat_get_dead_tuples('pgqueue.job_running'::regclass) < 50000 AS few_run,
               pg_stat_get_dead_tuples('pgqueue.job_blocked'::regclass) < 50000 AS few_wait
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
             ORDER BY coalesce(r.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
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
    ), before AS MATERIALIZED (
        SELECT FROM asked CROSS JOIN generate_series(-2, why_key.rank) AS lane (rank) CROSS JOIN LATERAL (
            SELECT FROM pgqueue.job_blocked b
            WHERE b.key = asked.whole
              AND (b.rank, b.id) > (lane.rank::smallint, CASE WHEN asked.few_wait THEN 0 ELSE why_key.id - 10000 END)
              AND (b.rank, b.id) < (lane.rank::smallint, CASE WHEN lane.rank = why_key.rank THEN why_key.id
                                                              ELSE 9223372036854775807 END)
            ORDER BY b.rank DESC, b.id DESC LIMIT 1001
        ) AS waiting LIMIT 1001
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'most', (SELECT n FROM most),
        'holders', (SELECT coalesce(json_agg(to_json(holder) ORDER BY holder.since, holder.id), '[]') FROM holder),
        'before', (SELECT count(*) FROM before),
        'whole', (SELECT few_wait FROM asked),
        'rate', (SELECT to_json(rate) FROM (
            SELECT k.count, k.period, k.burst, r.gap, l.next_at,
                   greatest(coalesce(extract(epoch FROM l.next_at - pgqueue.now())::float8, 0) - r.depth, 0) AS pause
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

-- What can be said of a running job, as one JSON object; NULL: it does not run.
-- * `worker`: the worker that has it; `begun`: whether its handler had started at that worker's last heartbeat, NULL: too young to tell.
-- * `behind`: the job of the same chain that runs before it (see chains.py).
-- * `p95`: the seconds that 95 of 100 runs of its task have not exceeded in the last 24 hours. NULL: none has ended.
-- * `requests`: what was asked of it. `sessions`: its own sessions, with what each waits for, and the sessions that keep it waiting.
CREATE FUNCTION pgqueue.why_running(id bigint) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
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
                              CASE WHEN a.wait_event_type = 'Lock' THEN pg_blocking_pids(a.pid) ELSE '{}' END) AS each (pid)) AS blocking
                    LEFT JOIN pg_stat_activity b ON b.pid = blocking.pid)
                ) ORDER BY a.pid), '[]')
            FROM worker
            CROSS JOIN LATERAL jsonb_to_recordset(worker.sessions) AS s (pid integer, backend_start timestamptz, job bigint)
            JOIN pg_stat_activity a ON a.pid = s.pid AND coalesce(a.backend_start = s.backend_start, true)
            WHERE s.job = run.id)
    )::text
    FROM run;
END $$;

-- What can be told of an id without a job, as one JSON object:
-- * `last`: the last id that was given. NULL: this role may not see it.
-- * `after`: when the next job with a higher id was enqueued, as far as it is near; NULL: none is known.
-- * `older`: whether a job with a lower id is still there.
-- * `done_kept`, `dead_kept`: for how many seconds ended jobs are kept at least.
-- * `open`: transactions of other sessions that have written something, prepared ones among them.
CREATE FUNCTION pgqueue.why_missing(id bigint) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH near AS MATERIALIZED (
        (SELECT a.enqueued_at, a.id FROM pgqueue.job_available a
         WHERE a.id > why_missing.id AND a.id < why_missing.id + 3000 ORDER BY a.id LIMIT 1)
        UNION ALL
        (SELECT s.enqueued_at, s.id FROM pgqueue.job_scheduled s
         WHERE s.id > why_missing.id AND s.id < why_missing.id + 3000 ORDER BY s.id LIMIT 1)
        UNION ALL
        (SELECT b.enqueued_at, b.id FROM pgqueue.job_blocked b
         WHERE b.id > why_missing.id AND b.id < why_missing.id + 3000 ORDER BY b.id LIMIT 1)
        UNION ALL
        (SELECT r.enqueued_at, r.id FROM pgqueue.job_running r
         WHERE r.id > why_missing.id AND r.id < why_missing.id + 3000 ORDER BY r.id LIMIT 1)
        UNION ALL
        (SELECT d.enqueued_at, d.id FROM pgqueue.job_done d WHERE d.id > why_missing.id ORDER BY d.id LIMIT 1)
        UNION ALL
        (SELECT d.enqueued_at, d.id FROM pgqueue.job_dead d WHERE d.id > why_missing.id ORDER BY d.id LIMIT 1)
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'last', CASE WHEN has_sequence_privilege('pgqueue.job_id_seq', 'USAGE, SELECT')
                     THEN coalesce(pg_sequence_last_value('pgqueue.job_id_seq'), 0) END,
        'after', (SELECT n.enqueued_at FROM near n ORDER BY n.id LIMIT 1),
        'older', EXISTS (SELECT FROM pgqueue.job_done d WHERE d.id < why_missing.id)
              OR EXISTS (SELECT FROM pgqueue.job_dead d WHERE d.id < why_missing.id),
        'done_kept', (SELECT extract(epoch FROM r.retention)::float8 FROM pgqueue.ring r WHERE r.kind = 'done'),
        'dead_kept', (SELECT extract(epoch FROM r.retention)::float8 FROM pgqueue.ring r WHERE r.kind = 'dead'),
        'open', (SELECT coalesce(json_agg(to_json(one) ORDER BY one.since), '[]') FROM (
            (SELECT a.pid, a.application_name AS application, a.state, a.xact_start AS since FROM pg_stat_activity a
             WHERE a.datname = current_database() AND a.backend_xid IS NOT NULL AND a.pid <> pg_backend_pid()
             ORDER BY a.xact_start LIMIT 100)
            UNION ALL
            (SELECT NULL, p.gid, 'prepared', p.prepared FROM pg_prepared_xacts p WHERE p.database = current_database()
             ORDER BY p.prepared LIMIT 100)
        ) AS one)
    )::text;
END $$;

-- Owned by the owner of the tables, whichever role applies this. Roles that see workers may ask.
DO $$
DECLARE
    made regprocedure;
    allowed record;
BEGIN
    FOREACH made IN ARRAY ARRAY['pgqueue.why_waiting(bigint, text, text)',
        'pgqueue.why_lane(bigint)',
        'pgqueue.why_key(bigint, integer, text, integer)',
        'pgqueue.why_running(bigint)',
        'pgqueue.why_missing(bigint)']::regprocedure[]
    LOOP
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
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (35, 'why', false);

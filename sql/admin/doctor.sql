-- The health of what the queue stands on, for `pgqueue doctor`. Every statement answers facts as JSON; Python says which of them are
-- findings. What a role may not see of other sessions is NULL, or no row.

-- name: doctor_sessions
-- What keeps dead rows from being removed, for more than `seconds`: transactions of this database, and of walsenders, the oldest first;
-- prepared transactions; replication slots that no client uses. Ages are in seconds. Of a query only the first words are answered, without
-- the texts in quotes: they may be private.
SELECT json_build_object(
    'snapshots', (SELECT coalesce(json_agg(s), '[]') FROM (
        SELECT a.pid, left(a.application_name, 40) AS application, left(a.usename::text, 40) AS role, a.state,
               extract(epoch FROM pgqueue.now() - a.xact_start)::float8 AS age,
               left(regexp_replace(regexp_replace(a.query, '''([^'']|'''')*(''|$)|\$\w*\$.*', '…', 'g'), '\s+', ' ', 'g'), 60) AS query
        FROM pg_stat_activity a
        WHERE (a.datname = current_database() OR a.backend_type = 'walsender') AND a.pid <> pg_backend_pid()
          AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.backend_type <> 'autovacuum worker'
          AND a.xact_start < pgqueue.now() - make_interval(secs => %(seconds)s::float8)
        ORDER BY a.xact_start LIMIT 5) AS s),
    'prepared', (SELECT coalesce(json_agg(p), '[]') FROM (
        SELECT left(p.gid, 60) AS gid, left(p.owner::text, 40) AS role, extract(epoch FROM pgqueue.now() - p.prepared)::float8 AS age
        FROM pg_prepared_xacts p
        WHERE p.database = current_database() AND p.prepared < pgqueue.now() - make_interval(secs => %(seconds)s::float8)
        ORDER BY p.prepared LIMIT 5) AS p),
    'slots', (SELECT coalesce(json_agg(r), '[]') FROM (
        SELECT s.slot_name AS name, s.slot_type AS kind, s.xmin IS NOT NULL AS holds,
               extract(epoch FROM pgqueue.now() - (to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8 AS age
        FROM pg_replication_slots s
        WHERE NOT s.active AND NOT s.temporary AND (s.restart_lsn IS NOT NULL OR s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL)
          AND coalesce((to_jsonb(s) ->> 'inactive_since')::timestamptz, '-infinity')
              < pgqueue.now() - make_interval(secs => %(seconds)s::float8)
        ORDER BY s.slot_name LIMIT 5) AS r)
)::text;

-- name: doctor_server
-- The share of the NOTIFY queue in use, from 0 to 1; how many clients are connected and how many may be; whether a session holds the
-- leader's lock; whether the database is read only by order; its number; the sequences that would give a number again, each with its last number and the highest one in the tables.
SELECT json_build_object(
    'notify', pg_notification_queue_usage(),
    'clients', (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
    'most', current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer,
    'led', EXISTS (
        SELECT FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('pgqueue.leader', 7)),
    'read_only', {{read_only}},
    'number', {{number}},
    'behind', (SELECT coalesce(json_agg(b ORDER BY b.sequence), '[]') FROM pgqueue.sequences_behind() AS b)
)::text;

-- name: doctor_tables
-- Our tables with more than 100,000 dead rows that were not vacuumed for `seconds` (age NULL: never); indexes that are invalid, and those
-- of `indexes` that are missing.
SELECT json_build_object(
    'dead', (SELECT coalesce(json_agg(d), '[]') FROM (
        SELECT t.relname AS name, t.n_dead_tup AS dead, t.n_live_tup AS live,
               extract(epoch FROM pgqueue.now() - greatest(t.last_autovacuum, t.last_vacuum))::float8 AS age
        FROM pg_stat_user_tables t
        WHERE t.schemaname = 'pgqueue' AND t.n_dead_tup > 100000
          AND coalesce(greatest(t.last_autovacuum, t.last_vacuum), pg_postmaster_start_time())
              < pgqueue.now() - make_interval(secs => %(seconds)s::float8)
        ORDER BY t.n_dead_tup DESC LIMIT 5) AS d),
    'invalid', (SELECT coalesce(json_agg(c.relname ORDER BY c.relname), '[]')
                FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = 'pgqueue' AND NOT (i.indisvalid AND i.indisready)),
    'missing', (SELECT coalesce(json_agg(expected.name ORDER BY expected.name), '[]') FROM unnest(%(indexes)s::text[]) AS expected (name)
                WHERE to_regclass('pgqueue.' || expected.name) IS NULL)
)::text;

-- name: doctor_workers
-- The versions of live workers, each with its number and the ages of its youngest and its oldest one in seconds; the age of the oldest worker,
-- and of the oldest one that is set to LISTEN; schedules that no worker declares any more; and the
-- age of the newest measurement of depth.
WITH live AS MATERIALIZED (
    SELECT w.version_tag, w.listens, extract(epoch FROM pgqueue.now() - w.started_at)::float8 AS age
    FROM pgqueue.worker w
    WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND w.beat_at >= (SELECT pgqueue.now()) - 3 * w.lease
    ORDER BY w.id DESC LIMIT 1000
)
SELECT json_build_object(
    'versions', (SELECT coalesce(json_agg(v), '[]') FROM (
        SELECT left(version_tag, 40) AS version, count(*) AS workers, min(age) AS youngest, max(age) AS oldest FROM live GROUP BY version_tag
        ORDER BY 2 DESC LIMIT 10) AS v),
    'oldest', (SELECT max(age) FROM live),
    'listener', (SELECT max(age) FROM live WHERE listens),
    'orphans', (SELECT coalesce(json_agg(o), '[]') FROM (
        SELECT left(s.name, 80) AS name, extract(epoch FROM pgqueue.now() - s.declared_at)::float8 AS age FROM pgqueue.schedule s
        WHERE s.declared_at <= (SELECT pgqueue.now()) - interval '10 minutes' AND s.paused_at IS NULL ORDER BY s.name LIMIT 10) AS o),
    'measured', (SELECT extract(epoch FROM pgqueue.now() - d.at)::float8 FROM pgqueue.depth d ORDER BY d.at DESC LIMIT 1)
)::text;

-- name: doctor_flows
-- Among the first n nodes for which jobs wait after the key `after`, those that have ended for more than `seconds`: how many, and for how
-- many seconds the first of them has. As JSON.
WITH RECURSIVE {{watched_nodes}}
, ended AS MATERIALIZED (
    SELECT x.node, x.key FROM named AS x WHERE x.node IS NOT NULL AND NOT {{node_lives}}
), since AS MATERIALIZED (
    -- Without a job in history it is as old as the jobs that wait for it.
    SELECT coalesce(
        (SELECT max(j.finished_at) FROM pgqueue.job j
         WHERE j.node IN (ended.node, -ended.node) AND j.state IN ('completed', 'skipped', 'failed', 'cancelled')),
        (SELECT b.enqueued_at FROM pgqueue.job_blocked b WHERE b.key = ended.key ORDER BY b.rank, b.id LIMIT 1)) AS at
    FROM ended
)
SELECT json_build_object('nodes', count(*), 'age', extract(epoch FROM pgqueue.now() - min(since.at))::float8)::text
FROM since WHERE since.at < (SELECT pgqueue.now()) - make_interval(secs => %(seconds)s::float8);

-- name: doctor_duties
-- What has become of each duty, as JSON.
SELECT coalesce(json_agg(d ORDER BY d.name), '[]')::text FROM ({{duties}}) AS d;

-- name: doctor_free
-- Those of these queues for which a live worker had a free slot at its last heartbeat, as JSON. A worker that has
-- just started has not said so for each queue: then all its slots count. The worker must know the task of one of the blocked `jobs` of the queue, if there are any.
WITH wanted AS MATERIALIZED (
    SELECT DISTINCT b.queue, b.task FROM pgqueue.job_blocked b WHERE b.id = ANY (%(jobs)s::bigint[])
), live AS MATERIALIZED (
    SELECT w.running, w.concurrency, w.lost, w.queues, w.free, w.tasks
    FROM pgqueue.worker w
    WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND w.beat_at >= (SELECT pgqueue.now()) - 3 * w.lease
      AND w.queues && %(queues)s::text[]
    ORDER BY w.id DESC LIMIT 1000
)
SELECT coalesce(json_agg(DISTINCT own.queue), '[]')::text
FROM live CROSS JOIN LATERAL unnest(live.queues, live.free) AS own (queue, free)
WHERE own.queue = ANY (%(queues)s::text[])
  AND coalesce(own.free, live.concurrency - live.lost - cardinality(live.running)) > 0
  AND (own.queue NOT IN (SELECT wanted.queue FROM wanted) OR EXISTS (
           SELECT FROM wanted WHERE wanted.queue = own.queue AND wanted.task = ANY (live.tasks)));

-- name: doctor_unserved
-- Of these queues, which no live worker serves: for how many seconds the first of their blocked jobs has waited, if it is among the `most`
-- oldest of all queues; how many jobs, at most `most`, workers have that have given no sign of life for three leases; and for how many seconds
-- the first of these workers has given none. As JSON: [queue, blocked, held, silent].
WITH asked AS MATERIALIZED (
    SELECT unnest(%(queues)s::text[]) AS queue
), oldest AS MATERIALIZED (
    SELECT b.queue, b.since FROM (
        SELECT j.queue, {{since}} AS since, (j.node < 0) IS TRUE AS waits FROM pgqueue.job_blocked j
        WHERE j.id > 0 ORDER BY j.id LIMIT %(most)s::integer
    ) AS b WHERE NOT b.waits
), silent AS MATERIALIZED (
    SELECT w.id, greatest(w.beat_at, 'epoch') AS beat_at FROM pgqueue.worker w
    WHERE w.beat_at < (SELECT pgqueue.now()) - 3 * w.lease ORDER BY w.id DESC LIMIT 100
), held AS MATERIALIZED (
    SELECT r.queue, silent.beat_at FROM silent CROSS JOIN LATERAL (
        SELECT r.queue FROM pgqueue.job_running r WHERE r.worker_id = silent.id ORDER BY r.claim LIMIT %(most)s::integer) AS r
    LIMIT %(most)s::integer
)
SELECT coalesce(json_agg(json_build_array(
           asked.queue,
           (SELECT extract(epoch FROM pgqueue.now() - min(o.since))::float8 FROM oldest o WHERE o.queue = asked.queue),
           (SELECT count(*) FROM held h WHERE h.queue = asked.queue),
           (SELECT extract(epoch FROM pgqueue.now() - min(h.beat_at))::float8 FROM held h WHERE h.queue = asked.queue))), '[]')::text
FROM asked;

-- name: doctor_growth
-- The queues in which more and more jobs have waited, available or blocked, for half an hour: in each ten minutes always more than ever in
-- the ten before, and at the end 100 more at least. As JSON, the largest growth first: [queue, least and most of each ten minutes of the
-- last two hours, the last ten first]. Paused queues are left out.
WITH minute AS MATERIALIZED (
    SELECT each.queue, each.at, sum(each.n)::bigint AS n
    FROM (SELECT m.queue, m.at, m.state, max(m.n) AS n FROM pgqueue.history_minute m
          WHERE m.at > (SELECT pgqueue.now()) - interval '2 hours' AND m.state IN ('available', 'blocked')
          GROUP BY m.queue, m.at, m.state) AS each
    GROUP BY each.queue, each.at
), span AS MATERIALIZED (
    SELECT minute.queue, floor(extract(epoch FROM (SELECT pgqueue.now()) - minute.at) / 600)::integer AS ago,
           min(minute.n) AS least, max(minute.n) AS most, count(*) AS minutes
    FROM minute GROUP BY 1, 2
), grows AS (
    SELECT a.queue, a.least - c.most AS by
    FROM span a JOIN span b ON b.queue = a.queue AND b.ago = 1 JOIN span c ON c.queue = a.queue AND c.ago = 2
    WHERE a.ago = 0 AND a.least > b.most AND b.least > c.most AND a.least - c.most >= 100 AND least(a.minutes, b.minutes, c.minutes) >= 3
      AND NOT a.queue = {{paused}}
    ORDER BY 2 DESC, 1 LIMIT 10
)
SELECT coalesce(json_agg(json_build_array(grows.queue, (
    SELECT json_agg(json_build_array(span.ago, span.least, span.most) ORDER BY span.ago) FROM span WHERE span.queue = grows.queue
)) ORDER BY grows.by DESC, grows.queue), '[]')::text
FROM grows;

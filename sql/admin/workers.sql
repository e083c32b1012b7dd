-- What people ask of supervisors and of the workers they keep.

-- name: workers_tell
-- Give an order to the supervisors of this host (NULL: of all), or to this one (NULL: all), that have beaten within a
-- minute. One row for each that was told.
WITH told AS (
    INSERT INTO pgqueue.supervisor_order (supervisor_id, kind, size)
    SELECT s.id, %(kind)s::text, %(size)s::integer FROM pgqueue.supervisor s
    WHERE (%(host)s::text IS NULL OR s.host = %(host)s::text) AND (%(supervisor)s::bigint IS NULL OR s.id = %(supervisor)s::bigint)
      AND pgqueue.now() - s.beat_at < interval '1 minute'
    ORDER BY s.id
    RETURNING id, supervisor_id
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, count, details)
    SELECT {{actor}}, %(kind)s::text,
        jsonb_strip_nulls(jsonb_build_object('host', %(host)s::text, 'supervisors', jsonb_agg(supervisor_id ORDER BY supervisor_id))),
        count(*), jsonb_strip_nulls(jsonb_build_object('size', %(size)s::integer))
    FROM told HAVING count(*) > 0
), heard AS (
    SELECT count(CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:orders', '')::text END)
    FROM (SELECT FROM told LIMIT 1) AS any_told WHERE %(notify)s::boolean
)
SELECT told.id, s.id, s.host, s.pid FROM told JOIN pgqueue.supervisor s ON s.id = told.supervisor_id, heard ORDER BY s.id;

-- name: workers_answers
-- What has become of these orders: done or not, why not, and whether the supervisor still beats.
SELECT o.id, o.done_at IS NOT NULL, o.problem,
       EXISTS (SELECT FROM pgqueue.supervisor s
               WHERE s.id = o.supervisor_id AND pgqueue.now() - s.beat_at < interval '1 minute')
FROM unnest(%(ids)s::bigint[]) AS asked (id) JOIN pgqueue.supervisor_order o ON o.id = asked.id;

-- name: workers_list
-- Every worker that is not known to be dead, with what it runs, as a JSON array.
SELECT coalesce(json_agg(to_json(shown) ORDER BY shown.host, shown.supervisor_id, shown.id), '[]')::text
FROM (
    SELECT w.id, w.host, w.pid, w.supervisor_id, w.state, w.version_tag, w.concurrency, w.lost, w.rss, w.queues, w.started_at,
           extract(epoch FROM pgqueue.now() - w.beat_at)::float8 AS beat_age,
           extract(epoch FROM w.lease)::float8 AS lease,
           cardinality(w.running) AS busy,
           (SELECT coalesce(json_agg(to_json(j) ORDER BY j.started_at, j.id), '[]') FROM (
                SELECT r.id, r.task, {{runs_since}} AS started_at, extract(epoch FROM pgqueue.now() - {{runs_since}})::float8 AS age
                FROM pgqueue.job_running r WHERE r.id = ANY (w.running) AND r.worker_id = w.id
                ORDER BY r.started_at, r.id LIMIT %(n)s::integer) AS j) AS jobs
    FROM pgqueue.worker w
    WHERE w.dead_at IS NULL AND (%(host)s::text IS NULL OR w.host = %(host)s::text)
    ORDER BY w.host, w.supervisor_id, w.id
    LIMIT 1000
) AS shown;

-- name: workers_longest
-- The `n` jobs that have run longest, the longest first, each with its worker, as a JSON array. What runs is few beside what waits or has ended.
SELECT coalesce(json_agg(json_build_object('id', j.id, 'task', j.task, 'worker', j.worker_id, 'host', w.host, 'started_at', j.started_at, 'age', j.age)
    ORDER BY j.started_at, j.id), '[]')::text
FROM (SELECT r.id, r.task, r.worker_id, {{runs_since}} AS started_at, extract(epoch FROM pgqueue.now() - {{runs_since}})::float8 AS age
      FROM pgqueue.job_running r ORDER BY r.started_at, r.id LIMIT %(n)s::integer) AS j
LEFT JOIN pgqueue.worker w ON w.id = j.worker_id;

-- name: workers_supervisors
-- Every supervisor of the last hour on this host (NULL: on all), 1,000 at most, with its last order, as a JSON array. The last 10,000 orders are looked at.
WITH last AS MATERIALIZED (
    SELECT DISTINCT ON (supervisor_id) supervisor_id, id, kind, size, created_at, done_at, problem
    FROM (SELECT * FROM pgqueue.supervisor_order ORDER BY id DESC LIMIT 10000) AS recent
    ORDER BY supervisor_id, id DESC
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY shown.host, shown.id), '[]')::text
FROM (
    SELECT s.id, s.host, s.pid, s.size, s.active, s.state, s.problem, s.started_at,
           extract(epoch FROM pgqueue.now() - s.beat_at)::float8 AS beat_age,
           CASE WHEN last.id IS NOT NULL THEN json_build_object('id', last.id, 'kind', last.kind, 'size', last.size,
               'created_at', last.created_at, 'done_at', last.done_at, 'problem', last.problem) END AS "order"
    FROM pgqueue.supervisor s LEFT JOIN last ON last.supervisor_id = s.id
    WHERE %(host)s::text IS NULL OR s.host = %(host)s::text
    ORDER BY s.host, s.id
    LIMIT 1000
) AS shown;

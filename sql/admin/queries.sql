-- What people ask: one job, a page of jobs, how things stand. Everything here only reads, is one statement, and stays
-- bounded however many rows there are: nothing is counted beyond 10,000 and no search goes on for ever.

-- name: queries_get
-- One job with its attempts that did not complete, and with what it has said in this run of how far it is, as JSON. No row:
-- no such job.
SELECT (SELECT to_json(shown)::text FROM (SELECT {{shown}}) AS shown),
       (SELECT coalesce(json_agg(to_json(a) ORDER BY a.finished_at), '[]')::text
        FROM pgqueue.attempt_rows(job.id) AS a WHERE a.enqueued_at = job.enqueued_at),
       (SELECT to_json(p)::text FROM pgqueue.progress_row(job.id) AS p
        WHERE job.state = 'running' AND p.updated_at >= job.started_at),
       (SELECT coalesce(json_agg(json_build_object('name', s.name, 'at', s.created_at, 'result', CASE
            WHEN pg_column_size(s.result) > 10000 THEN json_build_object('pgqueue', 'not shown: ' || pg_column_size(s.result) || ' bytes')::text
            ELSE pgqueue.text_of(s.result) END) ORDER BY s.created_at, s.name), '[]')::text
        FROM (SELECT * FROM pgqueue.step_rows(job.id, job.enqueued_at) LIMIT 200) AS s)
FROM (
    SELECT *, true AS has_room, {{shown_sizes}} FROM pgqueue.job_rows(ARRAY[%(id)s::bigint]) OFFSET 0
) AS job;

-- name: queries_keyed
-- The jobs that have this unique key, or this idempotency key, if they fit the search: two at most, the newest first, as a JSON array.
-- Found by the key, however many jobs there are.
WITH held AS MATERIALIZED (
    SELECT * FROM pgqueue.job_rows(ARRAY(
        SELECT k.job_id FROM pgqueue.unique_key k WHERE k.key IN ('unique:' || %(key)s::text, 'idempotency:' || %(key)s::text)))
), looked AS MATERIALIZED (
    {{looked_at}} FROM held
), found AS MATERIALIZED (
    SELECT * FROM held WHERE {{job_fits}}
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY id DESC), '[]')::text FROM (
    {{found_shown}}
) AS shown;

-- name: queries_find
-- The newest n jobs that fit, among the newest `most` of the partitions named; as a JSON array. If fewer than n fit, the second column
-- says how many rows were looked at, and the lowest id of them. The walk itself has no condition on rows: so its LIMIT is a limit
-- of the work, and the planner, however little it knows of a table, sees that some steps along its index are enough.
WITH looked AS MATERIALIZED (
    {{looked_at}} FROM (
        SELECT * FROM (
            {{newest}}
        ) AS part
        ORDER BY id DESC LIMIT %(most)s::integer
    ) AS newest
), found AS MATERIALIZED (
    SELECT * FROM (
        SELECT * FROM (
            {{newest}}
        ) AS part
        ORDER BY id DESC LIMIT %(most)s::integer
    ) AS newest
    WHERE {{job_fits}}
    ORDER BY id DESC
    LIMIT %(n)s::integer
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY id DESC), '[]')::text,
       CASE WHEN count(*) < %(n)s::integer THEN (
           SELECT json_build_array(count(*), min(id))::text FROM (
               SELECT id FROM (
                   {{newest}}
               ) AS part
               ORDER BY id DESC LIMIT %(most)s::integer
           ) AS walked)
       END
FROM (
    {{found_shown}}
) AS shown;

-- name: queries_flow
-- As `queries_find`, among the jobs of a flow, below the id `after` if there is one, or with `node` among those of that node only.
WITH walked AS MATERIALIZED (
    SELECT * FROM pgqueue.flow_rows(%(flow)s::bigint, %(node)s::bigint, %(after)s::bigint, %(most)s::integer)
    ORDER BY id DESC LIMIT %(most)s::integer
), looked AS MATERIALIZED (
    {{looked_at}} FROM walked
), found AS MATERIALIZED (
    SELECT * FROM walked WHERE {{job_fits}} ORDER BY id DESC LIMIT %(n)s::integer
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY id DESC), '[]')::text,
       CASE WHEN count(*) < %(n)s::integer THEN (SELECT json_build_array(count(*), min(id))::text FROM walked) END
FROM (
    {{found_shown}}
) AS shown;

-- name: queries_find_after
-- As `queries_find`, below the id `after`. A statement of its own: that condition looks as if it left few rows, so a table that was never
-- analysed might be sorted.
WITH looked AS MATERIALIZED (
    {{looked_at}} FROM (
        SELECT * FROM (
            {{newest_after}}
        ) AS part
        ORDER BY id DESC LIMIT %(most)s::integer
    ) AS newest
), found AS MATERIALIZED (
    SELECT * FROM (
        SELECT * FROM (
            {{newest_after}}
        ) AS part
        ORDER BY id DESC LIMIT %(most)s::integer
    ) AS newest
    WHERE {{job_fits}}
    ORDER BY id DESC
    LIMIT %(n)s::integer
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY id DESC), '[]')::text,
       CASE WHEN count(*) < %(n)s::integer THEN (
           SELECT json_build_array(count(*), min(id))::text FROM (
               SELECT id FROM (
                   {{newest_after}}
               ) AS part
               ORDER BY id DESC LIMIT %(most)s::integer
           ) AS walked)
       END
FROM (
    {{found_shown}}
) AS shown;

-- name: queries_find_ended
-- As `queries_find`, for states of history only: the jobs that ended last, by the time of their end. The second column says how many rows
-- were looked at, and the place of the last one: its time and its id.
WITH looked AS MATERIALIZED (
    {{looked_at}} FROM (
        {{ended_walk}}
    ) AS newest
), found AS MATERIALIZED (
    SELECT * FROM (
        {{ended_walk}}
    ) AS newest
    WHERE {{job_fits}}
    ORDER BY finished_at DESC, id DESC
    LIMIT %(n)s::integer
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY finished_at DESC, id DESC), '[]')::text,
       CASE WHEN count(*) < %(n)s::integer THEN (
           SELECT json_build_array(count(*), min(finished_at), (array_agg(id ORDER BY finished_at, id))[1])::text FROM (
               {{ended_walk}}
           ) AS walked)
       END
FROM (
    {{found_shown}}
) AS shown;

-- name: queries_find_ended_after
-- As `queries_find_ended`, from the place (`at`, `after`) on. A statement of its own, as `queries_find_after`.
WITH looked AS MATERIALIZED (
    {{looked_at}} FROM (
        {{ended_walk_after}}
    ) AS newest
), found AS MATERIALIZED (
    SELECT * FROM (
        {{ended_walk_after}}
    ) AS newest
    WHERE {{job_fits}}
    ORDER BY finished_at DESC, id DESC
    LIMIT %(n)s::integer
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY finished_at DESC, id DESC), '[]')::text,
       CASE WHEN count(*) < %(n)s::integer THEN (
           SELECT json_build_array(count(*), min(finished_at), (array_agg(id ORDER BY finished_at, id))[1])::text FROM (
               {{ended_walk_after}}
           ) AS walked)
       END
FROM (
    {{found_shown}}
) AS shown;

-- name: queries_find_scheduled
-- As `queries_find_ended`, for scheduled jobs only: those that are due first, by that time.
WITH looked AS MATERIALIZED (
    {{looked_at}} FROM (
        {{scheduled_walk}}
    ) AS newest
), found AS MATERIALIZED (
    SELECT * FROM (
        {{scheduled_walk}}
    ) AS newest
    WHERE {{job_fits}}
    ORDER BY run_at, id
    LIMIT %(n)s::integer
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY run_at, id), '[]')::text,
       CASE WHEN count(*) < %(n)s::integer THEN (
           SELECT json_build_array(count(*), max(run_at), (array_agg(id ORDER BY run_at DESC, id DESC))[1])::text FROM (
               {{scheduled_walk}}
           ) AS walked)
       END
FROM (
    {{found_shown}}
) AS shown;

-- name: queries_find_scheduled_after
-- As `queries_find_scheduled`, from the place (`at`, `after`) on.
WITH looked AS MATERIALIZED (
    {{looked_at}} FROM (
        {{scheduled_walk_after}}
    ) AS newest
), found AS MATERIALIZED (
    SELECT * FROM (
        {{scheduled_walk_after}}
    ) AS newest
    WHERE {{job_fits}}
    ORDER BY run_at, id
    LIMIT %(n)s::integer
)
SELECT coalesce(json_agg(to_json(shown) ORDER BY run_at, id), '[]')::text,
       CASE WHEN count(*) < %(n)s::integer THEN (
           SELECT json_build_array(count(*), max(run_at), (array_agg(id ORDER BY run_at DESC, id DESC))[1])::text FROM (
               {{scheduled_walk_after}}
           ) AS walked)
       END
FROM (
    {{found_shown}}
) AS shown;

-- name: queries_status
-- The database, the schema, the time, the newest 1,000 workers and the paused tasks, as one JSON object. And whether it is read only, and its number.
WITH worker AS MATERIALIZED (
    SELECT id, host, pid, version_tag, concurrency, cardinality(running) AS running, lost, queues, cardinality(tasks) AS tasks, started_at,
           extract(epoch FROM pgqueue.now() - beat_at)::float8 AS beat_age,
           CASE WHEN dead_at IS NOT NULL OR beat_at < pgqueue.now() - 3 * lease THEN 'dead' ELSE state END AS state
    FROM pgqueue.worker ORDER BY id DESC LIMIT 1000
)
SELECT json_build_object(
    'database', current_database(),
    'schema', 'pgqueue',
    'version', (SELECT max(version) FROM pgqueue.migration),
    'server_version', current_setting('server_version'),
    'at', pgqueue.now(),
    'read_only', {{read_only}},
    'number', {{number}},
    'workers', (SELECT coalesce(json_agg(to_json(worker) ORDER BY id), '[]') FROM worker),
    'paused_tasks', (SELECT coalesce(json_agg(p), '[]') FROM (
        SELECT name, paused_at, left(paused_by, 200) AS paused_by FROM pgqueue.paused_task ORDER BY name LIMIT 1000) AS p)
)::text;

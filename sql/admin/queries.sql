-- What people ask: one job, a page of jobs, how things stand. Everything here only reads, is one statement, and stays
-- bounded however many rows there are: nothing is counted beyond 10,000 and no search goes on for ever.

-- name: queries_get
-- One job with its attempts that did not complete, and with what it has said in this run of how far it is, as JSON. No row:
-- no such job.
SELECT (SELECT to_json(shown)::text FROM (SELECT {{shown}}) AS shown),
       (SELECT coalesce(json_agg(to_json(a) ORDER BY a.finished_at), '[]')::text
        FROM pgqueue.attempt_rows(job.id) AS a WHERE a.enqueued_at = job.enqueued_at IS NOT FALSE),
       (SELECT to_json(p)::text FROM pgqueue.progress_row(job.id) AS p
        WHERE job.state = 'running' AND p.updated_at >= job.started_at)
FROM (
    SELECT *, 0 AS total, {{shown_texts}} FROM pgqueue.job_rows(ARRAY[%(id)s::bigint]) OFFSET 0
) AS job;

-- name: queries_find
-- The newest n jobs that fit, among the newest `most` of the partitions named; as a JSON array. If fewer than n fit, the second column
-- says how many rows were looked at, and the lowest id of them. The walk itself has no condition on rows: so its LIMIT is a limit
-- of the work, and the planner, however little it knows of a table, sees that some steps along its index are enough.
WITH found AS MATERIALIZED (
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

-- name: queries_find_after
-- As `queries_find`, below the id `after`. A statement of its own: that condition looks as if it left few rows, so a table that was never
-- analysed might be sorted.
WITH found AS MATERIALIZED (
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

-- name: queries_status
-- How everything stands, as one JSON object: states, queues, workers. A partition of up to 10,000 rows is counted. A
-- larger one is estimated from about 300 of its blocks, always the same ones: unlike the planner's statistics this is
-- true to what is there now, whether or not ANALYZE was ever run. Of a large `available` the smallest queues are
-- counted exactly, by their index, until 200,000 rows have been read. Jobs of unknown tasks are looked for among the first
-- 10,000 of each lane and of those that are blocked, 100,000 in all: workers take everything else from there.
WITH RECURSIVE counted AS MATERIALIZED (
    SELECT 'available' AS part, state, queue, count(*) AS n
    FROM (SELECT state, queue FROM pgqueue.job_available LIMIT 10001) AS j GROUP BY state, queue
    UNION ALL
    SELECT 'scheduled', state, queue, count(*)
    FROM (SELECT state, queue FROM pgqueue.job_scheduled LIMIT 10001) AS j GROUP BY state, queue
    UNION ALL
    SELECT 'blocked', state, queue, count(*)
    FROM (SELECT state, queue FROM pgqueue.job_blocked LIMIT 10001) AS j GROUP BY state, queue
    UNION ALL
    SELECT 'running', state, queue, count(*)
    FROM (SELECT state, queue FROM pgqueue.job_running LIMIT 10001) AS j GROUP BY state, queue
    UNION ALL
    SELECT 'done', state, NULL, count(*)
    FROM (SELECT state FROM pgqueue.job_done LIMIT 10001) AS j GROUP BY state
    UNION ALL
    SELECT 'dead', state, NULL, count(*)
    FROM (SELECT state FROM pgqueue.job_dead LIMIT 10001) AS j GROUP BY state
), large AS MATERIALIZED (
    SELECT part, least(100, 30000 / greatest(1, (
               SELECT sum(pg_relation_size(relid)) / current_setting('block_size')::integer
               FROM pg_partition_tree('pgqueue.job_' || part) WHERE isleaf)))::float8 AS percent
    FROM counted GROUP BY part HAVING sum(n) > 10000
), sampled AS MATERIALIZED (
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'available' AS part, state, queue, count(*) * 100 / large.percent AS n
        FROM pgqueue.job_available TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY state, queue
    ) AS j WHERE large.part = 'available'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'scheduled', state, queue, count(*) * 100 / large.percent
        FROM pgqueue.job_scheduled TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY state, queue
    ) AS j WHERE large.part = 'scheduled'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'blocked', state, queue, count(*) * 100 / large.percent
        FROM pgqueue.job_blocked TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY state, queue
    ) AS j WHERE large.part = 'blocked'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'running', state, queue, count(*) * 100 / large.percent
        FROM pgqueue.job_running TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY state, queue
    ) AS j WHERE large.part = 'running'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'done', state, NULL, count(*) * 100 / large.percent
        FROM pgqueue.job_done TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY state
    ) AS j WHERE large.part = 'done'
    UNION ALL
    SELECT j.* FROM large CROSS JOIN LATERAL (
        SELECT 'dead', state, NULL, count(*) * 100 / large.percent
        FROM pgqueue.job_dead TABLESAMPLE SYSTEM (large.percent) REPEATABLE (1) GROUP BY state
    ) AS j WHERE large.part = 'dead'
), amount AS MATERIALIZED (
    SELECT part, state, queue, n::float8 AS n, true AS exact FROM counted
    WHERE part NOT IN (SELECT part FROM large)
    UNION ALL
    SELECT part, state, queue, n, false FROM sampled
), state AS (
    -- A large partition has more than 10,000 rows, whatever the sample says.
    SELECT known.state,
           greatest(coalesce(sum(amount.n), 0), CASE WHEN large.part IN ('done', 'dead') THEN 0
                                                     WHEN large.part IS NOT NULL THEN 10001 END)::bigint AS n,
           large.part IS NULL AS exact
    FROM (VALUES ('scheduled', 'scheduled'), ('available', 'available'), ('blocked', 'blocked'), ('running', 'running'),
                 ('done', 'completed'), ('done', 'skipped'), ('dead', 'failed'), ('dead', 'cancelled'))
         AS known (part, state)
    LEFT JOIN amount USING (part, state)
    LEFT JOIN large ON large.part = known.part
    GROUP BY known.state, large.part
), waiting (queue, place) AS (
    -- Every queue that has available jobs, by jumping along the index from one to the next.
    (SELECT queue, 1 FROM pgqueue.job_available ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM pgqueue.job_available j WHERE j.queue > w.queue ORDER BY j.queue LIMIT 1), w.place + 1
    FROM waiting w WHERE w.queue IS NOT NULL AND w.place < 1000
), guessed AS (
    SELECT w.queue, coalesce(a.n, 0) AS n,
           sum(least(10001, greatest(1000, coalesce(a.n, 0)))) OVER (ORDER BY coalesce(a.n, 0), w.queue) AS read_so_far
    FROM waiting w LEFT JOIN amount a ON a.part = 'available' AND a.queue = w.queue
    WHERE w.queue IS NOT NULL AND EXISTS (SELECT FROM large WHERE part = 'available')
), available AS (
    SELECT queue, n::bigint AS n, true AS exact FROM amount WHERE part = 'available' AND exact
    UNION ALL
    SELECT g.queue, CASE WHEN c.n <= 10000 THEN c.n ELSE greatest(g.n, c.n, 10001)::bigint END,
           coalesce(c.n <= 10000, false)
    FROM (SELECT *, n < 20000 AND read_so_far <= 200000 AS few FROM guessed) AS g CROSS JOIN LATERAL (
        -- In the index's order, so that no plan collects all rows of the queue before it counts the first.
        SELECT CASE WHEN g.few THEN count(*) END AS n FROM (
            SELECT FROM pgqueue.job_available j WHERE g.few AND j.queue = g.queue
            ORDER BY j.rank, j.pos LIMIT 10001
        ) AS j
    ) AS c
), worker AS MATERIALIZED (
    SELECT id, host, pid, version_tag, concurrency, cardinality(running) AS running, lost, queues, cardinality(tasks) AS tasks, started_at,
           extract(epoch FROM pgqueue.now() - beat_at)::float8 AS beat_age,
           CASE WHEN dead_at IS NOT NULL OR beat_at < pgqueue.now() - 3 * lease THEN 'dead' ELSE state END AS state
    FROM pgqueue.worker ORDER BY id DESC LIMIT 1000
), served AS (
    SELECT unnest(queues) AS queue, count(*) AS workers FROM worker
    WHERE state IN ('starting', 'running') GROUP BY 1
), pair AS MATERIALIZED (
    -- What live workers take. One that says nothing of its tasks is of the version before and may know any: ''.
    SELECT DISTINCT q.queue, t.task
    FROM (SELECT DISTINCT w.queues, w.tasks FROM pgqueue.worker w
          WHERE w.id = ANY (ARRAY(SELECT id FROM worker WHERE state IN ('starting', 'running')))) AS alike
    CROSS JOIN unnest(alike.queues) AS q (queue)
    CROSS JOIN unnest(coalesce(alike.tasks, ARRAY[''])) AS t (task)
), first AS MATERIALIZED (
    SELECT j.* FROM (
        SELECT j.queue, j.task, lane.rank
        FROM (SELECT queue FROM waiting WHERE queue IN (SELECT queue FROM pair EXCEPT SELECT queue FROM pair WHERE task = '')) AS w
        CROSS JOIN generate_series(-2, 19) AS lane (rank)
        CROSS JOIN LATERAL (
            SELECT j.queue, j.task FROM pgqueue.job_available j
            WHERE j.queue = w.queue AND j.rank = lane.rank::smallint ORDER BY j.pos LIMIT 10001
        ) AS j
        UNION ALL
        (SELECT b.queue, b.task, NULL FROM pgqueue.job_blocked b ORDER BY b.id LIMIT 10001)
    ) AS j LIMIT 100000
), unknown AS (
    SELECT queue, task, json_build_object('n', sum(n)::bigint, 'exact', bool_and(of_lane <= 10000 AND of_all < 100000)) AS jobs
    FROM (SELECT queue, task, count(*) AS n, sum(count(*)) OVER (PARTITION BY rank, CASE WHEN rank IS NOT NULL THEN queue END) AS of_lane,
                 sum(count(*)) OVER () AS of_all
          FROM first GROUP BY queue, task, rank) AS j
    WHERE NOT ((queue, task) IN (SELECT queue, task FROM pair) OR (queue, '') IN (SELECT queue, task FROM pair))
      AND (queue IN (SELECT queue FROM pair)) IS TRUE
    GROUP BY queue, task ORDER BY sum(n) DESC, queue, task LIMIT 1000
), queue AS (
    SELECT name,
           json_build_object('n', coalesce(available.n, 0), 'exact', coalesce(available.exact, true)) AS available,
           (SELECT json_build_object('n', coalesce(sum(n), 0)::bigint, 'exact', NOT EXISTS (
                SELECT FROM large WHERE part = 'scheduled'))
            FROM amount WHERE part = 'scheduled' AND amount.queue = name) AS scheduled,
           (SELECT json_build_object('n', coalesce(sum(n), 0)::bigint, 'exact', NOT EXISTS (
                SELECT FROM large WHERE part = 'blocked'))
            FROM amount WHERE part = 'blocked' AND amount.queue = name) AS blocked,
           (SELECT json_build_object('n', coalesce(sum(n), 0)::bigint, 'exact', NOT EXISTS (
                SELECT FROM large WHERE part = 'running'))
            FROM amount WHERE part = 'running' AND amount.queue = name) AS running,
           -- The head of each lane: how long the job that waits longest has been allowed to run.
           (SELECT extract(epoch FROM pgqueue.now() - min(greatest(head.enqueued_at, head.run_at)))::float8
            FROM generate_series(-2, 19) AS lane (rank) CROSS JOIN LATERAL (
                SELECT j.enqueued_at, j.run_at FROM pgqueue.job_available j
                WHERE j.queue = name AND j.rank = lane.rank::smallint ORDER BY j.pos LIMIT 1
            ) AS head WHERE available.n > 0) AS oldest,
           coalesce(served.workers, 0) AS workers,
           paused.paused_at
    FROM (SELECT queue FROM available
          UNION SELECT queue FROM amount WHERE queue IS NOT NULL
          UNION SELECT queue FROM served
          UNION SELECT q.name FROM pgqueue.queue q ORDER BY 1 LIMIT 1000) AS known (name)
    LEFT JOIN available ON available.queue = name
    LEFT JOIN served ON served.queue = name
    LEFT JOIN pgqueue.queue AS paused USING (name)
)
SELECT json_build_object(
    'database', current_database(),
    'schema', 'pgqueue',
    'version', (SELECT max(version) FROM pgqueue.migration),
    'server_version', current_setting('server_version'),
    'at', pgqueue.now(),
    'states', (SELECT json_object_agg(state, json_build_object('n', n, 'exact', exact)) FROM state),
    'queues', (SELECT coalesce(json_agg(to_json(queue) ORDER BY name), '[]') FROM queue),
    'unknown', (SELECT coalesce(json_agg(to_json(unknown)), '[]') FROM unknown),
    'workers', (SELECT coalesce(json_agg(to_json(worker) ORDER BY id), '[]') FROM worker)
)::text;

-- What people see of limits and set by hand, and what workers say of them when they start.

-- name: limits_set
-- Set a limit by hand (n), or let it be again what the code declares (NULL). Holds from this transaction's COMMIT on: a sweep hears
-- of it and lets in the jobs that may come. No row: the limit was neither declared nor set, and no job waits for it or runs under
-- it; or what it is to be again is not declared. Else what it allows now, what the code declares, and whether that was set by hand.
WITH changed AS (
    INSERT INTO pgqueue.key_limit AS l (name, n, set_at)
    SELECT %(name)s::text, coalesce(%(n)s::integer, 0), pgqueue.now()
    WHERE EXISTS (SELECT FROM pgqueue.key_limit k WHERE k.name = %(name)s::text AND coalesce(%(n)s::integer, k.declared) IS NOT NULL)
       OR %(n)s::integer IS NOT NULL
          AND (EXISTS (SELECT FROM pgqueue.job_blocked b WHERE b.key = 'limit:' || %(name)s::text)
               OR EXISTS (SELECT FROM pgqueue.job_running r WHERE r.limit_key = %(name)s::text))
    ON CONFLICT (name) DO UPDATE
        SET n = coalesce(%(n)s::integer, l.declared), set_at = CASE WHEN %(n)s::integer IS NOT NULL THEN excluded.set_at END
    RETURNING n, declared, set_at IS NOT NULL AS by_hand
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, details)
    SELECT {{actor}}, 'limits set', jsonb_build_object('limit', %(name)s::text), jsonb_build_object('n', n, 'by_hand', by_hand) FROM changed
)
SELECT n, declared, by_hand,
       CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:control', 'sweep')::text END
FROM changed;

-- name: limits_list
-- Every limit whose name begins with `begins` and that was declared or set, or that jobs wait for (1,000 of these), by name, as a JSON
-- array. Jobs are counted up to 10,001. Second: whether jobs may wait for others.
WITH RECURSIVE walked (key, place) AS (
    (SELECT b.key, 1 FROM pgqueue.job_blocked b WHERE b.key >= 'limit:' || %(begins)s::text ORDER BY b.key LIMIT 1)
    UNION ALL
    SELECT (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE starts_with(w.key, 'limit:' || %(begins)s::text) AND w.place < 1000
), named AS (
    SELECT substr(key, 7) AS name FROM walked WHERE starts_with(key, 'limit:' || %(begins)s::text)
    UNION
    SELECT name COLLATE "default" FROM pgqueue.key_limit WHERE starts_with(name, %(begins)s::text)
), listed AS (
    SELECT named.name, l.n, l.declared, l.set_at IS NOT NULL AS by_hand,
           (SELECT count(*) FROM (
                SELECT FROM pgqueue.job_running r WHERE r.limit_key = named.name LIMIT 10001) AS those) AS running,
           (SELECT count(*) FROM (
                (SELECT FROM pgqueue.job_available a WHERE a.limit_key = named.name AND a.holds LIMIT 10001)
                UNION ALL
                (SELECT FROM pgqueue.job_scheduled s WHERE s.limit_key = named.name AND s.holds LIMIT 10001)
                UNION ALL
                (SELECT FROM pgqueue.job_blocked b
                 WHERE b.limit_key = named.name AND b.holds AND (substr(b.key, 1, 5) = 'rate:') IS TRUE LIMIT 10001)
            ) AS those) AS held,
           (SELECT count(*) FROM (
                SELECT FROM pgqueue.job_blocked b WHERE b.key = 'limit:' || named.name LIMIT 10001) AS those) AS waiting,
           (SELECT {{waited}}
            FROM pgqueue.job_blocked j WHERE j.key = 'limit:' || named.name ORDER BY j.rank, j.id LIMIT 1) AS waited
    FROM named LEFT JOIN pgqueue.key_limit l ON l.name = named.name
)
SELECT coalesce(json_agg(to_json(listed) ORDER BY name), '[]')::text,
       (SELECT count(*) FROM walked WHERE starts_with(key, 'limit:' || %(begins)s::text)) = 1000
FROM listed;

-- name: limits_set_rate
-- Set a rate by hand, or let it be again what the code declares (both NULL). Holds from this transaction's COMMIT on; workers hear of it.
-- No row: no worker has declared a rate of this name, or what it is to be again is not declared. Else what it allows now, its
-- burst, what the code declares, and whether that was set by hand.
WITH changed AS (
    UPDATE pgqueue.key_rate r
    SET count = coalesce(%(count)s::integer, r.declared_count), period = coalesce(%(period)s::float8, r.declared_period),
        set_at = CASE WHEN %(count)s::integer IS NOT NULL THEN pgqueue.now() END
    WHERE r.name = %(name)s::text AND coalesce(%(count)s::integer, r.declared_count) IS NOT NULL
    RETURNING r.count, r.period, r.burst, r.declared_count, r.declared_period, r.set_at IS NOT NULL AS by_hand
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, details)
    SELECT {{actor}}, 'limits set', jsonb_build_object('rate', %(name)s::text), jsonb_build_object('count', count, 'period', period, 'by_hand', by_hand) FROM changed
)
SELECT count, period, burst, declared_count, declared_period, by_hand,
       CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:control', 'sweep')::text END
FROM changed;

-- name: limits_list_rates
-- Every rate whose name begins with `begins` and that was declared, or that jobs wait for (of 1,000 keys that are waited for), by name, as a
-- JSON array. Waiting jobs are counted up to 10,001 for each key. Second: whether jobs may wait for other keys.
WITH RECURSIVE walked (key, place) AS (
    (SELECT b.key, 1 FROM pgqueue.job_blocked b WHERE b.key >= 'rate:' || %(begins)s::text ORDER BY b.key LIMIT 1)
    UNION ALL
    SELECT (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE starts_with(w.key, 'rate:' || %(begins)s::text) AND w.place < 1000
), line AS MATERIALIZED (
    SELECT split_part(substr(walked.key, 6), ':', 1) AS name, waiting.n,
           (SELECT {{waited}}
            FROM pgqueue.job_blocked j WHERE j.key = walked.key ORDER BY j.rank, j.id LIMIT 1) AS waited
    FROM walked CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (SELECT FROM pgqueue.job_blocked b WHERE b.key = walked.key LIMIT 10001) AS those
    ) AS waiting
    WHERE starts_with(walked.key, 'rate:' || %(begins)s::text)
), listed AS (
    -- A period that no code declares was written by hand: JSON has no text for some of these.
    SELECT named.name, r.count, r.period, r.burst, CASE WHEN r.declared_period BETWEEN 1 AND 31622400 THEN r.declared_count END AS declared_count,
           r.declared_period, r.set_at IS NOT NULL AS by_hand,
           (SELECT count(*) FROM line WHERE line.name = named.name) AS lines,
           (SELECT coalesce(sum(n), 0)::bigint FROM line WHERE line.name = named.name) AS waiting,
           (SELECT max(waited) FROM line WHERE line.name = named.name) AS waited
    FROM (SELECT name FROM line UNION SELECT name COLLATE "default" FROM pgqueue.key_rate) AS named
    LEFT JOIN pgqueue.key_rate r ON r.name = named.name
    WHERE starts_with(named.name, %(begins)s::text)
)
SELECT coalesce(json_agg(to_json(listed) ORDER BY name), '[]')::text,
       (SELECT count(*) FROM walked WHERE starts_with(key, 'rate:' || %(begins)s::text)) = 1000
FROM listed;

-- name: limits_undeclared
-- Limits and rates that jobs wait for and that are neither declared nor set: no job is let in. Of the first n keys of limits, and of
-- n keys of rates after `after` ('rate:' for the first). One row: as a JSON array of {kind, name, waiting (counted up to
-- 10,001), waited (the seconds that the first job in line has waited)}, and the last key of rates looked at (NULL: there are no more).
WITH RECURSIVE walked (kind, key, place) AS (
    SELECT first.kind, (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > first.after ORDER BY b.key LIMIT 1), 1
    FROM (VALUES ('limit', 'limit:'), ('rate', %(after)s::text)) AS first (kind, after)
    UNION ALL
    SELECT w.kind, (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE starts_with(w.key, w.kind || ':') AND w.place < %(n)s::integer
), named AS MATERIALIZED (
    SELECT kind, key, CASE kind WHEN 'limit' THEN substr(key, 7) ELSE split_part(substr(key, 6), ':', 1) END AS name
    FROM walked WHERE starts_with(key, kind || ':')
), unknown AS MATERIALIZED (
    SELECT named.*, (SELECT {{waited}} FROM pgqueue.job_blocked j WHERE j.key = named.key ORDER BY j.rank, j.id LIMIT 1) AS waited
    FROM named
    WHERE NOT CASE kind WHEN 'limit' THEN EXISTS (SELECT FROM pgqueue.key_limit l WHERE l.name = named.name)
                        ELSE EXISTS (SELECT FROM pgqueue.key_rate r WHERE r.name = named.name) END
), counted AS (
    SELECT one.kind, one.name, (
        SELECT count(*) FROM (
            SELECT FROM unknown u CROSS JOIN LATERAL (
                SELECT FROM pgqueue.job_blocked b WHERE b.key = u.key LIMIT 10001
            ) AS line WHERE u.kind = one.kind AND u.name = one.name LIMIT 10001
        ) AS those) AS waiting, one.waited
    FROM (SELECT kind, name, max(waited) AS waited FROM unknown GROUP BY kind, name) AS one
)
SELECT (SELECT coalesce(json_agg(to_json(counted) ORDER BY kind, name), '[]')::text FROM counted),
       (SELECT key FROM walked WHERE kind = 'rate' AND place = %(n)s::integer AND starts_with(key, 'rate:'));

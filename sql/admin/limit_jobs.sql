-- Which jobs have a limit, and which wait for a limit or a rate.

-- name: limit_jobs_list
-- Of this limit or rate (`kind` is one of the two words) as a JSON object: 100 `holders`, those that run longest first, and the first 100
-- `waiters` by key and turn. A rate has no holders; of its keys the first 1,000 are looked at.
WITH RECURSIVE walked (key, place) AS (
    (SELECT b.key, 1 FROM pgqueue.job_blocked b
     WHERE %(kind)s::text = 'rate' AND b.key > 'rate:' || %(name)s::text || ':' ORDER BY b.key LIMIT 1)
    UNION ALL
    -- Not with the colon: most collations sort keys of other names among these.
    SELECT (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE starts_with(w.key, 'rate:' || %(name)s::text) AND w.place < 1000
), named AS (
    SELECT %(kind)s::text || ':' || %(name)s::text AS key
    UNION ALL
    SELECT key FROM walked WHERE starts_with(key, 'rate:' || %(name)s::text || ':')
), waiting AS (
    SELECT b.* FROM named n CROSS JOIN LATERAL (
        SELECT j.id, j.task, j.queue, j.key, j.rank, {{waited}} AS waited
        FROM pgqueue.job_blocked j WHERE j.key = n.key ORDER BY j.rank, j.id LIMIT 100
    ) AS b
    LIMIT 100
), holding AS (
    (SELECT id, task, queue, state, worker_id, {{runs_since}} AS since FROM pgqueue.job_running
     WHERE %(kind)s::text = 'limit' AND limit_key = %(name)s::text ORDER BY started_at LIMIT 100)
    UNION ALL
    (SELECT id, task, queue, state, NULL, NULL FROM pgqueue.job_available
     WHERE %(kind)s::text = 'limit' AND limit_key = %(name)s::text AND holds LIMIT 100)
    UNION ALL
    (SELECT id, task, queue, state, NULL, NULL FROM pgqueue.job_scheduled
     WHERE %(kind)s::text = 'limit' AND limit_key = %(name)s::text AND holds LIMIT 100)
    UNION ALL
    (SELECT id, task, queue, state, NULL, NULL FROM pgqueue.job_blocked
     WHERE %(kind)s::text = 'limit' AND limit_key = %(name)s::text AND holds AND (substr(key, 1, 5) = 'rate:') IS TRUE LIMIT 100)
    LIMIT 100
)
SELECT json_build_object(
    'holders', (SELECT coalesce(json_agg(json_build_object(
        'id', h.id, 'task', h.task, 'queue', h.queue, 'state', h.state, 'worker', h.worker_id,
        'process', w.host || ':' || w.pid, 'age', extract(epoch FROM pgqueue.now() - h.since)::float8)
        ORDER BY h.since, h.id), '[]') FROM holding h LEFT JOIN pgqueue.worker w ON w.id = h.worker_id),
    'waiters', (SELECT coalesce(json_agg(json_build_object(
        'id', b.id, 'task', b.task, 'queue', b.queue, 'key', b.key,
        'waited', b.waited) ORDER BY b.key, b.rank, b.id), '[]') FROM waiting b)
)::text;

-- name: limit_jobs_single_keys
-- The key that blocked jobs wait for, for each of lock, limit and rate, as a JSON object: NULL where they wait for several, or for none.
-- The first key and the last one of each kind are read from an index, whatever the number of jobs.
SELECT json_object_agg(kind, CASE WHEN first.key = last.key THEN first.key END)::text
FROM (VALUES ('lock'), ('limit'), ('rate')) AS of (kind)
LEFT JOIN LATERAL (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key >= of.kind || ':' AND b.key < of.kind || ';'
                   ORDER BY b.key LIMIT 1) AS first ON true
LEFT JOIN LATERAL (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key >= of.kind || ':' AND b.key < of.kind || ';'
                   ORDER BY b.key DESC LIMIT 1) AS last ON true;

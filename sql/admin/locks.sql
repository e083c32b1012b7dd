-- What people see of keys, and do to them by hand.

-- name: locks_list
-- Keys that begin with `begins`, with the jobs that hold them and how many wait, as a JSON array, those with the most waiters first: all
-- that are held or waited for, 1,000 of either at most. With `key` that one alone. Waiters are counted up to 10,001. Of a chain (see
-- chains.py) the first that is left holds the key; the others wait, before all that are blocked. Second: whether there may be other keys.
WITH RECURSIVE walked (key, place) AS (
    (SELECT b.key, 1 FROM pgqueue.job_blocked b WHERE b.key >= 'lock:' || %(begins)s::text ORDER BY b.key LIMIT 1)
    UNION ALL
    SELECT (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE starts_with(w.key, 'lock:' || %(begins)s::text) AND w.place < 1000
), taken AS MATERIALIZED (
    SELECT lock_key, id, task, queue, state, worker_id, started_at, enqueued_at, run_at,
           key IS NOT NULL AND row_number() OVER (PARTITION BY lock_key, worker_id ORDER BY holds DESC, rank, id) > 1 AS behind, rank
    FROM (
        SELECT * FROM pgqueue.job_running
        WHERE starts_with(lock_key, %(begins)s::text) AND (%(key)s::text IS NULL OR lock_key = %(key)s::text)
        ORDER BY started_at LIMIT 8000) AS r
), holder AS MATERIALIZED (
    (SELECT lock_key, id, task, queue, state, worker_id, {{runs_since}} AS since
     FROM taken WHERE NOT behind ORDER BY started_at LIMIT 1000)
    UNION ALL
    (SELECT lock_key, id, task, queue, state, NULL, NULL FROM pgqueue.job_available
     WHERE holds AND starts_with(lock_key, %(begins)s::text) AND (%(key)s::text IS NULL OR lock_key = %(key)s::text) LIMIT 1000)
    UNION ALL
    (SELECT lock_key, id, task, queue, state, NULL, NULL FROM pgqueue.job_scheduled
     WHERE holds AND starts_with(lock_key, %(begins)s::text) AND (%(key)s::text IS NULL OR lock_key = %(key)s::text) LIMIT 1000)
    UNION ALL
    (SELECT lock_key, id, task, queue, state, NULL, NULL FROM pgqueue.job_blocked
     WHERE holds AND starts_with(lock_key, %(begins)s::text) AND (%(key)s::text IS NULL OR lock_key = %(key)s::text) LIMIT 1000)
), parts AS (
    SELECT substr(key, 6) AS key, NULL::json AS job, NULL::timestamptz AS since, NULL::bigint AS id, false AS behind,
           NULL::smallint AS rank, NULL::timestamptz AS enqueued_at, NULL::timestamptz AS run_at
    FROM walked WHERE starts_with(key, 'lock:' || %(begins)s::text)
    UNION ALL
    SELECT h.lock_key, json_build_object(
               'id', h.id, 'task', h.task, 'queue', h.queue, 'state', h.state, 'worker', h.worker_id,
               'process', w.host || ':' || w.pid, 'age', extract(epoch FROM pgqueue.now() - h.since)::float8),
           h.since, h.id, false, NULL, NULL, NULL
    FROM holder h LEFT JOIN pgqueue.worker w ON w.id = h.worker_id
    UNION ALL
    SELECT lock_key, NULL, NULL, id, true, rank, enqueued_at, run_at FROM taken WHERE behind
), named AS MATERIALIZED (
    -- Grouped, not joined: all that is known of a key comes together in one pass, whatever the planner expects of the rows.
    SELECT key, coalesce(json_agg(job ORDER BY since, id) FILTER (WHERE job IS NOT NULL), '[]') AS holders,
           count(*) FILTER (WHERE behind) AS behind,
           (array_agg(id ORDER BY rank, id) FILTER (WHERE behind))[1] AS id,
           (array_agg(enqueued_at ORDER BY rank, id) FILTER (WHERE behind))[1] AS enqueued_at,
           (array_agg(run_at ORDER BY rank, id) FILTER (WHERE behind))[1] AS run_at
    FROM parts
    WHERE %(key)s::text IS NULL OR key = %(key)s::text
    GROUP BY key HAVING NOT bool_and(behind)
), listed AS (
    SELECT named.key, named.holders,
           (SELECT least(10001, named.behind + count(*)) FROM (
                SELECT FROM pgqueue.job_blocked b WHERE b.key = 'lock:' || named.key AND NOT b.holds LIMIT 10001) AS line) AS waiting,
           first.id AS next, first.waited
    FROM named
    LEFT JOIN LATERAL (
        SELECT id, {{waited}} AS waited FROM (
            SELECT 1 AS part, named.id, named.enqueued_at, named.run_at WHERE named.behind > 0
            UNION ALL
            (SELECT 2, b.id, b.enqueued_at, b.run_at FROM pgqueue.job_blocked b
             WHERE b.key = 'lock:' || named.key AND NOT b.holds ORDER BY b.rank, b.id LIMIT 1)
            ORDER BY 1 LIMIT 1) AS j
    ) AS first ON true
)
SELECT coalesce(json_agg(to_json(listed) ORDER BY waiting DESC, key), '[]')::text,
       %(key)s::text IS NULL AND (
           (SELECT count(*) FROM walked WHERE starts_with(key, 'lock:' || %(begins)s::text)) = 1000
           OR (SELECT count(*) FROM taken) = 8000 OR EXISTS (SELECT FROM holder GROUP BY state HAVING count(*) = 1000))
FROM listed;

-- name: locks_release
-- Take a key from those of its holders that do not run. Granted jobs, and jobs that now wait for a limit or a rate, wait for the key
-- again, before all that have not had it. A job that holds it until its next attempt waits for that without it. A limit that they held
-- goes with it. Waits for no transaction: a job that is being claimed just now is left alone.
-- The next sweep gives the key to the next waiter; NOTIFY asks for a sweep. One row: the ids; and those that run, each with its worker,
-- where that is, and whether it is dead. Of a chain (see chains.py) that is the first that is left.
WITH granted AS MATERIALIZED (
    SELECT a.ctid, a.id,
        -- Its id stands twice, as after a restore: it cannot go where the other one waits. Any claim asks for its key again.
        EXISTS (SELECT FROM pgqueue.job_blocked b WHERE b.id = a.id) AS stays
    FROM pgqueue.job_available a WHERE a.lock_key = %(key)s::text AND a.holds FOR UPDATE SKIP LOCKED
), later AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_scheduled WHERE lock_key = %(key)s::text AND holds FOR UPDATE SKIP LOCKED
), waiting AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_blocked WHERE lock_key = %(key)s::text AND holds FOR UPDATE SKIP LOCKED
), from_granted AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM granted))
    RETURNING {{job}}, {{attempts}}
), from_waiting AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM waiting))
    RETURNING {{job}}, {{attempts}}
), from_later AS (
    DELETE FROM pgqueue.job_scheduled WHERE ctid = ANY (ARRAY(SELECT ctid FROM later)) RETURNING *
), blocked AS (
    INSERT INTO pgqueue.job_blocked (state, key, rank, {{attempts}}, {{job}})
    SELECT 'blocked', 'lock:' || lock_key, {{front}}, {{attempts}},
        {{job}}
    FROM (
        SELECT * FROM from_granted WHERE id <> ALL (ARRAY(SELECT id FROM granted WHERE stays)) UNION ALL TABLE from_waiting
    ) AS given_up
    RETURNING id
), stayed AS (
    INSERT INTO pgqueue.job_available (state, rank, {{attempts}}, {{job}})
    SELECT 'available', {{front}}, {{attempts}}, {{job}}
    FROM from_granted WHERE id = ANY (ARRAY(SELECT id FROM granted WHERE stays))
    RETURNING id
), put_off AS (
    INSERT INTO pgqueue.job_scheduled (state, rank, reason, {{attempts}}, {{job}})
    SELECT 'scheduled', rank, reason, {{attempts}}, {{job}}
    FROM from_later
    RETURNING id
), released AS (
    SELECT id FROM blocked UNION ALL SELECT id FROM stayed UNION ALL SELECT id FROM put_off
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, jobs, count)
    SELECT {{actor}}, 'locks release', jsonb_build_object('lock', %(key)s::text), lost.ids, cardinality(lost.ids)
    FROM (SELECT array_agg(id ORDER BY id) AS ids FROM released) AS lost WHERE lost.ids IS NOT NULL
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:control', 'sweep')::text END AS done WHERE %(notify)s::boolean
)
SELECT ARRAY(SELECT id FROM released ORDER BY id)::text,
       (SELECT coalesce(json_agg(json_build_object(
            'id', r.id, 'task', r.task, 'worker', r.worker_id, 'process', w.host || ':' || w.pid,
            'dead', w.id IS NULL OR w.dead_at IS NOT NULL) ORDER BY r.id), '[]')
        FROM pgqueue.job_running r LEFT JOIN pgqueue.worker w ON w.id = r.worker_id
        WHERE r.lock_key = %(key)s::text
          AND (r.key IS NULL OR NOT EXISTS (
                SELECT FROM pgqueue.job_running before
                WHERE before.lock_key = r.lock_key AND before.worker_id = r.worker_id
                  AND (before.holds OR (before.rank, before.id) < (r.rank, r.id)))))::text,
       (SELECT count(done) FROM told);

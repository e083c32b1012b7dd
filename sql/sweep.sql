-- What the sweep asks: is it ours to do, which grants lie idle, which keys have room.

-- name: sweep_due
-- Whether the sweep is ours to do: nobody has done it for so many seconds (or the clock has stepped back). It is, if a row
-- comes back; it says whether anybody waits for a key or has been granted one, so that an idle queue costs nothing more.
UPDATE pgqueue.duty SET done_at = pgqueue.now()
WHERE name = 'sweep' AND (done_at <= pgqueue.now() - make_interval(secs => %(seconds)s::float8) OR done_at > pgqueue.now())
RETURNING EXISTS (SELECT FROM pgqueue.job_blocked)
       OR EXISTS (SELECT FROM pgqueue.job_available a WHERE a.holds AND a.lock_key IS NOT NULL);

-- name: sweep_park
-- Granted jobs of queues that are paused, or that nobody serves, wait again, in their old places; others may have their
-- keys. One whose queue only has no slot free stays. Answers the keys.
WITH idle AS MATERIALIZED (
    SELECT a.ctid FROM pgqueue.job_available a
    WHERE a.holds AND a.lock_key IS NOT NULL
      AND NOT (NOT a.queue = ANY (ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL))
               AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
                                                          AND a.queue = ANY (w.queues)))
    LIMIT %(n)s::integer
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM idle)) RETURNING *
), parked AS (
    INSERT INTO pgqueue.job_blocked (
        state, key, rank,
        id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key)
    SELECT 'blocked', 'lock:' || lock_key, CASE crashes WHEN 0 THEN 2 * priority + 1 WHEN 1 THEN -2 ELSE -1 END,
        id, queue, priority, task, args, headers, run_at, enqueued_at, attempt, max_attempts, crashes, snoozes, deadline,
        lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key
    FROM taken
    RETURNING key
)
SELECT DISTINCT key FROM parked;

-- name: sweep_keys
-- The next n keys somebody waits for, after this one, by jumping along their index: those that seem to have room, or a head
-- that may have to be skipped. Locks nothing, decides nothing. One row: these keys, and the last one looked at (NULL: the walk
-- is at its end).
WITH RECURSIVE walked (key, place) AS (
    (SELECT b.key, 1 FROM pgqueue.job_blocked b WHERE b.key > %(after)s::text ORDER BY b.key LIMIT 1)
    UNION ALL
    SELECT (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE w.key IS NOT NULL AND w.place < %(n)s::integer
), looked AS MATERIALIZED (
    SELECT walked.key, walked.place, held.n < head.most OR head.on_locked <> 'wait' AS waits
    FROM walked
    LEFT JOIN LATERAL (
        SELECT coalesce(b.lock_limit, 1) AS most, b.on_locked FROM pgqueue.job_blocked b
        WHERE b.key = walked.key AND NOT b.holds
          AND NOT b.queue = ANY (ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL))
          AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
                                                     AND b.queue = ANY (w.queues))
        ORDER BY b.rank, b.id LIMIT 1
    ) AS head ON true
    LEFT JOIN LATERAL (
        SELECT count(*)::integer AS n FROM (
            (SELECT FROM pgqueue.job_running r WHERE r.lock_key = substr(walked.key, 6) LIMIT head.most)
            UNION ALL
            (SELECT FROM pgqueue.job_available a WHERE a.lock_key = substr(walked.key, 6) AND a.holds LIMIT head.most)
            UNION ALL
            (SELECT FROM pgqueue.job_scheduled s WHERE s.lock_key = substr(walked.key, 6) AND s.holds LIMIT head.most)
            UNION ALL
            (SELECT FROM pgqueue.job_blocked b WHERE b.lock_key = substr(walked.key, 6) AND b.holds LIMIT head.most)
            LIMIT head.most
        ) AS holder
    ) AS held ON true
    WHERE walked.key IS NOT NULL
)
SELECT ARRAY(SELECT key FROM looked WHERE waits ORDER BY place),
       (SELECT key FROM looked WHERE place = %(n)s::integer);

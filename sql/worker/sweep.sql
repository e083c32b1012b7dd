-- What the sweep asks: is it ours to do, which grants lie idle, which keys have room.

-- name: sweep_due
-- Whether the sweep is ours to do: nobody has done it for so many seconds (or the clock has stepped back). It is, if a row
-- comes back; it says whether anybody waits for a key or has been granted one, so that an idle queue costs nothing more.
UPDATE pgqueue.duty SET done_at = pgqueue.now()
WHERE name = 'sweep' AND (done_at <= pgqueue.now() - make_interval(secs => %(seconds)s::float8) OR done_at > pgqueue.now())
RETURNING EXISTS (SELECT FROM pgqueue.job_blocked)
       OR EXISTS (SELECT FROM pgqueue.job_available a WHERE a.holds AND a.lock_key IS NOT NULL)
       OR EXISTS (SELECT FROM pgqueue.job_available a WHERE a.holds AND a.limit_key IS NOT NULL);

-- name: sweep_block
-- Jobs that hold a key and cannot go on, because their queue is paused or no live worker there knows their task, wait again for the first of their keys,
-- before all who have not had it; others may have those. Granted ones, and those that hold a lock while they wait for a limit, or either
-- while they wait for a rate. One whose queue only has no slot free stays. Answers the keys.
WITH RECURSIVE holding (queue, task) AS (
    (SELECT b.queue, b.task FROM pgqueue.job_blocked b WHERE b.holds AND b.queue <> '' ORDER BY b.queue, b.task LIMIT 1)
    UNION ALL
    SELECT after.queue, after.task FROM holding h CROSS JOIN LATERAL (
        SELECT b.queue, b.task FROM pgqueue.job_blocked b
        WHERE b.holds AND b.queue <> '' AND (b.queue, b.task) > (h.queue, h.task) ORDER BY b.queue, b.task LIMIT 1
    ) AS after
), closed AS MATERIALIZED (
    SELECT h.queue, h.task FROM holding h
    WHERE h.queue = {{paused}}
       OR NOT {{served}}
), found AS MATERIALIZED (
    (SELECT a.ctid, a.queue, a.task FROM pgqueue.job_available a WHERE a.holds AND a.lock_key IS NOT NULL)
    UNION ALL
    (SELECT a.ctid, a.queue, a.task FROM pgqueue.job_available a WHERE a.holds AND a.limit_key IS NOT NULL AND a.lock_key IS NULL)
), idle AS MATERIALIZED (
    SELECT a.ctid FROM pgqueue.job_available a
    WHERE a.ctid = ANY (ARRAY(
        SELECT found.ctid FROM found
        WHERE found.queue = {{paused}}
           OR NOT {{served}}
        LIMIT %(n)s::integer))
    FOR UPDATE SKIP LOCKED
), stuck AS MATERIALIZED (
    SELECT b.ctid FROM closed CROSS JOIN LATERAL (
        SELECT b.ctid FROM pgqueue.job_blocked b WHERE b.queue = closed.queue AND b.task = closed.task AND b.holds AND b.queue <> ''
        LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED
    ) AS b
), granted AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM idle))
    RETURNING {{job}}, {{attempts}}
), waiting AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM stuck))
    RETURNING {{job}}, {{attempts}}
), blocked AS (
    INSERT INTO pgqueue.job_blocked (state, key, rank, {{attempts}}, {{job}})
    SELECT 'blocked', coalesce('lock:' || lock_key, 'limit:' || limit_key, 'rate:' || rate_key),
        {{front}}, {{attempts}}, {{job}}
    FROM (TABLE granted UNION ALL TABLE waiting) AS moved
    RETURNING lock_key, limit_key
)
SELECT 'lock:' || lock_key FROM blocked WHERE lock_key IS NOT NULL
UNION
SELECT 'limit:' || limit_key FROM blocked WHERE limit_key IS NOT NULL;

-- name: sweep_keys
-- The next n keys somebody waits for, after this one, by jumping along their index: locks and limits that seem to have room, locks
-- with a head that may have to be skipped, and every rate: who knows rates decides. Locks nothing, decides nothing. One row: these
-- keys, and the last one looked at (NULL: the walk is at its end).
WITH RECURSIVE walked (key, place) AS (
    (SELECT b.key, 1 FROM pgqueue.job_blocked b WHERE b.key > %(after)s::text ORDER BY b.key LIMIT 1)
    UNION ALL
    SELECT (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE w.key IS NOT NULL AND w.place < %(n)s::integer
), looked AS MATERIALIZED (
    SELECT walked.key, walked.place, starts_with(walked.key, 'rate:') OR coalesce(held.n, had.n) < head.most
           OR starts_with(walked.key, 'lock:') AND head.on_locked <> 'wait' AS waits
    FROM walked
    LEFT JOIN LATERAL (
        SELECT CASE WHEN starts_with(walked.key, 'limit:')
                    THEN (SELECT l.n FROM pgqueue.key_limit l WHERE l.name = substr(walked.key, 7))
                    ELSE coalesce(b.lock_limit, 1) END AS most, b.on_locked
        FROM pgqueue.job_blocked b
        WHERE b.key = walked.key
          AND NOT b.queue = {{paused}}
          AND {{served}}
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
    ) AS held ON starts_with(walked.key, 'lock:')
    LEFT JOIN LATERAL (
        SELECT count(*)::integer AS n FROM (
            (SELECT FROM pgqueue.job_running r WHERE r.limit_key = substr(walked.key, 7) LIMIT head.most)
            UNION ALL
            (SELECT FROM pgqueue.job_available a WHERE a.limit_key = substr(walked.key, 7) AND a.holds LIMIT head.most)
            UNION ALL
            (SELECT FROM pgqueue.job_scheduled s WHERE s.limit_key = substr(walked.key, 7) AND s.holds LIMIT head.most)
            UNION ALL
            (SELECT FROM pgqueue.job_blocked b
             WHERE b.limit_key = substr(walked.key, 7) AND b.holds AND (substr(b.key, 1, 5) = 'rate:') IS TRUE LIMIT head.most)
            LIMIT head.most
        ) AS holder
    ) AS had ON starts_with(walked.key, 'limit:')
    WHERE walked.key IS NOT NULL
)
SELECT ARRAY(SELECT key FROM looked WHERE waits ORDER BY place),
       (SELECT key FROM looked WHERE place = %(n)s::integer);

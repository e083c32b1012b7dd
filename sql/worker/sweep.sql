-- What the sweep asks: whether it is ours to do, which granted jobs cannot go on, which keys have room.

-- name: sweep_due
-- Whether the sweep is ours to do: no worker has done it for this number of seconds, or the clock has stepped back. If
-- so, a row comes back. It says whether a job waits for a key or was granted one, so an idle queue costs nothing more.
UPDATE pgqueue.duty SET done_at = pgqueue.now()
WHERE name = 'sweep' AND (done_at <= pgqueue.now() - make_interval(secs => %(seconds)s::float8) OR done_at > pgqueue.now())
RETURNING EXISTS (SELECT FROM pgqueue.job_blocked)
       OR EXISTS (SELECT FROM pgqueue.job_available a WHERE a.holds AND a.lock_key IS NOT NULL)
       OR EXISTS (SELECT FROM pgqueue.job_available a WHERE a.holds AND a.limit_key IS NOT NULL);

-- name: sweep_tell
-- Tell the workers to sweep: jobs went back, some perhaps to wait for keys. The worker that gave them back may not know these, or be
-- unable to ask for them.
SELECT CASE WHEN %(notify)s::boolean AND {{may_notify}} THEN pg_notify('pgqueue.:control', 'sweep')::text END;

-- name: sweep_stuck
-- The id and task of n jobs that hold a key and cannot go on, but for those `passed`: their queue or task is paused, or no live worker
-- there knows it. They are granted, or hold a lock while they wait for a limit, or hold either while they wait for a rate. A job is not
-- among them if its queue only has no free slot.
WITH RECURSIVE holding (queue, task) AS (
    (SELECT b.queue, b.task FROM pgqueue.job_blocked b WHERE b.holds AND b.queue <> '' ORDER BY b.queue, b.task LIMIT 1)
    UNION ALL
    SELECT after.queue, after.task FROM holding h CROSS JOIN LATERAL (
        SELECT b.queue, b.task FROM pgqueue.job_blocked b
        WHERE b.holds AND b.queue <> '' AND (b.queue, b.task) > (h.queue, h.task) ORDER BY b.queue, b.task LIMIT 1
    ) AS after
), closed AS MATERIALIZED (
    SELECT h.queue, h.task FROM holding h WHERE h.queue = {{paused}} OR NOT {{served}}
), granted AS MATERIALIZED (
    (SELECT a.id, a.queue, a.task FROM pgqueue.job_available a WHERE a.holds AND a.lock_key IS NOT NULL)
    UNION ALL
    (SELECT a.id, a.queue, a.task FROM pgqueue.job_available a WHERE a.holds AND a.limit_key IS NOT NULL AND a.lock_key IS NULL)
), stuck AS (
    SELECT granted.id, granted.task FROM granted WHERE granted.queue = {{paused}} OR NOT {{served}}
    UNION ALL
    SELECT b.id, b.task FROM closed CROSS JOIN LATERAL (
        SELECT b.id, b.task FROM pgqueue.job_blocked b WHERE b.queue = closed.queue AND b.task = closed.task AND b.holds AND b.queue <> ''
    ) AS b
)
SELECT stuck.id, stuck.task FROM stuck WHERE stuck.id <> ALL (%(passed)s::bigint[]) LIMIT %(n)s::integer;

-- name: sweep_block
-- Block these jobs again, if they still hold a key and cannot go on. They wait for the first of their keys again, before the waiters
-- that have not had it. Other jobs may have the keys. Answers the keys. IS TRUE: so the jobs are read by their ids, whatever was planned.
-- Is impatient up to the COMMIT, which notifies nothing.
WITH {{impatience}}, idle AS MATERIALIZED (
    SELECT a.ctid FROM pgqueue.job_available a
    WHERE a.id = ANY (%(ids)s::bigint[]) AND (a.holds AND (a.queue = {{paused}} OR NOT {{served}})) IS TRUE
    FOR UPDATE SKIP LOCKED
), stuck AS MATERIALIZED (
    SELECT b.ctid FROM pgqueue.job_blocked b
    WHERE b.id = ANY (%(ids)s::bigint[]) AND (b.holds AND b.queue <> '' AND (b.queue = {{paused}} OR NOT {{served}})) IS TRUE
    FOR UPDATE SKIP LOCKED
), granted AS (
    DELETE FROM pgqueue.job_available WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM idle))
    RETURNING {{job}}, {{attempts}}
), waiting AS (
    DELETE FROM pgqueue.job_blocked WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM stuck))
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
-- Answer those of the next n keys with waiters, after this one, that the unblocker or the rate limiter should ask for.
-- Jumps along the index of keys, and over those of nodes, which are for the releaser.
--
-- - Locks and limits that seem to have room.
-- - Locks with a first waiter that may have to be skipped.
-- - Every rate: the rate limiter decides.
--
-- Locks nothing, decides nothing. One row: these keys, and the last key looked at (NULL: the walk is at its end).
WITH RECURSIVE walked (key, place) AS (
    SELECT {{key_after_first}}, 1
    UNION ALL
    SELECT {{key_after}}, w.place + 1
    FROM walked w WHERE w.key IS NOT NULL AND w.place < %(n)s::integer
), looked AS MATERIALIZED (
    SELECT wanted.key, wanted.place, starts_with(wanted.key, 'rate:') OR coalesce(held.n, had.n) < head.most
           OR starts_with(wanted.key, 'lock:') AND head.on_locked <> 'wait' AS waits
    FROM (SELECT walked.*, 0 AS after FROM walked WHERE walked.key IS NOT NULL) AS wanted
    LEFT JOIN LATERAL (
        SELECT CASE WHEN starts_with(wanted.key, 'limit:')
                    THEN (SELECT l.n FROM pgqueue.key_limit l WHERE l.name = substr(wanted.key, 7))
                    ELSE greatest(b.lock_limit, 1) END AS most, b.on_locked
        FROM pgqueue.job_blocked b
        WHERE b.key = wanted.key AND NOT b.queue = {{paused}} AND {{served}}
        ORDER BY b.rank, b.id LIMIT 1
    ) AS head ON true
    LEFT JOIN LATERAL ({{lock_holders}}) AS held ON starts_with(wanted.key, 'lock:')
    LEFT JOIN LATERAL ({{limit_holders}}) AS had ON starts_with(wanted.key, 'limit:')
)
SELECT ARRAY(SELECT key FROM looked WHERE waits ORDER BY place),
       (SELECT key FROM looked WHERE place = %(n)s::integer);

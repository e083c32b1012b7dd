-- name: rescue_disarm
-- End the sessions of a worker without a heartbeat since `beat`: a stopped process keeps its locks and could still
-- commit. Pid and start time must both match, and the database: a copy of it on the same server has rows that name the sessions of the
-- original.
--
-- Sessions that we may not end are left out, because asking would be an error. These are sessions of a superuser, if we
-- are none, and of another role, if we lack the right. Answers how many were told to end, and how many could not be ended or
-- even seen.
WITH found AS MATERIALIZED (
    SELECT a.pid, {{ours_to_end}} AS ours
    FROM pgqueue.worker w
    CROSS JOIN LATERAL jsonb_to_recordset(w.sessions) AS s (pid integer, backend_start timestamptz)
    JOIN pg_stat_activity a ON a.pid = s.pid AND coalesce(a.backend_start = s.backend_start, true)
    JOIN pg_roles me ON me.rolname = current_user
    WHERE w.id = %(worker_id)s::bigint AND w.beat = %(beat)s::bigint AND a.datname = current_database()
)
SELECT count(CASE WHEN ours THEN pg_terminate_backend(pid) END), count(*) FILTER (WHERE NOT ours) FROM found;

-- name: rescue_lock
-- Lock the worker's row against claims (they hold it FOR KEY SHARE). No row: it sent another heartbeat, or is gone.
SELECT id FROM pgqueue.worker WHERE id = %(worker_id)s::bigint AND beat = %(beat)s::bigint FOR UPDATE;

-- name: rescue_mark
-- From now on this worker can neither claim nor send heartbeats; if it comes back it must register anew.
UPDATE pgqueue.worker SET dead_at = coalesce(dead_at, pgqueue.now()), state = 'stopped'
WHERE id = %(worker_id)s::bigint AND beat = %(beat)s::bigint;

-- name: rescue_jobs
-- Give up to n jobs of a dead worker back to the front of their lanes, the first claimed first, but those that are `passed` over.
-- Answers how many were moved.
--
-- Which jobs count a crash:
--
-- 1. A job that was running at the last heartbeat.
-- 2. Of the jobs claimed since, as many as the worker had slots: they start in this order, and a killer may need only
--    milliseconds.
-- 3. Of the poison jobs of one claim only the worst, the first in this order, can have started. Beside a job with two
--    crashes no other job of its claim can have (poison_jobs.py).
-- 4. Of a chain only the first job that is left can have started (chains.py).
--
-- With the third crash a job is failed. Jobs of a chain behind its holder become the first waiters of their key again.
-- So do holders of a key with a task that no live worker knows.
WITH {{impatience}}, dead_worker AS MATERIALIZED (
    SELECT id, running, beat_at, concurrency, version_tag FROM pgqueue.worker WHERE id = %(worker_id)s::bigint
), picked AS MATERIALIZED (
    SELECT r.ctid FROM pgqueue.job_running r WHERE r.worker_id = %(worker_id)s::bigint AND r.id <> ALL (%(passed)s::bigint[])
    ORDER BY r.claim, r.rank, r.id LIMIT %(n)s::integer
    FOR UPDATE SKIP LOCKED
), lost AS (
    DELETE FROM pgqueue.job_running WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), placed AS MATERIALIZED (
    SELECT lost.*, key IS NOT NULL AND row_number() OVER chain > 1 AS later
    FROM lost
    WINDOW chain AS (PARTITION BY lost.claim, lost.lock_key ORDER BY lost.holds DESC, lost.rank, lost.id)
), judged AS MATERIALIZED (
    SELECT lost.*, coalesce(
        lost.id = ANY (w.running)
        OR (%(first)s::boolean AND lost.started_at > w.beat_at AND NOT later
            AND row_number() OVER (ORDER BY later, lost.claim, lost.crashes DESC, lost.rank, lost.id) <= w.concurrency
            AND (row_number() OVER together = 1 OR lost.crashes = 0 AND max(lost.crashes) OVER together < 2)),
        false) AS started,
        CASE WHEN lost.key IS NULL AND lost.holds
                  AND NOT {{served}}
             THEN coalesce('lock:' || lost.lock_key, 'limit:' || lost.limit_key, 'rate:' || lost.rate_key)
             ELSE lost.key END AS waits_for
    FROM placed AS lost LEFT JOIN dead_worker w ON true
    WINDOW together AS (PARTITION BY lost.claim ORDER BY lost.crashes DESC, lost.id)
), noted AS (
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome, message,
                                 version_tag)
    SELECT id, enqueued_at, attempt, worker_id, claim, started_at, pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'),
           'crashed', 'its worker died', (SELECT version_tag FROM dead_worker)
    FROM judged WHERE started
), dead AS (
    INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, crashes, run_at, started_at, attempt, snoozes, worker_id,
        claim, {{job}})
    SELECT 'failed', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), 'crashed',
        least(crashes + 1, 32767), run_at, started_at, attempt, snoozes, worker_id, claim, {{job}}
    FROM judged WHERE started AND crashes >= 2
    RETURNING id
), heard AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:ended.' || w.job_id, '')::text END AS done
    FROM pgqueue.job_waiter w WHERE %(notify)s::boolean AND w.job_id = ANY (ARRAY(SELECT id FROM dead))
), available AS (
    INSERT INTO pgqueue.job_available (state, rank, crashes, hold_pos, attempt, run_at, snoozes, holds, {{job}})
    SELECT 'available', CASE crashes + started::integer WHEN 0 THEN 2 * priority WHEN 1 THEN -2 ELSE -1 END,
        crashes + started::integer, CASE WHEN holds THEN nextval('pgqueue.job_hold_seq') END,
        greatest(attempt - CASE WHEN started THEN 0 ELSE 1 END, -32768), {{due}},
        snoozes, holds, {{job}}
    FROM judged WHERE NOT (started AND crashes >= 2) AND waits_for IS NULL
    ORDER BY id
    RETURNING id, queue
), blocked AS (
    INSERT INTO pgqueue.job_blocked (state, key, rank, crashes, attempt, run_at, snoozes, {{job}})
    SELECT 'blocked', waits_for, CASE crashes + started::integer WHEN 0 THEN 2 * priority WHEN 1 THEN -2 ELSE -1 END,
        crashes + started::integer, attempt - CASE WHEN started THEN 0 ELSE 1 END, run_at, snoozes, {{job}}
    FROM judged WHERE NOT (started AND crashes >= 2) AND waits_for IS NOT NULL
    RETURNING id
), happened AS MATERIALIZED (
    SELECT queue, task, CASE WHEN started AND crashes >= 2 THEN 'failed' ELSE 'rescued' END AS what FROM judged
), counted AS (
    {{count_happened}}
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || queue, 'zero')::text END AS done
    FROM (SELECT DISTINCT queue FROM available WHERE %(notify)s::boolean) AS q
)
SELECT (SELECT count(*) FROM lost), (SELECT count(done) FROM told) + (SELECT count(done) FROM heard), count(*), {{patient}}
FROM (SELECT id FROM available UNION ALL SELECT id FROM blocked) AS given_back;

-- name: rescue_first
-- The first job that a rescue of one would move: its id and its task.
SELECT r.id, r.task FROM pgqueue.job_running r WHERE r.worker_id = %(worker_id)s::bigint AND r.id <> ALL (%(passed)s::bigint[])
ORDER BY r.claim, r.rank, r.id LIMIT 1;

-- name: rescue_refuse_unfit
-- After a rescue, or a hand-back, met a value that does not fit: put aside the jobs of this worker that no lane could take (rows restored,
-- or inserted by hand). Answers their ids. What waits for them is told.
WITH refused AS (
    DELETE FROM pgqueue.job_running b WHERE b.worker_id = %(worker_id)s::bigint AND NOT {{fits_lane}}
    RETURNING b.*
), {{put_aside}}, {{told_of_refused}}
SELECT id, (SELECT count(done) FROM told) FROM put_aside;

-- name: rescue_strays
-- Workers that have jobs in job_running but are dead, or have no row: their jobs were claimed while they were being
-- judged.
SELECT DISTINCT r.worker_id
FROM pgqueue.job_running r LEFT JOIN pgqueue.worker w ON w.id = r.worker_id
WHERE w.id IS NULL OR w.dead_at IS NOT NULL;

-- name: rescue_leader
-- Whether a session of this worker holds the leader's lock.
SELECT EXISTS (
    SELECT FROM pgqueue.worker w
    CROSS JOIN LATERAL jsonb_to_recordset(w.sessions) AS s (pid integer)
    JOIN pg_locks l ON l.pid = s.pid
    WHERE w.id = %(worker_id)s::bigint AND l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('pgqueue.leader', 7));

-- What a relay does in the database of the queue.

-- name: target_settings
-- For all of this session: a transaction that stands still is ended, and commits are durable whatever the role's settings say.
SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', false), {{relay_durable}}

-- name: target_identity
-- Which queue this is, where it was last, and where it is now.
SELECT target::text, home, {{relay_home}} FROM pgqueue.relay_target

-- name: target_lock
-- One relay after another, until the transaction ends: two would name the queue twice.
SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.relay_target', 7))

-- name: target_restore
-- The row that `target_identity` reads, if a fixture has emptied the table. After `target_lock`, in a statement of its own.
INSERT INTO pgqueue.relay_target (one) SELECT true WHERE NOT EXISTS (SELECT FROM pgqueue.relay_target)

-- name: target_settle
-- This queue lies here, and has this name. All relays that settle it at once give it the same one.
UPDATE pgqueue.relay_target SET target = %(own)s::text::uuid, home = {{relay_home}}

-- name: target_inherit
-- The outbox with the name `before` goes on under this name, as those do that went on as `before`: their memory is its own. A report
-- under the old name takes that back: then both live.
UPDATE pgqueue.relay_fence SET heir = %(source)s::text::uuid
WHERE source = %(before)s::text::uuid OR heir = %(before)s::text::uuid

-- name: target_stopped
-- No job of this outbox is delivered for this reason; so much waits there. It stands under the name that the outbox will have.
INSERT INTO pgqueue.relay_fence AS f (source, epoch, name, waiting, oldest, refused, reported_at, stopped)
VALUES (%(source)s::text::uuid, 0, %(place)s::text, %(waiting)s::integer, %(oldest)s::float8, %(refused)s::integer, pgqueue.now(),
    %(reason)s::text)
ON CONFLICT (source) DO UPDATE
SET name = excluded.name, waiting = excluded.waiting, oldest = excluded.oldest, refused = excluded.refused,
    reported_at = excluded.reported_at, stopped = excluded.stopped

-- name: target_now
-- The time.
SELECT to_jsonb(pgqueue.now()) #>> '{}'

-- name: target_epoch
-- The highest epoch that was raised here for this outbox.
SELECT coalesce(max(epoch), 0) FROM pgqueue.relay_fence WHERE source = %(source)s::text::uuid

-- name: target_raise
-- From its COMMIT on, no session with a lower epoch delivers. Waits for one that is just delivering, as long as `lock_timeout`. No row:
-- another session was faster. Which session has raised it is noted.
INSERT INTO pgqueue.relay_fence AS f (source, epoch, pid, backend_start)
SELECT %(source)s::text::uuid, %(epoch)s::bigint, a.pid, a.backend_start FROM pg_stat_activity a WHERE a.pid = pg_backend_pid()
ON CONFLICT (source) DO UPDATE SET epoch = excluded.epoch, pid = excluded.pid, backend_start = excluded.backend_start
WHERE f.epoch < excluded.epoch
RETURNING epoch

-- name: target_holder
-- Which session holds the fence now: that of the transaction in its row. Pid and start, its role, and whether it is a relay's: it has
-- raised the fence, or is named as one. The start is NULL if this role may not see it.
SELECT a.pid, to_jsonb(a.backend_start) #>> '{}', a.usename::text,
    (a.pid = f.pid AND coalesce(a.backend_start = f.backend_start, true)) OR a.application_name = 'pgqueue relay target'
FROM pgqueue.relay_fence f
JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = f.xmax
JOIN pg_stat_activity a ON a.pid = l.pid
WHERE f.source = %(source)s::text::uuid AND a.datname = current_database() AND a.pid <> pg_backend_pid()

-- name: target_fence
-- Hold the fence until the transaction ends. No row: another session has raised it.
SELECT epoch FROM pgqueue.relay_fence WHERE source = %(source)s::text::uuid AND epoch = %(epoch)s::bigint FOR UPDATE

-- name: target_known
-- Which of these staged jobs have come here already. They were found in the outbox once more, and are remembered from now on.
UPDATE pgqueue.relayed SET relayed_at = pgqueue.now() WHERE uid = ANY (%(uids)s::text::uuid[]) RETURNING uid::text

-- name: target_remember
-- These staged jobs became these jobs. It fails if one of them is remembered already.
INSERT INTO pgqueue.relayed (uid, source, staged_id, job_id)
SELECT n.uid, %(source)s::text::uuid, n.staged_id, n.job_id
FROM unnest(%(uids)s::text::uuid[], %(staged_ids)s::text::bigint[], %(job_ids)s::text::bigint[]) AS n (uid, staged_id, job_id)

-- name: target_patience
-- The patience that this transaction had before `unique_enqueue_impatient`.
SELECT pg_catalog.set_config('lock_timeout', '2s', true)

-- name: target_looked
-- A look at the whole outbox began at `began` and has just ended: every row that it found was remembered anew. Kept if the one before is
-- older than the memory. One row: what was delivered before this time, and not remembered anew, was not in the outbox for that long.
-- If the clock was set back behind the looks that are kept, they are of a time to come, and what is remembered now would seem older than
-- they are. So they are given up: nothing is forgotten before there are two looks by the new clock.
UPDATE pgqueue.relay_fence
SET look = CASE WHEN next_at > clock.now THEN '-infinity'
                WHEN next_at + make_interval(secs => %(memory)s::float8) <= clock.now THEN next ELSE look END,
    next = CASE WHEN next_at > clock.now OR next_at + make_interval(secs => %(memory)s::float8) <= clock.now
                THEN least(%(began)s::text::timestamptz, clock.now) ELSE next END,
    next_at = CASE WHEN next_at > clock.now OR next_at + make_interval(secs => %(memory)s::float8) <= clock.now
                   THEN clock.now ELSE next_at END
FROM (SELECT pgqueue.now() AS now OFFSET 0) AS clock
WHERE source = %(source)s::text::uuid AND epoch = %(epoch)s::bigint
RETURNING look::text

-- name: target_report
-- How far this relay is behind, for `pgqueue status`. It works, so no other outbox goes on for it.
UPDATE pgqueue.relay_fence
SET name = %(place)s::text, waiting = %(waiting)s::integer, oldest = %(oldest)s::float8, refused = %(refused)s::integer,
    reported_at = pgqueue.now(), stopped = NULL, heir = NULL
WHERE source = %(source)s::text::uuid AND epoch = %(epoch)s::bigint

-- name: target_names
-- The names under which jobs of this outbox were delivered: its own, and those that it had before.
SELECT source::text FROM pgqueue.relay_fence WHERE source = %(source)s::text::uuid OR heir = %(source)s::text::uuid

-- name: target_old
-- Some of the staged jobs that were delivered under this name before this time.
SELECT uid::text FROM pgqueue.relayed
WHERE source = %(source)s::text::uuid AND relayed_at < %(before)s::text::timestamptz ORDER BY relayed_at LIMIT 5000

-- name: target_forget
-- Forget these, unless they were found once more meanwhile. Answers how many. IS TRUE: they are looked up by their uids alone.
WITH gone AS (
    DELETE FROM pgqueue.relayed
    WHERE uid = ANY (%(uids)s::text::uuid[]) AND (relayed_at < %(before)s::text::timestamptz) IS TRUE
    RETURNING uid
)
SELECT count(*) FROM gone

-- name: target_keep
-- These were found among the refused rows, and are remembered anew: from this time on at least, so that `target_old` reads others next.
UPDATE pgqueue.relayed SET relayed_at = greatest(pgqueue.now(), %(before)s::text::timestamptz)
WHERE uid = ANY (%(uids)s::text::uuid[])

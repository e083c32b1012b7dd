-- name: heartbeat_write
-- Raise our counter, write how we are and which jobs we run (NULL: that list stays, and what is said of duties), and read the counters
-- of all workers.
-- If we have been declared dead, our own row is missing from the answer.
--
-- It is missing, too, if the row was not made at `born` (NULL: not known yet). A standby that was promoted without its last commits may
-- give our id to another worker. That one's row must not be kept alive by us, nor ours by it.
WITH mine AS (
    UPDATE pgqueue.worker
    SET beat = beat + 1, beat_at = CASE WHEN %(running)s::bigint[] IS NULL THEN beat_at ELSE pgqueue.now() END,
        state = %(state)s::text, running = coalesce(%(running)s::bigint[], running),
        gathering = CASE WHEN %(running)s::bigint[] IS NULL THEN gathering ELSE %(gathering)s::bigint[] END,
        free = %(free)s::integer[], lost = %(lost)s::integer, rss = %(rss)s::bigint, sessions = %(sessions)s::text::jsonb,
        duties = CASE WHEN %(running)s::bigint[] IS NULL THEN duties ELSE %(duties)s::text::jsonb END
    WHERE id = %(worker_id)s::bigint AND dead_at IS NULL
      AND started_at = coalesce(%(born)s::text::timestamptz, started_at)
    RETURNING id, beat, extract(epoch FROM lease)::float8 AS lease, to_jsonb(started_at) #>> '{}' AS born
)
SELECT id, beat, lease, born FROM mine
UNION ALL
SELECT id, beat, extract(epoch FROM lease)::float8, NULL FROM pgqueue.worker
WHERE dead_at IS NULL AND id <> %(worker_id)s::bigint;

-- name: heartbeat_probe
-- Has anything happened to jobs? The head of the position sequence and the snapshot, as `fetch_probe` reads them, and the share of the
-- NOTIFY queue that is in use. It reads no table, because a heartbeat must not wait for the lock of one, and waits 100 ms at most for that of
-- the sequence; what follows waits as ever. Sent before the UPDATE, so its transaction has no id yet.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0),
       pg_current_snapshot()::text || left(set_config('lock_timeout', patience.usual, true), 0), pg_notification_queue_usage()
FROM (SELECT current_setting('lock_timeout') AS usual, set_config('lock_timeout', '100ms', true) AS short OFFSET 0) AS patience;

-- name: heartbeat_remark
-- Append a remark to attempts that go on, by their fence. The attempts need not be the cause of the remark.
INSERT INTO pgqueue.attempt (job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome, message,
                             version_tag)
SELECT r.id, r.enqueued_at, r.attempt, r.worker_id, r.claim, r.started_at, pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'),
       %(outcome)s::text, %(message)s::text, %(version_tag)s::text
FROM unnest(%(ids)s::bigint[], %(claims)s::integer[]) AS mine (id, claim)
CROSS JOIN LATERAL (
    SELECT r.* FROM pgqueue.job_running r
    WHERE r.id = mine.id AND r.claim + 0 = mine.claim AND r.worker_id + 0 = %(worker_id)s::bigint
    LIMIT 1
) AS r
RETURNING job_id;

-- What a relay does in the application's database, all on the one session that holds the lock.

-- name: source_settings
-- For all of this session: it ends after 15 s without a statement, its commits are durable whatever the role's settings say, and a
-- statement outside of a block is a snapshot of its own.
SELECT pg_catalog.set_config('idle_session_timeout', '15s', false),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', false),
       pg_catalog.set_config('default_transaction_isolation', 'repeatable read', false),
       {{relay_durable}}

-- name: source_lock
-- Take the lock that decides which relay works. Never waited for: a session that waits holds a snapshot, which keeps dead rows.
SELECT pg_try_advisory_lock(hashtextextended('pgqueue.relay', 7))

-- name: source_unlock
-- Give the lock back. The end of the session does so too, but later than its client believes.
SELECT pg_advisory_unlock(hashtextextended('pgqueue.relay', 7))

-- name: source_end_stalled
-- End the session that holds the lock if it has waited for its client for 15 s, in the middle of a message too, where none of its own
-- timeouts counts. Rows: whether each was told. The caller asks for the lock again and again, so it is told until it has ended.
SELECT pg_terminate_backend(a.pid)
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('pgqueue.relay', 7)
  AND pg_has_role(a.usesysid, 'USAGE') AND a.wait_event_type = 'Client' AND a.state_change + interval '15 s' < pgqueue.outbox_now()

-- name: source_identity
-- Which outbox this is, where it was last, which queue it belongs to, and where it is now.
SELECT source::text, home, target::text, {{relay_home}} FROM pgqueue.outbox_source

-- name: source_restore
-- The row that `source_identity` reads, if a fixture has emptied the table.
INSERT INTO pgqueue.outbox_source DEFAULT VALUES ON CONFLICT DO NOTHING

-- name: source_settle
-- This outbox lies here, has this name, and belongs to that queue.
UPDATE pgqueue.outbox_source SET source = %(own)s::text::uuid, home = {{relay_home}}, target = %(target)s::text::uuid

-- name: source_draw
-- Draw an epoch above all that were ever drawn here or seen at the target.
UPDATE pgqueue.outbox_source SET epoch = greatest(epoch, %(seen)s::bigint) + 1 WHERE source = %(source)s::text::uuid RETURNING epoch

-- name: source_read
-- The next rows behind the cursor, and those of `again`, in the order of their ids: all of one snapshot. At most `most` rows, and so many
-- bytes, but one at least. Each row begins with what the cursor has to know, in this order (see watermark.py):
-- 1. The snapshot of this statement was taken.
-- 2. The head of the sequence is read.
-- 3. This transaction takes its id.
-- `durable`: all that the snapshot sees as committed is on disk, for the log is, up to an end that was read later. It is false where the
-- server waits for standbys: what these have is not known.
-- `behind` is the id of the row before it with the same order key, or 0 if one before it was refused.
-- Without rows there is one with NULLs. `counted` is how many rows there were before those beyond the bytes were left out. Whatever is larger than a job's arguments may be is not read.
WITH reading AS MATERIALIZED (
    SELECT coalesce(pg_sequence_last_value('pgqueue.outbox_id_seq'), 0) AS head, pg_current_xact_id()::text::int8 AS xid,
        pg_current_snapshot()::text AS snapshot,
        pg_current_wal_insert_lsn() <= pg_current_wal_flush_lsn() AND current_setting('synchronous_standby_names') = '' AS durable
)
SELECT reading.head, reading.xid, reading.snapshot, reading.durable, found.id, found.uid, found.task, found.args, found.options, found.format,
    found.order_key, found.staged_at,
    CASE WHEN found.order_key IS NOT NULL THEN CASE
        WHEN EXISTS (SELECT FROM pgqueue.outbox_refused r WHERE left(r.order_key, 500) = found.order_key AND r.id < found.id) THEN 0
        ELSE (
            SELECT e.id FROM pgqueue.outbox e
            WHERE e.order_key IS NOT NULL AND (left(e.order_key, 500), e.id) >= (found.order_key, 0)
              AND (left(e.order_key, 500), e.id) < (found.order_key, found.id)
            ORDER BY left(e.order_key, 500) DESC, e.id DESC LIMIT 1)
    END END AS behind, found.counted
FROM reading LEFT JOIN (
    SELECT measured.*, row_number() OVER running AS place, sum(measured.bytes) OVER running AS total,
        count(*) OVER () AS counted
    FROM (
        SELECT o.id, o.uid, o.task, CASE WHEN o.args_size <= 2097152 AND o.options_size <= 2097152 THEN o.args END AS args,
            CASE WHEN o.options_size <= 2097152 THEN o.options END AS options, o.format, o.order_key, o.staged_at,
            least(o.args_size, 2097152) + least(o.options_size, 2097152) AS bytes
        FROM (
            SELECT r.*, octet_length(r.args) AS args_size, coalesce(octet_length(r.options), 0) AS options_size
            FROM (
                SELECT o.id, o.uid::text AS uid, left(o.task, 300) AS task, o.args::text AS args, o.options::text AS options,
                    o.format, left(o.order_key, 500) AS order_key, o.staged_at
                FROM (
                    (SELECT a.* FROM unnest(%(again)s::bigint[]) AS asked (id)
                     CROSS JOIN LATERAL (SELECT o.* FROM pgqueue.outbox o WHERE o.id = asked.id OFFSET 0) AS a
                     WHERE asked.id <= %(after)s::bigint)
                    UNION ALL
                    (SELECT b.* FROM pgqueue.outbox b WHERE b.id > %(after)s::bigint ORDER BY b.id LIMIT %(most)s::integer)
                ) AS o
                OFFSET 0  -- so that each text is made once
            ) AS r
            OFFSET 0
        ) AS o
    ) AS measured
    WINDOW running AS (ORDER BY measured.id ROWS UNBOUNDED PRECEDING)
) AS found ON found.total <= %(bytes)s::bigint OR found.place = 1
ORDER BY found.id

-- name: source_flush
-- A commit that is as durable as those of this session are takes all commits before it to disk, and to the standbys that the server waits
-- for. It changes nothing: a message for consumers of the log, of those that want pgqueue's.
SELECT pg_logical_emit_message(true, 'pgqueue', ''::text)

-- name: source_first
-- The first row behind `after`, without its arguments and options: the server could not make a text of these. No row: there is none.
SELECT o.id, o.uid::text, left(o.task, 300), NULL, NULL, o.format, NULL, o.staged_at
FROM pgqueue.outbox o WHERE o.id > %(after)s::bigint ORDER BY o.id LIMIT 1

-- name: source_waiting
-- How many staged jobs wait, for how many seconds the oldest of them, and how many were refused: those behind the cursor, those that
-- stayed, and those with an order key that is held back. No more than 10,001 of each are looked at.
SELECT count(*)::integer, {{staged_for}},
    (SELECT count(*)::integer FROM (SELECT FROM pgqueue.outbox_refused ORDER BY uid LIMIT 10001) AS refused)
FROM (
    (SELECT o.id, o.staged_at FROM pgqueue.outbox o WHERE o.id > %(after)s::bigint ORDER BY o.id LIMIT 10001)
    UNION
    (SELECT s.id, s.staged_at FROM unnest(%(stayed)s::bigint[]) AS asked (id)
     CROSS JOIN LATERAL (SELECT o.id, o.staged_at FROM pgqueue.outbox o WHERE o.id = asked.id OFFSET 0) AS s)
    UNION
    (SELECT h.id, h.staged_at FROM unnest(%(held)s::text[]) AS asked (key)
     CROSS JOIN LATERAL (
        SELECT o.id, o.staged_at FROM pgqueue.outbox o
        WHERE o.order_key IS NOT NULL AND (left(o.order_key, 500), o.id) >= (asked.key, 0)
          AND (left(o.order_key, 500), o.id) <= (asked.key, 9223372036854775807)
        ORDER BY left(o.order_key, 500), o.id LIMIT 10001) AS h
     LIMIT 10001)
) AS waiting
CROSS JOIN (SELECT pgqueue.outbox_now() AS now OFFSET 0) AS clock

-- name: source_head
-- Up to which id there are rows now.
SELECT greatest(pg_sequence_last_value('pgqueue.outbox_id_seq'), (SELECT max(id) FROM pgqueue.outbox), 0)

-- name: source_delete
-- Rows that were delivered, by id and uid: another row may have the id by now. A locked row stays. Answers the uids of those deleted.
WITH gone AS MATERIALIZED (
    SELECT o.ctid FROM unnest(%(ids)s::text::bigint[], %(uids)s::text::uuid[]) AS d (id, uid)
    CROSS JOIN LATERAL (SELECT o.ctid FROM pgqueue.outbox o WHERE o.uid = d.uid AND o.id + 0 = d.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS o
)
DELETE FROM pgqueue.outbox WHERE ctid = ANY (ARRAY(SELECT ctid FROM gone)) RETURNING uid::text

-- name: source_refuse
-- Rows that cannot be delivered go aside, each with its reason; by id and uid, and a locked one stays. Without their arguments and options
-- if `bare`: it is these that cannot be read. Answers the uids of those moved.
WITH asked AS MATERIALIZED (
    SELECT d.id, d.uid, d.reason FROM unnest(%(ids)s::text::bigint[], %(uids)s::text::uuid[], %(reasons)s::text[]) AS d (id, uid, reason)
), picked AS MATERIALIZED (
    SELECT o.ctid FROM asked
    CROSS JOIN LATERAL (
        SELECT o.ctid FROM pgqueue.outbox o WHERE o.uid = asked.uid AND o.id + 0 = asked.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS o
), gone AS (
    DELETE FROM pgqueue.outbox o WHERE o.ctid = ANY (ARRAY(SELECT picked.ctid FROM picked)) RETURNING o.*
)
INSERT INTO pgqueue.outbox_refused (id, task, args, options, format, order_key, uid, staged_at, reason)
SELECT gone.id, gone.task, CASE WHEN %(bare)s::boolean THEN '{}' ELSE gone.args END, CASE WHEN NOT %(bare)s::boolean THEN gone.options END,
    gone.format, gone.order_key, gone.uid, gone.staged_at, asked.reason
FROM gone JOIN asked ON asked.uid = gone.uid
ON CONFLICT (uid) DO UPDATE SET reason = excluded.reason, refused_at = excluded.refused_at
RETURNING uid::text

-- name: source_kept
-- Which of these uids are among the refused rows: they may come back, so they are remembered.
SELECT r.uid::text FROM pgqueue.outbox_refused r WHERE r.uid = ANY (%(uids)s::uuid[])

-- name: source_ping
-- A sign of life while the target works.
SELECT true

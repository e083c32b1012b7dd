-- name: pruner_advance
-- Advance one ring if its time has come (or when forced): truncate the next leaf and move to it in one transaction, or
-- do neither. False: not due, or another session does it. NULL: a reader holds the leaf; the next round tries again.
SELECT pgqueue.advance_ring(%(kind)s::text, %(forced)s::boolean);

-- name: pruner_rings
-- The rings with their retention in seconds and the age of the leaf being written.
SELECT kind, leaves, bin, extract(epoch FROM retention)::float8, extract(epoch FROM pgqueue.now() - since)::float8,
       since < pgqueue.now() - retention / (leaves - 2)
FROM pgqueue.ring ORDER BY kind;

-- name: pruner_count_anew
-- Count the leaf of this ring from now on, if it has begun in a time to come. No row: it has not.
UPDATE pgqueue.ring SET since = pgqueue.now() WHERE kind = %(kind)s::text AND since > pgqueue.now() RETURNING kind;

-- Each of the statements that forget rows answers what `forget_rows` does: how many are gone, how many the server has
-- refused to delete, and why.

-- name: pruner_waiters
-- Forget waiters that have waited for a job for more than an hour. Most died without a word; a waiter that lives goes
-- on by looking.
SELECT * FROM pgqueue.forget_rows('pgqueue.job_waiter', ARRAY(
    SELECT ctid FROM pgqueue.job_waiter WHERE created_at < (SELECT pgqueue.now()) - interval '1 hour'));

-- name: pruner_workers
-- Forget up to n dead workers: their rows have done their duty after an hour.
SELECT * FROM pgqueue.forget_rows('pgqueue.worker', ARRAY(
    SELECT ctid FROM pgqueue.worker WHERE dead_at < (SELECT pgqueue.now()) - interval '1 hour'
    ORDER BY id LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED));

-- name: pruner_declarations
-- Forget what workers have declared that are gone.
SELECT * FROM pgqueue.forget_rows('pgqueue.declaration', ARRAY(
    SELECT d.ctid FROM pgqueue.declaration d
    WHERE NOT EXISTS (SELECT FROM pgqueue.worker w WHERE w.id = d.worker_id AND w.dead_at IS NULL)));

-- name: pruner_ticks
-- Forget up to n ticks older than a day.
SELECT * FROM pgqueue.forget_rows('pgqueue.tick', ARRAY(
    SELECT ctid FROM pgqueue.tick WHERE at < (SELECT pgqueue.now()) - interval '1 day'
    ORDER BY at LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED));

-- name: pruner_rates
-- Forget up to n keys of rates that have been at rest for this number of seconds: their rows say nothing.
SELECT * FROM pgqueue.forget_rows('pgqueue.limiter', ARRAY(
    SELECT ctid FROM pgqueue.limiter
    WHERE next_at < (SELECT pgqueue.now()) - make_interval(secs => %(seconds)s::float8)
    LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED));

-- name: pruner_discarded_keys
-- Forget up to n keys of discarded jobs that have expired.
SELECT * FROM pgqueue.forget_rows('pgqueue.discarded_key', ARRAY(
    SELECT ctid FROM pgqueue.discarded_key WHERE expires_at <= (SELECT pgqueue.now())
    LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED));

-- name: pruner_unique_keys
-- Go on through the unique keys after `after`, n of them. Remove a key that holds no more and that its job can never
-- need again. (A job that failed or was cancelled can be retried by hand.) Note when a key expires before history
-- forgets its job.
--
-- Waits for no lock. Answers the last key looked at (NULL: there was none), how many were looked at and removed, and
-- how many are noted.
WITH walked AS MATERIALIZED (
    SELECT k.key, k.job_id, k.enqueued_at, k.hold, k.seconds, k.expires_at, k.xmin AS version FROM pgqueue.unique_key k
    WHERE k.key > %(after)s::text ORDER BY k.key LIMIT %(n)s::integer
), judged AS MATERIALIZED (
    SELECT walked.*, ended.finished_at, ended.dead
    FROM walked
    -- Scalar subqueries, each a look into one index: no plan turns them into a join that reads the tables.
    CROSS JOIN LATERAL (
        SELECT coalesce(
            (SELECT true FROM pgqueue.job_available j
             WHERE j.id = walked.job_id AND walked.enqueued_at = j.enqueued_at LIMIT 1),
            (SELECT true FROM pgqueue.job_scheduled j
             WHERE j.id = walked.job_id AND walked.enqueued_at = j.enqueued_at LIMIT 1),
            (SELECT true FROM pgqueue.job_blocked j
             WHERE j.id = walked.job_id AND walked.enqueued_at = j.enqueued_at LIMIT 1),
            (SELECT true FROM pgqueue.job_running j
             WHERE j.id = walked.job_id AND walked.enqueued_at = j.enqueued_at LIMIT 1), false) AS lives
        WHERE coalesce(walked.expires_at, '-infinity') <= (SELECT pgqueue.now())
        OFFSET 0
    ) AS there
    LEFT JOIN LATERAL (
        SELECT j.finished_at, j.state IN ('failed', 'cancelled') AS dead FROM pgqueue.job j
        WHERE j.id = walked.job_id AND walked.enqueued_at = j.enqueued_at
          AND j.state IN ('completed', 'skipped', 'failed', 'cancelled')
        ORDER BY j.finished_at DESC LIMIT 1
    ) AS ended ON true
    WHERE NOT there.lives
), settled AS MATERIALIZED (
    SELECT key, version, hold = 'after' AND expires_at IS NULL
        AND (dead OR finished_at + make_interval(secs => seconds) > pgqueue.now()) IS TRUE AS notes
    FROM judged
    WHERE dead IS NOT TRUE OR hold = 'after' AND expires_at IS NULL
), picked AS MATERIALIZED (
    SELECT k.ctid, settled.notes
    FROM settled CROSS JOIN LATERAL (
        SELECT k.ctid FROM pgqueue.unique_key k WHERE k.key = settled.key AND k.xmin = settled.version
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS k
), removed AS (
    DELETE FROM pgqueue.unique_key WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked WHERE NOT notes)) RETURNING key
), noted AS (
    UPDATE pgqueue.unique_key k SET expires_at = (
        SELECT max(j.finished_at) + make_interval(secs => k.seconds) FROM pgqueue.job j
        WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at
          AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))
    WHERE k.ctid = ANY (ARRAY(SELECT ctid FROM picked WHERE notes))
    RETURNING k.key
)
SELECT (SELECT max(key) FROM walked), (SELECT count(*) FROM walked), (SELECT count(*) FROM removed), (SELECT count(*) FROM noted);

-- name: pruner_flows
-- Go on through the flows after `after`, n of them at most, those that are older than history keeps what completed. Forget those that have no
-- job any more, with their nodes. Of nodes `most` at most: with that many the flows stay, and the next call comes to the same ones. Answers the
-- last flow looked at (NULL: no more are that old), how many nodes are gone, and what `forget_rows` does.
WITH walked AS MATERIALIZED (
    SELECT f.id, f.ctid FROM (SELECT f.id, f.enqueued_at, f.ctid FROM pgqueue.flow f WHERE f.id > %(after)s::bigint ORDER BY f.id LIMIT %(n)s::integer) AS f
    WHERE f.enqueued_at < (SELECT pgqueue.now()) - (SELECT min(r.retention) FROM pgqueue.ring r WHERE r.kind IN ('done', 'dead'))
), gone AS MATERIALIZED (
    SELECT w.id, w.ctid FROM walked w
    -- Scalar subqueries: no plan turns them into a join that reads the tables.
    WHERE coalesce(
        (SELECT true FROM pgqueue.job j WHERE j.node BETWEEN (w.id << 20) + 1 AND (w.id << 20) + 1048575 LIMIT 1),
        (SELECT true FROM pgqueue.job j WHERE j.node BETWEEN -((w.id << 20) + 1048575) AND -((w.id << 20) + 1) LIMIT 1)) IS NULL
), nodes AS MATERIALIZED (
    SELECT n.ctid FROM gone CROSS JOIN LATERAL (
        SELECT n.ctid FROM pgqueue.node n WHERE n.id BETWEEN (gone.id << 20) + 1 AND (gone.id << 20) + 1048575
    ) AS n LIMIT %(most)s::integer
), forgotten AS (
    DELETE FROM pgqueue.node WHERE ctid = ANY (ARRAY(SELECT ctid FROM nodes)) RETURNING id
)
SELECT (SELECT max(id) FROM walked HAVING count(*) = %(n)s::integer), (SELECT count(*) FROM forgotten), f.*
FROM pgqueue.forget_rows('pgqueue.flow', ARRAY(SELECT ctid FROM gone WHERE (SELECT count(*) FROM nodes) < %(most)s::integer)) AS f;

-- name: pruner_flow_kept
-- Go on through the flows of which something is kept, after `after`, n of them at most. Forget what is kept of those in which no job waits,
-- none can wait again, and none may read results: `most` rows at most. Answers the last flow looked at (NULL: there are no more), and
-- what `forget_rows` does. Jumps from flow to flow.
WITH RECURSIVE kept (flow, place) AS (
    (SELECT k.node >> 20, 1 FROM pgqueue.flow_kept k WHERE k.node > (%(after)s::bigint << 20) + 1048575 ORDER BY k.node LIMIT 1)
    UNION ALL
    SELECT (SELECT k.node >> 20 FROM pgqueue.flow_kept k WHERE k.node > (kept.flow << 20) + 1048575 ORDER BY k.node LIMIT 1), kept.place + 1
    FROM kept WHERE kept.flow IS NOT NULL AND kept.place < %(n)s::integer
), over AS MATERIALIZED (
    SELECT flow FROM kept WHERE flow IS NOT NULL AND NOT pgqueue.flow_may_release(flow) AND NOT pgqueue.flow_may_read(flow)
)
SELECT (SELECT flow FROM kept WHERE place = %(n)s::integer), f.*
FROM pgqueue.forget_rows('pgqueue.flow_kept', ARRAY(
    SELECT k.ctid FROM over CROSS JOIN LATERAL (
        SELECT k.ctid FROM pgqueue.flow_kept k WHERE k.node BETWEEN (over.flow << 20) + 1 AND (over.flow << 20) + 1048575
    ) AS k LIMIT %(most)s::integer)) AS f;

-- name: pruner_audit
-- Forget up to n of the oldest rows of the record: those older than so many `days`, and those beyond the newest `most`, by their numbers.
WITH newest AS MATERIALIZED (
    SELECT id FROM pgqueue.audit ORDER BY at DESC, id DESC LIMIT 1
), oldest AS MATERIALIZED (
    SELECT ctid, at, id FROM pgqueue.audit ORDER BY at, id LIMIT %(n)s::integer
)
SELECT * FROM pgqueue.forget_rows('pgqueue.audit', ARRAY(
    SELECT oldest.ctid FROM oldest
    WHERE oldest.at < pgqueue.now() - make_interval(days => %(days)s::integer) OR oldest.id <= (SELECT id FROM newest) - %(most)s::bigint));

-- name: pruner_versions
-- Forget the first start of versions that no worker has any more, after so many `days`; and of more than `most` versions the
-- oldest.
SELECT * FROM pgqueue.forget_rows('pgqueue.version_start', ARRAY(
    SELECT v.ctid FROM (SELECT s.ctid, s.version_tag, s.first_at, row_number() OVER (ORDER BY s.first_at DESC) AS place
                        FROM pgqueue.version_start s) AS v
    WHERE (v.first_at < pgqueue.now() - make_interval(days => %(days)s::integer) OR v.place > %(most)s::integer)
      AND NOT EXISTS (SELECT FROM pgqueue.worker w WHERE w.version_tag = v.version_tag)));

-- name: pruner_bulk
-- Forget those of the n oldest operations by filter that ended more than so many `days` ago, and which jobs they had.
WITH old AS MATERIALIZED (
    SELECT b.id, b.ctid FROM (SELECT id, ctid, ended_at FROM pgqueue.bulk ORDER BY id LIMIT %(n)s::integer) AS b
    WHERE b.ended_at < pgqueue.now() - make_interval(days => %(days)s::integer)
), jobs AS (
    DELETE FROM pgqueue.bulk_job WHERE bulk_id = ANY (ARRAY(SELECT id FROM old))
)
SELECT * FROM pgqueue.forget_rows('pgqueue.bulk', ARRAY(SELECT ctid FROM old));

-- name: doubles_resolve
-- A job could not go where it had to, because another row with its id stood there. Such ids are neighbours, for a sequence that lags gives
-- one after the other: all from `low` to `high` are looked at. Each may stand several times among jobs that run or wait.
--
-- Of each such id one row keeps it: the first of running, blocked, available, scheduled. Every other row waits.
-- 1. If it has another time than the rows before it, it is another job, which got the id after sequences had lagged. It gets a new id.
-- 2. If it has the time of a row before it, it is a second row of that job, restored or inserted by hand. It fails: refused.
-- Why no job is lost, and none runs twice for it:
-- 1. All is read in one snapshot, and a move is one transaction: a job that only moves is seen once.
-- 2. The row that keeps the id is left alone. So of each (id, time) one row goes on, whatever number of sessions do this at once.
-- 3. A row is locked before it is deleted, and never updated. If it is locked or gone, it is left out: nothing waits here.
-- 4. What is deleted is inserted by the same statement, or it raises.
-- 5. A job that holds a key holds it before and after, with its hold_pos: no count of holders changes. It draws a new position.
-- Unique keys, cursors and requests to cancel go along, for they name the job by id and time. If one of them is locked, its job is left
-- out. Attempts are history: they stay as they are.
-- Progress is said anew by the next run. Answers id, task, and the new id; NULL: refused.
WITH doubled AS MATERIALIZED (
    SELECT id FROM (
        SELECT id FROM pgqueue.job_running WHERE id >= %(low)s::bigint AND id <= %(high)s::bigint
        UNION ALL
        SELECT id FROM pgqueue.job_blocked WHERE id >= %(low)s::bigint AND id <= %(high)s::bigint
        UNION ALL
        SELECT id FROM pgqueue.job_available WHERE id >= %(low)s::bigint AND id <= %(high)s::bigint
        UNION ALL
        SELECT id FROM pgqueue.job_scheduled WHERE id >= %(low)s::bigint AND id <= %(high)s::bigint
    ) AS near
    GROUP BY id HAVING count(*) > 1
), standing AS MATERIALIZED (
    SELECT doubled.id, each.place, each.enqueued_at
    FROM doubled CROSS JOIN LATERAL (
        (SELECT 0 AS place, r.enqueued_at FROM pgqueue.job_running r WHERE r.id = doubled.id LIMIT 1)
        UNION ALL
        (SELECT 1, b.enqueued_at FROM pgqueue.job_blocked b WHERE b.id = doubled.id LIMIT 1)
        UNION ALL
        (SELECT 2, a.enqueued_at FROM pgqueue.job_available a WHERE a.id = doubled.id LIMIT 1)
        UNION ALL
        (SELECT 3, s.enqueued_at FROM pgqueue.job_scheduled s WHERE s.id = doubled.id LIMIT 1)
    ) AS each
), judged AS MATERIALIZED (
    SELECT standing.*, row_number() OVER (PARTITION BY id ORDER BY place) > 1 AS later,
           row_number() OVER (PARTITION BY id, enqueued_at ORDER BY place) > 1 AS again
    FROM standing
), found AS MATERIALIZED (
    SELECT judged.place, judged.again, one.*
    FROM judged CROSS JOIN LATERAL (
        SELECT * FROM (
            SELECT b.ctid, b.id, b.enqueued_at, b.task, b.unique_key, b.idempotency_key FROM pgqueue.job_blocked b
            WHERE judged.place = 1 AND b.id = judged.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS b
        UNION ALL
        SELECT * FROM (
            SELECT a.ctid, a.id, a.enqueued_at, a.task, a.unique_key, a.idempotency_key FROM pgqueue.job_available a
            WHERE judged.place = 2 AND a.id = judged.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS a
        UNION ALL
        SELECT * FROM (
            SELECT s.ctid, s.id, s.enqueued_at, s.task, s.unique_key, s.idempotency_key FROM pgqueue.job_scheduled s
            WHERE judged.place = 3 AND s.id = judged.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS s
    ) AS one
    WHERE judged.later
), unique_keys AS MATERIALIZED (
    SELECT found.id, found.place, k.*
    FROM found CROSS JOIN LATERAL (
        SELECT k.ctid, k.key, k.hold, k.seconds, k.expires_at FROM pgqueue.unique_key k
        WHERE k.key IN ('idempotency:' || found.idempotency_key, 'unique:' || found.unique_key)
          AND k.job_id = found.id AND k.enqueued_at = found.enqueued_at
        LIMIT 2 FOR UPDATE SKIP LOCKED
    ) AS k
    WHERE NOT found.again
), requests AS MATERIALIZED (
    SELECT found.id, found.place, s.*
    FROM found CROSS JOIN LATERAL (
        SELECT s.ctid, s.kind, s.reason, s.created_at FROM pgqueue.job_signal s
        WHERE s.job_id = found.id AND s.enqueued_at = found.enqueued_at FOR UPDATE SKIP LOCKED
    ) AS s
    WHERE NOT found.again
), moving AS MATERIALIZED (
    SELECT found.*, CASE WHEN NOT again THEN nextval('pgqueue.job_id_seq') END AS new_id
    FROM found
    WHERE again OR NOT EXISTS (
        SELECT FROM pgqueue.unique_key k
        WHERE k.key IN ('idempotency:' || found.idempotency_key, 'unique:' || found.unique_key)
          AND k.job_id = found.id AND k.enqueued_at = found.enqueued_at
          AND k.ctid <> ALL (ARRAY(SELECT unique_keys.ctid FROM unique_keys))
        OFFSET 0
    ) AND NOT EXISTS (
        SELECT FROM pgqueue.job_signal s
        WHERE s.job_id = found.id AND s.enqueued_at = found.enqueued_at
          AND s.ctid <> ALL (ARRAY(SELECT requests.ctid FROM requests))
        OFFSET 0
    )
), from_blocked AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM moving WHERE place = 1)) RETURNING *
), from_available AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM moving WHERE place = 2)) RETURNING *
), from_scheduled AS (
    DELETE FROM pgqueue.job_scheduled WHERE ctid = ANY (ARRAY(SELECT ctid FROM moving WHERE place = 3)) RETURNING *
), gone AS MATERIALIZED (
    SELECT moving.new_id, waiting.*
    FROM (TABLE from_blocked UNION ALL TABLE from_available UNION ALL TABLE from_scheduled) AS waiting
    JOIN moving ON moving.id = waiting.id
        AND moving.place = CASE waiting.state WHEN 'blocked' THEN 1 WHEN 'available' THEN 2 ELSE 3 END
), refused AS MATERIALIZED (
    SELECT * FROM gone WHERE new_id IS NULL
), {{put_aside}}, blocked AS (
    INSERT INTO pgqueue.job_blocked (state, id, key, holds, hold_pos, rank, {{attempts}}, {{beside_id}}, max_attempts, deadline)
    SELECT state, new_id, key, holds, hold_pos, rank, {{attempts}}, {{beside_id}}, max_attempts, deadline
    FROM gone WHERE state = 'blocked' AND new_id IS NOT NULL
    RETURNING id
), available AS (
    INSERT INTO pgqueue.job_available (
        state, id, holds, hold_pos, rank, run_at, attempt, crashes, snoozes, {{beside_id}}, max_attempts, deadline)
    SELECT state, new_id, holds, hold_pos, rank, {{due}}, attempt, crashes, snoozes, {{beside_id}}, max_attempts, deadline
    FROM gone WHERE state = 'available' AND new_id IS NOT NULL
    RETURNING id, queue
), scheduled AS (
    INSERT INTO pgqueue.job_scheduled (
        state, id, holds, hold_pos, rank, reason, {{attempts}}, {{beside_id}}, max_attempts, deadline)
    SELECT state, new_id, holds, hold_pos, rank, reason, {{attempts}}, {{beside_id}}, max_attempts, deadline
    FROM gone WHERE state = 'scheduled' AND new_id IS NOT NULL
    RETURNING id
), keys_gone AS (
    DELETE FROM pgqueue.unique_key
    WHERE ctid = ANY (ARRAY(SELECT k.ctid FROM unique_keys k JOIN moving ON moving.id = k.id AND moving.place = k.place))
    RETURNING key
), keys_named AS (
    INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds, expires_at)
    SELECT keys_gone.key, moving.new_id, moving.enqueued_at, k.hold, k.seconds, k.expires_at
    FROM keys_gone JOIN unique_keys k ON k.key = keys_gone.key JOIN moving ON moving.id = k.id AND moving.place = k.place
), cursors AS MATERIALIZED (
    SELECT c.ctid FROM moving CROSS JOIN LATERAL (
        SELECT c.ctid FROM pgqueue.job_cursor c WHERE c.job_id = moving.id AND c.enqueued_at = moving.enqueued_at OFFSET 0
    ) AS c
    WHERE moving.new_id IS NOT NULL
), cursors_gone AS (
    DELETE FROM pgqueue.job_cursor WHERE ctid = ANY (ARRAY(SELECT ctid FROM cursors))
    RETURNING job_id, enqueued_at, n, cursor, created_at
), cursors_named AS (
    INSERT INTO pgqueue.job_cursor (job_id, enqueued_at, n, cursor, created_at)
    SELECT moving.new_id, c.enqueued_at, c.n, c.cursor, c.created_at
    FROM cursors_gone c JOIN moving ON moving.id = c.job_id AND moving.enqueued_at = c.enqueued_at AND moving.new_id IS NOT NULL
), steps AS MATERIALIZED (
    SELECT s.ctid FROM moving CROSS JOIN LATERAL (
        SELECT s.ctid FROM pgqueue.job_step s WHERE s.job_id = moving.id AND s.enqueued_at = moving.enqueued_at OFFSET 0
    ) AS s
    WHERE moving.new_id IS NOT NULL
), steps_gone AS (
    DELETE FROM pgqueue.job_step WHERE ctid = ANY (ARRAY(SELECT ctid FROM steps))
    RETURNING job_id, enqueued_at, name, result, created_at
), steps_named AS (
    INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result, created_at)
    SELECT moving.new_id, s.enqueued_at, s.name, s.result, s.created_at
    FROM steps_gone s JOIN moving ON moving.id = s.job_id AND moving.enqueued_at = s.enqueued_at AND moving.new_id IS NOT NULL
), requests_gone AS (
    DELETE FROM pgqueue.job_signal
    WHERE ctid = ANY (ARRAY(SELECT r.ctid FROM requests r JOIN moving ON moving.id = r.id AND moving.place = r.place))
), requests_named AS (
    INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason, created_at)
    SELECT moving.new_id, moving.enqueued_at, r.kind, r.reason, r.created_at
    FROM requests r JOIN moving ON moving.id = r.id AND moving.place = r.place
), told AS (
    -- The sweep: another worker may have passed over a blocked row while it was locked here.
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (SELECT queue AS channel, '' AS what FROM available
          UNION SELECT ':control', 'sweep' FROM blocked
          UNION SELECT ':scheduled', '' FROM scheduled
          UNION SELECT ':control', 'node:' || abs(node) FROM refused WHERE node IS NOT NULL) AS news
    WHERE %(notify)s::boolean
), made AS MATERIALIZED (
    SELECT id FROM put_aside UNION ALL SELECT id FROM blocked UNION ALL SELECT id FROM available UNION ALL SELECT id FROM scheduled
)
SELECT moving.id, moving.task, moving.new_id,
    CASE WHEN (SELECT count(*) FROM made) <> (SELECT count(*) FROM moving)
         THEN pgqueue.refuse('rows of one id were deleted and not inserted')::text END,
    (SELECT count(done) FROM told)
FROM moving;

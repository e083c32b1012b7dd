-- Who gets a key. Truth is rows: the holders of a lock are its rows in job_running, and those elsewhere with `holds`; those of a
-- limit the same, but of the blocked rows only those that wait for what comes after it, a rate. A row becomes a holder in
-- `unblock_move` and `unblock_next` (locks), `unblock_limits`, and a claim after `keyed_claim_lock` (locks) only; every other move takes its
-- hold with it, or gives it up. All who would change that
-- lock the key first (`unblock_lock`), and count in a statement of its own after it, whose snapshot so has whatever the one
-- before has committed. Lock order: keys (in the order of their hashes, or by trying), our worker's row, then rows of jobs with SKIP
-- LOCKED.

-- name: unblock_waiters
-- Those of these keys that somebody waits for. Asked after a holder's end has been committed, and without a lock: who is blocked
-- later than this has seen asks for the key himself, and finds that holder gone. Each line is read behind (rank, id); see waiter_cursors.py.
-- Answers the keys, and how long, in seconds, it took to read those that were read from the `front`, and how many those were.
SELECT coalesce(array_agg(looked.key) FILTER (WHERE looked.somebody), '{}'),
       extract(epoch FROM sum(looked.took) FILTER (WHERE looked.rank = %(front)s::smallint))::float8,
       count(*) FILTER (WHERE looked.rank = %(front)s::smallint)
FROM (
    -- OFFSET 0, and a column from outside: each row is timed by itself.
    SELECT freed.key, freed.rank, line.somebody, pgqueue.now() - began.at AS took
    FROM unnest(%(keys)s::text[], %(ranks)s::smallint[], %(ids)s::bigint[]) AS freed (key, rank, id)
    CROSS JOIN LATERAL (SELECT pgqueue.now() AS at, freed.key OFFSET 0) AS began
    CROSS JOIN LATERAL (
        SELECT EXISTS (SELECT FROM pgqueue.job_blocked b
                       WHERE b.key = began.key AND (b.rank, b.id) > (freed.rank, freed.id)) AS somebody OFFSET 0
    ) AS line
    OFFSET 0
) AS looked;

-- name: unblock_lock
-- Lock these keys, at most 64, for this transaction: in the order of their hashes, so that no two can wait for each other.
-- It is a short one, of pgqueue's own, and may be lost: then its jobs wait again.
SELECT count(pg_advisory_xact_lock(hashed.hash)::text)
FROM (
    SELECT DISTINCT hashtextextended(concat('pgqueue.', asked.key), 7) AS hash
    FROM unnest(%(keys)s::text[]) AS asked (key) ORDER BY hash LIMIT 64
) AS hashed
CROSS JOIN (
    SELECT set_config('lock_timeout', '1s', true), set_config('synchronous_commit', 'off', true) OFFSET 0
) AS settings;

-- name: unblock_next
-- The same as `unblock_move` for the usual case, at half its price: with these keys locked, let in here the first in the line of
-- each that has room, if it needs nothing more, is no poison job, is of our `tasks`, and one of our `slots` is left for it. Skips no job.
-- Where the limit is 1, those next in the line come in with it, so many `behind` by pool, up to the first that is not of the same
-- kind: they will run after it here, one at a time (see chains.py). They do not hold the key; it is in their `key`, and in `rank` and
-- `id` is their order.
-- Holders are read behind the hold_pos that is `after` for the key (see holder_cursors.py), its line behind (rank, id) (see waiter_cursors.py).
-- The first row has no id: its pos is the lowest hold_pos of those let in here, its queue the keys, as a JSON array, that others
-- held before; its args are the keys whose line may go on (somebody could not be let in here, or the limit is not 1),
-- for `unblock_move`, as a JSON array; its priority says whether those let in were too large to be answered here, 32 kB: then
-- `unblock_read` has them, for nobody waits for a key while more than fits in a socket travels, and its headers [key, rank in the line,
-- id, place in its chain] of each. The rest are those jobs, in the columns of a claim, with the place in their chain (0: the
-- holder; the others' is negative) as their pos, and the rank they had in the line.
WITH me AS MATERIALIZED (
    SELECT w.id FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE
), head AS MATERIALIZED (
    SELECT wanted.key, first.*, held.n
    FROM me CROSS JOIN unnest(%(keys)s::text[], %(afters)s::bigint[], %(ranks)s::smallint[], %(ids)s::bigint[])
        AS wanted (key, after, rank, id)
    CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.rank, b.queue, coalesce(b.lock_limit, 1) AS most,
               b.crashes = 0 AND coalesce(b.limit_key, b.rate_key) IS NULL AND {{known_here}} AS plain
        FROM pgqueue.job_blocked b
        WHERE b.key = wanted.key AND (b.rank, b.id) > (wanted.rank, wanted.id) AND NOT b.holds
          AND NOT b.queue = {{paused}}
          AND (b.queue = ANY (%(queues)s::text[]) AND {{known_here}}
               OR (b.queue, b.task) IN (SELECT s.queue, s.task FROM pgqueue.served() AS s)
               OR (b.queue, '') IN (SELECT s.queue, s.task FROM pgqueue.served() AS s))
        ORDER BY b.rank, b.id LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) AS first
    CROSS JOIN LATERAL (
        -- A chain holds the key alone, as long as anything is left of it: there is a limit of 1 in it that has yet to start.
        SELECT CASE WHEN count(holder.key) > 0 THEN first.most ELSE count(*)::integer END AS n FROM (
            (SELECT r.key FROM pgqueue.job_running r
             WHERE r.lock_key = substr(wanted.key, 6) AND coalesce(r.hold_pos, 9223372036854775807) > wanted.after LIMIT first.most)
            UNION ALL
            (SELECT NULL FROM pgqueue.job_available a WHERE a.lock_key = substr(wanted.key, 6) AND a.holds
               AND coalesce(a.hold_pos, 9223372036854775807) > wanted.after LIMIT first.most)
            UNION ALL
            (SELECT NULL FROM pgqueue.job_scheduled s WHERE s.lock_key = substr(wanted.key, 6) AND s.holds
               AND coalesce(s.hold_pos, 9223372036854775807) > wanted.after LIMIT first.most)
            UNION ALL
            (SELECT NULL FROM pgqueue.job_blocked b WHERE b.lock_key = substr(wanted.key, 6) AND b.holds
               AND coalesce(b.hold_pos, 9223372036854775807) > wanted.after LIMIT first.most)
            LIMIT first.most
        ) AS holder
    ) AS held
    WHERE held.n < first.most
), placed AS MATERIALIZED (
    SELECT head.key, head.ctid, head.id, head.rank, head.queue, head.n, head.most > head.n + 1 AS more, head.plain AND coalesce(
               row_number() OVER (PARTITION BY mine.pool, head.plain ORDER BY head.rank, head.id)
               <= (%(slots)s::integer[])[mine.pool], false) AS here,
           CASE WHEN head.most = 1 THEN (%(behind)s::integer[])[mine.pool] END AS behind
    FROM head
    LEFT JOIN unnest(%(queues)s::text[], %(pools)s::integer[]) AS mine (queue, pool) ON mine.queue = head.queue
), chained AS MATERIALIZED (
    SELECT placed.key, after.ctid, after.id, after.rank, after.place
    FROM placed CROSS JOIN LATERAL (
        SELECT line.*, row_number() OVER (ORDER BY line.rank, line.id) AS place,
               bool_and(line.alike) OVER (ORDER BY line.rank, line.id) AS fits
        FROM (
            SELECT b.ctid, b.id, b.rank,
                   b.queue = placed.queue AND coalesce(b.lock_limit, 1) = 1 AND (b.on_locked IN ('skip', 'once')) IS NOT TRUE AND b.crashes = 0
                       AND coalesce(b.limit_key, b.rate_key) IS NULL AND {{known_here}} AS alike
            FROM pgqueue.job_blocked b
            WHERE b.key = placed.key AND (b.rank, b.id) > (placed.rank, placed.id) AND NOT b.holds
            ORDER BY b.rank, b.id LIMIT CASE WHEN placed.here THEN coalesce(placed.behind, 0) ELSE 0 END
            FOR UPDATE SKIP LOCKED
        ) AS line
    ) AS after
    WHERE after.fits
), taken AS (
    DELETE FROM pgqueue.job_blocked
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM placed WHERE here UNION ALL SELECT ctid FROM chained))
    RETURNING {{job}}, {{attempts}}, rank
), running AS (
    INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, attempt, rank, holds, key, run_at, crashes,
        snoozes, {{job}})
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), least(attempt + 1, 32767),
        CASE WHEN chained.id IS NULL THEN 2 * priority ELSE taken.rank END, chained.id IS NULL, chained.key, run_at, crashes,
        snoozes, {{job}}
    FROM taken LEFT JOIN chained USING (id)
    RETURNING id, hold_pos
), shown AS MATERIALIZED (
    SELECT taken.id, coalesce(chained.place, 0) AS place,
        priority, taken.rank, queue, task, args::text AS args, headers::text AS headers, run_at, enqueued_at,
        least(attempt + 1, 32767)::smallint AS attempt, max_attempts, crashes, snoozes,
        CASE WHEN deadline <= pgqueue.now() THEN '-infinity' ELSE deadline END AS deadline, lock_key,
        CASE WHEN coalesce(unique_key, idempotency_key) IS NOT NULL
             THEN json_build_array(unique_key, idempotency_key)::text END AS keys
    FROM taken LEFT JOIN chained USING (id)
), large AS MATERIALIZED (
    SELECT coalesce(sum(octet_length(args) + coalesce(octet_length(headers), 0)), 0) > 32768 AS so FROM shown
)
SELECT NULL::bigint, made.lowest, NULL::smallint, seen.held::text, NULL::text, seen.longer::text,
       CASE WHEN seen.n <> made.n THEN pgqueue.refuse('an admit deleted jobs it did not move') END::smallint,
       large.so::integer::smallint, NULL::smallint, NULL::smallint, NULL::smallint,
       NULL::timestamptz, NULL::timestamptz, NULL::timestamptz,
       CASE WHEN large.so THEN (
            SELECT json_agg(json_build_array(key, rank, id, -place))
            FROM (SELECT key, rank, id, 0 AS place FROM placed WHERE here UNION ALL SELECT key, rank, id, place FROM chained) AS came
            ) END::text,
       NULL::text, NULL::text, NULL::text, NULL::text, NULL::smallint
FROM large, (SELECT count(*) AS n, min(hold_pos) AS lowest FROM running) AS made, (
    SELECT count(*) FILTER (WHERE here) + (SELECT count(*) FROM chained) AS n, json_agg(key) FILTER (WHERE here AND n > 0) AS held,
           coalesce(json_agg(key) FILTER (WHERE more OR NOT here), '[]') AS longer
    FROM placed
) AS seen
UNION ALL
SELECT id, -place, (2 * priority)::smallint, queue, task, args, attempt, priority, max_attempts, crashes, snoozes,
       enqueued_at, run_at, deadline, headers, lock_key, keys, NULL, NULL, rank
FROM shown WHERE NOT (SELECT so FROM large);

-- name: unblock_move
-- With these keys locked: count the holders of each, and let in as many of those that wait for it, in (rank, id) order, as
-- its limit allows: here to this worker (`queues` with the place of their pool, `slots` by pool), the rest to the front of
-- their lanes as granted. Heads of queues that are paused, or of tasks that no live worker of their queue knows, are passed over. A head with a smaller limit
-- of its own holds up those behind it. Those that need a limit or a rate, too, wait for that next, and keep the lock.
-- Then, of the jobs `fresh` (and, if `heads` says so, of the first of each line) that have never started and found no room:
-- `skip` ends as skipped; `once` too, if another job of its task waits for the key that way, which will run after it.
-- Holders are read behind the hold_pos that is `after` for the key (see holder_cursors.py), its line behind (rank, id) (see waiter_cursors.py); but
-- the first of each line that may be skipped, and the one of `once` that stays, are looked for from the front.
-- Answers the ids of those let in here, of those skipped, how many were granted, how many were told, what those that have
-- the lock now wait for next, the lowest hold_pos of all that were let in, the keys that others held before, the keys with a line
-- and no room left, and of each that somebody has left the line of, as a JSON array: [key, how many, rank and id of the last one].
WITH me AS MATERIALIZED (
    SELECT w.id FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE
), known AS MATERIALIZED (
    SELECT s.queue, s.task FROM pgqueue.served() AS s
), line AS MATERIALIZED (
    SELECT wanted.key, wanted.rank, wanted.id, held.n, head.most
    FROM me CROSS JOIN unnest(%(keys)s::text[], %(afters)s::bigint[], %(ranks)s::smallint[], %(ids)s::bigint[])
        AS wanted (key, after, rank, id)
    CROSS JOIN LATERAL (
        SELECT coalesce(b.lock_limit, 1) AS most FROM pgqueue.job_blocked b
        WHERE b.key = wanted.key AND (b.rank, b.id) > (wanted.rank, wanted.id) AND NOT b.holds
          AND NOT b.queue = {{paused}}
          AND (b.queue = ANY (%(queues)s::text[]) AND {{known_here}}
               OR (b.queue, b.task) IN (SELECT k.queue, k.task FROM known AS k)
               OR (b.queue, '') IN (SELECT k.queue, k.task FROM known AS k))
        ORDER BY b.rank, b.id LIMIT 1
    ) AS head
    CROSS JOIN LATERAL (
        -- A chain holds the key alone, as long as anything is left of it: there is a limit of 1 in it that has yet to start.
        SELECT CASE WHEN count(holder.key) > 0 THEN head.most ELSE count(*)::integer END AS n FROM (
            (SELECT r.key FROM pgqueue.job_running r
             WHERE r.lock_key = substr(wanted.key, 6) AND coalesce(r.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
            UNION ALL
            (SELECT NULL FROM pgqueue.job_available a WHERE a.lock_key = substr(wanted.key, 6) AND a.holds
               AND coalesce(a.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
            UNION ALL
            (SELECT NULL FROM pgqueue.job_scheduled s WHERE s.lock_key = substr(wanted.key, 6) AND s.holds
               AND coalesce(s.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
            UNION ALL
            (SELECT NULL FROM pgqueue.job_blocked b WHERE b.lock_key = substr(wanted.key, 6) AND b.holds
               AND coalesce(b.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
            LIMIT head.most
        ) AS holder
    ) AS held
), head AS MATERIALIZED (
    SELECT line.key, line.n, b.*
    FROM line CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.rank, b.queue, b.lock_limit,
               b.crashes = 0 AND coalesce(b.limit_key, b.rate_key) IS NULL AND {{known_here}} AS plain
        FROM pgqueue.job_blocked b
        WHERE b.key = line.key AND (b.rank, b.id) > (line.rank, line.id) AND NOT b.holds
          AND NOT b.queue = {{paused}}
          AND (b.queue = ANY (%(queues)s::text[]) AND {{known_here}}
               OR (b.queue, b.task) IN (SELECT k.queue, k.task FROM known AS k)
               OR (b.queue, '') IN (SELECT k.queue, k.task FROM known AS k))
        ORDER BY b.rank, b.id LIMIT line.most - line.n
        FOR UPDATE SKIP LOCKED
    ) AS b
), fitting AS MATERIALIZED (
    SELECT numbered.*, bool_and(n + nth <= coalesce(lock_limit, 1)) OVER (PARTITION BY key ORDER BY nth) AS fits
    FROM (SELECT head.*, row_number() OVER (PARTITION BY key ORDER BY rank, id) AS nth FROM head) AS numbered
), unblocked AS MATERIALIZED (
    -- A poison job is granted: its lane sees to it that it comes alone.
    SELECT f.ctid, f.id, f.rank, f.key, f.plain AND coalesce(
               row_number() OVER (PARTITION BY mine.pool, f.plain ORDER BY f.rank, f.id)
               <= (%(slots)s::integer[])[mine.pool], false) AS here
    FROM fitting f
    LEFT JOIN unnest(%(queues)s::text[], %(pools)s::integer[]) AS mine (queue, pool) ON mine.queue = f.queue
    WHERE f.fits
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM unblocked))
    RETURNING {{job}}, {{attempts}}, rank
), onward AS (
    INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'blocked', coalesce('limit:' || limit_key, 'rate:' || rate_key), true, nextval('pgqueue.job_hold_seq'), rank,
        {{attempts}}, {{job}}
    FROM taken WHERE coalesce(limit_key, rate_key) IS NOT NULL
    RETURNING key, hold_pos
), running AS (
    {{start}} WHERE id = ANY (ARRAY(SELECT id FROM unblocked WHERE here))
    RETURNING id, hold_pos
), granted AS (
    INSERT INTO pgqueue.job_available (state, rank, holds, hold_pos, run_at, attempt, crashes, snoozes, {{job}})
    SELECT 'available', {{front}}, true,
        nextval('pgqueue.job_hold_seq'), {{due}}, attempt, crashes,
        snoozes, {{job}}
    FROM taken WHERE NOT id = ANY (ARRAY(SELECT id FROM unblocked WHERE here)) AND coalesce(limit_key, rate_key) IS NULL
    RETURNING queue, hold_pos
), room AS MATERIALIZED (
    SELECT line.key, line.n + (SELECT count(*) FROM unblocked WHERE unblocked.key = line.key)::integer AS n FROM line
    WHERE %(heads)s::boolean OR cardinality(%(fresh)s::bigint[]) > 0
), asked AS MATERIALIZED (
    SELECT room.key, b.ctid, b.id, b.task, b.on_locked
    FROM unnest(%(fresh)s::bigint[]) AS fresh (id)
    CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.key, b.task, b.on_locked, b.lock_limit, b.attempt, b.snoozes, b.crashes
        FROM pgqueue.job_blocked b WHERE b.id = fresh.id AND NOT b.holds LIMIT 1
    ) AS b
    JOIN room ON room.key = b.key AND room.n >= coalesce(b.lock_limit, 1)
    WHERE b.on_locked IN ('skip', 'once') AND b.attempt = 0 AND b.snoozes = 0 AND b.crashes = 0
    UNION
    SELECT room.key, b.ctid, b.id, b.task, b.on_locked
    FROM room
    CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.task, b.on_locked, b.lock_limit, b.attempt, b.snoozes, b.crashes
        FROM pgqueue.job_blocked b
        WHERE b.key = room.key AND NOT b.holds AND NOT b.id = ANY (ARRAY(SELECT id FROM unblocked))
        ORDER BY b.rank, b.id LIMIT 1
    ) AS b
    WHERE %(heads)s::boolean AND room.n >= coalesce(b.lock_limit, 1)
      AND b.on_locked IN ('skip', 'once') AND b.attempt = 0 AND b.snoozes = 0 AND b.crashes = 0
), late AS MATERIALIZED (
    SELECT * FROM asked WHERE NOT id = ANY (ARRAY(SELECT id FROM unblocked))
), keeper AS MATERIALIZED (
    -- Locked against a cancel: should it be withdrawn in this moment, the others stay.
    SELECT once.key, once.task, b.id
    FROM (SELECT DISTINCT key, task FROM late WHERE on_locked = 'once') AS once
    CROSS JOIN LATERAL (
        SELECT b.id FROM pgqueue.job_blocked b
        WHERE b.key = once.key AND b.task = once.task AND b.on_locked = 'once' AND NOT b.holds
          AND NOT b.id = ANY (ARRAY(SELECT id FROM unblocked))
        ORDER BY b.rank, b.id LIMIT 1
        FOR KEY SHARE SKIP LOCKED
    ) AS b
), refused AS MATERIALIZED (
    SELECT b.ctid FROM pgqueue.job_blocked b
    WHERE b.ctid = ANY (ARRAY(
        SELECT late.ctid FROM late LEFT JOIN keeper ON keeper.key = late.key AND keeper.task = late.task
        WHERE late.on_locked = 'skip' OR keeper.id <> late.id))
    FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM refused)) RETURNING *
), skipped AS (
    INSERT INTO pgqueue.job_done (state, finished_at, bin, reason, {{attempts}}, {{job}})
    SELECT 'skipped', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), 'locked', {{attempts}}, {{job}}
    FROM dropped
    RETURNING id
), told AS (
    SELECT pg_notify('pgqueue.' || channel, '')::text AS done FROM (
        SELECT queue::text AS channel FROM granted
        UNION
        SELECT ':ended.' || w.job_id FROM pgqueue.job_waiter w WHERE w.job_id = ANY (ARRAY(SELECT id FROM skipped))
    ) AS heard
    WHERE %(notify)s::boolean
)
SELECT CASE WHEN (SELECT count(*) FROM unblocked)
                 <> (SELECT count(*) FROM running) + (SELECT count(*) FROM granted) + (SELECT count(*) FROM onward)
            THEN ARRAY[pgqueue.refuse('an admit deleted jobs it did not move')::bigint]
            ELSE ARRAY(SELECT id FROM running) END,
       ARRAY(SELECT id FROM skipped), (SELECT count(*) FROM granted), (SELECT count(done) FROM told),
       ARRAY(SELECT DISTINCT key FROM onward),
       (SELECT min(hold_pos)
        FROM (SELECT hold_pos FROM running UNION ALL SELECT hold_pos FROM granted UNION ALL SELECT hold_pos FROM onward) AS made),
       ARRAY(SELECT key FROM line WHERE n > 0),
       ARRAY(SELECT key FROM line
             WHERE most <= n + (SELECT count(*) FROM unblocked WHERE unblocked.key = line.key)),
       (SELECT json_agg(json_build_array(gone.key, gone.n, gone.rank, gone.id))::text
        FROM (SELECT DISTINCT ON (key COLLATE "C") key, rank, id, count(*) OVER (PARTITION BY key COLLATE "C") AS n
              FROM unblocked ORDER BY key COLLATE "C", rank DESC, id DESC) AS gone);

-- name: unblock_read
-- The jobs that were let in by this claim for these keys, in the columns of a claim, the oldest first; read behind the hold_pos that is
-- `after` for the key, as they were counted. In a transaction of its own: however large the payloads are, nobody waits for a key
-- while they travel.
SELECT r.id, 0::bigint, r.rank, r.queue, r.task, r.args::text, r.attempt, r.priority, r.max_attempts, r.crashes, r.snoozes,
       r.enqueued_at, r.run_at, CASE WHEN r.deadline <= pgqueue.now() THEN '-infinity' ELSE r.deadline END, r.headers::text,
       r.lock_key, CASE WHEN coalesce(r.unique_key, r.idempotency_key) IS NOT NULL
                        THEN json_build_array(r.unique_key, r.idempotency_key)::text END, r.limit_key, r.rate_key
FROM unnest(%(keys)s::text[], %(afters)s::bigint[]) AS mine (key, after)
CROSS JOIN LATERAL (
    SELECT * FROM pgqueue.job_running r
    WHERE r.lock_key = substr(mine.key, 6) AND coalesce(r.hold_pos, 9223372036854775807) > mine.after
      AND r.claim + 0 = %(claim)s::integer AND r.worker_id + 0 = %(worker_id)s::bigint
    OFFSET 0
) AS r
ORDER BY r.priority, r.id;

-- name: unblock_refuse_doubles
-- After an admit met an id that is running or available already (rows restored or inserted by hand): put the blocked row aside
-- as failed, so that it harms only itself. Answers their ids.
WITH double AS (
    DELETE FROM pgqueue.job_blocked b
    WHERE b.id = ANY (ARRAY(SELECT id FROM pgqueue.job_running UNION ALL SELECT id FROM pgqueue.job_available WHERE holds))
    RETURNING b.*
)
{{put_aside}};

-- name: unblock_limits
-- The same for keys that are limits: with them locked, count the holders of each, and let in as many of those that wait, in (rank,
-- id) order, as it allows now: here to this worker, those that need a rate to that line, and some as granted to the front of their
-- lanes: of each queue as many as others have slots for by their last beats, but one always, unless one comes in here or is granted
-- and not taken yet. No more, so that an urgent job that comes later does not find the whole limit in the hands of those that wait for a slot.
-- Those for whom nobody has one hold up nobody who can go: they get the last places, in their order, with those behind them who need
-- the same slots after a rate. Of its queue no job is passed, of tasks that only others know none of its queue and task; but while one is granted and not taken, those of its queue that find no
-- slot may be passed by those of another one. Poison jobs come before all others, if a slot of their queue is free. A limit that nobody
-- has declared lets nobody in.
-- Holders are read behind the hold_pos that is `after` for the key (see holder_cursors.py), its line behind (rank, id) (see waiter_cursors.py), but
-- for poison jobs. Answers the ids of those let in here, what those wait for that went on, how many were granted, how many were told,
-- the lowest hold_pos of those let in; of each key that had room, as JSON arrays: [key, the lowest hold_pos of all its holders];
-- the keys with room left and nobody in line; and of each that somebody waited for, as JSON arrays: [key, how many have left its
-- line, rank and id of the last one before whom all have].
WITH me AS MATERIALIZED (
    SELECT w.id FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE
), known AS MATERIALIZED (
    SELECT s.queue, s.task FROM pgqueue.served() AS s
), served AS MATERIALIZED (
    -- The open queues that a worker serves, with what others had free there at their last beats. Ours twice: for jobs of our tasks, with
    -- our own slots; and for those of tasks that only others know.
    SELECT open.queue, open.free, open.pool IS NOT NULL AS shared, kind.ours, CASE WHEN kind.ours THEN open.pool END AS pool,
           CASE WHEN kind.ours THEN coalesce((%(slots)s::integer[])[open.pool], 0) ELSE 0 END AS slots
    FROM (SELECT each.queue, sum(each.free)::integer AS free, max(mine.pool) AS pool FROM (
        SELECT unnest(w.queues) AS queue, CASE WHEN w.state = 'running' AND w.id <> %(worker_id)s::bigint
               THEN greatest(0, w.concurrency - w.lost - cardinality(w.running)) ELSE 0 END AS free
        FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
        UNION ALL
        SELECT unnest(%(queues)s::text[]), 0
    ) AS each
    LEFT JOIN unnest(%(queues)s::text[], %(pools)s::integer[]) AS mine (queue, pool) ON mine.queue = each.queue
    WHERE NOT each.queue = {{paused}}
    GROUP BY each.queue) AS open
    JOIN (VALUES (true), (false)) AS kind (ours) ON NOT kind.ours OR open.pool IS NOT NULL
), line AS MATERIALIZED (
    SELECT wanted.*, l.n - held.n AS room, held.lowest
    FROM me CROSS JOIN unnest(%(keys)s::text[], %(afters)s::bigint[], %(ranks)s::smallint[], %(ids)s::bigint[])
        AS wanted (key, after, rank, id)
    CROSS JOIN LATERAL (SELECT n FROM pgqueue.key_limit WHERE name = substr(wanted.key, 7)) AS l
    CROSS JOIN LATERAL (
        SELECT count(*)::integer AS n, min(coalesce(holder.hold_pos, 0)) AS lowest FROM (
            (SELECT r.hold_pos FROM pgqueue.job_running r
             WHERE r.limit_key = substr(wanted.key, 7) AND coalesce(r.hold_pos, 9223372036854775807) > wanted.after LIMIT l.n)
            UNION ALL
            (SELECT a.hold_pos FROM pgqueue.job_available a WHERE a.limit_key = substr(wanted.key, 7) AND a.holds
               AND coalesce(a.hold_pos, 9223372036854775807) > wanted.after LIMIT l.n)
            UNION ALL
            (SELECT s.hold_pos FROM pgqueue.job_scheduled s WHERE s.limit_key = substr(wanted.key, 7) AND s.holds
               AND coalesce(s.hold_pos, 9223372036854775807) > wanted.after LIMIT l.n)
            UNION ALL
            (SELECT b.hold_pos FROM pgqueue.job_blocked b
             WHERE b.limit_key = substr(wanted.key, 7) AND b.holds AND (substr(b.key, 1, 5) = 'rate:') IS TRUE
               AND coalesce(b.hold_pos, 9223372036854775807) > wanted.after LIMIT l.n)
            LIMIT l.n
        ) AS holder
    ) AS held
    WHERE l.n > held.n
), head AS MATERIALIZED (
    -- By queue, so that those who can go are not looked for behind those who cannot; poison jobs by themselves for the same reason.
    -- One more of each than can go now: those of other queues who come after that one are not to pass it.
    -- Granted poison jobs do not count for others: who runs one takes no other, and has slots for those.
    -- Jobs of tasks that only others know are looked for among the first of a queue of ours, eight for each that may go, not behind
    -- all of ours: the workers that know them look further.
    SELECT line.key, line.room, served.ours, served.pool, served.slots, served.free AS free_at_most, reach.most,
           CASE WHEN b.rank < 0 THEN granted.poison ELSE granted.n END AS granted, b.*
    FROM line CROSS JOIN served
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE one.rank < 0)::integer AS poison, count(*) FILTER (WHERE one.rank >= 0)::integer AS n
        FROM (
            SELECT a.rank FROM pgqueue.job_available a
            WHERE a.limit_key = substr(line.key, 7) AND a.holds AND a.queue || '' = served.queue  -- a lane may be long
              AND ((a.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE AND served.shared) = served.ours
              AND coalesce(a.hold_pos, 9223372036854775807) > line.after LIMIT 2 * greatest(1, served.free)
        ) AS one
    ) AS granted
    CROSS JOIN LATERAL (SELECT greatest(1, served.slots + served.free - granted.n, served.slots) AS most) AS reach
    LEFT JOIN LATERAL (
        SELECT b.rank, b.id FROM pgqueue.job_blocked b
        WHERE served.shared AND NOT served.ours
          AND substr(b.key, 7) = substr(line.key, 7) AND left(b.key, 6) = 'limit:' AND b.queue = served.queue
          AND (b.rank, b.id) > (line.rank, line.id)
        ORDER BY b.rank, b.id OFFSET 8 * least(line.room, 25) LIMIT 1
    ) AS far ON true
    CROSS JOIN LATERAL (
        SELECT * FROM (
            SELECT b.ctid, b.id, b.rank, b.queue, b.task, b.crashes, b.rate_key IS NOT NULL AS more FROM pgqueue.job_blocked b
            WHERE substr(b.key, 7) = substr(line.key, 7) AND left(b.key, 6) = 'limit:' AND b.queue = served.queue AND b.rank >= 0
              AND (b.rank, b.id) > (line.rank, line.id) AND (b.rank, b.id) < (coalesce(far.rank, 32767), coalesce(far.id, 0))
              AND CASE WHEN {{known_here}} AND served.shared THEN served.ours
                       ELSE NOT served.ours AND ((b.queue, b.task) IN (SELECT k.queue, k.task FROM known AS k)
                                                 OR (b.queue, '') IN (SELECT k.queue, k.task FROM known AS k)) END
            ORDER BY b.rank, b.id LIMIT least(line.room, reach.most + 1)
            FOR UPDATE SKIP LOCKED
        ) AS ordinary
        UNION ALL
        SELECT * FROM (
            SELECT b.ctid, b.id, b.rank, b.queue, b.task, b.crashes, b.rate_key IS NOT NULL AS more FROM pgqueue.job_blocked b
            WHERE substr(b.key, 7) = substr(line.key, 7) AND left(b.key, 6) = 'limit:' AND b.queue = served.queue AND b.rank < 0
              AND CASE WHEN {{known_here}} AND served.shared THEN served.ours
                       ELSE NOT served.ours AND ((b.queue, b.task) IN (SELECT k.queue, k.task FROM known AS k)
                                                 OR (b.queue, '') IN (SELECT k.queue, k.task FROM known AS k)) END
            ORDER BY b.rank, b.id LIMIT least(line.room, greatest(1, served.free - granted.poison))
            FOR UPDATE SKIP LOCKED
        ) AS poison_job
    ) AS b
), able AS MATERIALIZED (
    -- How many slots those others had free that know the task.
    SELECT one.queue, one.task, sum(greatest(0, w.concurrency - w.lost - cardinality(w.running)))::integer AS free
    FROM (SELECT DISTINCT queue, task FROM head WHERE free_at_most > 0) AS one
    JOIN pgqueue.worker w ON one.queue = ANY (w.queues) AND coalesce(one.task = ANY (w.tasks), w.tasks IS NULL)
    WHERE w.dead_at IS NULL AND w.state = 'running' AND w.id <> %(worker_id)s::bigint
    GROUP BY one.queue, one.task
), turned AS MATERIALIZED (
    -- `kin`: of the tasks that only others know each waits by itself, for each has its own workers. `beyond`: the one more. `pool`, `other`: whose slots are the same, as far as we know. A poison job is granted: its lane sees to it
    -- that it comes alone.
    SELECT head.*, coalesce(able.free, 0) AS free, rank < 0 AS alone, CASE WHEN pool IS NULL THEN head.queue END AS other,
           CASE WHEN NOT ours THEN head.task END AS kin,
           row_number() OVER (PARTITION BY key, head.queue, ours, rank < 0 ORDER BY rank, id) > most AS beyond,
           crashes = 0 AND NOT more
           AND row_number() OVER (PARTITION BY pool, crashes = 0 AND NOT more ORDER BY rank, id) <= slots AS here
    FROM head LEFT JOIN able ON able.queue = head.queue AND able.task = head.task
), judged AS MATERIALIZED (
    -- `late`: nobody has a slot for it, or for one before it that waits for the same ones. Who goes on to a rate needs one later.
    SELECT turned.*, free = 0 AND CASE WHEN alone THEN slots = 0 ELSE
                         bool_or(free = 0 AND NOT (here OR more)) OVER (PARTITION BY key, pool, other, alone ORDER BY rank, id) END AS late,
           here OR more OR row_number() OVER (PARTITION BY key, queue, ours, kin, alone, here OR more ORDER BY rank, id)
               <= greatest((alone OR NOT bool_or(here) OVER (PARTITION BY key, queue, ours))::integer, free) - granted AS fits
    FROM turned
), fitting AS MATERIALIZED (
    -- Nobody passes anybody of his queue, nor, if he has a slot of ours to wait for, who waits for those before him.
    SELECT judged.*, bool_and(fits) OVER (PARTITION BY key, queue, ours, kin, alone ORDER BY rank, id)
           AND (slots = 0 OR NOT late OR bool_and(fits OR free > 0) OVER (PARTITION BY key, pool, other, alone ORDER BY rank, id)) AS goes
    FROM judged
), lined AS MATERIALIZED (
    -- One for whom nobody has a slot comes after those who can go: it would keep the room from them. Nobody comes after one that
    -- goes and is the last we have read of its queue: others may be behind that. Then it goes on to a rate, or one before it does,
    -- and the key is asked for once more.
    SELECT fitting.*, row_number() OVER (PARTITION BY key ORDER BY late, rank, id) AS place,
           beyond AND NOT more OR coalesce(bool_or(beyond) OVER (
               PARTITION BY key ORDER BY late, rank, id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS after
    FROM fitting WHERE goes
), unblocked AS MATERIALIZED (
    SELECT ctid, id, key, here FROM lined WHERE place <= room AND NOT after
), seen AS MATERIALIZED (
    SELECT judged.*, bool_and(gone) OVER (PARTITION BY key, queue, ours ORDER BY rank, id) AS before
    FROM (SELECT head.key, head.queue, head.ours, head.rank, head.id, head.id = ANY (ARRAY(SELECT id FROM unblocked)) AS gone
          FROM turned AS head WHERE NOT head.alone) AS judged
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM unblocked))
    RETURNING {{job}}, {{attempts}}, rank
), onward AS (
    INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'blocked', 'rate:' || rate_key, true, nextval('pgqueue.job_hold_seq'), rank, {{attempts}}, {{job}}
    FROM taken WHERE rate_key IS NOT NULL
    RETURNING key, hold_pos
), running AS (
    {{start}} WHERE id = ANY (ARRAY(SELECT id FROM unblocked WHERE here))
    RETURNING id, hold_pos
), granted AS (
    INSERT INTO pgqueue.job_available (state, rank, holds, hold_pos, run_at, attempt, crashes, snoozes, {{job}})
    SELECT 'available', {{front}}, true,
        nextval('pgqueue.job_hold_seq'), {{due}}, attempt, crashes,
        snoozes, {{job}}
    FROM taken WHERE NOT id = ANY (ARRAY(SELECT id FROM unblocked WHERE here)) AND rate_key IS NULL
    RETURNING queue, hold_pos
), made AS MATERIALIZED (
    SELECT min(hold_pos) AS lowest
    FROM (SELECT hold_pos FROM running UNION ALL SELECT hold_pos FROM granted UNION ALL SELECT hold_pos FROM onward) AS new
), told AS (
    SELECT pg_notify('pgqueue.' || queue, '')::text AS done
    FROM (SELECT DISTINCT queue FROM granted WHERE %(notify)s::boolean) AS heard
)
SELECT CASE WHEN (SELECT count(*) FROM unblocked)
                 <> (SELECT count(*) FROM running) + (SELECT count(*) FROM granted) + (SELECT count(*) FROM onward)
            THEN ARRAY[pgqueue.refuse('an admit deleted jobs it did not move')::bigint]
            ELSE ARRAY(SELECT id FROM running) END,
       ARRAY(SELECT DISTINCT key FROM onward), (SELECT count(*) FROM granted), (SELECT count(done) FROM told),
       (SELECT lowest FROM made),
       -- Those made now have the higher ones, unless the numbers have gone back.
       (SELECT json_agg(json_build_array(line.key, least(line.lowest, made.lowest)))
        FROM line CROSS JOIN made WHERE least(line.lowest, made.lowest) > 0)::text,
       ARRAY(SELECT line.key FROM line WHERE line.room > (SELECT count(*) FROM unblocked WHERE unblocked.key = line.key)
                                         AND NOT EXISTS (SELECT FROM turned WHERE turned.key = line.key AND turned.beyond)
                                         AND NOT EXISTS (SELECT FROM seen WHERE seen.key = line.key AND NOT seen.gone)),
       (SELECT json_agg(json_build_array(key, n, place[1], place[2])) FROM (
            -- Of each queue the last of those that have gone before the first who has not; of all queues the one in front.
            SELECT key, sum(n) AS n, min(place) AS place FROM (
                SELECT key, count(*) FILTER (WHERE before) AS n,
                       coalesce(max(ARRAY[rank::bigint, id]) FILTER (WHERE before), min(ARRAY[rank::bigint, id - 1])) AS place
                FROM seen GROUP BY key, queue, ours
            ) AS by_queue GROUP BY key
        ) AS left_behind)::text;

-- name: unblock_read_limits
-- The same for limits: among our own, for of a limit others may have very many.
SELECT r.id, 0::bigint, r.rank, r.queue, r.task, r.args::text, r.attempt, r.priority, r.max_attempts, r.crashes, r.snoozes,
       r.enqueued_at, r.run_at, CASE WHEN r.deadline <= pgqueue.now() THEN '-infinity' ELSE r.deadline END, r.headers::text,
       r.lock_key, CASE WHEN coalesce(r.unique_key, r.idempotency_key) IS NOT NULL
                        THEN json_build_array(r.unique_key, r.idempotency_key)::text END, r.limit_key, r.rate_key
FROM pgqueue.job_running r
WHERE r.worker_id = %(worker_id)s::bigint AND r.claim = %(claim)s::integer
ORDER BY r.priority, r.id;

-- Which waiting job gets a key. Truth is rows: the holders of a lock are its rows in job_running, and those elsewhere with `holds`. The
-- holders of a limit are the same, but of the blocked rows only those that wait for what comes after a limit: a rate.
-- Why no key has more holders than it may have (see also unblocker.py):
-- 1. A row becomes a holder in `unblock_move` and `unblock_next` (locks), in `unblock_limits`, and in a claim after `keyed_claim_lock`.
--    Every other move of a row takes its hold with it, or gives it up.
-- 2. Each of these transactions locks the key first (`unblock_lock`, `keyed_claim_lock`).
-- 3. It counts in a later statement, whose snapshot has whatever the transaction before has committed.
-- Lock order: keys (in the order of their hashes, or by trying), our worker's row, then rows of jobs with SKIP LOCKED.

-- name: unblock_waiters
-- Those of these keys that a job waits for. Asked without a lock, after the end of a holder has been committed. A worker that blocks a job
-- later than this has seen asks for the key by itself, and finds that holder gone. Each waiting queue is read behind (rank, id); see
-- waiter_cursors.py. Answers the keys; how many seconds it took to read those that were read from the `front`; how many those were.
SELECT coalesce(array_agg(looked.key) FILTER (WHERE looked.waits), '{}'),
       extract(epoch FROM sum(looked.took) FILTER (WHERE looked.rank = %(front)s::smallint))::float8,
       count(*) FILTER (WHERE looked.rank = %(front)s::smallint)
FROM (
    -- OFFSET 0, and a column from outside: each row is timed by itself.
    SELECT freed.key, freed.rank, line.waits, pgqueue.now() - began.at AS took
    FROM unnest(%(keys)s::text[], %(ranks)s::smallint[], %(ids)s::bigint[]) AS freed (key, rank, id)
    CROSS JOIN LATERAL (SELECT pgqueue.now() AS at, freed.key OFFSET 0) AS began
    CROSS JOIN LATERAL (
        SELECT EXISTS (SELECT FROM pgqueue.job_blocked b
                       WHERE b.key = began.key AND (b.rank, b.id) > (freed.rank, freed.id)) AS waits OFFSET 0
    ) AS line
    OFFSET 0
) AS looked;

-- name: unblock_lock
-- Lock these keys, at most 64. The transaction is a short one, of pgqueue's own.
{{lock_keys}}
CROSS JOIN (SELECT set_config('lock_timeout', '1s', true), {{durable}} OFFSET 0) AS settings;

-- name: unblock_next
-- As `unblock_move` for the usual case, at half its price. With these keys locked, the first job that waits for each key that has room
-- comes in here. It must need nothing more, be no poison job and of our `tasks`, and one of our `slots` must be left for it.
-- Where the limit is 1, the next jobs of the waiting queue come in with it, as a chain: so many `behind` by pool. The chain ends before
-- the first job that is not of the same kind. Its jobs run here one at a time (see chains.py). A job behind the first does not hold the
-- key. The key is in its `key`; the order of the chain is that of `rank` and `id`.
-- Holders are read behind the hold_pos `after` (see holder_cursors.py), waiting queues behind (rank, id) (see waiter_cursors.py).
-- The last column of the first row is the summary, as a JSON object:
-- * `lowest_hold`: the lowest hold_pos of the jobs that came in.
-- * `held`: those of their keys that other jobs held before.
-- * `onward`: the keys for `unblock_move`: a job could not come in here, or the limit is not 1.
-- * `gone`: of each key [key, how many have left its waiting queue, rank and id of the last of these].
-- * `too_large`: whether the jobs take more than 32 kB. Then they are not answered, and `unblock_read` has them: no worker waits for a
--   key while more than fits in a socket travels.
-- The rest are the jobs. The position of a job is 0, or minus its place in the chain behind the first.
WITH me AS MATERIALIZED (
    {{live_worker}}
), head AS MATERIALIZED (
    SELECT wanted.key, head.*, held.n
    FROM me CROSS JOIN unnest(%(keys)s::text[], %(afters)s::bigint[], %(ranks)s::smallint[], %(ids)s::bigint[])
        AS wanted (key, after, rank, id)
    CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.rank, b.queue, coalesce(b.lock_limit, 1) AS most, {{runs_here}} AS plain
        FROM pgqueue.job_blocked b WHERE {{waiter}}
        ORDER BY b.rank, b.id LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS head
    CROSS JOIN LATERAL ({{lock_holders}}) AS held
    WHERE held.n < head.most
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
            SELECT b.ctid, b.id, b.rank, b.queue = placed.queue AND coalesce(b.lock_limit, 1) = 1
                       AND (b.on_locked IN ('skip', 'once')) IS NOT TRUE AND {{runs_here}} AS alike
            FROM pgqueue.job_blocked b
            WHERE b.key = placed.key AND (b.rank, b.id) > (placed.rank, placed.id) AND NOT b.holds
            ORDER BY b.rank, b.id LIMIT CASE WHEN placed.here THEN coalesce(placed.behind, 0) ELSE 0 END
            FOR UPDATE SKIP LOCKED
        ) AS line
    ) AS after
    WHERE after.fits
), came AS MATERIALIZED (
    SELECT key, ctid, id, rank FROM placed WHERE here UNION ALL SELECT key, ctid, id, rank FROM chained
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM came)) RETURNING {{job}}, {{attempts}}, rank
), running AS (
    INSERT INTO pgqueue.job_running (
        state, worker_id, claim, started_at, rank, holds, key, attempt, run_at, crashes, snoozes, {{job}})
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(),
        CASE WHEN chained.id IS NULL THEN 2 * priority ELSE taken.rank END, chained.id IS NULL, chained.key,
        least(attempt + 1, 32767), run_at, crashes, snoozes, {{job}}
    FROM taken LEFT JOIN chained USING (id)
    RETURNING hold_pos
), shown AS MATERIALIZED (
    SELECT came_in.*, sum(coalesce(octet_length(args_text), 0) + coalesce(octet_length(headers_text), 0)) OVER () > 32768 AS too_large
    FROM (
        SELECT {{job}}, run_at, least(attempt + 1, 32767)::smallint AS attempt, crashes, snoozes, (2 * priority)::smallint AS rank,
            -coalesce(chained.place, 0) AS pos, {{texts}}
        FROM taken LEFT JOIN chained USING (id) OFFSET 0
    ) AS came_in
)
SELECT {{no_job}}, CASE
    WHEN (SELECT count(*) FROM came) <> (SELECT count(*) FROM running)
    THEN pgqueue.refuse('an unblocking deleted jobs it did not move')::text
    ELSE json_build_object(
        'lowest_hold', (SELECT min(hold_pos) FROM running),
        'held', (SELECT coalesce(json_agg(key), '[]') FROM placed WHERE here AND n > 0),
        'onward', (SELECT coalesce(json_agg(key), '[]') FROM placed WHERE more OR NOT here),
        'gone', (SELECT coalesce(json_agg(json_build_array(key, n, last[1], last[2])), '[]') FROM (
            SELECT key, count(*) AS n, max(ARRAY[rank::bigint, id]) AS last FROM came GROUP BY key) AS gone),
        'too_large', EXISTS (SELECT FROM shown WHERE too_large))::text END AS summary
UNION ALL
SELECT {{claimed}}, NULL FROM shown WHERE NOT too_large;

-- name: unblock_move
-- With these keys locked: count the holders of each lock, and let waiting jobs in, in (rank, id) order, as the limit of the first allows.
-- A job with a smaller limit holds up the jobs behind it. Heads of queues or tasks that are paused, or of tasks that no live worker of
-- their queue knows, are passed over. `queues` come with the place of their pool, `slots` by pool. A job that comes in goes one of three ways:
-- 1. If it needs a limit or a rate, too, it waits for that next, and keeps the lock.
-- 2. Else it runs here, if it is of our `tasks`, is no poison job, and a slot is left.
-- 3. Else it goes to the front of its lane as granted. A poison job does, for its lane sees to it that it comes alone.
-- Holders are read behind the hold_pos `after` (see holder_cursors.py), waiting queues behind (rank, id) (see waiter_cursors.py).
-- Answers a summary, as a JSON object; the jobs that run here are read by `unblock_read`:
-- * `lowest_hold`: the lowest hold_pos of the jobs that came in.
-- * `held`: the keys that other jobs held before.
-- * `onward`: the keys that jobs now wait for, which came in and need more.
-- * `full`: the keys with waiters and no room left.
-- * `gone`: of each key [key, how many have left its waiting queue, rank and id of the last of these].
WITH {{impatience}}, me AS MATERIALIZED (
    {{live_worker}}
), line AS MATERIALIZED (
    SELECT wanted.key, wanted.rank, wanted.id, held.n, head.most
    FROM me CROSS JOIN unnest(%(keys)s::text[], %(afters)s::bigint[], %(ranks)s::smallint[], %(ids)s::bigint[])
        AS wanted (key, after, rank, id)
    CROSS JOIN LATERAL (
        SELECT coalesce(b.lock_limit, 1) AS most FROM pgqueue.job_blocked b WHERE {{waiter}} ORDER BY b.rank, b.id LIMIT 1
    ) AS head
    CROSS JOIN LATERAL ({{lock_holders}}) AS held
), head AS MATERIALIZED (
    SELECT wanted.key, wanted.n, b.* FROM line AS wanted CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.rank, b.queue, b.lock_limit, {{runs_here}} AS plain
        FROM pgqueue.job_blocked b WHERE {{waiter}}
        ORDER BY b.rank, b.id LIMIT wanted.most - wanted.n FOR UPDATE SKIP LOCKED
    ) AS b
), fitting AS MATERIALIZED (
    SELECT numbered.*, bool_and(n + nth <= coalesce(lock_limit, 1)) OVER (PARTITION BY key ORDER BY nth) AS fits
    FROM (SELECT head.*, row_number() OVER (PARTITION BY key ORDER BY rank, id) AS nth FROM head) AS numbered
), unblocked AS MATERIALIZED (
    SELECT f.ctid, f.id, f.rank, f.key, f.plain AND coalesce(
               row_number() OVER (PARTITION BY mine.pool, f.plain ORDER BY f.rank, f.id)
               <= (%(slots)s::integer[])[mine.pool], false) AS here
    FROM fitting f
    LEFT JOIN unnest(%(queues)s::text[], %(pools)s::integer[]) AS mine (queue, pool) ON mine.queue = f.queue
    WHERE f.fits
), taken AS (
    DELETE FROM pgqueue.job_blocked WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM unblocked)) RETURNING {{job}}, {{attempts}}, rank
), onward AS (
    INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'blocked', coalesce('limit:' || limit_key, 'rate:' || rate_key), true, nextval('pgqueue.job_hold_seq'), rank,
        {{attempts}}, {{job}}
    FROM taken WHERE coalesce(limit_key, rate_key) IS NOT NULL
    RETURNING key, hold_pos
), running AS (
    {{start}} WHERE id = ANY (ARRAY(SELECT id FROM unblocked WHERE here))
    RETURNING hold_pos
), granted AS (
    {{grant}} WHERE NOT id = ANY (ARRAY(SELECT id FROM unblocked WHERE here)) AND coalesce(limit_key, rate_key) IS NULL
    RETURNING queue, hold_pos
), made AS MATERIALIZED (
    SELECT hold_pos FROM running UNION ALL SELECT hold_pos FROM granted UNION ALL SELECT hold_pos FROM onward
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || queue, '')::text END AS done
    FROM (SELECT DISTINCT queue FROM granted WHERE %(notify)s::boolean) AS heard
)
SELECT CASE
    WHEN (SELECT count(*) FROM unblocked) <> (SELECT count(*) FROM made)
    THEN pgqueue.refuse('an unblocking deleted jobs it did not move')::text
    ELSE json_build_object(
        'lowest_hold', (SELECT min(hold_pos) FROM made),
        'held', (SELECT coalesce(json_agg(key), '[]') FROM line WHERE n > 0),
        'onward', (SELECT coalesce(json_agg(DISTINCT key), '[]') FROM onward),
        'full', (SELECT coalesce(json_agg(key), '[]') FROM line
                 WHERE most <= n + (SELECT count(*) FROM unblocked WHERE unblocked.key = line.key)),
        'gone', (SELECT coalesce(json_agg(json_build_array(key, n, last[1], last[2])), '[]') FROM (
            SELECT key, count(*) AS n, max(ARRAY[rank::bigint, id]) AS last FROM unblocked GROUP BY key) AS gone),
        'told', (SELECT count(done) FROM told))::text END AS summary, {{patient}};

-- name: unblock_skip
-- Behind `unblock_move` in its transaction, with the same keys locked: end jobs as skipped that have never started and find no room. These
-- are some of the jobs `fresh`; and, if `heads` says so, of the first waiters of these keys. A job that says `skip` ends. A job that says
-- `once` ends if another `once` job of its task waits for the key, and will run after it. Waiting queues are read from the front. Answers
-- how many were skipped. Right because:
-- 1. The keys are locked, so no other transaction makes a holder of one; the snapshot is from after the move, and has its holders.
-- 2. Holders are counted for the limit of each job. One that ends meanwhile was there when the job asked.
-- 3. The `once` job that stays is locked against a cancel: should it be withdrawn in this moment, the others stay.
WITH found AS MATERIALIZED (
    SELECT b.* FROM unnest(%(fresh)s::bigint[]) AS fresh (id)
    CROSS JOIN LATERAL (SELECT {{skippable}} FROM pgqueue.job_blocked b WHERE b.id = fresh.id AND NOT b.holds LIMIT 1) AS b
    UNION
    SELECT b.* FROM unnest(%(keys)s::text[]) AS wanted (key)
    CROSS JOIN LATERAL (
        SELECT {{skippable}} FROM pgqueue.job_blocked b WHERE b.key = wanted.key AND NOT b.holds ORDER BY b.rank, b.id LIMIT 1
    ) AS b
    WHERE %(heads)s::boolean
), full_key AS MATERIALIZED (
    SELECT wanted.key, head.most
    FROM (SELECT DISTINCT key, most FROM found WHERE skips) AS head
    JOIN unnest(%(keys)s::text[], %(afters)s::bigint[]) AS wanted (key, after) ON wanted.key = head.key
    CROSS JOIN LATERAL ({{lock_holders}}) AS held
    WHERE held.n >= head.most AND EXISTS ({{live_worker}})
), late AS MATERIALIZED (
    SELECT found.* FROM found JOIN full_key USING (key, most) WHERE found.skips
), keeper AS MATERIALIZED (
    SELECT once.key, once.task, b.id
    FROM (SELECT DISTINCT key, task FROM late WHERE on_locked = 'once') AS once
    CROSS JOIN LATERAL (
        SELECT b.id FROM pgqueue.job_blocked b
        WHERE b.key = once.key AND b.task = once.task AND b.on_locked = 'once' AND NOT b.holds
        ORDER BY b.rank, b.id LIMIT 1 FOR KEY SHARE SKIP LOCKED
    ) AS b
), refused AS MATERIALIZED (
    SELECT b.ctid FROM pgqueue.job_blocked b
    WHERE b.ctid = ANY (ARRAY(
        SELECT late.ctid FROM late LEFT JOIN keeper ON keeper.key = late.key AND keeper.task = late.task
        WHERE late.on_locked = 'skip' OR keeper.id <> late.id))
    FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM refused)) RETURNING {{job}}, {{attempts}}
), skipped AS (
    INSERT INTO pgqueue.job_done (state, finished_at, bin, reason, {{attempts}}, {{job}})
    SELECT 'skipped', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), 'locked', {{attempts}}, {{job}}
    FROM dropped
    RETURNING id
), happened AS MATERIALIZED (
    SELECT queue, task, 'skipped' AS what FROM dropped
), counted AS (
    {{count_happened}}
), told AS (
    -- The leader looks whether a node of a flow has ended by this.
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (SELECT ':ended.' || w.job_id AS channel, '' AS what FROM pgqueue.job_waiter w WHERE w.job_id = ANY (ARRAY(SELECT id FROM skipped))
          UNION SELECT ':control', 'node:' || node FROM dropped WHERE node IS NOT NULL) AS news
    WHERE %(notify)s::boolean
)
SELECT (SELECT count(*) FROM skipped), (SELECT count(done) FROM told);

-- name: unblock_read
-- The jobs that this claim let in for these keys, in the columns of a claim, the most urgent and oldest first. A job behind the first of
-- a chain has minus its place there as its position. Holders are read behind the hold_pos `after`, as they were counted. In a
-- transaction of its own: however large the payloads are, no worker waits for a key while they travel.
SELECT {{claimed}}
FROM unnest(%(keys)s::text[], %(afters)s::bigint[]) AS mine (key, after)
CROSS JOIN LATERAL (
    SELECT {{job}}, {{attempts}}, r.rank,
           CASE WHEN r.key IS NOT NULL THEN -row_number() OVER (PARTITION BY r.key ORDER BY r.rank, r.id) END AS pos, {{texts}}
    FROM pgqueue.job_running r
    WHERE r.lock_key = substr(mine.key, 6) AND coalesce(r.hold_pos, 9223372036854775807) > mine.after
      AND r.claim + 0 = %(claim)s::integer AND r.worker_id + 0 = %(worker_id)s::bigint
    OFFSET 0
) AS r
ORDER BY priority, id;

-- name: unblock_refuse_unfit
-- After an unblocking, or a rate, met a value that does not fit: put aside the blocked jobs that no lane could take (rows restored, or
-- inserted by hand). Rows of `job_blocked` are not checked where they enter. What waits for them is told.
WITH refused AS (
    DELETE FROM pgqueue.job_blocked b
    WHERE NOT {{fits_lane}}
    RETURNING b.*
), {{put_aside}}, {{told_of_refused}}
SELECT id, (SELECT count(done) FROM told) FROM put_aside;

-- name: unblock_limits
-- With these keys, which are limits, locked: count the holders of each, and let waiting jobs in, in (rank, id) order, as the limit allows.
-- A limit that was never declared lets no job in. A job that comes in goes one of three ways:
-- 1. If it needs a rate, too, it waits for that next, and keeps the limit.
-- 2. Else it runs here, if a slot is left for it.
-- 3. Else it goes to the front of its lane as granted. As many are as other workers had slots for at their last heartbeats. A slot that
--    several queues share counts once. Of the queues that have the very same slots one job is granted always, unless one starts here, or
--    is granted and not taken yet. No more than that: an urgent job that comes later should not find the whole limit granted to jobs that
--    wait for a slot.
-- Which job passes which:
-- 1. A job for which no worker has a slot holds up none that can go. It gets the last places, in its order; and so do the jobs behind it
--    that need the same slots after a rate.
-- 2. No job passes another of its queue; of a task that only other workers know, none of its queue and task.
-- 3. While a job is granted and not taken, the jobs of its queue that find no slot may be passed by those of another queue.
-- 4. Poison jobs come before all others, if a slot of their queue is free.
-- Holders are read behind the hold_pos `after` (see holder_cursors.py), waiting queues behind (rank, id) (see waiter_cursors.py), but for
-- poison jobs. Answers a summary, as a JSON object; the jobs that run here are read by `unblock_read_limits`:
-- * `lowest_hold`: the lowest hold_pos of the jobs that came in.
-- * `oldest`: of each key that had room [key, the lowest hold_pos of all its holders].
-- * `onward`: the keys that jobs now wait for, which came in and need more.
-- * `ended`: the keys with room left and no waiter.
-- * `gone`: of each key [key, how many have left its waiting queue, rank and id of the last job before which all have left].
WITH {{impatience}}, me AS MATERIALIZED (
    {{live_worker}}
), known AS MATERIALIZED (
    SELECT s.queue, s.task FROM pgqueue.served() AS s WHERE NOT s.task = {{paused_task}}
), pooled AS MATERIALIZED (
    -- The queues of each worker, with the slots that another one had free there at its last heartbeat. Queues without slots of their own share
    -- the common ones: `lead` is the first of them. `mark` names these slots, so that a sum of marks names a set of slots.
    SELECT w.id, own.queue, CASE WHEN w.state = 'running' AND w.id <> %(worker_id)s::bigint
           THEN coalesce(own.free, greatest(0, w.concurrency - w.lost - cardinality(w.running))) ELSE 0 END AS free,
           CASE WHEN own.slots IS NULL THEN min(own.queue COLLATE "C") FILTER (WHERE own.slots IS NULL) OVER (PARTITION BY w.id)
                ELSE own.queue END AS lead,
           hashtextextended(CASE WHEN own.slots IS NULL THEN 'common:' ELSE own.queue END, w.id)::numeric AS mark
    FROM pgqueue.worker w CROSS JOIN LATERAL unnest(w.queues, w.free, w.slots) AS own (queue, free, slots)
    WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
), open_queue AS MATERIALIZED (
    -- The open queues that a worker serves. `kindred` ones have the very same slots; those of a `circle` have some in common.
    SELECT each.queue, sum(each.free)::integer AS free, max(mine.pool) AS pool, min(each.lead COLLATE "C") AS circle, sum(each.mark) AS kindred
    FROM (
        SELECT pooled.queue, pooled.free, pooled.lead, pooled.mark FROM pooled
        UNION ALL
        SELECT own.queue, 0, own.queue, 0 FROM unnest(%(queues)s::text[]) AS own (queue)
    ) AS each
    LEFT JOIN unnest(%(queues)s::text[], %(pools)s::integer[]) AS mine (queue, pool) ON mine.queue = each.queue
    WHERE NOT each.queue = {{paused}}
    GROUP BY each.queue
), circle AS MATERIALIZED (
    -- How many slots others had free for all queues of a circle: each slot once.
    SELECT one.circle, sum(one.free)::integer AS free FROM (
        SELECT o.circle, max(pooled.free) AS free FROM pooled JOIN open_queue o ON o.queue = pooled.queue
        WHERE pooled.free > 0 GROUP BY o.circle, pooled.id, pooled.lead
    ) AS one GROUP BY one.circle
), served AS MATERIALIZED (
    -- Ours twice: for jobs of our tasks, with our own slots; and for those of tasks that only others know.
    SELECT o.queue, o.free, o.pool IS NOT NULL AS shared, kind.ours, CASE WHEN kind.ours THEN o.pool END AS pool,
           CASE WHEN kind.ours THEN coalesce((%(slots)s::integer[])[o.pool], 0) ELSE 0 END AS slots, o.kindred, o.circle,
           (SELECT circle.free FROM circle WHERE circle.circle = o.circle) AS circle_free
    FROM open_queue o JOIN (VALUES (true), (false)) AS kind (ours) ON NOT kind.ours OR o.pool IS NOT NULL
), line AS MATERIALIZED (
    SELECT wanted.*, head.most - held.n AS room, held.lowest
    FROM me CROSS JOIN unnest(%(keys)s::text[], %(afters)s::bigint[], %(ranks)s::smallint[], %(ids)s::bigint[])
        AS wanted (key, after, rank, id)
    CROSS JOIN LATERAL (SELECT n AS most FROM pgqueue.key_limit WHERE name = substr(wanted.key, 7)) AS head
    CROSS JOIN LATERAL ({{limit_holders}}) AS held
    WHERE head.most > held.n
), granted_now AS MATERIALIZED (
    -- The jobs that are granted and not taken yet.
    SELECT line.key, served.queue, served.ours, served.pool, served.kindred, served.circle, one.task, one.rank < 0 AS alone, count(*)::integer AS n
    FROM line CROSS JOIN served CROSS JOIN LATERAL (
        SELECT a.rank, a.task FROM pgqueue.job_available a
        WHERE a.limit_key = substr(line.key, 7) AND a.holds AND a.queue || '' = served.queue  -- a lane may be long
          AND ((a.task IN ({{open_tasks}})) IS TRUE AND served.shared) = served.ours
          AND coalesce(a.hold_pos, 9223372036854775807) > line.after LIMIT 2 * greatest(1, served.free)
    ) AS one
    GROUP BY line.key, served.queue, served.ours, served.pool, served.kindred, served.circle, one.task, one.rank < 0
), head AS MATERIALIZED (
    -- By queue, so that jobs that can go are not looked for behind jobs that cannot; poison jobs by themselves for the same reason.
    -- One more of each than can go now: a job of another queue that comes after that one is not to pass it.
    -- Granted poison jobs do not count for others: a worker that runs one takes no other, and has slots for those.
    -- Jobs of tasks that only others know are looked for among the first of a queue of ours, not behind all of ours: eight for each that
    -- may go. The workers that know them look further.
    SELECT line.key, line.room, served.ours, served.pool, served.slots, served.free AS free_at_most, reach.most, served.circle,
           served.circle_free, served.kindred, CASE WHEN b.rank < 0 THEN granted.poison ELSE granted.n END AS granted, b.*
    FROM line CROSS JOIN served
    LEFT JOIN (
        SELECT g.key, g.queue, g.ours, sum(g.n) FILTER (WHERE g.alone) AS poison, sum(g.n) FILTER (WHERE NOT g.alone) AS n
        FROM granted_now AS g GROUP BY g.key, g.queue, g.ours
    ) AS own ON own.key = line.key AND own.queue = served.queue AND own.ours = served.ours
    CROSS JOIN LATERAL (SELECT coalesce(own.poison, 0)::integer AS poison, coalesce(own.n, 0)::integer AS n) AS granted
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
                       ELSE NOT served.ours AND NOT b.task = {{paused_task}}
                            AND (b.queue, b.task) IN (SELECT k.queue, k.task FROM known AS k) END
            ORDER BY b.rank, b.id LIMIT least(line.room, reach.most + 1)
            FOR UPDATE SKIP LOCKED
        ) AS ordinary
        UNION ALL
        SELECT * FROM (
            SELECT b.ctid, b.id, b.rank, b.queue, b.task, b.crashes, b.rate_key IS NOT NULL AS more FROM pgqueue.job_blocked b
            WHERE substr(b.key, 7) = substr(line.key, 7) AND left(b.key, 6) = 'limit:' AND b.queue = served.queue AND b.rank < 0
              AND CASE WHEN {{known_here}} AND served.shared THEN served.ours
                       ELSE NOT served.ours AND NOT b.task = {{paused_task}}
                            AND (b.queue, b.task) IN (SELECT k.queue, k.task FROM known AS k) END
            ORDER BY b.rank, b.id LIMIT least(line.room, greatest(1, served.free - granted.poison))
            FOR UPDATE SKIP LOCKED
        ) AS poison_job
    ) AS b
), able AS MATERIALIZED (
    -- How many slots the other workers that know the task had free for its queue.
    SELECT one.queue, one.task, sum(coalesce(w.free[array_position(w.queues, one.queue::text)],
                                             greatest(0, w.concurrency - w.lost - cardinality(w.running))))::integer AS free
    FROM (SELECT queue, task FROM head WHERE free_at_most > 0 UNION SELECT queue, task FROM granted_now) AS one
    JOIN pgqueue.worker w ON one.queue = ANY (w.queues) AND one.task = ANY (w.tasks)
    WHERE w.dead_at IS NULL AND w.state = 'running' AND w.id <> %(worker_id)s::bigint
    GROUP BY one.queue, one.task
), circle_granted AS MATERIALIZED (
    -- How many free slots of a circle will be taken by jobs that are granted.
    SELECT g.key, g.circle, g.alone, sum(least(g.n, able.free)) AS n FROM granted_now g JOIN able ON able.queue = g.queue AND able.task = g.task
    GROUP BY g.key, g.circle, g.alone
), turned AS MATERIALIZED (
    -- `kin`: each task that only others know waits by itself, for each has its own workers. `beyond`: the one more. `pool`, `other`: the
    -- jobs that need the same slots, as far as we know. A poison job is granted: its lane sees to it that it comes alone.
    SELECT head.*, coalesce(able.free, 0) AS free, rank < 0 AS alone, CASE WHEN pool IS NULL THEN head.queue END AS other,
           CASE WHEN NOT ours THEN head.task END AS kin,
           row_number() OVER (PARTITION BY key, head.queue, ours, rank < 0 ORDER BY rank, id) > most AS beyond,
           crashes = 0 AND NOT more
           AND row_number() OVER (PARTITION BY pool, crashes = 0 AND NOT more ORDER BY rank, id) <= slots AS here
    FROM head LEFT JOIN able ON able.queue = head.queue AND able.task = head.task
), judged AS MATERIALIZED (
    -- `late`: no worker has a slot for it, or for a job before it that waits for the same slots. A job that goes on to a rate needs its
    -- slot later.
    SELECT turned.*, free = 0 AND CASE WHEN alone THEN slots = 0 ELSE
                         bool_or(free = 0 AND NOT (here OR more)) OVER (PARTITION BY key, pool, other, alone ORDER BY rank, id) END AS late,
           bool_or(here) OVER (PARTITION BY key, kindred, pool, ours) AS starts,
           granted + row_number() OVER (PARTITION BY key, queue, ours, kin, alone, here OR more ORDER BY rank, id) AS nth
    FROM turned
), placed AS MATERIALIZED (
    -- `fits`: it starts here, or has another slot: among the jobs of its queue, and among those of all queues that have slots in common.
    -- Or it is the one of its slots for which there is none.
    SELECT judged.*, here OR more OR CASE WHEN nth <= free
               THEN count(*) FILTER (WHERE nth <= free AND NOT (here OR more)) OVER (PARTITION BY key, circle, alone ORDER BY rank, id)
                    + coalesce((SELECT n FROM circle_granted c WHERE (c.key, c.circle, c.alone) = (judged.key, judged.circle, judged.alone)), 0)
                    <= circle_free
               ELSE nth = 1 AND (alone OR NOT starts)
                    AND count(*) FILTER (WHERE nth = 1 AND free = 0 AND NOT (here OR more))
                        OVER (PARTITION BY key, kindred, pool, ours, kin, alone ORDER BY rank, id) = 1
                    AND NOT EXISTS (
                        SELECT FROM granted_now g WHERE (g.key, g.kindred, g.ours, g.alone) = (judged.key, judged.kindred, judged.ours, judged.alone)
                        AND g.pool IS NOT DISTINCT FROM judged.pool AND (g.ours OR g.task = judged.task)) END AS fits
    FROM judged
), fitting AS MATERIALIZED (
    -- No job passes another of its queue. If it waits for a slot of ours, it passes no job before it that waits for the same slots.
    SELECT placed.*, bool_and(fits) OVER (PARTITION BY key, queue, ours, kin, alone ORDER BY rank, id)
           AND (slots = 0 OR NOT late OR bool_and(fits OR free > 0) OVER (PARTITION BY key, pool, other, alone ORDER BY rank, id)) AS goes
    FROM placed
), lined AS MATERIALIZED (
    -- A job for which no worker has a slot comes after those that can go: it would keep the room from them. No job comes after one that
    -- goes and is the last that was read of its queue: others may be behind that. Then it goes on to a rate, or one before it does, and
    -- the key is asked for once more.
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
    DELETE FROM pgqueue.job_blocked WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM unblocked))
    RETURNING {{job}}, {{attempts}}, rank
), onward AS (
    INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'blocked', 'rate:' || rate_key, true, nextval('pgqueue.job_hold_seq'), rank, {{attempts}}, {{job}}
    FROM taken WHERE rate_key IS NOT NULL
    RETURNING key, hold_pos
), running AS (
    {{start}} WHERE id = ANY (ARRAY(SELECT id FROM unblocked WHERE here))
    RETURNING hold_pos
), granted AS (
    {{grant}} WHERE NOT id = ANY (ARRAY(SELECT id FROM unblocked WHERE here)) AND rate_key IS NULL
    RETURNING queue, hold_pos
), made AS MATERIALIZED (
    SELECT hold_pos FROM running UNION ALL SELECT hold_pos FROM granted UNION ALL SELECT hold_pos FROM onward
), lowest AS MATERIALIZED (
    SELECT min(hold_pos) AS hold_pos FROM made
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || queue, '')::text END AS done
    FROM (SELECT DISTINCT queue FROM granted WHERE %(notify)s::boolean) AS heard
)
SELECT CASE
    WHEN (SELECT count(*) FROM unblocked) <> (SELECT count(*) FROM made)
    THEN pgqueue.refuse('an unblocking deleted jobs it did not move')::text
    ELSE json_build_object(
        'lowest_hold', (SELECT hold_pos FROM lowest),
        -- The jobs that came in now have higher numbers, unless the numbers have gone back.
        'oldest', (SELECT coalesce(json_agg(json_build_array(line.key, least(line.lowest, lowest.hold_pos))), '[]')
                   FROM line CROSS JOIN lowest WHERE least(line.lowest, lowest.hold_pos) > 0),
        'onward', (SELECT coalesce(json_agg(DISTINCT key), '[]') FROM onward),
        'ended', (SELECT coalesce(json_agg(line.key), '[]') FROM line
                  WHERE line.room > (SELECT count(*) FROM unblocked WHERE unblocked.key = line.key)
                    AND NOT EXISTS (SELECT FROM turned WHERE turned.key = line.key AND turned.beyond)
                    AND NOT EXISTS (SELECT FROM seen WHERE seen.key = line.key AND NOT seen.gone)),
        'gone', (SELECT coalesce(json_agg(json_build_array(key, n, place[1], place[2])), '[]') FROM (
            -- Of each queue the last of the jobs that have gone before the first that has not; of all queues the one in front.
            SELECT key, sum(n) AS n, min(place) AS place FROM (
                SELECT key, count(*) FILTER (WHERE before) AS n,
                       coalesce(max(ARRAY[rank::bigint, id]) FILTER (WHERE before), min(ARRAY[rank::bigint, id - 1])) AS place
                FROM seen GROUP BY key, queue, ours
            ) AS by_queue GROUP BY key) AS left_behind),
        'told', (SELECT count(done) FROM told))::text END AS summary, {{patient}};

-- name: unblock_read_limits
-- As `unblock_read`, for limits: among our own jobs, for other workers may have very many of a limit.
{{read_claim}};

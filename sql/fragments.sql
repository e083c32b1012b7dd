-- What several statements have in common. Where a statement, or a later fragment, says `{{name}}`, the server gets the text of the
-- fragment `name`. To see a statement in full: `python -m pgqueue.database.statements fetch_claim`.
-- A new column of jobs is a migration, a name in `job` or `new_job`, a field of `Job` or `NewJob`, and a row in jobs/fields.py.

-- Columns of jobs ---------------------------------------------------------------------------------------------------------------------

-- name: keys
-- What a job needs before it may run.
lock_key, lock_limit, on_locked, limit_key, rate_key

-- name: beside_node
-- What stays with a job for good, beside its id, its headers and its node. Every partition has these columns.
queue, priority, task, args, enqueued_at, {{keys}}, unique_key, idempotency_key

-- name: beside_headers
-- What stays with a job for good, beside its id and its headers: to these a retry may add one. Every partition has these columns.
{{beside_node}}, node

-- name: beside_id
-- What stays with a job for good, beside its id. Every partition has these columns.
headers, {{beside_headers}}

-- name: lasting
-- What stays with a job for good, unless its id was given twice (see doubles.sql). Every partition has these columns.
id, {{beside_id}}

-- name: job
-- What no move of a job changes; only a retry by hand changes the last two. Every partition has these columns.
{{lasting}}, max_attempts, deadline

-- name: attempts
-- What some moves change. Every partition has these columns.
run_at, attempt, crashes, snoozes

-- name: run
-- A job that has run, as history keeps it.
started_at, worker_id, claim, {{attempts}}, {{job}}

-- name: new_job
-- What an enqueue says of a job. The database says the rest.
task, args, queue, priority, headers, max_attempts, run_at, deadline, {{keys}}

-- name: texts
-- The arguments and the headers of a job as text, for `claimed`. The text is made once: beside this stands OFFSET 0, else each use of it
-- would make it anew. A value may have no text, for a number of 12 bytes may take 147,000 as text, and a text ends at 1 GB. One that is
-- stored without compression and has less than 64 kB always has; for the others `text_of` answers NULL instead of an error.
CASE WHEN pg_column_compression(args) IS NULL AND pg_column_size(args) < 65536 THEN args::text
     ELSE pgqueue.text_of(args) END AS args_text,
CASE WHEN headers IS NULL THEN NULL
     WHEN pg_column_compression(headers) IS NULL AND pg_column_size(headers) < 65536 THEN headers::text
     ELSE pgqueue.text_of(headers) END AS headers_text

-- name: readable
-- Whether what a worker reads of a job is within the limits of an enqueue. A row of a plain INSERT may be larger; it is not sent.
octet_length(args_text) <= 2097152 AND (headers IS NULL OR octet_length(headers_text) <= 2097152)
AND (coalesce(unique_key, idempotency_key) IS NULL OR greatest(octet_length(unique_key), octet_length(idempotency_key)) <= 500)

-- name: claimed_rest
-- The columns of `claimed` behind the deadline.
CASE WHEN octet_length(headers_text) <= 2097152 THEN headers_text END, lock_key,
CASE WHEN coalesce(unique_key, idempotency_key) IS NOT NULL
          AND greatest(octet_length(unique_key), octet_length(idempotency_key)) <= 500
     THEN json_build_array(unique_key, idempotency_key)::text END,
limit_key, rate_key, node,
CASE WHEN {{readable}} THEN NULL
     ELSE json_build_array(octet_length(args_text), octet_length(headers_text), headers IS NULL,
                           greatest(octet_length(unique_key), octet_length(idempotency_key)))::text END

-- name: claimed
-- A job in the columns that `Job` reads, from a row with `texts`. Only a claim knows a position; a deadline that has passed is answered as
-- -infinity. If the job is not `readable`, its arguments are NULL, and the last column says how large its values are.
id, coalesce(pos, 0), rank, queue, task, CASE WHEN {{readable}} THEN args_text END, attempt, priority, max_attempts, crashes, snoozes,
enqueued_at, run_at, CASE WHEN deadline <= pgqueue.now() THEN '-infinity' ELSE deadline END, {{claimed_rest}}

-- name: shown_sizes
-- How many bytes the values of a job have as text, for `shown`: NULL if a value is NULL, or has no text. Beside OFFSET 0, so that each is
-- made once. Not the texts themselves: a sort of a page would carry 64 MB of them.
octet_length(pgqueue.text_of(args)) AS args_size, octet_length(pgqueue.text_of(headers)) AS headers_size,
octet_length(pgqueue.text_of(result)) AS result_size

-- name: shown
-- What people are told of a job with `shown_sizes`. Its values are JSON as text: no value of one job keeps the others from being read. One
-- that is not shown is an object that says so. On a page of large jobs not each of them has room.
id, state, queue, task, priority, enqueued_at, run_at, started_at, finished_at, deadline, attempt, max_attempts, crashes, snoozes, worker_id,
left(version_tag, 1000) AS version_tag, left(lock_key, 1000) AS lock_key, left(limit_key, 1000) AS limit_key,
left(rate_key, 1000) AS rate_key, left(key, 1000) AS key, left(unique_key, 1000) AS unique_key,
left(idempotency_key, 1000) AS idempotency_key, left(reason, 10000) AS reason, abs(node) >> 20 AS flow, abs(node) & 1048575 AS node,
CASE WHEN args_size <= 2097152 AND has_room THEN pgqueue.text_of(args)
     ELSE json_build_object('pgqueue', 'not shown: ' || coalesce(args_size::text, 'more than 1000000000') || ' bytes')::text
END AS args,
CASE WHEN headers IS NULL THEN NULL
     WHEN headers_size <= 2097152 AND has_room THEN pgqueue.text_of(headers)
     ELSE json_build_object('pgqueue', 'not shown: ' || coalesce(headers_size::text, 'more than 1000000000') || ' bytes')::text
END AS headers,
CASE WHEN result IS NULL THEN NULL
     WHEN result_size <= 2097152 AND has_room THEN pgqueue.text_of(result)
     ELSE json_build_object('pgqueue', 'not shown: ' || coalesce(result_size::text, 'more than 1000000000') || ' bytes')::text
END AS result

-- name: found_shown
-- What people are told of the rows of `found`. Their sizes are summed, the small ones first: so one large job leaves out itself only.
SELECT {{shown}}, (SELECT to_json(p) FROM pgqueue.job_progress p
                   WHERE summed.state = 'running' AND p.job_id = summed.id AND p.updated_at >= summed.started_at) AS said
FROM (
    SELECT *, sum(size) OVER (ORDER BY size, id DESC ROWS UNBOUNDED PRECEDING) <= %(room)s::bigint AS has_room
    FROM (
        SELECT *, CASE WHEN args_size <= 2097152 THEN args_size ELSE 0 END
            + CASE WHEN headers_size <= 2097152 THEN headers_size ELSE 0 END
            + CASE WHEN result_size <= 2097152 THEN result_size ELSE 0 END AS size
        FROM (SELECT *, {{shown_sizes}} FROM found OFFSET 0) AS read
    ) AS sized
) AS summed

-- name: erred_steps
-- The durable steps of the jobs of `erred`, as JSON: a text may quote what a step has answered. If those of a job are more than a page of it
-- shows, or have no room, an object says so instead of them. Their sizes are summed, the small ones first.
SELECT sized.id, CASE
    WHEN sized.n <= 200 AND sum(sized.size) OVER (ORDER BY sized.size, sized.id ROWS UNBOUNDED PRECEDING) <= %(room)s::bigint THEN (
        SELECT json_agg(json_build_object('name', s.name, 'at', s.created_at, 'result', pgqueue.text_of(s.result)))
        FROM pgqueue.step_rows(sized.id, sized.enqueued_at) AS s)
    ELSE json_build_array(json_build_object(
        'name', '', 'at', sized.enqueued_at, 'result', json_build_object('pgqueue', 'not shown: its steps')::text))
    END AS steps
FROM (
    SELECT jobs.id, jobs.enqueued_at, count(*) AS n, sum(CASE
        WHEN s.result IS NULL THEN 0
        WHEN pg_column_size(s.result) <= 10000 THEN coalesce(octet_length(pgqueue.text_of(s.result)), 1000000000)
        ELSE 1000000000 END) AS size
    FROM (SELECT DISTINCT id, enqueued_at FROM erred) AS jobs
    CROSS JOIN LATERAL (SELECT * FROM pgqueue.step_rows(jobs.id, jobs.enqueued_at) LIMIT 201) AS s
    GROUP BY jobs.id, jobs.enqueued_at
) AS sized

-- name: no_job
-- The columns of `claimed` in a row that holds a summary instead of a job.
NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL

-- name: front
-- The rank of a job that goes back to its lane: before jobs that were never taken. A job with crashes goes to the lanes of poison jobs.
CASE crashes WHEN 0 THEN 2 * priority WHEN 1 THEN -2 ELSE -1 END

-- name: due
-- If the clock has stepped back behind `run_at`, it becomes now: a job that was due stays due.
CASE WHEN run_at > pgqueue.now() THEN pgqueue.now() ELSE run_at END

-- By hand ----------------------------------------------------------------------------------------------------------------------------

-- name: audit_row
-- A row of the record, as it is shown.
a.id, a.at, a.actor, a.role, a.action, a.target, a.jobs, a.count, a.details

-- name: audit_with_job
-- The newest `n` rows that name this job, and those of the operations by filter, among the newest `most`, that are known to have changed it.
-- `OFFSET 0`: else the record is walked from its young end until `n` rows are found, which few jobs have.
(SELECT r.* FROM (SELECT a.* FROM pgqueue.audit a WHERE a.jobs @> ARRAY[%(job)s::bigint] OFFSET 0) AS r
 ORDER BY r.at DESC, r.id DESC LIMIT %(n)s::integer)
UNION ALL
(SELECT r.* FROM (
     SELECT b.id, b.audit_at, b.audit_id FROM pgqueue.bulk b ORDER BY b.id DESC LIMIT %(most)s::integer) AS newest
 CROSS JOIN LATERAL (
     SELECT j.job_id FROM pgqueue.bulk_job j
     WHERE j.bulk_id = newest.id AND j.job_id = %(job)s::bigint
       AND j.reason IN ('cancelled', 'requested', 'retried', 'again', 'discarded', 'rescheduled') LIMIT 1) AS changed
 CROSS JOIN LATERAL (
     SELECT r.* FROM pgqueue.audit r WHERE r.at = newest.audit_at AND r.id = newest.audit_id LIMIT 1) AS r)

-- name: actor
-- What the writer says of itself, else the role that is logged in.
coalesce(%(actor)s::text, left(session_user::text, 200))

-- Conditions --------------------------------------------------------------------------------------------------------------------------

-- name: paused
-- A queue is one of these if it is paused.
ANY (ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL))

-- name: paused_task
-- A task is one of these if it is paused.
ANY (ARRAY(SELECT p.name FROM pgqueue.paused_task p))

-- name: open_tasks
-- Our tasks, but for those that are paused. Read by the statement that takes jobs, as the paused queues are. Compared with an array, not
-- joined: that is the same work whatever was planned, and next to none while no task is paused.
SELECT ours.task FROM unnest(%(tasks)s::text[]) AS ours (task) WHERE NOT ours.task = {{paused_task}}

-- name: served
-- Whether a live worker takes jobs of this `queue` and `task`.
((queue, task) IN (SELECT s.queue, s.task FROM pgqueue.served() AS s)
 AND NOT task = {{paused_task}})

-- name: may_notify
-- Whether the server's NOTIFY queue has room. If it is full, every transaction that notifies fails at its COMMIT, and NOTIFY is only a
-- hint. Asked where there is something to tell, right before each pg_notify of ours: it costs 0.7 us.
pg_notification_queue_usage() < 0.9

-- name: fits_lane
-- Whether a lane could take the job `b` of a row that was restored, or inserted by hand. What is claimed is checked where it enters.
(b.priority BETWEEN 0 AND 9 AND b.rank BETWEEN -2 AND 19 AND octet_length(b.queue) BETWEEN 1 AND 40
 AND pgqueue.keys_can_be(b.lock_key, b.lock_limit, b.on_locked, b.limit_key, b.rate_key)) IS TRUE

-- name: known_here
-- Whether the blocked job `b` has one of our `tasks`, and that is not paused. IS TRUE: so it is a filter, and never becomes a join.
(b.task IN ({{open_tasks}})) IS TRUE

-- name: live_worker
-- Our own worker's row, locked against `rescue_lock`. If the row is missing, or says that the worker is dead, nothing may be taken.
SELECT w.id FROM pgqueue.worker w WHERE w.id = %(worker_id)s::bigint AND w.dead_at IS NULL FOR KEY SHARE

-- Claims ------------------------------------------------------------------------------------------------------------------------------

-- name: open_lane
-- Whether a claim may ask the lane `l`: its queue is not paused, and no more urgent job of the other kind waits.
NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
AND l.rank <= coalesce(nullif(current_setting('pgqueue.before', true), '')::integer, 32767)

-- name: claim_lanes
-- The open lanes of a claim, each with its limit, if our worker is alive. The ORDER BY must be there: a hashed anti-join turns the
-- lanes round.
SELECT l.queue, l.rank, l.after, l.upto, l.most, l.place
FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(uptos)s::bigint[], %(mosts)s::integer[])
     WITH ORDINALITY AS l (queue, rank, after, upto, most, place)
WHERE EXISTS ({{live_worker}}) AND {{open_lane}}
ORDER BY l.place

-- name: in_lane
-- The available jobs `j` of our open tasks in the range of this lane. Beside it stands the condition of the index: plain jobs, or keyed.
j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after AND j.pos <= lane.upto
AND (j.task IN ({{open_tasks}})) IS TRUE

-- name: reading_lanes
-- The lanes of the other kind whose rank is `beyond` this one, in order, but for those of paused queues.
SELECT l.queue, l.rank, l.after, l.place
FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(others)s::bigint[]) WITH ORDINALITY AS l (queue, rank, after, place)
WHERE l.rank > %(beyond)s::integer
  AND NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
ORDER BY l.place

-- name: plain_taken
-- The plain jobs that are `picked` run now on our worker: what is deleted is inserted.
taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked))
    RETURNING pos, rank, run_at, least(attempt + 1, 32767)::smallint AS attempt, crashes, snoozes, {{job}}
), running AS (
    INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, hold_pos, rank, {{attempts}}, {{job}})
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), NULL, rank, {{attempts}}, {{job}}
    FROM taken
    RETURNING id
)

-- name: reading_jobs
-- The available jobs `j` of our open tasks behind the cursor of this lane. Beside it stands the condition of the index.
j.queue = lane.queue AND j.rank = lane.rank AND j.pos > lane.after AND (j.task IN ({{open_tasks}})) IS TRUE

-- name: reading
-- What the watermark has to know before a claim, in this order:
-- 1. The snapshot of this statement was taken.
-- 2. The head of the position sequence is read.
-- 3. This transaction takes its id.
-- Then the first job of the other kind, the paused queues and the paused tasks. A setting of this transaction goes with it. `| 1` stands for both ranks
-- of a priority. The statement adds how durable the transaction is, and FROM `reading_from`.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0), pg_current_xact_id()::text::int8,
       pg_current_snapshot()::text, other.rank, other.place, other.pos,
       ARRAY(SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL), ARRAY(SELECT name FROM pgqueue.paused_task),
       set_config('pgqueue.before', coalesce((other.rank | 1)::text, ''), true)

-- name: reading_from
-- Where `reading` is read from: one row.
(SELECT 1) AS always LEFT JOIN other ON true

-- name: durable
-- This transaction is durable when it is answered, whatever role, database and server say. A job with a key starts only after that. Else a
-- crash could take back that it holds the key, and another job of the key would start beside it.
pg_catalog.set_config('synchronous_commit',
    coalesce(nullif(pg_catalog.current_setting('synchronous_commit'), 'off'), 'on'), true)

-- name: block
-- The jobs of `taken` wait for the first that each lacks, of its lock, its limit and its rate. A job that `holds` has lock and limit. A
-- job with crashes that was inserted by hand with another rank gets that of a poison job: among others it would hold up a limit.
INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, {{attempts}}, {{job}})
SELECT 'blocked', CASE WHEN lock_key IS NOT NULL AND NOT holds THEN 'lock:' || lock_key
                       WHEN limit_key IS NOT NULL AND NOT holds THEN 'limit:' || limit_key ELSE 'rate:' || rate_key END,
    holds, CASE WHEN holds THEN nextval('pgqueue.job_hold_seq') END,
    CASE WHEN crashes = 0 OR rank < 0 THEN rank ELSE {{front}} END, {{attempts}}, {{job}}
FROM taken

-- Keys --------------------------------------------------------------------------------------------------------------------------------

-- name: lock_keys
-- Lock these keys, at most 64, for this transaction: in the order of their hashes, so that no two transactions wait for each other.
SELECT count(pg_catalog.pg_advisory_xact_lock(hashed.hash)::pg_catalog.text)
FROM (
    SELECT DISTINCT pg_catalog.hashtextextended('pgqueue.' || asked.key, 7) AS hash
    FROM unnest(%(keys)s::text[]) AS asked (key) ORDER BY hash LIMIT 64
) AS hashed

-- name: lock_holders
-- How many jobs hold the lock `wanted.key`; counted up to `head.most`, behind the hold_pos `wanted.after` (see holder_cursors.py).
-- A chain holds the key alone, as long as a job of it is left: a job with the limit 1 has yet to start.
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

-- name: limit_holders
-- How many jobs hold the limit `wanted.key`, and the lowest hold_pos of these; counted as `lock_holders`. A blocked job holds it only
-- while it waits for what comes after the limit: a rate.
SELECT count(*)::integer AS n, min(coalesce(holder.hold_pos, 0)) AS lowest FROM (
    (SELECT r.hold_pos FROM pgqueue.job_running r
     WHERE r.limit_key = substr(wanted.key, 7) AND coalesce(r.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
    UNION ALL
    (SELECT a.hold_pos FROM pgqueue.job_available a WHERE a.limit_key = substr(wanted.key, 7) AND a.holds
       AND coalesce(a.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
    UNION ALL
    (SELECT s.hold_pos FROM pgqueue.job_scheduled s WHERE s.limit_key = substr(wanted.key, 7) AND s.holds
       AND coalesce(s.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
    UNION ALL
    (SELECT b.hold_pos FROM pgqueue.job_blocked b
     WHERE b.limit_key = substr(wanted.key, 7) AND b.holds AND (substr(b.key, 1, 5) = 'rate:') IS TRUE
       AND coalesce(b.hold_pos, 9223372036854775807) > wanted.after LIMIT head.most)
    LIMIT head.most
) AS holder

-- name: rate
-- What the rate of `asked.key` allows, in seconds (see rate_limiter.py): how late a job may start, and the gap between two jobs. `depth` is
-- how far ahead the time of the key may be, 3,000 years at most: so no time that comes of it is beyond what the server can store.
SELECT t.late, t.gap, least((p.burst - 1) * t.gap + t.early, 1e11) AS depth
FROM pgqueue.key_rate p
CROSS JOIN LATERAL (SELECT least(greatest(0.2::float8, least(5, p.period / p.count / 100)), p.period / 20) AS late,
                           least(0.05::float8, p.period / 40) AS early) AS e
CROSS JOIN LATERAL (SELECT e.late, e.early, (p.period + e.late + e.early) / p.count AS gap) AS t
WHERE p.name = split_part(asked.key, ':', 1)

-- name: of_rate
-- The jobs `b` that wait for the rate `limiter.key`, as the index on these has it.
substr(b.key, 6) = limiter.key AND left(b.key, 5) = 'rate:'

-- name: start
-- Jobs of `taken` run here, and hold the keys that they have.
INSERT INTO pgqueue.job_running (
    state, worker_id, claim, started_at, rank, holds, attempt, run_at, crashes, snoozes, {{job}})
SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), 2 * priority, true,
    least(attempt + 1, 32767), run_at, crashes, snoozes, {{job}}
FROM taken

-- name: grant
-- Jobs of `taken` go to the front of their lanes, and hold the keys that they have, until a worker takes them.
INSERT INTO pgqueue.job_available (state, rank, holds, hold_pos, run_at, attempt, crashes, snoozes, {{job}})
SELECT 'available', {{front}}, true, nextval('pgqueue.job_hold_seq'), {{due}}, attempt, crashes, snoozes, {{job}}
FROM taken

-- name: runs_here
-- Whether the blocked job `b` may run here with its lock: it is no poison job, needs nothing more, and has one of our `tasks`.
b.crashes = 0 AND coalesce(b.limit_key, b.rate_key) IS NULL AND {{known_here}}

-- name: waiter
-- The jobs `b` that wait for the lock `wanted.key` behind its (rank, id) (see waiter_cursors.py). Their queue is open, and we or another
-- live worker of the queue know their task.
b.key = wanted.key AND (b.rank, b.id) > (wanted.rank, wanted.id) AND NOT b.holds AND NOT b.queue = {{paused}}
AND (b.queue = ANY (%(queues)s::text[]) AND {{known_here}} OR {{served}})

-- name: skippable
-- What decides whether the blocked job `b` may be skipped.
b.key, b.ctid, b.id, b.task, b.on_locked, coalesce(b.lock_limit, 1) AS most,
b.on_locked IN ('skip', 'once') AND b.attempt = 0 AND b.snoozes = 0 AND b.crashes = 0 AS skips

-- name: read_claim
-- The jobs that this claim let in, in the columns of a claim, the most urgent and oldest first.
SELECT {{claimed}} FROM (
    SELECT *, {{texts}} FROM pgqueue.job_running r WHERE r.worker_id = %(worker_id)s::bigint AND r.claim = %(claim)s::integer OFFSET 0
) AS r ORDER BY priority, id

-- Flows -------------------------------------------------------------------------------------------------------------------------------

-- name: released_lives
-- Whether a job of the node `x.node` lives that does not wait for its release: true or NULL. As below.
coalesce(
    (SELECT true FROM pgqueue.job_running j WHERE j.node = x.node ORDER BY j.id DESC NULLS LAST LIMIT 1),
    (SELECT true FROM pgqueue.job_available j WHERE j.node = x.node ORDER BY j.id DESC NULLS LAST LIMIT 1),
    (SELECT true FROM pgqueue.job_scheduled j WHERE j.node = x.node ORDER BY j.id DESC NULLS LAST LIMIT 1),
    (SELECT true FROM pgqueue.job_blocked j WHERE j.node = x.node ORDER BY j.id DESC NULLS LAST LIMIT 1))

-- name: node_lives
-- Whether a job of the node `x.node` lives. One snapshot has a living job in one partition. Read from the highest id: jobs end in the
-- order of their ids, more or less. Scalar subqueries, of which the first that finds a job is the last that is read.
coalesce({{released_lives}},
    (SELECT true FROM pgqueue.job_blocked j WHERE j.node = -x.node ORDER BY j.id DESC NULLS LAST LIMIT 1), false)

-- name: key_after_first
-- The first key after `after` that a job waits for, but for those of nodes, which are for the releaser.
coalesce((SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > %(after)s::text AND b.key < 'node:' ORDER BY b.key LIMIT 1),
         (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > greatest(%(after)s::text, 'node;') ORDER BY b.key LIMIT 1))

-- name: key_after
-- The same after the key of the row `w`.
coalesce((SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key AND b.key < 'node:' ORDER BY b.key LIMIT 1),
         (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > greatest(w.key, 'node;') ORDER BY b.key LIMIT 1))

-- name: watched_nodes
-- The next n nodes for which jobs wait, after the key `after`, in the order of their keys: `named`. Jumps along the index of keys.
walked (key, place) AS (
    (SELECT b.key, 1 FROM pgqueue.job_blocked b WHERE b.key > greatest(%(after)s::text, 'node:') AND b.key < 'node;' ORDER BY b.key LIMIT 1)
    UNION ALL
    SELECT (SELECT b.key FROM pgqueue.job_blocked b WHERE b.key > w.key AND b.key < 'node;' ORDER BY b.key LIMIT 1), w.place + 1
    FROM walked w WHERE w.key IS NOT NULL AND w.place < %(n)s::integer
), named AS MATERIALIZED (
    SELECT key, place, CASE WHEN substr(key, 6) ~ '^[1-9][0-9]{0,17}$' THEN substr(key, 6)::bigint END AS node
    FROM walked WHERE key IS NOT NULL
)

-- name: node_failed
-- The first job found that failed or was cancelled, of these nodes: an array `named.nodes`, with the numbers of both signs.
SELECT failed.id, failed.node FROM (
    (SELECT d.id, abs(d.node) AS node FROM pgqueue.job_dead d WHERE d.node = ANY (named.nodes) LIMIT 1)
    UNION ALL
    (SELECT k.id, k.node FROM pgqueue.flow_kept k WHERE k.node = ANY (named.nodes) AND k.state IN ('failed', 'cancelled') LIMIT 1)
) AS failed LIMIT 1

-- Ends of jobs ------------------------------------------------------------------------------------------------------------------------

-- name: my_running
-- The row of the job `mine`, if it still runs here under that claim: looked up by its id alone.
SELECT r.ctid, r.id FROM pgqueue.job_running r
WHERE r.id = mine.id AND r.claim + 0 = mine.claim AND r.worker_id + 0 = %(worker_id)s::bigint
LIMIT 1

-- name: my_fence
-- One job that runs here under this claim, as `take_running` and `lock_running` are told of it.
%(id)s::bigint, %(claim)s::integer, %(worker_id)s::bigint

-- name: not_marked
-- Whether this is not the transaction that the worker has begun: that one has its mark (`commit_message`). NULL where there
-- is none to look for.
coalesce(current_setting('pgqueue_job.mark', true), '') <> %(mark)s::integer::text

-- name: my_pairs
-- The condition of many jobs that run here under these claims: looked up by their ids alone (see the head of complete.sql).
id = ANY (%(ids)s::bigint[]) AND worker_id + 0 = %(worker_id)s::bigint
AND ((id, claim) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(claims)s::integer[]))) IS TRUE

-- name: pick_results
-- The rows of jobs that succeeded, locked, each with its result, and how long ago it began.
SELECT r.ctid, r.id, mine.result, mine.ago
FROM unnest(%(ids)s::bigint[], %(claims)s::integer[], %(results)s::text[], %(agos)s::float8[]) AS mine (id, claim, result, ago)
CROSS JOIN LATERAL ({{my_running}} FOR UPDATE SKIP LOCKED) AS r

-- name: complete
-- The jobs of `ended` go to history, without a result.
INSERT INTO pgqueue.job_done (state, finished_at, bin, version_tag, {{run}})
SELECT 'completed', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), %(version_tag)s::text, {{run}}
FROM ended

-- name: complete_each
-- The jobs of `ended` go to history, each with what `picked` says of it.
INSERT INTO pgqueue.job_done (
    state, finished_at, bin, version_tag, result, started_at, worker_id, claim, {{attempts}}, {{job}})
SELECT 'completed', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), %(version_tag)s::text, picked.result::jsonb,
    coalesce(pgqueue.now() - make_interval(secs => picked.ago), started_at), worker_id, claim, {{attempts}}, {{job}}
FROM ended JOIN picked USING (id)

-- name: note_attempts
-- What became of the attempts of `ended`, as `picked` says.
INSERT INTO pgqueue.attempt (
    job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome, error_type, message, traceback, fingerprint,
    version_tag)
SELECT id, enqueued_at, attempt, worker_id, claim, coalesce(pgqueue.now() - make_interval(secs => picked.ago), started_at), pgqueue.now(),
    (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'), outcome, error_type, message, traceback, fingerprint, %(version_tag)s::text
FROM ended JOIN picked USING (id)

-- name: impatience
-- A statement that moves jobs waits this long for a transaction that has inserted one of their ids, and is open: 20 ms. Then it fails.
-- Its DELETE says `hurried`, its answer `patient`: the COMMIT may have to wait for its turn to notify.
impatience AS MATERIALIZED (
    SELECT current_setting('lock_timeout') AS usual, set_config('lock_timeout', '20ms', true) AS short
)

-- name: hurried
-- From here on the statement waits no longer than `impatience` says.
(SELECT short FROM impatience) IS NOT NULL

-- name: patient
-- What comes after this waits as long as usual.
set_config('lock_timeout', (SELECT usual FROM impatience), true)

-- name: give_back
-- The jobs of `ended` go to the front of their lanes, or of the waiting queue of the key that they `wait_for`; the attempt is not spent.
-- A job that was no holder there is none here. Answers as the other ends do. What deletes them is `hurried`.
available AS (
    INSERT INTO pgqueue.job_available (state, rank, holds, hold_pos, run_at, attempt, crashes, snoozes, {{job}})
    SELECT 'available', {{front}}, holds, CASE WHEN holds THEN nextval('pgqueue.job_hold_seq') END,
        {{due}}, greatest(attempt - 1, -32768), crashes, snoozes, {{job}}
    FROM ended WHERE wait_for IS NULL ORDER BY id
    RETURNING id, queue
), blocked AS (
    INSERT INTO pgqueue.job_blocked (state, key, holds, hold_pos, rank, run_at, attempt, crashes, snoozes, {{job}})
    SELECT 'blocked', wait_for, keeps_lock, CASE WHEN keeps_lock THEN nextval('pgqueue.job_hold_seq') END, {{front}}, run_at,
        greatest(attempt - 1, -32768), crashes, snoozes, {{job}}
    FROM (SELECT *, key IS NULL AND lock_key IS NOT NULL AS keeps_lock FROM ended WHERE wait_for IS NOT NULL) AS waits
    RETURNING id
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || queue, '')::text END AS done
    FROM (SELECT DISTINCT queue FROM available WHERE %(notify)s::boolean) AS q
)
SELECT CASE WHEN count(*) < cardinality(%(ids)s::bigint[]) THEN coalesce(array_agg(id), '{}') END, (SELECT count(done) FROM told), {{patient}}
FROM (SELECT id FROM available UNION ALL SELECT id FROM blocked) AS given_back

-- name: tell_waiters
-- Tell those that wait for the end of one of these jobs.
(SELECT count(CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:ended.' || w.job_id, '')::text END)
 FROM pgqueue.job_waiter w WHERE %(notify)s::boolean AND w.job_id = ANY (%(ids)s::bigint[]))

-- name: ended_ids
-- NULL if every job was ended, else the ids of those that were.
CASE WHEN count(*) < cardinality(%(ids)s::bigint[]) THEN coalesce(array_agg(id), '{}') END

-- name: plain_answer
-- The same without a look at each id if every job was ended; and the waiters are told.
CASE WHEN count(*) < cardinality(%(ids)s::bigint[]) THEN ARRAY(SELECT id FROM ended) END, {{tell_waiters}}

-- name: count_happened
-- Count the jobs of `happened (queue, task, what)` in the history. For what no worker's memory counts, because it happens in the database.
INSERT INTO pgqueue.history_part (at, counts)
SELECT date_bin('1 minute', pgqueue.now(), '2000-01-01 00:00:00+00'),
    jsonb_agg(jsonb_build_object('queue', queue, 'task', task, what, n))
FROM (SELECT queue, task, what, count(*) AS n FROM happened GROUP BY queue, task, what) AS each
HAVING count(*) > 0

-- Doubles -----------------------------------------------------------------------------------------------------------------------------

-- name: put_aside
-- The jobs of `refused` fail, and count as failed; `put_aside` are their ids.
happened AS MATERIALIZED (
    SELECT queue, task, 'failed' AS what FROM refused
), counted AS (
    {{count_happened}}
), put_aside AS (
    INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, {{attempts}}, {{job}})
    SELECT 'failed', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), 'refused', {{attempts}}, {{job}}
    FROM refused
    RETURNING id
)

-- name: told_of_refused
-- What waits for a job that was put aside is told: waits for its result, and the leader for its node.
told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (SELECT ':ended.' || w.job_id AS channel, '' AS what FROM pgqueue.job_waiter w WHERE w.job_id = ANY (ARRAY(SELECT id FROM put_aside))
          UNION (SELECT DISTINCT ':control', 'node:' || abs(node) FROM refused WHERE node IS NOT NULL LIMIT 100)) AS news
    WHERE %(notify)s::boolean
)

-- History -----------------------------------------------------------------------------------------------------------------------------

-- name: happenings
-- What the history counts, each as a number of jobs.
started, completed, failed, retried, snoozed, cancelled, expired, skipped, interrupted, rescued

-- name: history_summed
-- The rows of `line`, added up for each time, queue and task. A histogram may be shorter than another: what it lacks is 0.
counted AS MATERIALIZED (
    SELECT at, queue, task, sum(started)::bigint AS started, sum(completed)::bigint AS completed, sum(failed)::bigint AS failed,
        sum(retried)::bigint AS retried, sum(snoozed)::bigint AS snoozed, sum(cancelled)::bigint AS cancelled,
        sum(expired)::bigint AS expired, sum(skipped)::bigint AS skipped, sum(interrupted)::bigint AS interrupted,
        sum(rescued)::bigint AS rescued, sum(wait_seconds) AS wait_seconds, sum(run_seconds) AS run_seconds
    FROM line GROUP BY at, queue, task
), times AS MATERIALIZED (
    SELECT at, queue, task, array_agg(waited ORDER BY place) FILTER (WHERE waited IS NOT NULL) AS wait,
        array_agg(ran ORDER BY place) FILTER (WHERE ran IS NOT NULL) AS run
    FROM (
        SELECT at, queue, task, place, sum(u.waited)::bigint AS waited, sum(u.ran)::bigint AS ran
        FROM line CROSS JOIN LATERAL unnest(wait, run) WITH ORDINALITY AS u (waited, ran, place) GROUP BY at, queue, task, place) AS each
    GROUP BY at, queue, task
), summed AS MATERIALIZED (
    SELECT at, queue, task, {{happenings}}, wait_seconds, run_seconds, coalesce(wait, '{}') AS wait, coalesce(run, '{}') AS run
    FROM counted LEFT JOIN times USING (at, queue, task)
)

-- name: history_asked
-- Whether the row `m` of the history is asked for: of this queue and task. What was measured has no task; beside the rows of single tasks
-- it has no place.
(%(queue)s::text IS NULL OR m.queue = %(queue)s::text) AND (%(task)s::text IS NULL OR m.task = %(task)s::text)
AND (m.state IS NULL OR %(by)s::text <> 'task' AND %(task)s::text IS NULL)

-- name: history_deep
-- What was measured, of the rows of `measured (at, queue, state, n, oldest)`: for each time and queue the largest number of jobs of
-- each state and the longest times; of all queues together the sums of these numbers.
deep AS MATERIALIZED (
    SELECT at, CASE WHEN %(by)s::text = 'all' THEN '' ELSE queue END AS queue, sum(n) FILTER (WHERE state = 'available')::bigint AS available,
        sum(n) FILTER (WHERE state = 'scheduled')::bigint AS scheduled, sum(n) FILTER (WHERE state = 'blocked')::bigint AS blocked,
        sum(n) FILTER (WHERE state = 'running')::bigint AS running, max(oldest) FILTER (WHERE state IN ('available', 'scheduled')) AS oldest,
        max(oldest) FILTER (WHERE state = 'blocked') AS longest_blocked
    FROM (SELECT at, queue, state, max(n) AS n, max(oldest) AS oldest FROM measured GROUP BY at, queue, state) AS each
    GROUP BY 1, 2
)

-- name: history_answer
-- The rows of `summed` and of `deep`, as JSON. Where something was measured, a state without jobs has 0 of them. Where nothing was counted,
-- the numbers are 0, but in the last two minutes NULL: these are not counted yet (a part is written after 65 s, and folded after 95).
SELECT coalesce(json_agg(each), '[]')::text
FROM (SELECT extract(epoch FROM at)::float8 AS at, queue, coalesce(task, '') AS task,
          coalesce(started, known.none) AS started, coalesce(completed, known.none) AS completed,
          coalesce(failed, known.none) AS failed, coalesce(retried, known.none) AS retried, coalesce(snoozed, known.none) AS snoozed,
          coalesce(cancelled, known.none) AS cancelled, coalesce(expired, known.none) AS expired,
          coalesce(skipped, known.none) AS skipped, coalesce(interrupted, known.none) AS interrupted,
          coalesce(rescued, known.none) AS rescued, coalesce(wait_seconds, known.none) AS wait_seconds,
          coalesce(run_seconds, known.none) AS run_seconds,
          coalesce(wait, '{}') AS wait, coalesce(run, '{}') AS run,
          CASE WHEN deep.at IS NOT NULL THEN coalesce(available, 0) END AS available,
          CASE WHEN deep.at IS NOT NULL THEN coalesce(scheduled, 0) END AS scheduled,
          CASE WHEN deep.at IS NOT NULL THEN coalesce(blocked, 0) END AS blocked,
          CASE WHEN deep.at IS NOT NULL THEN coalesce(running, 0) END AS running, oldest, longest_blocked
      FROM summed FULL JOIN deep USING (at, queue)
      CROSS JOIN LATERAL (SELECT CASE WHEN at <= (SELECT pgqueue.now()) - interval '2 minutes' THEN 0 END AS none) AS known
      ORDER BY at, queue, task) AS each

-- name: task_history
-- The rows of `asked`, added up for each task.
line AS MATERIALIZED (
    SELECT %(since)s::text::timestamptz AS at, '' AS queue, m.task, {{happenings}}, m.wait_seconds, m.run_seconds, m.wait, m.run FROM asked AS m
), held AS (
    SELECT a.task, array_agg(DISTINCT a.queue) AS queues FROM asked AS a GROUP BY a.task
), {{history_summed}}

-- name: task_history_answer
-- The rows of `summed`, and the tasks that are paused, as JSON.
SELECT json_build_object(
    'now', extract(epoch FROM pgqueue.now())::float8,
    'rows', (SELECT coalesce(json_agg(each), '[]') FROM (
        SELECT s.task AS name, held.queues, s.started, s.completed, s.failed, s.retried, s.wait_seconds, s.run_seconds, s.wait, s.run
        FROM summed AS s JOIN held ON held.task = s.task ORDER BY s.run_seconds DESC, s.task LIMIT 1000) AS each),
    'paused', (SELECT coalesce(json_agg(p.name ORDER BY p.name), '[]') FROM (SELECT name FROM pgqueue.paused_task LIMIT 1000) AS p)
)::text

-- name: history_columns
-- What a row of the history holds, beside its leaf.
at, queue, task, {{happenings}}, wait_seconds, run_seconds, wait, run

-- New jobs ----------------------------------------------------------------------------------------------------------------------------

-- name: lines
-- A batch as columns of text. Each parameter has a line for each job, or one line that holds for all; an empty line is NULL.
string_to_table(%(task)s::text, E'\n'), string_to_table(%(args)s::text, E'\n'),
string_to_table(%(queue)s::text, E'\n'), string_to_table(%(priority)s::text, E'\n'),
string_to_table(%(headers)s::text, E'\n'), string_to_table(%(max_attempts)s::text, E'\n'),
string_to_table(%(run_at)s::text, E'\n'), string_to_table(%(delay)s::text, E'\n'),
string_to_table(%(deadline)s::text, E'\n'), string_to_table(%(deadline_seconds)s::text, E'\n'),
string_to_table(%(lock_key)s::text, E'\n'), string_to_table(%(lock_limit)s::text, E'\n'),
string_to_table(%(on_locked)s::text, E'\n'),
string_to_table(%(limit_key)s::text, E'\n'), string_to_table(%(rate_key)s::text, E'\n')

-- name: line_names
-- The names of these columns.
task, args, queue, priority, headers, max_attempts, run_at, delay, deadline, deadline_seconds, {{keys}}

-- name: line_values
-- A line as a job to be. A key is JSON, for it may have line breaks.
coalesce(line.task, %(task)s::text) AS task,
line.args::jsonb AS args,
coalesce(line.queue, %(queue)s::text) AS queue,
coalesce(line.priority, %(priority)s::text)::smallint AS priority,
nullif(coalesce(line.headers, %(headers)s::text), '')::jsonb AS headers,
nullif(coalesce(line.max_attempts, %(max_attempts)s::text), '')::smallint AS max_attempts,
coalesce(
    nullif(coalesce(line.run_at, %(run_at)s::text), '')::timestamptz,
    pgqueue.now() + make_interval(secs => nullif(coalesce(line.delay, %(delay)s::text), '')::float8)
) AS run_at,
coalesce(
    nullif(coalesce(line.deadline, %(deadline)s::text), '')::timestamptz,
    pgqueue.now() + make_interval(secs => nullif(coalesce(line.deadline_seconds, %(deadline_seconds)s::text), '')::float8)
) AS deadline,
nullif(coalesce(line.lock_key, %(lock_key)s::text), '')::jsonb #>> '{}' AS lock_key,
nullif(coalesce(line.lock_limit, %(lock_limit)s::text), '')::integer AS lock_limit,
nullif(coalesce(line.on_locked, %(on_locked)s::text), '') AS on_locked,
nullif(coalesce(line.limit_key, %(limit_key)s::text), '')::jsonb #>> '{}' AS limit_key,
nullif(coalesce(line.rate_key, %(rate_key)s::text), '')::jsonb #>> '{}' AS rate_key

-- name: keyed_jobs
-- A batch with unique keys as the functions take it that insert such jobs. They make the ids and the times: a unique key names both.
ARRAY(
    SELECT ROW({{new_job}}, unique_key, idempotency_key, hold, hold_seconds, replaces)::pgqueue.keyed_job
    FROM (
        SELECT line.place,
            {{line_values}},
            nullif(coalesce(line.unique_key, %(unique_key)s::text), '')::jsonb #>> '{}' AS unique_key,
            nullif(coalesce(line.idempotency_key, %(idempotency_key)s::text), '')::jsonb #>> '{}' AS idempotency_key,
            coalesce(line.hold, %(hold)s::text) AS hold,
            nullif(coalesce(line.hold_seconds, %(hold_seconds)s::text), '')::float8 AS hold_seconds,
            coalesce(line.on_duplicate, %(on_duplicate)s::text) = 'replace' AS replaces
        FROM ROWS FROM (
            {{lines}},
            string_to_table(%(unique_key)s::text, E'\n'), string_to_table(%(idempotency_key)s::text, E'\n'),
            string_to_table(%(hold)s::text, E'\n'), string_to_table(%(hold_seconds)s::text, E'\n'),
            string_to_table(%(on_duplicate)s::text, E'\n')
        ) WITH ORDINALITY AS line ({{line_names}}, unique_key, idempotency_key, hold, hold_seconds, on_duplicate, place)
    ) AS asked
    ORDER BY place
)

-- name: keyed_job
-- The same of one job.
ARRAY[ROW(
    %(task)s::text, %(args)s::text::jsonb, %(queue)s::text, %(priority)s::smallint, %(headers)s::text::jsonb, %(max_attempts)s::smallint,
    coalesce(%(run_at)s::text::timestamptz, pgqueue.now() + make_interval(secs => %(delay)s::float8)),
    coalesce(%(deadline)s::text::timestamptz, pgqueue.now() + make_interval(secs => %(deadline_seconds)s::float8)),
    %(lock_key)s::text, %(lock_limit)s::integer, %(on_locked)s::text, %(limit_key)s::text, %(rate_key)s::text,
    %(unique_key)s::text, %(idempotency_key)s::text, %(hold)s::text, %(hold_seconds)s::float8, %(on_duplicate)s::text = 'replace'
)::pgqueue.keyed_job]

-- name: first_state
-- The state of a new job: available, if it has no time to start, or that has come.
CASE WHEN run_at > pgqueue.now() THEN 'scheduled' ELSE 'available' END

-- name: channel
-- The channel that hears of a new job.
CASE state WHEN 'available' THEN queue ELSE ':scheduled' END

-- name: tell_channels
-- Tell the channels of the jobs that `added` has put in.
(SELECT count(CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel.heard, '') END)
 FROM (SELECT DISTINCT heard FROM added WHERE %(notify)s::boolean) AS channel)

-- name: keyed_answer
-- What became of the jobs of `put`.
added AS (
    SELECT heard FROM put WHERE holder IS NULL
)
SELECT
    (SELECT array_agg(id ORDER BY place) FROM put),
    (SELECT json_agg(json_build_array(key, holder, holder_since, waits) ORDER BY place)::text FROM put WHERE holder IS NOT NULL),
    {{tell_channels}}

-- name: scheduled_columns
-- What the schedule of a job says of it.
task, args, queue, priority, rank, headers, max_attempts, deadline, {{keys}}

-- name: scheduled_values
-- The same columns, of a job that the schedule `s` makes for the time `made.at`.
s.task, s.args, s.queue, s.priority, 2 * s.priority + 1,
coalesce(s.options -> 'headers', '{}') || jsonb_build_object('pgqueue:schedule', s.name, 'pgqueue:line', s.line, 'pgqueue:zone', s.tz,
    'pgqueue:tick', to_char(made.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')),
(s.options ->> 'max_attempts')::smallint, pgqueue.now() + make_interval(secs => (s.options ->> 'deadline')::float8),
s.options ->> 'lock_key', (s.options ->> 'lock_limit')::integer, s.options ->> 'on_locked', s.options ->> 'limit_key',
s.options ->> 'rate_key'

-- Relays ------------------------------------------------------------------------------------------------------------------------------

-- name: relay_durable
-- All commits of this session are on disk, and on the standbys that the server waits for, when they are answered.
pg_catalog.set_config('synchronous_commit',
    CASE pg_catalog.current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false)

-- name: relay_home
-- Where this database lies: its cluster, and its number there. A standby has the same.
(SELECT c.system_identifier::text || '/' || d.oid::text
 FROM pg_catalog.pg_control_system() AS c CROSS JOIN pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())

-- Searches ----------------------------------------------------------------------------------------------------------------------------

-- name: newest
-- The newest `most` rows of each partition that is named. A partition that is not named is not read.
(SELECT * FROM pgqueue.job_scheduled WHERE 'scheduled' = ANY (%(parts)s::text[])
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_available WHERE 'available' = ANY (%(parts)s::text[])
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_blocked WHERE 'blocked' = ANY (%(parts)s::text[])
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_running WHERE 'running' = ANY (%(parts)s::text[])
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_done WHERE 'done' = ANY (%(parts)s::text[])
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_dead WHERE 'dead' = ANY (%(parts)s::text[])
 ORDER BY id DESC LIMIT %(most)s::integer)

-- name: newest_after
-- As `newest`, below the id `after`.
(SELECT * FROM pgqueue.job_scheduled WHERE 'scheduled' = ANY (%(parts)s::text[]) AND id < %(after)s::bigint
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_available WHERE 'available' = ANY (%(parts)s::text[]) AND id < %(after)s::bigint
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_blocked WHERE 'blocked' = ANY (%(parts)s::text[]) AND id < %(after)s::bigint
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_running WHERE 'running' = ANY (%(parts)s::text[]) AND id < %(after)s::bigint
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_done WHERE 'done' = ANY (%(parts)s::text[]) AND id < %(after)s::bigint
 ORDER BY id DESC LIMIT %(most)s::integer)
UNION ALL
(SELECT * FROM pgqueue.job_dead WHERE 'dead' = ANY (%(parts)s::text[]) AND id < %(after)s::bigint
 ORDER BY id DESC LIMIT %(most)s::integer)

-- name: ended_walk
-- The `most` jobs of history that ended last, the last first. A partition that is not named is not read. The condition of the index stands
-- as it was written there.
SELECT * FROM (
    (SELECT * FROM pgqueue.job_done WHERE 'done' = ANY (%(parts)s::text[]) AND isfinite(finished_at) IS NOT NULL
     ORDER BY finished_at DESC, id DESC LIMIT %(most)s::integer)
    UNION ALL
    (SELECT * FROM pgqueue.job_dead WHERE 'dead' = ANY (%(parts)s::text[]) AND isfinite(finished_at) IS NOT NULL
     ORDER BY finished_at DESC, id DESC LIMIT %(most)s::integer)
) AS part
ORDER BY finished_at DESC, id DESC LIMIT %(most)s::integer

-- name: ended_walk_after
-- As `ended_walk`, from the place (`at`, `after`) on.
SELECT * FROM (
    (SELECT * FROM pgqueue.job_done WHERE 'done' = ANY (%(parts)s::text[]) AND isfinite(finished_at) IS NOT NULL
       AND finished_at <= %(at)s::text::timestamptz AND (finished_at < %(at)s::text::timestamptz OR id < %(after)s::bigint)
     ORDER BY finished_at DESC, id DESC LIMIT %(most)s::integer)
    UNION ALL
    (SELECT * FROM pgqueue.job_dead WHERE 'dead' = ANY (%(parts)s::text[]) AND isfinite(finished_at) IS NOT NULL
       AND finished_at <= %(at)s::text::timestamptz AND (finished_at < %(at)s::text::timestamptz OR id < %(after)s::bigint)
     ORDER BY finished_at DESC, id DESC LIMIT %(most)s::integer)
) AS part
ORDER BY finished_at DESC, id DESC LIMIT %(most)s::integer

-- name: scheduled_walk
-- The `most` scheduled jobs that are due first, the first one first. Without the condition the planner would not see that of the index.
SELECT * FROM pgqueue.job_scheduled WHERE run_at >= '-infinity' ORDER BY run_at, id LIMIT %(most)s::integer

-- name: scheduled_walk_after
-- As `scheduled_walk`, from the place (`at`, `after`) on.
SELECT * FROM pgqueue.job_scheduled
WHERE run_at >= %(at)s::text::timestamptz AND (run_at, id) > (%(at)s::text::timestamptz, %(after)s::bigint)
ORDER BY run_at, id LIMIT %(most)s::integer

-- name: awaits_attempt
-- Whether a scheduled job waits for another attempt. Else it waits for its time, or has put itself off.
(attempt > 0 OR crashes > 0)

-- name: job_is_of
-- Whether a job is of the states, the queue and the task of a search.
pgqueue.fits(state, {{awaits_attempt}}, queue, task, finished_at, %(states)s::text[], %(queue)s::text, %(task)s::text, NULL)

-- name: looked_at
-- The ids and the times of the jobs that a search looks at, for what it asks of their attempts. Read only if it does. Jobs of another
-- state, queue or task are left out: to look up an attempt takes longer than to read a job.
SELECT coalesce(array_agg(id) FILTER (WHERE {{job_is_of}}), '{}') AS ids,
       coalesce(array_agg(enqueued_at) FILTER (WHERE {{job_is_of}}), '{}') AS since

-- name: job_fits
-- Whether a job fits a search. What it asks of attempts is asked for all jobs of `looked` at once.
{{job_is_of}}
      AND id <> ALL (%(but)s::bigint[])
      AND (%(flow)s::bigint IS NULL OR abs(node) >> 20 = %(flow)s::bigint)
      AND (%(node)s::bigint IS NULL OR abs(node) & 1048575 = %(node)s::bigint)
      AND (%(key)s::text IS NULL OR %(key)s::text IN (unique_key, idempotency_key, lock_key, limit_key, rate_key))
      AND (%(since)s::text IS NULL OR enqueued_at >= %(since)s::text::timestamptz)
      AND (%(until)s::text IS NULL OR enqueued_at < %(until)s::text::timestamptz)
      AND (%(args)s::text IS NULL OR args @> %(args)s::text::jsonb)
      AND (%(worker)s::bigint IS NULL OR worker_id = %(worker)s::bigint
           OR id IN (SELECT pgqueue.attempted(l.ids, l.since, %(worker)s::bigint, NULL, NULL) FROM looked AS l))
      AND (%(error_type)s::text IS NULL
           OR id IN (SELECT pgqueue.attempted(l.ids, l.since, NULL, %(error_type)s::text, NULL) FROM looked AS l))
      AND (%(error)s::text IS NULL OR position(lower(%(error)s::text) IN lower(reason)) > 0
           OR id IN (SELECT pgqueue.attempted(l.ids, l.since, NULL, NULL, %(error)s::text) FROM looked AS l))

-- Depth -------------------------------------------------------------------------------------------------------------------------------

-- name: takers
-- The queues and tasks that live workers take, for numbers that people see: a heartbeat within three leases.
SELECT DISTINCT q.queue, t.task
FROM (SELECT DISTINCT w.queues, w.tasks FROM pgqueue.worker w
      WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND w.beat_at >= (SELECT pgqueue.now()) - 3 * w.lease) AS alike
CROSS JOIN unnest(alike.queues) AS q (queue)
CROSS JOIN unnest(alike.tasks) AS t (task)

-- name: is_unknown
-- Whether live workers serve the queue of the group `g` of jobs, and none of them knows its task: see `takers`, here `taker`.
((g.queue IN (SELECT taker.queue FROM taker)) IS TRUE
 AND NOT (g.queue, g.task) IN (SELECT taker.queue, taker.task FROM taker))

-- name: waits_for
-- Why the available jobs of the group `g` wait: their task is unknown or paused, their queue is paused or not served, or they wait for a
-- free slot.
CASE WHEN {{is_unknown}} THEN 'unknown' WHEN g.queue = {{paused}} THEN 'paused'
     WHEN g.task = {{paused_task}} THEN 'task_paused'
     WHEN (g.queue IN (SELECT taker.queue FROM taker)) IS TRUE THEN 'slot' ELSE 'unserved' END

-- name: since
-- Since when a waiting job could run. Times that were written by hand may be infinite: that counts as 1970, or as now.
least(greatest(j.enqueued_at, j.run_at, 'epoch'), (SELECT pgqueue.now()))

-- name: runs_since
-- Since when a running job runs; an infinite time is read in the same way.
least(greatest(started_at, 'epoch'), (SELECT pgqueue.now()))

-- name: waited
-- The seconds that a waiting job has waited.
greatest(0, extract(epoch FROM pgqueue.now() - {{since}}))::float8

-- name: staged_for
-- The seconds that the first of the rows of `waiting` has been staged; infinite times are read in the same way.
extract(epoch FROM max(clock.now - least(greatest(waiting.staged_at, 'epoch'), clock.now)))::float8

-- name: scheduled_for
-- Why a scheduled job waits: for another attempt, after a snooze, or for its time.
CASE WHEN {{awaits_attempt}} THEN 'retry' WHEN j.snoozes > 0 THEN 'snooze' ELSE 'time' END

-- name: due_since
-- Since when the first of the scheduled jobs `g` could run: its time has come, and its task is neither paused nor unknown.
min(greatest(g.run_at, 'epoch')) FILTER (WHERE g.run_at <= (SELECT pgqueue.now()) AND NOT g.task = {{paused_task}} AND NOT {{is_unknown}})

-- name: blocked_by
-- What a blocked job waits for: a lock, a limit, a rate, or other jobs of its flow.
CASE WHEN starts_with(j.key, 'lock:') THEN 'lock' WHEN starts_with(j.key, 'limit:') THEN 'limit' WHEN starts_with(j.key, 'rate:') THEN 'rate'
     WHEN starts_with(j.key, 'node:') THEN 'flow' ELSE '' END

-- name: newest_depth
-- The time of the newest measurement, if it is fresh at `clock.now`: the next one is not overdue by more than 10 s. A row of a time to come
-- is not believed: the clock was set back. The newest rows are the last of the primary key, and none of them is dead.
SELECT d.at FROM (SELECT d.at, d.next_at FROM pgqueue.depth d ORDER BY d.at DESC LIMIT 1) AS d
WHERE d.next_at >= clock.now - interval '10 seconds' AND d.at <= clock.now + interval '1 second'

-- Changes by hand ---------------------------------------------------------------------------------------------------------------------

-- name: seen_waiting
-- The jobs of `asked` as this statement's snapshot has them.
seen AS MATERIALIZED (
    SELECT DISTINCT ON (found.id) found.id, found.state, found.enqueued_at
    FROM pgqueue.job_states(ARRAY(SELECT id FROM asked)) AS found
    -- A second row of an id that was put aside in history does not hide the job. If an id was given twice, the job that got it last is
    -- meant.
    ORDER BY found.id, found.state IN ('available', 'scheduled', 'blocked', 'running') DESC, found.enqueued_at DESC
)

-- name: cancel_asked
-- Cancel the jobs of `asked`: `cancelled` are those that waited, `requested` those whose workers are asked to stop them. Only those of the
-- queue and the task that `meant` has (NULL: of any).
{{seen_waiting}}, gone AS MATERIALIZED (
    -- It reads later than `seen`: it may find a job that was just moving, or ran, or has got another queue or task.
    SELECT t.state, {{job}}, {{attempts}}, holds
    FROM meant CROSS JOIN LATERAL pgqueue.take_waiting(
        ARRAY(SELECT id FROM seen ORDER BY id), ARRAY(SELECT enqueued_at FROM seen ORDER BY id), meant.only_queue, meant.only_task) AS t
), happened AS MATERIALIZED (
    SELECT queue, task, 'cancelled' AS what FROM gone
), counted AS (
    {{count_happened}}
), cancelled AS (
    INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, {{attempts}}, {{job}})
    SELECT 'cancelled', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), %(reason)s::text, {{attempts}},
        {{job}}
    FROM gone
    RETURNING id
), requested AS (
    INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason)
    SELECT id, enqueued_at, 'cancel', %(reason)s::text FROM seen
    WHERE state = 'running' AND id <> ALL (ARRAY(SELECT id FROM gone))
    RETURNING job_id
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:control', what)::text END AS done FROM (
        (SELECT 'signal' AS what FROM requested LIMIT 1)
        UNION ALL
        (SELECT 'sweep' FROM gone WHERE holds LIMIT 1)
        UNION ALL
        -- The leader looks at these nodes; the sweep finds the rest.
        (SELECT DISTINCT 'node:' || abs(node) FROM gone WHERE node IS NOT NULL LIMIT 100)
    ) AS news WHERE %(notify)s::boolean
), heard AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:ended.' || w.job_id, '')::text END AS done
    FROM pgqueue.waiters(ARRAY(SELECT id FROM cancelled)) AS w (job_id) WHERE %(notify)s::boolean
)

-- name: retry_keyed
-- Those of `found` whose keys another job has, and those that are `picked`.
keyed AS MATERIALIZED (
    SELECT taken.job_id AS id, taken.holder
    FROM (
        SELECT array_agg(idempotency_key) AS idempotency_keys, array_agg(unique_key) AS unique_keys, array_agg(id) AS ids,
            array_agg(enqueued_at) AS since
        FROM (SELECT DISTINCT ON (id) * FROM found ORDER BY id, finished_at DESC) AS dead
        WHERE unique_key IS NOT NULL OR idempotency_key IS NOT NULL
    ) AS dead
    CROSS JOIN LATERAL pgqueue.take_all_keys(
        dead.idempotency_keys, dead.unique_keys, NULL, NULL, dead.ids, dead.since, NULL) AS taken
), picked AS MATERIALIZED (
    SELECT id, enqueued_at FROM found WHERE id <> ALL (ARRAY(SELECT id FROM keyed))
)

-- name: retry_put
-- The jobs of `dead` are available again. One that had never been released waits again: for the last of the nodes that it waits for, and
-- the leader looks whether that lives. Without the row that names them it waits for a node that there cannot be.
waits_again AS (
    INSERT INTO pgqueue.job_blocked (state, key, rank, max_attempts, deadline, attempt, snoozes, {{lasting}})
    SELECT DISTINCT ON (dead.id) 'blocked', 'node:' || coalesce(
            (SELECT max(u.node) FROM pgqueue.node n CROSS JOIN LATERAL unnest(n.after || n.after_end || n.after_failure) AS u (node)
             WHERE n.id = -dead.node), 1), 2 * priority + 1, max_attempts,
        CASE WHEN deadline > pgqueue.now() THEN deadline END, attempt, snoozes, {{lasting}}
    FROM dead WHERE node < 0 ORDER BY dead.id, finished_at DESC
    RETURNING id, queue, key
), now_available AS (
    INSERT INTO pgqueue.job_available (state, rank, run_at, max_attempts, deadline, attempt, snoozes, {{lasting}})
    SELECT DISTINCT ON (id) 'available', 2 * priority + 1, pgqueue.now(),
        CASE WHEN max_attempts IS NOT NULL THEN least(greatest(max_attempts, attempt::integer + 1), 32767) END,
        CASE WHEN deadline > pgqueue.now() THEN deadline END, attempt, snoozes, {{lasting}}
    FROM dead WHERE (node < 0) IS NOT TRUE ORDER BY id, finished_at DESC
    RETURNING id, queue
), retried AS (
    SELECT id, queue FROM now_available UNION ALL SELECT id, queue FROM waits_again
), finished AS MATERIALIZED (
    SELECT DISTINCT ON (j.id) j.*
    FROM pgqueue.job_rows(ARRAY(
        SELECT id FROM seen WHERE %(again)s::boolean AND state IN ('completed', 'skipped'))) AS j
    WHERE (j.id, j.enqueued_at, j.state) IN (SELECT id, enqueued_at, state FROM seen)
    ORDER BY j.id, j.finished_at DESC
), unreleased AS MATERIALIZED (
    -- What they had waited for did not come. They have no results for arguments.
    SELECT id FROM finished WHERE node < 0
), again AS (
    INSERT INTO pgqueue.job_available (state, rank, headers, queue, priority, task, args, max_attempts, {{keys}})
    SELECT 'available', 2 * priority + 1,
        CASE WHEN jsonb_typeof(headers) = 'object' THEN headers ELSE '{}' END || jsonb_build_object('retry_of', id),
        queue, priority, task, args, max_attempts, {{keys}}
    FROM finished WHERE (node < 0) IS NOT TRUE ORDER BY id
    RETURNING id, queue, (headers ->> 'retry_of')::bigint AS retry_of
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (SELECT queue AS channel, '' AS what FROM now_available UNION SELECT queue, '' FROM again
          UNION (SELECT DISTINCT ':control', key FROM waits_again LIMIT 100)) AS news WHERE %(notify)s::boolean
)

-- name: reschedule_asked
-- Reschedule the jobs of `asked`: `moved`.
{{seen_waiting}}, gone AS MATERIALIZED (
    SELECT state, reason, attempt, crashes, snoozes, {{job}}, holds, key, rank, (node < 0) IS TRUE AS waits
    FROM pgqueue.take_waiting(ARRAY(SELECT id FROM seen ORDER BY id), ARRAY(SELECT enqueued_at FROM seen ORDER BY id), NULL, NULL)
), clock AS MATERIALIZED (
    SELECT pgqueue.now() AS now, %(at)s::text::timestamptz AS at
), later AS (
    INSERT INTO pgqueue.job_scheduled (state, run_at, attempt, crashes, snoozes, reason, {{job}})
    SELECT 'scheduled', clock.at, attempt, crashes, snoozes, reason, {{job}} FROM gone CROSS JOIN clock
    WHERE clock.at > clock.now AND NOT waits
    RETURNING id
), at_once AS (
    INSERT INTO pgqueue.job_available (state, rank, run_at, attempt, crashes, snoozes, {{job}})
    SELECT 'available', CASE crashes WHEN 0 THEN 2 * priority + 1 WHEN 1 THEN -2 ELSE -1 END, clock.now, attempt, crashes, snoozes, {{job}}
    FROM gone CROSS JOIN clock WHERE clock.at <= clock.now AND NOT waits
    RETURNING id, queue
), still_waits AS (
    -- It starts no earlier than that; and first it waits for its release.
    INSERT INTO pgqueue.job_blocked (state, key, rank, run_at, attempt, crashes, snoozes, {{job}})
    SELECT 'blocked', key, rank, clock.at, attempt, crashes, snoozes, {{job}} FROM gone CROSS JOIN clock WHERE waits
    RETURNING id
), moved AS MATERIALIZED (
    SELECT id FROM later UNION ALL SELECT id FROM at_once UNION ALL SELECT id FROM still_waits
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (SELECT queue AS channel, '' AS what FROM at_once
          UNION SELECT ':scheduled', '' FROM later
          UNION SELECT ':control', 'sweep' FROM gone WHERE holds
          -- A release may have passed over the row while it was locked here.
          UNION (SELECT DISTINCT ':control', left(key, 40) FROM gone WHERE waits LIMIT 100)) AS news
    WHERE %(notify)s::boolean
)

-- Operations by filter ----------------------------------------------------------------------------------------------------------------

-- name: bulk_row
-- An operation by filter `b`, as it is shown.
json_build_object('id', b.id, 'action', b.action, 'target', b.target, 'options', b.options, 'actor', b.actor, 'started_at', b.started_at,
    'ended_at', b.ended_at, 'stopped_by', b.stopped_by, 'up_to', b.up_to, 'after', b.after, 'round', b.round, 'pace', b.pace, 'note', b.note,
    'counts', b.counts, 'changed', b.changed,
    'holder', CASE WHEN b.ended_at IS NULL AND b.leased_until > pgqueue.now() THEN b.holder END)::text

-- name: filter
-- The filter of a call, in the columns that an operation has.
%(states)s::text[] AS states, %(queue)s::text AS queue, %(task)s::text AS task,
pgqueue.now() - make_interval(secs => %(older)s::float8) AS ended_before

-- name: bulk_filter
-- The filter of an operation, as `filter`: certain jobs, and the class of errors of their attempts, too.
{{filter}}, %(ids)s::bigint[] AS ids, %(error_type)s::text AS error_type

-- name: bulk_fits
-- Whether the job `w` fits the filter `b`, but for what its attempts have failed with.
pgqueue.fits(w.state, w.retrying, w.queue, w.task, w.finished_at, b.states, b.queue, b.task, b.ended_before)

-- name: bulk_caused
-- Those of the jobs `w` that fit whose attempts have failed with the class of errors of `b`. Nothing is read if none is asked for.
SELECT pgqueue.attempted(array_agg(w.id), array_agg(w.enqueued_at), NULL, b.error_type, NULL) AS id

-- name: bulk_times
-- When the operation `b` may go on (`next_at`), and until when its process has it (`leased_until`), at `clock.now`. A time that is further
-- than the longest pause could have set it is over: the clock was set back.
SELECT CASE WHEN b.next_at > clock.now + pause.most THEN clock.now ELSE b.next_at END AS next_at,
    CASE WHEN b.leased_until > clock.now + pause.most + make_interval(secs => %(lease)s::float8) THEN '-infinity' ELSE b.leased_until END
        AS leased_until
FROM (SELECT make_interval(secs => greatest(%(later)s::float8, coalesce(1 / b.pace, 0) + 1)) AS most) AS pause

-- name: bulk_picked
-- The next jobs of an operation, `fitting`, at most `most` among the next `walk` rows; none if this process has it no more (`mine` is empty).
-- If one job is meant (`only`), it is that one or none: `other` says whether another job comes first.
-- A step waits half a second at most for whatever it waits for.
mine AS MATERIALIZED (
    SELECT b.*, set_config('lock_timeout', '500ms', true) AS patience
    FROM pgqueue.bulk b
    WHERE b.id = %(bulk)s::bigint AND b.fence = %(fence)s::bigint AND b.ended_at IS NULL
    FOR UPDATE SKIP LOCKED
), walked AS MATERIALIZED (
    SELECT w.* FROM mine CROSS JOIN LATERAL pgqueue.jobs_after(mine.states, mine.ids, mine.after, mine.up_to, %(walk)s::integer) AS w
    WHERE mine.round = 0
), caused AS MATERIALIZED (
    {{bulk_caused}} FROM walked AS w CROSS JOIN mine AS b WHERE b.error_type IS NOT NULL AND {{bulk_fits}} GROUP BY b.error_type
), following AS MATERIALIZED (
    (SELECT DISTINCT w.id FROM walked AS w CROSS JOIN mine AS b
     WHERE {{bulk_fits}} AND (b.error_type IS NULL OR w.id IN (SELECT c.id FROM caused AS c)) ORDER BY w.id LIMIT %(most)s::integer)
    UNION ALL
    (SELECT j.job_id FROM mine CROSS JOIN LATERAL (
         SELECT j.job_id FROM pgqueue.bulk_job j
         WHERE j.bulk_id = mine.id AND j.reason = 'locked' AND j.job_id > mine.after ORDER BY j.job_id LIMIT %(most)s::integer) AS j
     WHERE mine.round > 0)
), fitting AS MATERIALIZED (
    SELECT f.id FROM following f WHERE f.id = coalesce(%(only)s::bigint, f.id)
), other AS MATERIALIZED (
    SELECT (SELECT count(*) FROM following) > (SELECT count(*) FROM fitting) AS first
)

-- name: bulk_asked
-- Those of them that no other transaction has, locked: `asked`. A job may have become another one since the walk, or since it was locked:
-- only those count that fit the filter now. `stands` are those that still seem to, of the jobs that are tried again.
asked AS MATERIALIZED (
    SELECT DISTINCT free.id FROM mine CROSS JOIN LATERAL pgqueue.bulk_lock(mine.id, ARRAY(SELECT id FROM fitting)) AS free (id)
), stands AS MATERIALIZED (
    SELECT w.id FROM mine AS b CROSS JOIN LATERAL (
        SELECT j.id, j.state, j.queue, j.task, j.finished_at, {{awaits_attempt}} AS retrying
        FROM pgqueue.job_rows(ARRAY(SELECT id FROM fitting WHERE b.round > 0)) AS j) AS w
    WHERE {{bulk_fits}}
)

-- name: bulk_left
-- Why the job `f` was left out. One that does not fit when it is tried again is not what the filter means any more.
CASE WHEN (SELECT round FROM mine) > 0 AND f.id <> ALL (ARRAY(SELECT id FROM stands)) THEN 'moved' ELSE 'locked' END

-- name: bulk_stepped
-- Write down what became of the jobs of `judged (id, did)`, and where the next step goes on. A job that was locked is counted as such once.
-- The jobs of the walk come first, then those that were locked, `rounds` times, with a pause of `later` seconds before.
tally AS MATERIALIZED (
    SELECT j.did, count(*) AS n FROM judged j CROSS JOIN mine WHERE mine.round = 0 OR j.did <> 'locked' GROUP BY j.did
), summed AS MATERIALIZED (
    SELECT coalesce(jsonb_object_agg(each.did, each.n) FILTER (WHERE each.n > 0), '{}') AS counts,
        coalesce(max(each.n) FILTER (WHERE each.did = 'locked'), 0) AS locked
    FROM (
        SELECT one.did, sum(one.n)::bigint AS n FROM (
            SELECT c.key AS did, c.value::bigint AS n FROM mine CROSS JOIN LATERAL jsonb_each_text(mine.counts) AS c
            UNION ALL
            SELECT t.did, t.n FROM tally t
            UNION ALL
            SELECT 'locked', - t.n FROM tally t CROSS JOIN mine WHERE mine.round > 0
        ) AS one GROUP BY one.did
    ) AS each
), kept AS (
    INSERT INTO pgqueue.bulk_job (bulk_id, reason, job_id)
    SELECT mine.id, p.did, p.id
    FROM mine CROSS JOIN (SELECT j.did, j.id, row_number() OVER (PARTITION BY j.did ORDER BY j.id) AS place FROM judged j) AS p
    WHERE (mine.round = 0 OR p.did <> 'locked')
      AND p.place + coalesce((mine.counts ->> p.did)::bigint, 0) <= CASE p.did WHEN 'locked' THEN 10000 ELSE 1000 END
    ON CONFLICT DO NOTHING
), freed AS (
    DELETE FROM pgqueue.bulk_job b USING mine, judged j
    WHERE mine.round > 0 AND j.did <> 'locked' AND b.bulk_id = mine.id AND b.reason = 'locked' AND b.job_id = j.id
), reach AS MATERIALIZED (
    SELECT fits.n, CASE WHEN other.first THEN mine.after
                        WHEN fits.n >= %(most)s::integer OR mine.round > 0 THEN coalesce(fits.last, mine.after)
                        ELSE coalesce(looked.last, mine.after) END AS after,
        NOT other.first AND fits.n < %(most)s::integer AND (mine.round > 0 OR looked.n < %(walk)s::integer) AS whole
    FROM mine CROSS JOIN other CROSS JOIN (SELECT count(*) AS n, max(id) AS last FROM fitting) AS fits
    CROSS JOIN (SELECT count(*) AS n, max(id) AS last FROM walked) AS looked
), ahead AS MATERIALIZED (
    SELECT clock.now, reach.whole AND (summed.locked = 0 OR mine.round >= %(rounds)s::integer) AS ends,
        CASE WHEN reach.whole THEN clock.now + make_interval(secs => %(later)s::float8)
             WHEN mine.pace IS NULL THEN clock.now
             -- A step that comes late is not made up for: the jobs of a second would be more than the pace.
             ELSE clock.now + make_interval(secs => reach.n / mine.pace) END AS next_at
    FROM mine CROSS JOIN reach CROSS JOIN summed CROSS JOIN (SELECT pgqueue.now() AS now OFFSET 0) AS clock
), stepped AS (
    UPDATE pgqueue.bulk b SET fence = b.fence + 1, counts = summed.counts,
        changed = b.changed + coalesce((
            SELECT sum(t.n) FROM tally t
            WHERE t.did IN ('cancelled', 'requested', 'retried', 'again', 'discarded', 'rescheduled')), 0)::bigint,
        after = CASE WHEN reach.whole THEN 0 ELSE reach.after END, round = b.round + CASE WHEN reach.whole THEN 1 ELSE 0 END,
        next_at = ahead.next_at, leased_until = greatest(ahead.next_at, ahead.now) + make_interval(secs => %(lease)s::float8),
        ended_at = CASE WHEN ahead.ends THEN ahead.now END
    FROM mine, reach, summed, ahead WHERE b.id = mine.id
    RETURNING b.fence, ahead.ends, extract(epoch FROM ahead.next_at - ahead.now)::float8 AS pause, reach.n
)

-- name: number
-- The number of this database among several: its jobs' ids begin at number << 43 plus one.
coalesce((SELECT (q.seqstart - 1 >> 43)::integer FROM pg_sequence q WHERE q.seqrelid = to_regclass('pgqueue.job_id_seq')), 0)

-- name: read_only
-- Whether this database is read only by order, for all its clients. Not if only this role, or this session, is.
(current_setting('default_transaction_read_only') = 'on' AND (
    (SELECT s.source NOT IN ('user', 'database user', 'client', 'session') FROM pg_settings s WHERE s.name = 'default_transaction_read_only')
    OR EXISTS (
        SELECT FROM pg_db_role_setting r CROSS JOIN LATERAL unnest(r.setconfig) AS own (setting)
        WHERE r.setrole = 0 AND r.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
          AND own.setting IN ('default_transaction_read_only=on', 'default_transaction_read_only=true'))))

-- name: duties
-- What live workers say of their duties, one row of each: how many seconds ago it last ran anywhere, and how long that took; the last error, and
-- how many seconds ago that was; for how many seconds it has failed each time in some worker (NULL: in none).
SELECT said.name, min(said.ran) AS ran, (array_agg(said.took ORDER BY said.ran))[1] AS took,
       (array_agg(said.error ORDER BY said.failed) FILTER (WHERE said.error IS NOT NULL))[1] AS error, min(said.failed) AS failed,
       max(said.failing) AS failing
FROM (
    SELECT d.value ->> 0 AS name, w.silent + (d.value ->> 1)::float8 AS ran, (d.value ->> 2)::float8 AS took, d.value ->> 3 AS error,
           w.silent + (d.value ->> 4)::float8 AS failed, w.silent + (d.value ->> 5)::float8 AS failing
    FROM (SELECT each.duties, greatest(0, extract(epoch FROM pgqueue.now() - each.beat_at))::float8 AS silent
          FROM (SELECT v.* FROM pgqueue.worker v ORDER BY v.id DESC LIMIT 10000) AS each
          WHERE each.dead_at IS NULL AND each.duties IS NOT NULL AND each.beat_at >= (SELECT pgqueue.now()) - 3 * each.lease) AS w
    CROSS JOIN LATERAL jsonb_array_elements(w.duties) AS d
) AS said
GROUP BY said.name

-- Sessions ----------------------------------------------------------------------------------------------------------------------------

-- name: ours_to_end
-- Whether the role `me` may end the session `a`: asking for another one is an error. Not ours are those of another role without the
-- right, a superuser's if we are none, and those that we may not even see as they are.
a.backend_start IS NOT NULL AND (pg_has_role(a.usesysid, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE'))
AND (me.rolsuper OR (SELECT NOT r.rolsuper FROM pg_roles r WHERE r.oid = a.usesysid) IS TRUE)

-- name: ended_session
-- The session `a` is told to end, until it has ended: whether it has, after 5 s at most. One that is told once sends a last message, and
-- waits for room in its socket. A client that reads nothing makes no room. Told again, it ends without the message. The second time may
-- come before it has begun with that, on a busy machine: so there is a third.
CASE WHEN pg_terminate_backend(a.pid, 200) THEN true WHEN pg_terminate_backend(a.pid, 800) THEN true ELSE pg_terminate_backend(a.pid, 4000) END

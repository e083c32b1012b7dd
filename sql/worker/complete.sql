-- The statements here end running jobs by their fence (id, worker, claim). They answer NULL when every job was ended,
-- else the ids of the jobs that were. None waits for a lock: if the row of a job is locked or gone, the job is left
-- out. The exceptions are `complete_plain_unlocked`, `complete_within` and `complete_mine`.
--
-- A job that goes on, as for another attempt, is inserted with its id. If an open transaction of the application has
-- inserted that id, too, as after a restore, the statement waits 20 ms (`impatience`), and is then an error.
--
-- There are two ways of finding the rows. Both use the index on ids, whatever statistics say. docs/design/run.md has
-- the figures.
--
-- - `complete_plain` asks for `id = ANY`, and compares the pairs (id, claim) in a condition. IS TRUE keeps that
--   condition from becoming a join, which might read the table.
-- - The others need a value of each job beside its row, so they look each id up by itself. LATERAL with a LIMIT cannot
--   be turned into a join that reads the table.
--
-- `worker_id + 0` and `claim + 0` keep these columns from being conditions of an index.
--
-- The waiters for the result of a job that ends here are notified. They are asked for by id, by the index. Only this
-- way costs nothing without waiters, and no more while an old snapshot keeps the dead rows of earlier waiters.
--
-- The row of a job that came behind another one of its lock says when it came, not when it began. The worker that ended
-- it says how long `ago` it began. For other jobs `ago` is NULL, and if all are, the array is empty.

-- name: complete_plain
-- Jobs that succeeded without a result: to history. The shortest way, because most jobs take it. Right because:
-- 1. A row is ended only if its worker is ours, and its id and claim are one of the pairs.
-- 2. A running row is deleted or inserted, never updated. So a row that was compared is locked as it was, or left out.
-- 3. An id has one row (UNIQUE). If two runs of one job are among the pairs, that row has the claim of one of them. So
--    it is ended once, and answered once.
-- 4. What is deleted is inserted by the same statement, with every column and under no condition: both happen, or
--    neither.
-- 5. The answer counts what was deleted. If that is less than was asked, it names the ids, so no job is taken for
--    ended.
WITH ended AS (
    DELETE FROM pgqueue.job_running
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM pgqueue.job_running WHERE {{my_pairs}} FOR UPDATE SKIP LOCKED))
    RETURNING {{run}}
), done AS (
    {{complete}}
)
SELECT {{plain_answer}}
FROM ended;

-- name: complete_plain_unlocked
-- Many jobs at once, to history without a result, without a lock before the DELETE. That saves a record of the log and
-- a look at each row. If a row is locked, it waits 20 ms, and is then an error (lock_not_available). Right because:
-- 1. The error undoes the transaction, so nothing has ended. The flush goes once more, with `complete_plain`.
-- 2. After a wait the row is compared once more. If it was moved meanwhile, it is left out.
-- 3. No deadlock lasts: a wait ends after 20 ms, and PostgreSQL looks for deadlocks after a second.
-- 4. Only the DELETE is that impatient. The COMMIT may have to wait for its turn to notify.
WITH {{impatience}}, ended AS (
    DELETE FROM pgqueue.job_running WHERE {{hurried}} AND {{my_pairs}}
    RETURNING {{run}}
), done AS (
    {{complete}}
)
SELECT {{plain_answer}}, {{patient}}
FROM ended;

-- name: complete_durably
-- Beside the end of a job that hands its lock on: the next job of its chain starts when this is answered.
SELECT {{durable}};

-- name: complete_result
-- Jobs that succeeded with a result: to history, each with its own result.
WITH picked AS MATERIALIZED (
    {{pick_results}}
), ended AS (
    DELETE FROM pgqueue.job_running WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), done AS (
    {{complete_each}}
    RETURNING id
)
SELECT {{ended_ids}}, {{tell_waiters}}
FROM done;

-- name: complete_successors
-- Jobs that succeeded and have enqueued successors: to history, each with its result if it has one. The successors of
-- the runs that were ended become jobs.
--
-- Why of runs, not of jobs? A worker that had seemed dead may have been given its own job again, and end both runs with
-- one flush. By the fence only one of them ends.
--
-- Successors with unique keys go another way (`completer`). To take a key may mean to wait, and a wait here keeps a
-- whole flush waiting.
WITH picked AS MATERIALIZED (
    {{pick_results}}
), ended AS (
    DELETE FROM pgqueue.job_running WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), done AS (
    {{complete_each}}
    RETURNING id, claim
), asked AS MATERIALIZED (
    SELECT s.place, s.task, s.args::jsonb AS args, s.queue, s.priority, s.headers::jsonb AS headers, s.max_attempts,
        coalesce(s.run_at::timestamptz, pgqueue.now() + make_interval(secs => s.delay)) AS run_at,
        coalesce(s.deadline::timestamptz, pgqueue.now() + make_interval(secs => s.seconds)) AS deadline, {{keys}}, s.node
    FROM unnest(%(parents)s::bigint[], %(parent_claims)s::integer[], %(nodes)s::bigint[], %(task)s::text[], %(args)s::text[], %(queue)s::text[],
                %(priority)s::smallint[], %(headers)s::text[], %(max_attempts)s::smallint[], %(run_at)s::text[],
                %(delay)s::float8[], %(deadline)s::text[], %(deadline_seconds)s::float8[], %(lock_key)s::text[],
                %(lock_limit)s::integer[], %(on_locked)s::text[], %(limit_key)s::text[], %(rate_key)s::text[])
         WITH ORDINALITY
         AS s (parent, claim, node, task, args, queue, priority, headers, max_attempts, run_at, delay, deadline, seconds, {{keys}}, place)
    WHERE (s.parent, s.claim) IN (SELECT id, claim FROM done)
), judged AS MATERIALIZED (
    SELECT asked.*, run_at > pgqueue.now() IS TRUE AS later FROM asked ORDER BY place
), available AS (
    INSERT INTO pgqueue.job_available (rank, node, {{new_job}}) SELECT 2 * priority + 1, node, {{new_job}} FROM judged WHERE NOT later
    RETURNING queue
), scheduled AS (
    INSERT INTO pgqueue.job_scheduled (state, rank, node, {{new_job}})
    SELECT 'scheduled', 2 * priority + 1, node, {{new_job}} FROM judged WHERE later
    RETURNING id
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, '')::text END AS done
    FROM (SELECT queue AS channel FROM available UNION SELECT ':scheduled' FROM scheduled) AS heard
    WHERE %(notify)s::boolean
)
SELECT {{ended_ids}}, {{tell_waiters}}, (SELECT count(done) FROM told)
FROM done;

-- name: complete_within
-- One job that succeeded, completed inside a transaction of its handler, by its fence. If it is not this run's any
-- more, or the transaction is not the one that the worker has begun, the statement raises. Then that transaction cannot
-- commit, whatever the client does. `ago` is in microseconds:
-- where this is sent as text, it must have no fraction. The session is the handler's: what reads a table is a function
-- with settings of its own.
WITH ended AS MATERIALIZED (
    SELECT {{run}} FROM pgqueue.take_running({{my_fence}})
), done AS (
    INSERT INTO pgqueue.job_done (
        state, finished_at, bin, version_tag, result, started_at, worker_id, claim, {{attempts}}, {{job}})
    SELECT 'completed', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), %(version_tag)s::text, %(result)s::text::jsonb,
        coalesce(pgqueue.now() - make_interval(secs => %(ago)s::bigint / 1e6), started_at), worker_id, claim, {{attempts}}, {{job}}
    FROM ended
)
SELECT pgqueue.refuse_lost(%(id)s::bigint)::text WHERE NOT EXISTS (SELECT FROM ended)
UNION ALL
SELECT pgqueue.refuse_ended(%(id)s::bigint)::text WHERE {{not_marked}}
UNION ALL
SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:ended.' || w.job_id, '')::text END
FROM pgqueue.waiters(ARRAY[%(id)s::bigint]) AS w (job_id) WHERE %(notify)s::boolean;

-- name: complete_mine
-- Whether a job is still this run's, after its transaction broke off. While its row is locked, this waits for that
-- transaction to end. No row: the job has been ended, by that transaction or by another worker. Raises in a transaction
-- of its handler that the worker has not begun.
SELECT CASE WHEN {{not_marked}} THEN pgqueue.refuse_ended(id) ELSE id END FROM pgqueue.lock_running({{my_fence}});

-- name: complete_batch_mine
-- Whether all jobs of a batch are still this run's, before they end in one transaction. Their rows are locked until that
-- ends; a row that another transaction has is waited for. Raises if one is not, or if the worker has not begun this transaction.
SELECT CASE WHEN pgqueue.lock_running_batch(%(ids)s::bigint[], %(claims)s::integer[], %(worker_id)s::bigint)
                 < cardinality(%(ids)s::bigint[]) THEN pgqueue.refuse_lost(%(id)s::bigint)
            WHEN {{not_marked}} THEN pgqueue.refuse_ended(%(id)s::bigint) END;

-- name: complete_retry
-- Attempts that did not complete and will be made again: to scheduled, each after its own delay in seconds. An attempt
-- given back (`spent` false) does not count, a snooze counts as one. A failed attempt that waits for 2.5 s or more waits until the next
-- quarter of a second: jobs that failed together come in a few batches, which costs a fraction of one by one. What happened is appended to `attempt`. The key is
-- given up, unless `holding`. A job of a chain that ran has the key, too. If the attempt was traced, its span goes into the headers, for the
-- next one to name; else, as for most workers, the array of traces is empty.
WITH {{impatience}}, picked AS MATERIALIZED (
    SELECT r.ctid, r.id, mine.delay, mine.spent, mine.snoozed, mine.holding, mine.outcome, mine.error_type, mine.message,
        mine.traceback, mine.fingerprint, mine.ago, mine.trace
    FROM unnest(%(ids)s::bigint[], %(claims)s::integer[], %(delays)s::float8[], %(spents)s::boolean[],
                %(snoozeds)s::boolean[], %(holdings)s::boolean[], %(outcomes)s::text[], %(error_types)s::text[],
                %(messages)s::text[], %(tracebacks)s::text[], %(fingerprints)s::text[], %(agos)s::float8[], %(traces)s::text[])
         AS mine (id, claim, delay, spent, snoozed, holding, outcome, error_type, message, traceback, fingerprint, ago, trace)
    CROSS JOIN LATERAL ({{my_running}} FOR UPDATE SKIP LOCKED) AS r
), ended AS (
    DELETE FROM pgqueue.job_running WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), noted AS (
    {{note_attempts}}
), later AS (
    INSERT INTO pgqueue.job_scheduled (
        state, holds, hold_pos, run_at, attempt, crashes, snoozes, reason, headers, id, {{beside_headers}}, max_attempts, deadline)
    SELECT 'scheduled', (holds OR key IS NOT NULL) AND picked.holding,
        CASE WHEN (holds OR key IS NOT NULL) AND picked.holding THEN nextval('pgqueue.job_hold_seq') END,
        CASE WHEN picked.outcome = 'failed' AND picked.delay BETWEEN 2.5 AND 86400000
             THEN date_bin('250 ms', pgqueue.now() + make_interval(secs => picked.delay + 0.249999), timestamptz '2000-01-01 00:00:00+00')
             ELSE pgqueue.now() + make_interval(secs => picked.delay) END, attempt - CASE WHEN picked.spent THEN 0 ELSE 1 END, crashes,
        CASE WHEN picked.snoozed THEN least(snoozes + 1, 32767) ELSE snoozes END, picked.message,
        CASE WHEN picked.trace IS NULL OR jsonb_typeof(headers) <> 'object' THEN headers
             WHEN octet_length(headers::text) > 1048576 THEN headers -- as large as an enqueue may make them
             ELSE coalesce(headers, '{}') || jsonb_build_object('pgqueue:attempt', picked.trace) END,
        id, {{beside_headers}}, max_attempts, deadline
    FROM ended JOIN picked USING (id)
    RETURNING id, run_at
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:scheduled', '')::text END AS done FROM later WHERE %(notify)s::boolean LIMIT 1
)
SELECT {{ended_ids}}, (SELECT count(done) FROM told), {{patient}}
FROM later;

-- name: complete_fail
-- Jobs that failed for good or were cancelled: to history, each with its state and reason; the last attempt is appended
-- to `attempt`.
WITH picked AS MATERIALIZED (
    SELECT r.ctid, r.id, mine.state, mine.reason, mine.outcome, mine.error_type, mine.message, mine.traceback,
        mine.fingerprint, mine.ago
    FROM unnest(%(ids)s::bigint[], %(claims)s::integer[], %(states)s::text[], %(reasons)s::text[],
                %(outcomes)s::text[], %(error_types)s::text[], %(messages)s::text[], %(tracebacks)s::text[],
                %(fingerprints)s::text[], %(agos)s::float8[])
         AS mine (id, claim, state, reason, outcome, error_type, message, traceback, fingerprint, ago)
    CROSS JOIN LATERAL ({{my_running}} FOR UPDATE SKIP LOCKED) AS r
), ended AS (
    DELETE FROM pgqueue.job_running WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), noted AS (
    {{note_attempts}}
), dead AS (
    INSERT INTO pgqueue.job_dead (
        state, finished_at, bin, version_tag, reason, started_at, worker_id, claim, {{attempts}}, {{job}})
    SELECT picked.state, pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), %(version_tag)s::text, picked.reason,
        coalesce(pgqueue.now() - make_interval(secs => picked.ago), started_at), worker_id, claim, {{attempts}}, {{job}}
    FROM ended JOIN picked USING (id)
    RETURNING id
)
SELECT {{ended_ids}}, {{tell_waiters}}
FROM dead;

-- name: complete_release
-- Jobs given back that never started: to the front of their lanes, the attempt not spent. If the clock has stepped
-- behind a run_at, it becomes now: a job that was due stays due. Jobs of a chain behind its holder become the first
-- waiters of their lock again. Jobs with a limit become its first waiters: they had no slot, and others may have one. A
-- job that has a rate, too, waits for that next, and keeps its limit.
WITH {{impatience}}, ended AS (
    DELETE FROM pgqueue.job_running
    WHERE {{hurried}} AND ctid = ANY (ARRAY(
        SELECT r.ctid FROM unnest(%(ids)s::bigint[], %(claims)s::integer[]) AS mine (id, claim)
        CROSS JOIN LATERAL ({{my_running}} FOR UPDATE SKIP LOCKED) AS r))
    RETURNING *, CASE WHEN key IS NULL AND rate_key IS NULL THEN 'limit:' || limit_key ELSE key END AS wait_for
), {{give_back}};

-- name: complete_interrupt
-- Jobs that were stopped in the middle for a reason of their worker's own (a shutdown, a lost lease). They go where
-- `complete_release` puts them; what happened is appended to `attempt`.
WITH {{impatience}}, picked AS MATERIALIZED (
    SELECT r.ctid, r.id, mine.outcome, NULL AS error_type, mine.message, NULL AS traceback, NULL AS fingerprint, mine.ago
    FROM unnest(%(ids)s::bigint[], %(claims)s::integer[], %(outcomes)s::text[], %(messages)s::text[], %(agos)s::float8[])
         AS mine (id, claim, outcome, message, ago)
    CROSS JOIN LATERAL ({{my_running}} FOR UPDATE SKIP LOCKED) AS r
), ended AS (
    DELETE FROM pgqueue.job_running WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *, key AS wait_for
), noted AS (
    {{note_attempts}}
), {{give_back}};

-- name: complete_missing
-- Of jobs that could not be ended just now, those that are still ours. Their rows are locked; the next flush tries
-- again.
SELECT r.id FROM unnest(%(ids)s::bigint[], %(claims)s::integer[]) AS mine (id, claim) CROSS JOIN LATERAL ({{my_running}}) AS r;

-- name: complete_settled
-- Of jobs that are ours no more, those that an earlier try of ours ended, though its answer was lost. History says so,
-- or the row of the attempt, by its claim. `worker_ids`: we may have seemed dead meanwhile, and have another id.
SELECT mine.id
FROM unnest(%(ids)s::bigint[], %(claims)s::integer[]) AS mine (id, claim)
WHERE EXISTS (SELECT FROM pgqueue.job j
              WHERE j.state IN ('completed', 'failed', 'cancelled') AND coalesce(j.reason, '') <> 'crashed'
                AND j.id = mine.id AND j.claim = mine.claim AND j.worker_id = ANY (%(worker_ids)s::bigint[]) OFFSET 0)
   OR EXISTS (SELECT FROM pgqueue.attempt a
              WHERE a.job_id = mine.id AND a.worker_id = ANY (%(worker_ids)s::bigint[])
                AND a.claim = mine.claim AND a.outcome NOT IN ('crashed', 'aborted', 'memory') OFFSET 0);

-- name: complete_release_keys
-- Jobs with these keys have just been completed, in this transaction or before. So their keys are free, or expire a set
-- time after their end. Only tidies up: an enqueue that wants the key judges for itself. Waits for no lock, and leaves
-- alone the keys of jobs that have not completed.
WITH picked AS MATERIALIZED (
    SELECT k.ctid, k.hold
    FROM unnest(%(keys)s::text[], %(ids)s::bigint[]) AS mine (key, id)
    CROSS JOIN LATERAL (
        SELECT d.enqueued_at FROM pgqueue.job_done d
        WHERE d.id = mine.id AND d.bin = (SELECT bin FROM pgqueue.ring WHERE kind = 'done')
        ORDER BY d.finished_at DESC LIMIT 1
    ) AS done
    CROSS JOIN LATERAL (
        SELECT k.ctid, k.hold FROM pgqueue.unique_key k
        WHERE k.key = mine.key AND k.job_id = mine.id AND k.enqueued_at = done.enqueued_at
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS k
), freed AS (
    DELETE FROM pgqueue.unique_key WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked WHERE hold <> 'after'))
)
UPDATE pgqueue.unique_key SET expires_at = pgqueue.now() + make_interval(secs => seconds)
WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked WHERE hold = 'after'))
RETURNING job_id;

-- name: complete_read
-- Read what an outcome says, as the statements that end jobs do, and write nothing (see refusals.py).
SELECT (SELECT count(said.json::jsonb) FROM unnest(%(jsons)s::text[]) AS said (json)),
       (SELECT count(pgqueue.now() + make_interval(secs => said.seconds)) FROM unnest(%(seconds)s::float8[]) AS said (seconds)),
       cardinality(%(texts)s::text[]);

-- Jobs with unique keys. The primary key of `unique_key` decides: a job has the key if its row goes in, by the statement that
-- inserts the job. Whether a row that is there still holds is said by `key_state`, which looks at the job it names. All statements lock in
-- one order: `take_all_keys` takes the keys of a batch in the order of their bytes, then it locks the jobs that have others of them. A row is
-- removed by its version: one that was removed and written anew meanwhile stays. While a statement waits for a transaction that is just
-- taking the same key, it is bounded by the session's lock_timeout, by 5 s if that has none; afterwards the setting is as it was.

-- name: unique_enqueue
-- A batch of jobs of which some have unique keys (as JSON: they may have line breaks), in the columns of `enqueue_many_later`. A job is
-- inserted if it got all of its keys, or if it has none. One row: the ids in the order of the batch, NULL for a job that was not inserted;
-- and for each of these, in order, as a JSON array: a key, the job that has it, when that was enqueued, and whether it has never started.
WITH put AS MATERIALIZED (
    SELECT * FROM pgqueue.enqueue_keyed({{keyed_jobs}})
), {{keyed_answer}};

-- name: unique_enqueue_replacing
-- The same for a batch in which some jobs replace the job that has their key, if it has never started.
WITH put AS MATERIALIZED (
    SELECT * FROM pgqueue.enqueue_replacing({{keyed_jobs}})
), {{keyed_answer}};

-- name: unique_enqueue_one
-- One job with a unique key, in the parameters of `enqueue_later`. It answers as `unique_enqueue`.
WITH put AS MATERIALIZED (
    SELECT * FROM pgqueue.enqueue_keyed({{keyed_job}})
), {{keyed_answer}};

-- name: unique_enqueue_one_replacing
-- The same if the job replaces the job that has its key, if that has never started.
WITH put AS MATERIALIZED (
    SELECT * FROM pgqueue.enqueue_replacing({{keyed_job}})
), {{keyed_answer}};

-- name: unique_enqueue_replace
-- Jobs that have never started become what this batch says (as `unique_enqueue`, with the job's id), in one move. They keep their ids,
-- their keys and the time of their first enqueue, and start at the latest so many seconds after that. If its time has come, a job keeps
-- its turn: it goes to the front of its lane. A job that waits for its release still waits. What was asked of its last run, which never began, is forgotten. One row: the ids of the jobs
-- that were changed; the others are on the move.
WITH asked AS MATERIALIZED (
    SELECT line.holder::bigint AS id, line.since::timestamptz AS since, nullif(coalesce(line.at_most, %(at_most)s::text), '')::float8 AS at_most, {{line_values}}
    FROM ROWS FROM (
        {{lines}},
        string_to_table(%(holder)s::text, E'\n'), string_to_table(%(since)s::text, E'\n'),
        string_to_table(%(at_most)s::text, E'\n')
    ) AS line ({{line_names}}, holder, since, at_most)
), gone AS MATERIALIZED (
    SELECT * FROM pgqueue.take_back(ARRAY(SELECT id FROM asked ORDER BY id), ARRAY(SELECT since FROM asked ORDER BY id))
), forgotten AS MATERIALIZED (
    SELECT pgqueue.forget_requests(array_agg(id), array_agg(enqueued_at)) AS n FROM gone
), changed AS MATERIALIZED (
    SELECT {{job}}, holds, was_due, waits_for, least(run_at, enqueued_at + make_interval(secs => at_most)) AS run_at
    FROM asked JOIN gone USING (id)
), judged AS MATERIALIZED (
    SELECT *, run_at > pgqueue.now() IS TRUE AS later FROM changed
), still_waiting AS (
    INSERT INTO pgqueue.job_blocked (state, key, rank, run_at, {{job}})
    SELECT 'blocked', waits_for, 2 * priority + 1, run_at, {{job}} FROM judged WHERE waits_for IS NOT NULL
    RETURNING id
), now_available AS (
    INSERT INTO pgqueue.job_available (state, rank, run_at, {{job}})
    SELECT 'available', 2 * priority + CASE WHEN was_due THEN 0 ELSE 1 END, run_at, {{job}} FROM judged
    WHERE NOT later AND waits_for IS NULL
    RETURNING id, queue
), now_scheduled AS (
    INSERT INTO pgqueue.job_scheduled (state, rank, run_at, {{job}})
    SELECT 'scheduled', 2 * priority + 1, run_at, {{job}} FROM judged WHERE later AND waits_for IS NULL
    RETURNING id
), told AS (
    -- A job that held a key has given it up; a sweep lets in the jobs that wait for it. A release may have passed over a job that waits
    -- for it, while it was locked here.
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (
        SELECT queue::text AS channel, '' AS what FROM now_available
        UNION SELECT ':scheduled', '' FROM now_scheduled
        UNION SELECT ':control', 'sweep' FROM changed WHERE holds
        UNION (SELECT DISTINCT ':control', left(waits_for, 40) FROM changed WHERE waits_for IS NOT NULL LIMIT 100)
    ) AS heard
    WHERE %(notify)s::boolean
)
SELECT ARRAY(SELECT id FROM now_available UNION ALL SELECT id FROM now_scheduled UNION ALL SELECT id FROM still_waiting), (SELECT count(done) FROM told), (SELECT n FROM forgotten);

-- name: unique_enqueue_impatient
-- For the rest of this transaction: wait 5 ms at most for a transaction that has a key or a row.
SELECT pg_catalog.set_config('lock_timeout', '5ms', true);

-- name: unique_enqueue_following
-- The successors of a job, in its transaction, some with unique keys; a batch as that of `unique_enqueue`. One statement whatever it
-- finds. If its key is held, a successor is not made, and no more is said than which job holds it. One row: these as a JSON array of
-- [task, holder].
WITH put AS MATERIALIZED (
    SELECT * FROM pgqueue.enqueue_keyed({{keyed_jobs}})
), added AS (
    SELECT heard FROM put WHERE holder IS NULL
)
SELECT (SELECT json_agg(json_build_array(task, holder) ORDER BY place)::text FROM put WHERE holder IS NOT NULL), {{tell_channels}};

-- Operations on all jobs that fit a filter: what is asked of them, and their steps. Why each job is dealt with once: the head of steps.py.
-- A step is one statement. It has a row for the process that has the operation, and none for any other.

-- name: bulk_preview
-- How many jobs fit a filter, and the first ten that were met, as JSON: `n`, whether that is exact, `ids`, and the highest id that was given.
-- It looks at the first `most` rows. If there are more, it looks at as many again, in 40 equal stretches of the ids that follow: what it
-- has not seen of a stretch is as what it has seen.
WITH b AS MATERIALIZED (
    SELECT {{bulk_filter}}, coalesce(pg_sequence_last_value('pgqueue.job_id_seq'::regclass), 0) AS up_to
), first_walked AS MATERIALIZED (
    SELECT w.id, w.enqueued_at, {{bulk_fits}} AS fits
    FROM b CROSS JOIN LATERAL pgqueue.jobs_after(b.states, b.ids, 0, b.up_to, %(most)s::integer) AS w
), first_caused AS MATERIALIZED (
    {{bulk_caused}} FROM first_walked AS w CROSS JOIN b WHERE b.error_type IS NOT NULL AND w.fits GROUP BY b.error_type
), first AS MATERIALIZED (
    SELECT w.id, w.fits AND (b.error_type IS NULL OR w.id IN (SELECT c.id FROM first_caused AS c)) AS fits FROM first_walked AS w CROSS JOIN b
), looked AS MATERIALIZED (
    SELECT count(*) AS n, count(*) FILTER (WHERE fits) AS fitting, coalesce(max(id), 0) AS last, count(*) < %(most)s::integer AS whole FROM first
), stretch AS MATERIALIZED (
    SELECT looked.last + (s * wide.ids / 40)::bigint AS low, looked.last + ((s + 1) * wide.ids / 40)::bigint AS high
    FROM looked CROSS JOIN b
    CROSS JOIN LATERAL (SELECT coalesce(pgqueue.bulk_last(b.states, b.up_to), 0)::numeric - looked.last AS ids) AS wide
    CROSS JOIN generate_series(0, 39) AS s
    WHERE NOT looked.whole AND wide.ids > 0
), seen_walked AS MATERIALIZED (
    SELECT stretch.low, stretch.high, w.id, w.enqueued_at, w.fits
    FROM stretch CROSS JOIN LATERAL (
        SELECT w.id, w.enqueued_at, {{bulk_fits}} AS fits
        FROM b CROSS JOIN LATERAL pgqueue.jobs_after(b.states, NULL, stretch.low, stretch.high, %(most)s::integer / 40) AS w
    ) AS w
), seen_caused AS MATERIALIZED (
    {{bulk_caused}} FROM seen_walked AS w CROSS JOIN b WHERE b.error_type IS NOT NULL AND w.fits GROUP BY b.error_type
), seen AS MATERIALIZED (
    SELECT w.low, w.high, w.id, w.fits AND (b.error_type IS NULL OR w.id IN (SELECT c.id FROM seen_caused AS c)) AS fits
    FROM seen_walked AS w CROSS JOIN b
), sized AS MATERIALIZED (
    SELECT count(*) < %(most)s::integer / 40 AS whole, count(*) FILTER (WHERE fits) AS fitting,
        (high - low)::float8 / (max(id) - low) AS share
    FROM seen GROUP BY low, high
)
SELECT json_build_object(
    'n', looked.fitting + coalesce((SELECT sum(CASE WHEN s.whole THEN s.fitting ELSE s.fitting * s.share END) FROM sized s), 0)::bigint,
    'exact', looked.whole OR NOT EXISTS (SELECT FROM sized s WHERE NOT s.whole),
    'up_to', b.up_to,
    'ids', ARRAY(SELECT DISTINCT one.id FROM (SELECT id FROM first WHERE fits UNION ALL SELECT id FROM seen WHERE fits) AS one ORDER BY 1 LIMIT 10)
)::text
FROM looked CROSS JOIN b;

-- name: bulk_start
-- A new operation, on jobs whose ids have been given by now, or up to a lower id. Workers hear of it.
WITH b AS (
    INSERT INTO pgqueue.bulk (actor, action, target, states, queue, task, ended_before, ids, error_type, options, up_to, pace, note)
    SELECT {{actor}}, %(action)s::text, %(target)s::text::jsonb, {{bulk_filter}}, %(options)s::text::jsonb,
        least(%(up_to)s::bigint, coalesce(pg_sequence_last_value('pgqueue.job_id_seq'::regclass), 0)), %(pace)s::float8, %(note)s::text
    RETURNING *
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.:control', 'bulk')::text END AS done FROM b WHERE %(notify)s::boolean
)
SELECT {{bulk_row}}, (SELECT count(done) FROM told) FROM b;

-- name: bulk_list
-- The newest n operations: a row of JSON each.
SELECT {{bulk_row}}, NULL FROM pgqueue.bulk b WHERE b.id < coalesce(%(before)s::bigint, 9223372036854775807) ORDER BY b.id DESC LIMIT %(n)s::integer;

-- name: bulk_get
-- One operation, and the first 1,000 jobs of each reason, as JSON. No row: there is none.
SELECT {{bulk_row}}, (
    SELECT coalesce(json_object_agg(r.reason, r.ids), '{}')::text FROM (
        SELECT c.key AS reason, ARRAY(
            SELECT j.job_id FROM pgqueue.bulk_job j WHERE j.bulk_id = b.id AND j.reason = c.key ORDER BY j.job_id LIMIT 1000) AS ids
        FROM jsonb_each(b.counts) AS c) AS r)
FROM pgqueue.bulk b WHERE b.id = %(bulk)s::bigint;

-- name: bulk_stop
-- End an operation that is not over: no step begins after this is committed. It waits for a step that is under way. No row: none is open.
WITH b AS (
    UPDATE pgqueue.bulk b SET ended_at = pgqueue.now(), stopped_by = {{actor}}
    WHERE b.id = %(bulk)s::bigint AND b.ended_at IS NULL RETURNING *
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, count, details)
    SELECT b.stopped_by, 'bulk stop', jsonb_build_object('bulk', b.id), 1, jsonb_build_object('changed', b.changed) FROM b
)
SELECT {{bulk_row}}, NULL FROM b;

-- name: bulk_due
-- In how many seconds some operation may go on, that no other process works on. NULL: there is none.
SELECT extract(epoch FROM min(greatest(t.next_at, CASE WHEN b.holder = %(holder)s::text THEN '-infinity' ELSE t.leased_until END)) - clock.now)::float8
FROM pgqueue.bulk b CROSS JOIN (SELECT pgqueue.now() AS now OFFSET 0) AS clock CROSS JOIN LATERAL ({{bulk_times}}) AS t
WHERE b.ended_at IS NULL GROUP BY clock.now;

-- name: bulk_claim
-- Take the operation that has waited longest, or a certain one, unless another process works on it. The number of its steps goes up: what
-- another process may still send is refused. No row: none is due.
WITH due AS MATERIALIZED (
    SELECT b.id, clock.now FROM pgqueue.bulk b CROSS JOIN (SELECT pgqueue.now() AS now OFFSET 0) AS clock CROSS JOIN LATERAL ({{bulk_times}}) AS t
    WHERE b.ended_at IS NULL AND t.next_at <= clock.now AND (t.leased_until <= clock.now OR b.holder = %(holder)s::text)
      AND (%(bulk)s::bigint IS NULL OR b.id = %(bulk)s::bigint)
    ORDER BY b.next_at, b.id LIMIT 1 FOR UPDATE OF b SKIP LOCKED
)
UPDATE pgqueue.bulk b SET fence = b.fence + 1, holder = %(holder)s::text, leased_until = due.now + make_interval(secs => %(lease)s::float8)
FROM due WHERE b.id = due.id
RETURNING b.id, b.fence, b.action, b.options::text, b.pace;

-- name: bulk_release
-- This process works on the operation no more: another one may take it at once.
UPDATE pgqueue.bulk b SET leased_until = '-infinity', fence = b.fence + 1
WHERE b.id = %(bulk)s::bigint AND b.fence = %(fence)s::bigint RETURNING b.id;

-- name: bulk_cancel
-- A step of a cancel: a row with the number of steps, whether all is done, the seconds until the next one, and how many jobs fitted.
WITH {{bulk_picked}}, {{bulk_asked}}, meant AS MATERIALIZED (
    SELECT NULL::text AS only_queue, NULL::text AS only_task  -- compared when the jobs were locked
), {{cancel_asked}}, judged AS MATERIALIZED (
    SELECT f.id, CASE WHEN f.id IN (SELECT id FROM cancelled) THEN 'cancelled' WHEN f.id IN (SELECT job_id FROM requested) THEN 'requested'
                      ELSE {{bulk_left}} END AS did
    FROM fitting AS f
), {{bulk_stepped}}
SELECT s.fence, s.ends, s.pause, s.n, (SELECT count(done) FROM told) + (SELECT count(done) FROM heard) FROM stepped AS s;

-- name: bulk_retry
-- A step of a retry, as `bulk_cancel`. `asked` are locked. A worker has no right to delete them but through the operation.
-- A job that has not been released is retried after all others, as those that were locked: else it would be cancelled again, for a job
-- that it waits for and that a later step retries. So come the first 9,000, which are remembered; others come in their turn.
WITH {{bulk_picked}}, {{bulk_asked}}, seen AS MATERIALIZED (
    SELECT DISTINCT ON (found.id) found.id, found.state, found.enqueued_at
    FROM pgqueue.job_states(ARRAY(SELECT id FROM asked)) AS found
    -- A job that lives is not started a second time for a row of its id that was put aside. Else the job that has ended last is meant.
    ORDER BY found.id, found.state IN ('available', 'scheduled', 'blocked', 'running') DESC,
        found.state IN ('failed', 'cancelled') DESC, found.finished_at DESC
), found AS MATERIALIZED (
    SELECT j.id, j.enqueued_at, j.unique_key, j.idempotency_key, j.finished_at
    FROM pgqueue.job_rows(ARRAY(SELECT id FROM seen WHERE state IN ('failed', 'cancelled') ORDER BY id)) AS j
    WHERE j.state IN ('failed', 'cancelled') AND (j.id, j.enqueued_at) IN (SELECT id, enqueued_at FROM seen)
      AND NOT (j.node < 0 AND (SELECT mine.round = 0 AND coalesce((mine.counts ->> 'locked')::bigint, 0) < 9000 FROM mine)) IS TRUE
), {{retry_keyed}}, dead AS MATERIALIZED (
    SELECT {{job}}, attempt, snoozes, finished_at
    FROM (SELECT mine.id AS bulk FROM mine) AS mine CROSS JOIN LATERAL pgqueue.bulk_take_dead(
        mine.bulk, ARRAY(SELECT id FROM picked ORDER BY id), ARRAY(SELECT enqueued_at FROM picked ORDER BY id)) AS taken
), {{retry_put}}, judged AS MATERIALIZED (
    SELECT f.id, CASE WHEN f.id IN (SELECT id FROM retried) THEN 'retried' WHEN f.id IN (SELECT retry_of FROM again) THEN 'again'
                      WHEN f.id IN (SELECT id FROM keyed) THEN 'held' WHEN f.id IN (SELECT id FROM unreleased) THEN 'unreleased'
                      WHEN f.id IN (SELECT id FROM seen WHERE state IN ('available', 'scheduled', 'blocked', 'running')) THEN 'alive'
                      ELSE {{bulk_left}} END AS did
    FROM fitting AS f
), {{bulk_stepped}}
SELECT s.fence, s.ends, s.pause, s.n, (SELECT count(done) FROM told) FROM stepped AS s;

-- name: bulk_reschedule
-- A step of a reschedule, as `bulk_cancel`.
WITH {{bulk_picked}}, {{bulk_asked}}, {{reschedule_asked}}, judged AS MATERIALIZED (
    SELECT f.id, CASE WHEN f.id IN (SELECT id FROM moved) THEN 'rescheduled' ELSE {{bulk_left}} END AS did FROM fitting AS f
), {{bulk_stepped}}
SELECT s.fence, CASE WHEN (SELECT count(*) FROM gone) <> (SELECT count(*) FROM moved)
                     THEN pgqueue.refuse('jobs were deleted and not rescheduled') IS NULL ELSE s.ends END,
       s.pause, s.n, (SELECT count(done) FROM told)
FROM stepped AS s;

-- name: bulk_discard
-- A step of a discard, as `bulk_cancel`.
WITH {{bulk_picked}}, {{bulk_asked}}, discarded AS MATERIALIZED (
    SELECT d.id, d.discarded, d.state
    FROM mine CROSS JOIN LATERAL pgqueue.bulk_discard(mine.id, ARRAY(SELECT id FROM asked ORDER BY id)) AS d
), judged AS MATERIALIZED (
    SELECT f.id, CASE WHEN f.id IN (SELECT id FROM discarded WHERE discarded) THEN 'discarded'
                      WHEN f.id IN (SELECT id FROM discarded WHERE state IN ('available', 'scheduled', 'blocked', 'running')) THEN 'alive'
                      WHEN f.id IN (SELECT id FROM discarded WHERE state = 'needed') THEN 'needed'
                      ELSE {{bulk_left}} END AS did
    FROM fitting AS f
), {{bulk_stepped}}
SELECT s.fence, s.ends, s.pause, s.n, NULL FROM stepped AS s;

-- name: bulk_first
-- The next job that fits; NULL: there is none, or not among the next `walk` rows. Changes nothing. No row: this process has it no more.
WITH {{bulk_picked}}
SELECT (SELECT f.id FROM fitting AS f) FROM mine;

-- name: bulk_pass
-- Leave out this job (`only`), for this reason: the server has refused what was to be done to it alone. As `bulk_cancel`, and its id; NULL
-- if another job comes first now.
WITH {{bulk_picked}}, judged AS MATERIALIZED (
    SELECT f.id, %(did)s::text AS did FROM fitting AS f
), {{bulk_stepped}}
SELECT s.fence, s.ends, s.pause, s.n, NULL, (SELECT max(id) FROM judged) FROM stepped AS s;

-- What people do by hand, inside their own transaction: cancel jobs, retry them, discard them. A statement that changes jobs writes one
-- row of the record: the actor, the filter (`target`, an empty object if the jobs were named), and the jobs that it has changed.

-- name: actions_unreleased
-- Those of these jobs that have not been released: they wait for jobs of their flow, or ended while they did.
SELECT DISTINCT j.id FROM pgqueue.job_rows(%(ids)s::text::bigint[]) AS j WHERE j.node < 0 ORDER BY j.id;

-- name: actions_cancel
-- Waiting jobs end as cancelled, running ones are asked to; a row for each id: its state as this statement's snapshot had it
-- (NULL: in none), and whether it was cancelled here. A waiting one that was not is on the move, and to be asked for anew.
-- Waits for transactions that have a row just now, in the order of ids, whatever partition these are in; locks no running row. A sweep
-- hears of keys that were held. If a filter has chosen the jobs by `queue` or `task` (NULL: it has not), a job that has another one by now is
-- left alone, as if it were in no state.
WITH meant AS MATERIALIZED (
    SELECT %(queue)s::text AS only_queue, %(task)s::text AS only_task
), fitting AS MATERIALIZED (
    SELECT j.id FROM meant CROSS JOIN LATERAL pgqueue.job_rows(
        CASE WHEN only_queue IS NULL AND only_task IS NULL THEN '{}' ELSE %(ids)s::text::bigint[] END) AS j
    WHERE (only_queue IS NULL OR j.queue = only_queue) AND (only_task IS NULL OR j.task = only_task)
), asked AS MATERIALIZED (
    SELECT named.id FROM meant CROSS JOIN unnest(%(ids)s::text::bigint[]) AS named (id)
    WHERE only_queue IS NULL AND only_task IS NULL OR named.id IN (SELECT id FROM fitting)
), {{cancel_asked}}, recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, jobs, count, details)
    SELECT {{actor}}, 'cancel', %(target)s::text::jsonb, changed.ids, cardinality(changed.ids), jsonb_build_object('reason', %(reason)s::text)
    FROM (SELECT array_agg(id ORDER BY id) AS ids
          FROM (SELECT id FROM cancelled UNION ALL SELECT job_id FROM requested) AS job) AS changed
    WHERE changed.ids IS NOT NULL
)
SELECT named.id, coalesce(gone.state, seen.state), cancelled.id IS NOT NULL, NULL::bigint,
       (SELECT count(done) FROM told) + (SELECT count(done) FROM heard)
FROM unnest(%(ids)s::text::bigint[]) AS named (id)
LEFT JOIN seen ON seen.id = named.id LEFT JOIN gone ON gone.id = named.id LEFT JOIN cancelled ON cancelled.id = named.id
ORDER BY named.id;

-- name: actions_retry
-- Dead jobs are available again, at the end of their lanes, and what was asked of their last run is forgotten; completed ones,
-- if asked, once more as new jobs that name the old. A row for each id: its state when all of them were locked (NULL: in
-- none), the id of the job that is available now, and of the one that holds its unique key, so that it is not. A dead one without
-- either is on the move, and to be asked for anew. The state of one that was skipped before it was released is answered as `unreleased`.
-- Locks what it retries in the order of ids; then takes the keys, in their order, before
-- anything is moved.
-- The attempts count on; one more is allowed at least.
WITH asked AS MATERIALIZED (
    SELECT id FROM unnest(%(ids)s::text::bigint[]) AS id
), seen AS MATERIALIZED (
    SELECT * FROM pgqueue.lock_ended(%(ids)s::text::bigint[], '{failed,cancelled}')
), found AS MATERIALIZED (
    SELECT id, enqueued_at, unique_key, idempotency_key, finished_at FROM seen WHERE locked
), {{retry_keyed}}, dead AS MATERIALIZED (
    SELECT {{job}}, attempt, snoozes, finished_at
    FROM pgqueue.take_dead(ARRAY(SELECT id FROM picked ORDER BY id), ARRAY(SELECT enqueued_at FROM picked ORDER BY id))
), {{retry_put}}, recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, jobs, count, details)
    SELECT {{actor}}, 'retry', %(target)s::text::jsonb, changed.ids, cardinality(changed.ids), changed.details
    FROM (SELECT array_agg(id ORDER BY id) AS ids, CASE WHEN bool_or(new) THEN '{"again": true}' ELSE '{}' END::jsonb AS details
          FROM (SELECT id, false AS new FROM retried UNION ALL SELECT retry_of, true FROM again) AS job) AS changed
    WHERE changed.ids IS NOT NULL
)
SELECT asked.id, CASE WHEN asked.id IN (SELECT id FROM unreleased) THEN 'unreleased' ELSE seen.state END, coalesce(retried.id, again.id),
       keyed.holder, (SELECT count(done) FROM told)
FROM asked
LEFT JOIN keyed ON keyed.id = asked.id
LEFT JOIN seen ON seen.id = asked.id
LEFT JOIN retried ON retried.id = asked.id
LEFT JOIN again ON again.retry_of = asked.id
ORDER BY asked.id;

-- name: actions_retry_lock
-- Lock those of these jobs that failed or were cancelled, in the order of their ids: what a retry of many does before it takes a key. A
-- row for each id: its state when all of them were locked (NULL: in none), and the keys of the job, if it was locked.
WITH asked AS MATERIALIZED (
    SELECT id FROM unnest(%(ids)s::text::bigint[]) AS id
), seen AS MATERIALIZED (
    SELECT * FROM pgqueue.lock_ended(%(ids)s::text::bigint[], '{failed,cancelled}')
), dead AS MATERIALIZED (
    SELECT DISTINCT ON (id) * FROM seen WHERE locked ORDER BY id, finished_at DESC
)
SELECT asked.id, seen.state, 'idempotency:' || dead.idempotency_key, 'unique:' || dead.unique_key
FROM asked LEFT JOIN seen ON seen.id = asked.id LEFT JOIN dead ON dead.id = asked.id
ORDER BY asked.id;

-- name: actions_retry_keys
-- Lock these unique keys (as JSON: they may have line breaks), in the order of their bytes. A row for each that a living job has: the key,
-- and that job.
SELECT held.key, held.holder
FROM pgqueue.lock_keys(ARRAY(SELECT json_array_elements_text(%(keys)s::text::json))) AS held;

-- name: actions_discard
-- Jobs that have ended are deleted, with their attempts, cursors and progress. A row for each id: its state when all of them
-- were locked (NULL: in none), and whether it was deleted. A job that has ended and was not deleted is to be asked for anew.
-- If an id stands twice, both rows go; if one of them lives, none.
-- A key that still holds goes on answering: its hash is kept until it expires. Other keys of the jobs go.
-- A job that its flow needs (`needed_by_flows`) is left alone; its state is then answered as `needed`.
-- Locks the jobs in the order of their ids, then the keys in theirs, as a retry does. Waits for transactions that have one of them just now.
-- If a filter has chosen jobs that ended more than `older` seconds ago (NULL: it has not), one that has ended anew is left alone, as if it
-- were in no state.
WITH locked AS MATERIALIZED (
    SELECT * FROM pgqueue.lock_ended(%(ids)s::text::bigint[], '{completed,skipped,failed,cancelled}')
), seen AS MATERIALIZED (
    SELECT l.id, l.state, l.locked FROM locked AS l
    WHERE %(older)s::float8 IS NULL OR NOT l.locked OR l.finished_at < (SELECT pgqueue.now()) - make_interval(secs => %(older)s::float8)
), done AS MATERIALIZED (
    SELECT d.id, d.discarded, d.state FROM pgqueue.discard_ended(ARRAY(SELECT DISTINCT id FROM seen WHERE locked ORDER BY id)) AS d
), found AS MATERIALIZED (
    SELECT asked.id, CASE WHEN bool_or(done.state = 'needed') THEN 'needed' ELSE seen.state END AS state,
        coalesce(bool_or(done.discarded), false) AS discarded
    FROM unnest(%(ids)s::text::bigint[]) AS asked (id) LEFT JOIN seen ON seen.id = asked.id LEFT JOIN done ON done.id = asked.id
    GROUP BY asked.id, seen.state
), recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, jobs, count)
    SELECT {{actor}}, 'discard', %(target)s::text::jsonb, changed.ids, cardinality(changed.ids)
    FROM (SELECT array_agg(DISTINCT id) AS ids FROM found WHERE discarded) AS changed
    WHERE changed.ids IS NOT NULL
)
SELECT found.id, found.state, found.discarded, NULL::bigint, NULL FROM found ORDER BY found.id;

-- name: actions_reschedule
-- Jobs that wait are due at another time: scheduled if that is to come, else available at once, at the end of their lanes. A job with
-- crashes keeps to the lanes of poison jobs. What a job held, it gives up: a sweep hears of that. A row for each id: its state as this
-- statement's snapshot had it (NULL: in none), and whether it was rescheduled. A waiting one that was not is on the move, and to be asked
-- for anew. Locks rows as a cancel does.
WITH asked AS MATERIALIZED (
    SELECT id FROM unnest(%(ids)s::text::bigint[]) AS id
), {{reschedule_asked}}, recorded AS (
    INSERT INTO pgqueue.audit (actor, action, target, jobs, count, details)
    SELECT {{actor}}, 'reschedule', %(target)s::text::jsonb, changed.ids, cardinality(changed.ids), jsonb_build_object('at', greatest(clock.at, clock.now))
    FROM clock CROSS JOIN (SELECT array_agg(id ORDER BY id) AS ids FROM moved) AS changed
    WHERE changed.ids IS NOT NULL
)
SELECT asked.id, coalesce(gone.state, seen.state),
       CASE WHEN (SELECT count(*) FROM gone) <> (SELECT count(*) FROM moved)
            THEN pgqueue.refuse('jobs were deleted and not rescheduled') IS NULL ELSE gone.id IS NOT NULL END,
       NULL::bigint, (SELECT count(done) FROM told)
FROM asked LEFT JOIN seen ON seen.id = asked.id LEFT JOIN gone ON gone.id = asked.id
ORDER BY asked.id;

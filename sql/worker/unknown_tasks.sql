-- Jobs of tasks that no live worker of their queue knows. They stay available, or blocked, and no worker could end
-- them. A queue that no worker serves, or a queue or task that is paused, is left alone: `status` says so, and a worker may come. If no
-- look was made for a day, because all workers were stopped, the time begins anew.

-- name: unknown_tasks_look
-- Look at the next n available and blocked jobs after this id. Note the tasks that no live worker knows. It is not the turn yet of a job
-- that waits for its release.
--
-- 1. If a job of these is past its deadline, cancel it.
-- 2. If it has been due, and its task unknown, for `seconds`, fail it.
--
-- Waits for no lock of a job. Answers the last id (NULL: no job is left), how many jobs were looked at, and how many of
-- them were ended.
WITH looked AS MATERIALIZED (
    SELECT j.id, j.queue, j.task, j.enqueued_at, j.run_at, j.deadline, (j.node < 0) IS TRUE AS waits FROM pgqueue.job j
    WHERE j.state IN ('available', 'blocked') AND j.id > %(after)s::bigint
    ORDER BY j.id LIMIT %(n)s::integer
), unknown AS MATERIALIZED (
    SELECT l.* FROM looked l
    WHERE NOT l.waits AND NOT {{served}}
      AND (l.queue IN (SELECT s.queue FROM pgqueue.served() AS s)) IS TRUE
      AND NOT l.queue = {{paused}} AND NOT l.task = {{paused_task}}
), seen AS (
    INSERT INTO pgqueue.unknown_task AS t (queue, task, since, seen_at)
    SELECT each.queue, each.task, pgqueue.now(), pgqueue.now()
    FROM (SELECT DISTINCT u.queue, u.task FROM unknown u) AS each ORDER BY each.queue, each.task
    ON CONFLICT (queue, task) DO UPDATE
        SET seen_at = excluded.seen_at,
            since = CASE WHEN t.seen_at < excluded.seen_at - interval '1 day' THEN excluded.since ELSE t.since END
    RETURNING t.queue, t.task, t.since
), judged AS MATERIALIZED (
    SELECT u.id, u.deadline <= pgqueue.now() IS TRUE AS late
    FROM unknown u LEFT JOIN seen ON seen.queue = u.queue AND seen.task = u.task
    WHERE u.deadline <= pgqueue.now()
       OR greatest(seen.since, u.enqueued_at, u.run_at) <= pgqueue.now() - make_interval(secs => %(seconds)s::float8)
), waiting AS MATERIALIZED (
    SELECT a.ctid FROM pgqueue.job_available a WHERE a.id = ANY (ARRAY(SELECT id FROM judged)) FOR UPDATE SKIP LOCKED
), stuck AS MATERIALIZED (
    SELECT b.ctid FROM pgqueue.job_blocked b WHERE b.id = ANY (ARRAY(SELECT id FROM judged)) FOR UPDATE SKIP LOCKED
), available AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM waiting)) RETURNING *
), blocked AS (
    DELETE FROM pgqueue.job_blocked WHERE ctid = ANY (ARRAY(SELECT ctid FROM stuck)) RETURNING *
), ended AS MATERIALIZED (
    SELECT e.*, judged.late FROM (TABLE available UNION ALL TABLE blocked) AS e JOIN judged ON judged.id = e.id
), noted AS (
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome, message, version_tag)
    SELECT id, enqueued_at, attempt, %(worker_id)s::bigint, 0, pgqueue.now(), pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'),
        CASE WHEN late THEN 'cancelled' ELSE 'refused' END,
        CASE WHEN late THEN 'deadline' ELSE concat('no task named ', quote_literal(task), ' is imported by any worker') END,
        %(version_tag)s::text
    FROM ended
), dead AS (
    INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, version_tag, {{attempts}}, {{job}})
    SELECT CASE WHEN late THEN 'cancelled' ELSE 'failed' END, pgqueue.now(),
        (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), CASE WHEN late THEN 'deadline' ELSE 'refused' END,
        %(version_tag)s::text, {{attempts}}, {{job}}
    FROM ended
    RETURNING id
), happened AS MATERIALIZED (
    SELECT queue, task, CASE WHEN late THEN 'expired' ELSE 'failed' END AS what FROM ended
), counted AS (
    {{count_happened}}
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END AS done
    FROM (SELECT ':ended.' || w.job_id AS channel, '' AS what FROM pgqueue.job_waiter w WHERE w.job_id = ANY (ARRAY(SELECT id FROM dead))
          UNION (SELECT DISTINCT ':control', 'node:' || abs(node) FROM ended WHERE node IS NOT NULL LIMIT 100)) AS news
    WHERE %(notify)s::boolean
)
SELECT (SELECT max(id) FROM looked), (SELECT count(*) FROM looked), (SELECT count(*) FROM dead), (SELECT count(done) FROM told);

-- name: unknown_tasks_forget
-- Forget the tasks that a live worker knows again. Also forget those that the last whole walk over all jobs, begun at
-- `walked`, has not seen (NULL: none of these). Answers the time now, in seconds since 1970, and what `forget_rows` does.
SELECT extract(epoch FROM pgqueue.now())::float8, f.* FROM pgqueue.forget_rows('pgqueue.unknown_task', ARRAY(
    SELECT t.ctid FROM pgqueue.unknown_task t
    WHERE {{served}} OR t.seen_at < to_timestamp(%(walked)s::float8))) AS f;

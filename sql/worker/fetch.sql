-- The claim of plain jobs: those without a lock, a limit or a rate. What claims have in common is in fragments.sql.

-- name: fetch_reading
-- What the watermark has to know before a claim of plain jobs. Then the most urgent of these lanes that has a job with keys of these
-- `tasks` behind its cursor: its rank, its place (from 1) and the position of that job; NULL if none has one. Then the paused queues and
-- tasks. The claim asks no lane of a lower priority than that one.
WITH lane AS MATERIALIZED (
    {{reading_lanes}}
), other AS MATERIALIZED (
    SELECT lane.rank, lane.place, waiting.pos FROM lane CROSS JOIN LATERAL (
        SELECT j.pos FROM pgqueue.job_available j
        WHERE {{reading_jobs}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
        ORDER BY j.pos NULLS FIRST LIMIT 1
    ) AS waiting LIMIT 1
)
-- A plain claim may be lost with a crash of the server: then its jobs run once more.
{{reading}}, set_config('synchronous_commit', 'off', true)
FROM {{reading_from}};

-- name: fetch_claim
-- Move up to n available plain jobs of these `tasks` in the open lanes to this worker, the most urgent lane first. Every condition
-- stands in `lane` and `picked`. What is picked is deleted; what is deleted is inserted, or the statement raises. The last column of
-- the first row is the summary, as a JSON object: `lanes` are the places (from 1) of the lanes that were open, `paused` the tasks that
-- were not. The rest are the jobs.
WITH lane AS MATERIALIZED (
    {{claim_lanes}}
), picked AS MATERIALIZED (
    SELECT available.ctid FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid FROM pgqueue.job_available j
        WHERE {{in_lane}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
        ORDER BY j.pos NULLS FIRST LIMIT lane.most FOR UPDATE SKIP LOCKED
    ) AS available LIMIT %(n)s::integer
), {{plain_taken}}
SELECT {{no_job}}, CASE WHEN (SELECT count(*) FROM picked) <> (SELECT count(*) FROM running)
                        THEN pgqueue.refuse('a claim deleted jobs it did not start')::text
                        ELSE json_build_object('lanes', (SELECT coalesce(json_agg(place), '[]') FROM lane),
                                                'paused', ARRAY(SELECT name FROM pgqueue.paused_task))::text END AS summary
UNION ALL
SELECT {{claimed}}, NULL FROM (SELECT *, {{texts}} FROM taken OFFSET 0) AS taken;

-- name: fetch_glance
-- Move up to n available plain jobs of these `tasks` in one lane to this worker, if the lane is open. The last column of the first row is
-- the snapshot of this statement. The rest are the jobs.
WITH picked AS MATERIALIZED (
    SELECT j.ctid FROM pgqueue.job_available j
    WHERE j.queue = %(queue)s::text AND j.rank = %(rank)s::smallint AND j.pos > %(after)s::bigint
      AND (j.task IN ({{open_tasks}})) IS TRUE AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
      AND NOT %(queue)s::text = {{paused}} AND EXISTS ({{live_worker}})
    ORDER BY j.pos NULLS FIRST LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED
), {{plain_taken}}
SELECT {{no_job}}, CASE WHEN (SELECT count(*) FROM picked) <> (SELECT count(*) FROM running)
                        THEN pgqueue.refuse('a claim deleted jobs it did not start')::text
                        -- As any claim of plain jobs, it may be lost with a crash of the server.
                        ELSE pg_current_snapshot()::text || left(set_config('synchronous_commit', 'off', true), 0) END
UNION ALL
SELECT {{claimed}}, NULL FROM (SELECT *, {{texts}} FROM taken OFFSET 0) AS taken;

-- name: fetch_first
-- The job that a claim of one plain job of these `tasks` and lanes would take: its lane, position, id and task. No row: there is none.
WITH lane AS MATERIALIZED (
    {{claim_lanes}}
)
SELECT available.* FROM lane CROSS JOIN LATERAL (
    SELECT j.queue, j.rank, j.pos, j.id, j.task FROM pgqueue.job_available j
    WHERE {{in_lane}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
    ORDER BY j.pos NULLS FIRST LIMIT 1 FOR UPDATE SKIP LOCKED
) AS available LIMIT 1;

-- name: fetch_put_aside
-- The server refuses each claim of this available job, by itself, too: it fails, reason `refused`, and its attempt says why. Without its
-- arguments and headers if `bare`: it is these that cannot be read. Answers its id; no row: it is locked, or gone.
WITH taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(
        SELECT a.ctid FROM pgqueue.job_available a WHERE a.id = %(id)s::bigint AND a.pos + 0 = %(pos)s::bigint FOR UPDATE SKIP LOCKED))
    RETURNING {{attempts}}, {{job}}
), refused AS (
    SELECT {{attempts}}, id, queue, priority, task, CASE WHEN %(bare)s::boolean THEN '{}' ELSE args END AS args,
        CASE WHEN NOT %(bare)s::boolean THEN headers END AS headers, enqueued_at, {{keys}}, unique_key, idempotency_key, node,
        max_attempts, deadline
    FROM taken
), noted AS (
    INSERT INTO pgqueue.attempt (
        job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome, error_type, message)
    SELECT id, enqueued_at, least(attempt + 1, 32767), %(worker_id)s::bigint, 0, pgqueue.now(), pgqueue.now(),
        (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'), 'failed', %(error_type)s::text, %(message)s::text
    FROM refused
), {{put_aside}}
SELECT id, (SELECT count(CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, what)::text END)
            FROM (SELECT ':ended.' || w.job_id AS channel, '' AS what FROM pgqueue.job_waiter w WHERE w.job_id = %(id)s::bigint
                  UNION ALL SELECT ':control', 'node:' || node FROM refused WHERE node IS NOT NULL) AS news
            WHERE %(notify)s::boolean)
FROM put_aside;

-- name: fetch_lock_timeout
-- The statements behind this one, in its transaction, wait so long for a lock.
SELECT set_config('lock_timeout', %(timeout)s::text, true);

-- name: fetch_probe
-- Has anything happened since the last fetch? Read-only, takes no id, touches no job: the head of the position sequence,
-- the snapshot, the paused queues and the paused tasks.
SELECT coalesce(pg_sequence_last_value('pgqueue.job_pos_seq'), 0),
       pg_current_snapshot()::text,
       ARRAY(SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL), ARRAY(SELECT name FROM pgqueue.paused_task);

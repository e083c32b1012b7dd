-- The claim of jobs with keys: a lock, a limit or a rate. What claims have in common is in fragments.sql; why a claim may take a job
-- of a key is at the head of keyed_claim.py.

-- name: keyed_claim_reading
-- What the watermark has to know before a claim of jobs with keys. As `fetch_reading`, but it looks for plain jobs as the other kind.
WITH lane AS MATERIALIZED (
    {{reading_lanes}}
), other AS MATERIALIZED (
    SELECT lane.rank, lane.place, waiting.pos FROM lane CROSS JOIN LATERAL (
        SELECT j.pos FROM pgqueue.job_available j
        WHERE {{reading_jobs}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
        ORDER BY j.pos NULLS FIRST LIMIT 1
    ) AS waiting LIMIT 1
)
{{reading}}, {{durable}}
FROM {{reading_from}};

-- name: keyed_claim_first
-- As `fetch_first`, for jobs with keys.
WITH lane AS MATERIALIZED (
    {{claim_lanes}}
)
SELECT available.* FROM lane CROSS JOIN LATERAL (
    SELECT j.queue, j.rank, j.pos, j.id, j.task FROM pgqueue.job_available j
    WHERE {{in_lane}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
    ORDER BY j.pos NULLS FIRST LIMIT 1 FOR UPDATE SKIP LOCKED
) AS available LIMIT 1;

-- name: keyed_claim_lock
-- Ahead of a claim in the same transaction: lock the keys of the next n available jobs of these `tasks` and lanes. A setting of this
-- transaction tells the claim the first job of each key, unless that job has a limit or a rate, too. A key that another session has
-- locked is left out: this waits for no lock, so it may lock in any order. All `workers` together take an eighth of the server's lock
-- table at most; answers how many entries that is. It must be a statement of its own, before the claim: the claim counts holders in a
-- snapshot from after these locks.
WITH table_of_locks AS MATERIALIZED (
    SELECT current_setting('max_locks_per_transaction')::bigint * current_setting('max_connections')::bigint / 8 AS eighth
), lane AS MATERIALIZED (
    SELECT l.queue, l.rank, l.after, l.upto, l.place
    FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(afters)s::bigint[], %(uptos)s::bigint[])
         WITH ORDINALITY AS l (queue, rank, after, upto, place)
    WHERE {{open_lane}} ORDER BY l.place
), seen AS MATERIALIZED (
    SELECT available.* FROM lane CROSS JOIN LATERAL (
        SELECT j.id, j.rank, CASE WHEN NOT j.holds THEN j.lock_key END AS lock_key,
               coalesce(j.limit_key, j.rate_key) IS NULL AS alone
        FROM pgqueue.job_available j
        WHERE {{in_lane}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
        ORDER BY j.pos NULLS FIRST LIMIT %(n)s::integer
    ) AS available LIMIT %(n)s::integer
), first AS MATERIALIZED (
    SELECT DISTINCT ON (lock_key COLLATE "C") lock_key, id, alone FROM seen WHERE lock_key IS NOT NULL
    ORDER BY lock_key COLLATE "C", rank, id
    LIMIT greatest(1, (SELECT eighth FROM table_of_locks) / %(workers)s::integer)
)
SELECT (SELECT eighth FROM table_of_locks),
       -- not the text itself: the worker does not read it
       pg_catalog.set_config('pgqueue.locked', coalesce(pg_catalog.array_agg(id)::pg_catalog.text, ''), true) IS NOT NULL
FROM first WHERE alone AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('pgqueue.lock:' || lock_key, 7));

-- name: keyed_claim_block
-- Ahead of a claim in the same transaction: block those of the next n available jobs of these `tasks` and lanes that need a key. So a
-- long row of such jobs costs few fetches, and does not count against a claim's n. Locks no other job, and leaves the rest where it is.
-- If there were any, one row with a JSON object: how many (`n`), and their `keys` with those ids that may be skipped. `several` are the
-- keys of which a job has a limit above 1; `lowest` are the lowest rank and the lowest id of any.
WITH lane AS MATERIALIZED (
    {{claim_lanes}}
), seen AS MATERIALIZED (
    SELECT available.ctid, available.keyed FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid, j.rate_key IS NOT NULL OR NOT j.holds AND coalesce(j.lock_key, j.limit_key) IS NOT NULL AS keyed
        FROM pgqueue.job_available j
        WHERE {{in_lane}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
        ORDER BY j.pos NULLS FIRST LIMIT %(n)s::integer
    ) AS available LIMIT %(n)s::integer
), picked AS MATERIALIZED (
    SELECT ctid FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM seen WHERE keyed)) FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING *
), blocked AS (
    {{block}}
    RETURNING id, rank, key, on_locked, lock_limit
)
SELECT json_build_object(
    'n', sum(n), 'keys', json_object_agg(key, coalesce(ids, '{}')), 'several', json_agg(key) FILTER (WHERE several),
    'lowest', json_build_array(min(lowest_rank), min(lowest_id)))::text
FROM (SELECT key, array_agg(id) FILTER (WHERE on_locked <> 'wait' AND starts_with(key, 'lock:')) AS ids, count(*) AS n,
             bool_or(lock_limit > 1) AS several, min(rank) AS lowest_rank, min(id) AS lowest_id
      FROM blocked GROUP BY key) AS keys
HAVING count(*) > 0;

-- name: keyed_claim_move
-- Take up to n available jobs with keys, of these `tasks` and the open lanes, the most urgent lane first. A job that holds its keys, or
-- whose key is `free`, comes to this worker. Any other is blocked, and waits for the first that it lacks of lock, limit and rate. A job
-- that `holds` has lock and limit. A rate is never held, only passed, so every job under a rate is blocked. Every condition stands in
-- `lane` and `picked`. What is picked is deleted; what is deleted is inserted, or the statement raises.
-- The holders of a lock are read behind the hold_pos that `starts`, a JSON object, has for its key (see holder_cursors.py). Its waiting
-- queue is read behind the [rank, id] that `lines` has (see waiter_cursors.py).
-- The last column of the first row is the summary, as a JSON object: `lanes` and `paused`, as `fetch_claim`; `lowest_hold`, the lowest hold_pos of
-- the jobs that run now; `held`, the locks that came with such a job; and `blocked`, unless no job was. That is an object, too: `lanes`
-- [queue, rank, how many jobs, highest position], and `keys`, `several`, `lowest`, as `keyed_claim_block`. The rest are the jobs.
WITH lane AS MATERIALIZED (
    {{claim_lanes}}
), picked AS MATERIALIZED (
    SELECT available.* FROM lane CROSS JOIN LATERAL (
        SELECT j.ctid, j.id,
               CASE WHEN NOT j.holds AND coalesce(j.limit_key, j.rate_key) IS NULL THEN j.lock_key END AS lock_key
        FROM pgqueue.job_available j
        WHERE {{in_lane}} AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
        ORDER BY j.pos NULLS FIRST LIMIT lane.most FOR UPDATE SKIP LOCKED
    ) AS available LIMIT %(n)s::integer
), free AS MATERIALIZED (
    -- Jobs whose keys `keyed_claim_lock` has locked, and that no job holds or waits for: they need not be blocked. Each key is looked
    -- up by itself (OFFSET 0, LIMIT), and so is each id (IS TRUE). A join might read all of job_blocked, or compare all with all.
    SELECT wanted.id
    FROM (
        SELECT j.id, 'lock:' || j.lock_key AS key, coalesce(((SELECT %(starts)s::text::jsonb) ->> j.lock_key)::bigint, 0) AS after,
               coalesce(((SELECT %(lines)s::text::jsonb) -> j.lock_key ->> 0)::smallint, -32768) AS line_rank,
               coalesce(((SELECT %(lines)s::text::jsonb) -> j.lock_key ->> 1)::bigint, 0) AS line_id
        FROM picked AS j
        WHERE j.lock_key IS NOT NULL
          AND (j.id IN (SELECT unnest(nullif(current_setting('pgqueue.locked', true), '')::bigint[]))) IS TRUE
    ) AS wanted
    CROSS JOIN (SELECT 1 AS most) AS head
    CROSS JOIN LATERAL ({{lock_holders}}) AS held
    WHERE held.n = 0
      AND NOT EXISTS (SELECT FROM pgqueue.job_blocked b
                      WHERE b.key = wanted.key AND (b.rank, b.id) > (wanted.line_rank, wanted.line_id) OFFSET 0)
), taken AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked))
    RETURNING {{job}}, {{attempts}}, pos, rank, holds, rate_key IS NULL AND holds OR id IN (SELECT id FROM free) AS runs
), running AS (
    INSERT INTO pgqueue.job_running (
        state, worker_id, claim, started_at, rank, holds, hold_pos, attempt, run_at, crashes, snoozes, {{job}})
    SELECT 'running', %(worker_id)s::bigint, %(claim)s::integer, pgqueue.now(), rank, true, nextval('pgqueue.job_hold_seq'),
        least(attempt + 1, 32767), run_at, crashes, snoozes, {{job}}
    FROM taken WHERE runs
    RETURNING hold_pos
), blocked AS (
    {{block}} WHERE NOT runs
    RETURNING id, rank, key, on_locked, lock_limit
)
SELECT {{no_job}}, CASE
    WHEN (SELECT count(*) FROM picked) <> (SELECT count(*) FROM running) + (SELECT count(*) FROM blocked)
    THEN pgqueue.refuse('a claim deleted jobs it did not start')::text
    ELSE json_build_object(
        'lanes', (SELECT coalesce(json_agg(place), '[]') FROM lane), 'paused', ARRAY(SELECT name FROM pgqueue.paused_task),
        'lowest_hold', (SELECT min(hold_pos) FROM running),
        'held', (SELECT coalesce(json_agg(lock_key), '[]') FROM taken WHERE holds AND lock_key IS NOT NULL AND runs),
        'blocked', CASE WHEN EXISTS (SELECT FROM blocked) THEN json_build_object(
            'lanes', (SELECT json_agg(json_build_array(queue, rank, n, pos)) FROM (
                SELECT queue, rank, count(*) AS n, max(pos) AS pos FROM taken WHERE NOT runs GROUP BY queue, rank) AS lanes),
            'keys', (SELECT json_object_agg(key, coalesce(ids, '{}')) FROM (
                SELECT key, array_agg(id) FILTER (WHERE on_locked <> 'wait' AND starts_with(key, 'lock:')) AS ids
                FROM blocked GROUP BY key) AS keys),
            'several', (SELECT json_agg(DISTINCT key) FROM blocked WHERE lock_limit > 1),
            'lowest', (SELECT json_build_array(min(rank), min(id)) FROM blocked)) END)::text END AS summary
UNION ALL
SELECT {{claimed}}, NULL
FROM (SELECT {{job}}, run_at, least(attempt + 1, 32767)::smallint AS attempt, crashes, snoozes, pos, rank, {{texts}}
      FROM taken WHERE runs OFFSET 0) AS started;

-- breaking: no
--
-- What was true before a wait may not be true after it.
--
-- 1. An operation by filter locked jobs by their ids and states. A job that another transaction was just replacing (an enqueue with
--    `on_duplicate="replace"`) could belong to another queue or task by then, and was cancelled.
-- 2. A discard deleted the row of a unique key at the place where it had locked it. If it had waited for a completion that wrote the row
--    anew, its snapshot had nothing at that place. The text of the key stayed.

-- Lock those of these jobs that fit this operation, and that no other transaction has. It waits for none, so their order does not matter.
-- What it compares is the row that it locks. Running jobs are answered and not locked: only their worker and a rescue may do that.
CREATE FUNCTION pgqueue.bulk_lock(bulk bigint, ids bigint[]) RETURNS SETOF bigint LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    b pgqueue.bulk;
    real_states text[];
    only_retrying boolean;
BEGIN
    SELECT * INTO b FROM pgqueue.bulk WHERE bulk.id = bulk_lock.bulk;
    real_states := array_replace(b.states, 'retrying', 'scheduled');
    only_retrying := 'retrying' = ANY (b.states) AND 'scheduled' <> ALL (b.states);
    RETURN QUERY SELECT j.id FROM pgqueue.job j
    WHERE j.id = ANY (bulk_lock.ids) AND j.state = ANY (real_states) AND j.state <> 'running'
      AND (NOT only_retrying OR j.state <> 'scheduled' OR j.attempt > 0 OR j.crashes > 0)
      AND (b.queue IS NULL OR j.queue = b.queue) AND (b.task IS NULL OR j.task = b.task)
      AND (b.ended_before IS NULL OR j.finished_at < b.ended_before)
    FOR UPDATE SKIP LOCKED;
    IF 'running' = ANY (b.states) THEN
        RETURN QUERY SELECT r.id FROM pgqueue.job_running r
        WHERE r.id = ANY (bulk_lock.ids) AND (b.queue IS NULL OR r.queue = b.queue) AND (b.task IS NULL OR r.task = b.task);
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.bulk_lock(bigint, bigint[]) IS 'Part of an operation by filter: for no other caller.';

-- As in 0029, and a key is deleted by its name. Once it is locked, the row of the key names this job, whichever version of it there is; no
-- other job gets the key before this transaction ends.
CREATE OR REPLACE FUNCTION pgqueue.discard_ended(ids bigint[]) RETURNS TABLE (id bigint, state text, discarded boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT a.id FROM unnest(discard_ended.ids) AS a (id)
    ), seen AS MATERIALIZED (
        SELECT DISTINCT ON (found.id) found.id, found.state
        FROM pgqueue.job_states(discard_ended.ids) AS found
        ORDER BY found.id, found.state IN ('available', 'scheduled', 'blocked', 'running') DESC, found.finished_at DESC
    ), ended AS MATERIALIZED (
        SELECT j.*
        FROM (
            SELECT seen.id FROM seen WHERE seen.state IN ('completed', 'skipped', 'failed', 'cancelled') ORDER BY seen.id
        ) AS mine
        CROSS JOIN LATERAL (
            SELECT j.id, j.enqueued_at, j.finished_at, j.unique_key, j.idempotency_key, j.tableoid AS part, j.ctid AS place
            FROM pgqueue.job j
            WHERE j.id = mine.id AND j.state IN ('completed', 'skipped', 'failed', 'cancelled')
            FOR UPDATE
        ) AS j
    ), keys AS MATERIALIZED (
        SELECT mine.key, mine.id, mine.enqueued_at, k.hold = 'after' AND k.until > pgqueue.now() AS holds, k.until
        FROM (
            SELECT named.key, ended.id, ended.enqueued_at, max(ended.finished_at) AS finished_at
            FROM ended CROSS JOIN LATERAL (
                VALUES ('unique:' || ended.unique_key), ('idempotency:' || ended.idempotency_key)
            ) AS named (key)
            WHERE named.key IS NOT NULL
            GROUP BY named.key, ended.id, ended.enqueued_at
            ORDER BY named.key COLLATE "C"
        ) AS mine
        CROSS JOIN LATERAL (
            SELECT k.hold, coalesce(k.expires_at, mine.finished_at + make_interval(secs => k.seconds)) AS until
            FROM pgqueue.unique_key k
            WHERE k.key = mine.key AND k.job_id = mine.id AND k.enqueued_at = mine.enqueued_at IS NOT FALSE
            LIMIT 1 FOR UPDATE
        ) AS k
    ), kept AS (
        INSERT INTO pgqueue.discarded_key (hash, job_id, enqueued_at, expires_at)
        SELECT DISTINCT ON (keys.key) pgqueue.key_hash(keys.key), keys.id, keys.enqueued_at, keys.until
        FROM keys WHERE keys.holds ORDER BY keys.key, keys.until DESC
        ON CONFLICT (hash) DO UPDATE
        SET job_id = excluded.job_id, enqueued_at = excluded.enqueued_at, expires_at = excluded.expires_at
    ), freed AS (
        DELETE FROM pgqueue.unique_key k WHERE k.key = ANY (ARRAY(SELECT keys.key FROM keys))
    ), attempts AS (
        DELETE FROM pgqueue.attempt a WHERE a.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), cursors AS (
        DELETE FROM pgqueue.job_cursor c WHERE c.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), progress AS (
        DELETE FROM pgqueue.job_progress p WHERE p.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), signals AS (
        DELETE FROM pgqueue.job_signal s WHERE s.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
    ), done AS (
        DELETE FROM pgqueue.job_done d
        WHERE d.id = ANY (ARRAY(SELECT ended.id FROM ended)) AND (d.tableoid, d.ctid) IN (SELECT ended.part, ended.place FROM ended)
        RETURNING d.id
    ), dead AS (
        DELETE FROM pgqueue.job_dead d
        WHERE d.id = ANY (ARRAY(SELECT ended.id FROM ended)) AND (d.tableoid, d.ctid) IN (SELECT ended.part, ended.place FROM ended)
        RETURNING d.id
    )
    SELECT asked.id, seen.state::text, asked.id IN (SELECT done.id FROM done UNION ALL SELECT dead.id FROM dead)
    FROM asked LEFT JOIN seen ON seen.id = asked.id
    ORDER BY asked.id;
END $$;

-- Owned by the owner of the tables, whichever role applies this. Roles that take part in operations lock their jobs.
DO $$
DECLARE
    made CONSTANT regprocedure := 'pgqueue.bulk_lock(bigint, bigint[])';
    model CONSTANT regprocedure := 'pgqueue.bulk_lock(bigint[], text[])';
    allowed record;
BEGIN
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = model) THEN
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END IF;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        WHERE p.oid = model AND a.grantee <> p.proowner GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', made, allowed.role, allowed.too);
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (40, 'looked_again', false);

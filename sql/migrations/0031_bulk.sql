-- breaking: no
--
-- Operations on all jobs that fit a filter, in steps that any process can go on with. The proof is at the head of admin/bulk/steps.py.

CREATE TABLE pgqueue.bulk (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    started_at   timestamptz NOT NULL DEFAULT pgqueue.now(),
    actor        text        NOT NULL CHECK (octet_length(actor) BETWEEN 1 AND 800),
    action       text        NOT NULL CHECK (action IN ('cancel', 'retry', 'discard', 'reschedule')),
    -- The filter: as the record shows it, and in the parts that a step compares. At least one part beside the states is given, or a state.
    target       jsonb       NOT NULL,
    states       text[]      NOT NULL CHECK (cardinality(states) > 0),
    queue        text        COLLATE "C",
    task         text        COLLATE "C",
    ended_before timestamptz,
    -- What else the action needs: a reason, a time, whether completed jobs are run again.
    options      jsonb       NOT NULL DEFAULT '{}',
    -- Ids above this one are not looked at.
    up_to        bigint      NOT NULL,
    -- Jobs a second at most. NULL: as many as there are.
    pace         float8      CHECK (pace > 0),
    -- Each step, and each process that takes the operation, adds 1. A step names the number that it knows.
    fence        bigint      NOT NULL DEFAULT 0,
    -- 0: the walk over all ids. Then the jobs that were locked are tried again, some times.
    round        smallint    NOT NULL DEFAULT 0,
    -- The jobs up to this id have been dealt with in this round.
    after        bigint      NOT NULL DEFAULT 0,
    -- What became of the jobs: a number for each reason. `changed` is how many of them were changed.
    counts       jsonb       NOT NULL DEFAULT '{}',
    changed      bigint      NOT NULL DEFAULT 0,
    -- The process that works on it, and until when no other process takes it.
    holder       text,
    leased_until timestamptz NOT NULL DEFAULT '-infinity',
    -- No step begins before this.
    next_at      timestamptz NOT NULL DEFAULT pgqueue.now(),
    ended_at     timestamptz,
    stopped_by   text,
    -- The row of the record, written by a trigger.
    audit_at     timestamptz,
    audit_id     bigint
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.bulk IS 'Operations on all jobs that fit a filter, and how far each is.';
-- Those that are not over. No step changes what this index has.
CREATE INDEX bulk_open ON pgqueue.bulk (id) WHERE ended_at IS NULL;

-- The first jobs of each reason; and of those that were locked, all that are to be tried again.
CREATE TABLE pgqueue.bulk_job (
    bulk_id bigint NOT NULL,
    reason  text   COLLATE "C" NOT NULL,
    job_id  bigint NOT NULL,
    PRIMARY KEY (bulk_id, reason, job_id)
);
COMMENT ON TABLE pgqueue.bulk_job IS 'The first jobs of each reason of an operation, and those that were locked.';

-- The next `most` jobs after one id and up to another, in order, in the partitions that hold these states; another state of the same
-- partition is among them. The state `retrying` stands for scheduled jobs that wait for another attempt. No condition on rows but the
-- ids: so `most` is a limit of the work.
CREATE FUNCTION pgqueue.bulk_walk(states text[], after bigint, up_to bigint, most integer)
RETURNS TABLE (id bigint, state text, queue varchar, task varchar, finished_at timestamptz, retrying boolean) LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT w.id, w.state, w.queue, w.task, w.finished_at, w.attempt > 0 OR w.crashes > 0 FROM (
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes FROM pgqueue.job_scheduled j
         WHERE bulk_walk.states && ARRAY['scheduled', 'retrying'] AND j.id > bulk_walk.after AND j.id <= bulk_walk.up_to
         ORDER BY j.id LIMIT bulk_walk.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes FROM pgqueue.job_available j
         WHERE 'available' = ANY (bulk_walk.states) AND j.id > bulk_walk.after AND j.id <= bulk_walk.up_to ORDER BY j.id LIMIT bulk_walk.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes FROM pgqueue.job_blocked j
         WHERE 'blocked' = ANY (bulk_walk.states) AND j.id > bulk_walk.after AND j.id <= bulk_walk.up_to ORDER BY j.id LIMIT bulk_walk.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes FROM pgqueue.job_running j
         WHERE 'running' = ANY (bulk_walk.states) AND j.id > bulk_walk.after AND j.id <= bulk_walk.up_to ORDER BY j.id LIMIT bulk_walk.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes FROM pgqueue.job_done j
         WHERE bulk_walk.states && ARRAY['completed', 'skipped'] AND j.id > bulk_walk.after AND j.id <= bulk_walk.up_to
         ORDER BY j.id LIMIT bulk_walk.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes FROM pgqueue.job_dead j
         WHERE bulk_walk.states && ARRAY['failed', 'cancelled'] AND j.id > bulk_walk.after AND j.id <= bulk_walk.up_to
         ORDER BY j.id LIMIT bulk_walk.most)
    ) AS w ORDER BY w.id LIMIT bulk_walk.most;
END $$;
COMMENT ON FUNCTION pgqueue.bulk_walk IS 'Part of an operation by filter: for no other caller.';

-- The highest id, up to this one, in the partitions that hold these states.
CREATE FUNCTION pgqueue.bulk_last(states text[], up_to bigint) RETURNS bigint LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN greatest(
        (SELECT j.id FROM pgqueue.job_scheduled j WHERE states && ARRAY['scheduled', 'retrying'] AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_available j WHERE 'available' = ANY (states) AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_blocked j WHERE 'blocked' = ANY (states) AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_running j WHERE 'running' = ANY (states) AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_done j WHERE states && ARRAY['completed', 'skipped'] AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_dead j WHERE states && ARRAY['failed', 'cancelled'] AND j.id <= up_to ORDER BY j.id DESC LIMIT 1));
END $$;
COMMENT ON FUNCTION pgqueue.bulk_last IS 'Part of an operation by filter: for no other caller.';

-- Lock those of these jobs that are in one of the states, and that no other transaction has. It waits for none, so their order does not
-- matter. Running jobs are answered and not locked: only their worker and a rescue may do that.
CREATE FUNCTION pgqueue.bulk_lock(ids bigint[], states text[]) RETURNS SETOF bigint LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    real_states text[] := array_replace(states, 'retrying', 'scheduled');
    only_retrying boolean := 'retrying' = ANY (states) AND 'scheduled' <> ALL (states);
BEGIN
    RETURN QUERY SELECT j.id FROM pgqueue.job j
    WHERE j.id = ANY (bulk_lock.ids) AND j.state = ANY (real_states) AND j.state <> 'running'
      AND (NOT only_retrying OR j.state <> 'scheduled' OR j.attempt > 0 OR j.crashes > 0)
    FOR UPDATE SKIP LOCKED;
    IF 'running' = ANY (bulk_lock.states) THEN
        RETURN QUERY SELECT r.id FROM pgqueue.job_running r WHERE r.id = ANY (bulk_lock.ids);
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.bulk_lock IS 'Part of an operation by filter: for no other caller.';

-- One row of the record for each operation, whose number of jobs is that of the steps that were committed. A trigger writes it, as the
-- owner of the tables: an operator has no right to change the record. A row that names one already comes from a dump.
CREATE FUNCTION pgqueue.record_bulk() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_RELID <> 'pgqueue.bulk'::regclass THEN
        RAISE EXCEPTION 'pgqueue: record_bulk is the trigger of pgqueue.bulk, and of no other table' USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF TG_OP = 'INSERT' THEN
        INSERT INTO pgqueue.audit (actor, action, target, count, details)
        VALUES (NEW.actor, 'bulk ' || NEW.action, NEW.target, 0, NEW.options || jsonb_build_object('bulk', NEW.id, 'up_to', NEW.up_to))
        RETURNING at, id INTO NEW.audit_at, NEW.audit_id;
    ELSE
        UPDATE pgqueue.audit a SET count = NEW.changed WHERE a.at = NEW.audit_at AND a.id = NEW.audit_id;
    END IF;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION pgqueue.record_bulk IS 'The row of the record of an operation by filter.';
CREATE TRIGGER record_bulk BEFORE INSERT ON pgqueue.bulk
    FOR EACH ROW WHEN (NEW.audit_id IS NULL) EXECUTE FUNCTION pgqueue.record_bulk();
CREATE TRIGGER record_changed AFTER UPDATE ON pgqueue.bulk
    FOR EACH ROW WHEN (NEW.changed IS DISTINCT FROM OLD.changed) EXECUTE FUNCTION pgqueue.record_bulk();

-- A worker goes on with operations, and has no right to delete what has ended but by whole leaves. So these act as the owner of the
-- tables, on jobs that an open operation of this action means. A worker cannot begin one.
CREATE FUNCTION pgqueue.bulk_meant(bulk bigint, action text, ids bigint[]) RETURNS TABLE (id bigint, enqueued_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    b pgqueue.bulk;
BEGIN
    SELECT * INTO b FROM pgqueue.bulk WHERE bulk.id = bulk_meant.bulk AND bulk.action = bulk_meant.action AND bulk.ended_at IS NULL;
    RETURN QUERY SELECT j.id, j.enqueued_at FROM pgqueue.job j
    WHERE j.id = ANY (bulk_meant.ids) AND j.id <= b.up_to AND j.state IN ('completed', 'skipped', 'failed', 'cancelled')
      AND j.state = ANY (b.states) AND (b.queue IS NULL OR j.queue = b.queue) AND (b.task IS NULL OR j.task = b.task)
      AND (b.ended_before IS NULL OR j.finished_at < b.ended_before);
END $$;
COMMENT ON FUNCTION pgqueue.bulk_meant IS 'Part of an operation by filter: for no other caller.';

-- Jobs that are to be retried, deleted.
CREATE FUNCTION pgqueue.bulk_take_dead(bulk bigint, ids bigint[], since timestamptz[]) RETURNS SETOF pgqueue.job LANGUAGE plpgsql
SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    meant_ids bigint[];
    meant_since timestamptz[];
BEGIN
    SELECT array_agg(m.id), array_agg(m.enqueued_at) INTO meant_ids, meant_since
    FROM pgqueue.bulk_meant(bulk_take_dead.bulk, 'retry', bulk_take_dead.ids) AS m
    WHERE (m.id, m.enqueued_at) IN (SELECT * FROM unnest(bulk_take_dead.ids, bulk_take_dead.since));
    RETURN QUERY SELECT * FROM pgqueue.take_dead(meant_ids, meant_since);
END $$;
COMMENT ON FUNCTION pgqueue.bulk_take_dead IS 'Part of an operation by filter: for no other caller.';

-- Jobs that are to be discarded, as by `discard_ended`. One that lives is answered, and left alone.
CREATE FUNCTION pgqueue.bulk_discard(bulk bigint, ids bigint[]) RETURNS TABLE (id bigint, state text, discarded boolean) LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT * FROM pgqueue.discard_ended(
        ARRAY(SELECT DISTINCT m.id FROM pgqueue.bulk_meant(bulk_discard.bulk, 'discard', bulk_discard.ids) AS m ORDER BY m.id));
END $$;
COMMENT ON FUNCTION pgqueue.bulk_discard IS 'Part of an operation by filter: for no other caller.';

-- Owned by the owner of the tables, whichever role applies this. A role that could look at the record looks here. One that could pause
-- queues begins operations. A worker goes on with them.
DO $$
DECLARE
    tables name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    made regprocedure;
    definer boolean;
    giving record;
    allowed record;
BEGIN
    EXECUTE format('ALTER TABLE pgqueue.bulk OWNER TO %I', tables);
    EXECUTE format('ALTER TABLE pgqueue.bulk_job OWNER TO %I', tables);
    FOR made, definer IN
        SELECT p.oid::regprocedure, p.prosecdef FROM pg_proc p
        WHERE p.pronamespace = 'pgqueue'::regnamespace
          AND p.proname IN ('bulk_walk', 'bulk_last', 'bulk_lock', 'bulk_meant', 'bulk_take_dead', 'bulk_discard', 'record_bulk')
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', made, tables);
        IF definer OR (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = 'pgqueue.now()'::regprocedure) THEN
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
        END IF;
    END LOOP;
    FOR giving IN
        SELECT * FROM (VALUES
            ('pgqueue.audit'::regclass, 'SELECT', 'SELECT ON pgqueue.bulk, pgqueue.bulk_job'),
            ('pgqueue.queue', 'INSERT',
             'INSERT (actor, action, target, states, queue, task, ended_before, options, up_to, pace) ON pgqueue.bulk'),
            ('pgqueue.supervisor_order', 'INSERT',
             'UPDATE (fence, round, after, counts, changed, holder, leased_until, next_at, ended_at, stopped_by) ON pgqueue.bulk'),
            ('pgqueue.supervisor_order', 'INSERT', 'INSERT, DELETE ON pgqueue.bulk_job'),
            ('pgqueue.unknown_task', 'DELETE', 'DELETE ON pgqueue.bulk'),
            ('pgqueue.audit', 'SELECT',
             'EXECUTE ON FUNCTION pgqueue.bulk_walk(text[], bigint, bigint, integer), pgqueue.bulk_last(text[], bigint)'),
            ('pgqueue.supervisor_order', 'INSERT',
             'EXECUTE ON FUNCTION pgqueue.bulk_lock(bigint[], text[]), pgqueue.bulk_take_dead(bigint, bigint[], timestamptz[]), '
             'pgqueue.bulk_discard(bigint, bigint[])'),
            ('pgqueue.unknown_task', 'DELETE', 'EXECUTE ON FUNCTION pgqueue.take_waiting(bigint[], timestamptz[])')
        ) AS one (like_table, privilege, rights)
    LOOP
        FOR allowed IN
            SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
                   CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
            FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
            WHERE c.oid = giving.like_table AND a.grantee <> c.relowner AND a.privilege_type = giving.privilege
            GROUP BY a.grantee
        LOOP
            EXECUTE format('GRANT %s TO %s %s', giving.rights, allowed.role, allowed.too);
        END LOOP;
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (31, 'bulk', false);

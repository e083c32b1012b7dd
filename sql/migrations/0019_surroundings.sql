-- breaking: no
--
-- What surrounds the tables of pgqueue in a database: the sessions of an application, and how other people run PostgreSQL.


-- Sessions of an application ---------------------------------------------------------------------------------------------------------
--
-- A worker's own session never reads a table as a whole. A session of an application, or of a handler, plans as it likes, and a plan
-- that was made while a table was small is kept when the table has grown: a completion then reads all running jobs. Under SERIALIZABLE
-- such a read locks the whole table, so any two handlers conflict. Here the functions of those sessions have settings of their own.
--
-- They have no search_path of their own: a trigger of the application on a table of jobs runs inside them, with the path of its session.
-- STABLE ones read in the snapshot of the statement that calls them, so a job on the move is still seen in exactly one partition.

-- The row of a job that runs under this claim, deleted. No row: the job is not this run's any more.
CREATE FUNCTION pgqueue.take_running(id bigint, claim integer, worker_id bigint) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY DELETE FROM pgqueue.job_running r
    WHERE r.id = take_running.id AND r.claim + 0 = take_running.claim AND r.worker_id + 0 = take_running.worker_id RETURNING r.*;
END $$;

-- The same row, locked until the transaction ends. While another transaction has it, this waits.
CREATE FUNCTION pgqueue.lock_running(id bigint, claim integer, worker_id bigint) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT r.* FROM pgqueue.job_running r
    WHERE r.id = lock_running.id AND r.claim + 0 = lock_running.claim AND r.worker_id + 0 = lock_running.worker_id FOR UPDATE;
END $$;

-- Delete the cursors of the job enqueued `since` then whose number is below this one.
CREATE FUNCTION pgqueue.drop_cursors(job_id bigint, since timestamptz, below integer) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    DELETE FROM pgqueue.job_cursor c
    WHERE c.job_id = drop_cursors.job_id AND c.enqueued_at = since IS NOT FALSE AND c.n < drop_cursors.below;
END $$;

-- The waiters for the end of these jobs: the id of the job, once for each waiter.
CREATE FUNCTION pgqueue.waiters(ids bigint[]) RETURNS SETOF bigint LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT w.job_id FROM pgqueue.job_waiter w WHERE w.job_id = ANY (waiters.ids);
END $$;

-- The states of these jobs. An id has two rows here if one of them was put aside in history, or the id was given again.
CREATE FUNCTION pgqueue.job_states(ids bigint[]) RETURNS TABLE (id bigint, state text, enqueued_at timestamptz, finished_at timestamptz)
LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT j.id, j.state, j.enqueued_at, j.finished_at FROM unnest(job_states.ids) AS asked (id)
    CROSS JOIN LATERAL (SELECT j.id, j.state, j.enqueued_at, j.finished_at FROM pgqueue.job j WHERE j.id = asked.id OFFSET 0) AS j;
END $$;

-- The rows of these jobs, as `job_states`.
CREATE FUNCTION pgqueue.job_rows(ids bigint[]) RETURNS SETOF pgqueue.job LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT j.* FROM unnest(job_rows.ids) AS asked (id)
    CROSS JOIN LATERAL (SELECT j.* FROM pgqueue.job j WHERE j.id = asked.id OFFSET 0) AS j;
END $$;

-- The next `most` jobs in these states after the id `after`, in order. No condition but these: so `most` is a limit of the work.
CREATE FUNCTION pgqueue.jobs_after(states text[], after bigint, most integer) RETURNS TABLE (id bigint, queue varchar, task varchar)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT j.id, j.queue, j.task FROM pgqueue.job j
    WHERE j.state = ANY (jobs_after.states) AND j.id > jobs_after.after ORDER BY j.id LIMIT jobs_after.most;
END $$;

-- The attempts of a job that did not complete.
CREATE FUNCTION pgqueue.attempt_rows(job_id bigint) RETURNS SETOF pgqueue.attempt LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT a.* FROM pgqueue.attempt a WHERE a.job_id = attempt_rows.job_id;
END $$;

-- The highest number of a batch of a job with this id, and the cursor of the last batch of the job that was enqueued at `since`.
CREATE FUNCTION pgqueue.last_batch(job_id bigint, since timestamptz) RETURNS TABLE (n integer, cursor jsonb) LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT
        (SELECT c.n FROM pgqueue.job_cursor c WHERE c.job_id = last_batch.job_id ORDER BY c.n DESC LIMIT 1),
        (SELECT c.cursor FROM pgqueue.job_cursor c
         WHERE c.job_id = last_batch.job_id AND c.enqueued_at = last_batch.since IS NOT FALSE ORDER BY c.n DESC LIMIT 1);
END $$;

-- What a job says of how far it is.
CREATE FUNCTION pgqueue.progress_row(job_id bigint) RETURNS SETOF pgqueue.job_progress LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT p.* FROM pgqueue.job_progress p WHERE p.job_id = progress_row.job_id;
END $$;

-- Those of these jobs that wait, deleted; each is named by its id and the time of its enqueue. While another transaction has one, this
-- waits.
--
-- Locks them in the order of their ids, whatever partition they are in (see 0018). If one has moved to another partition meanwhile, it
-- would be locked after jobs with higher ids. So the locks are given back, and all begins anew.
CREATE FUNCTION pgqueue.take_waiting(ids bigint[], since timestamptz[]) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    parts oid[];
    places tid[];
BEGIN
    LOOP
        <<round>>
        BEGIN
            SELECT array_agg(j.part), array_agg(j.place) INTO parts, places
            FROM (SELECT a.id, a.since FROM unnest(take_waiting.ids, take_waiting.since) AS a (id, since) ORDER BY a.id) AS asked
            CROSS JOIN LATERAL (
                SELECT j.tableoid AS part, j.ctid AS place FROM pgqueue.job j
                WHERE j.id = asked.id AND j.enqueued_at = asked.since AND j.state IN ('available', 'scheduled', 'blocked')
                LIMIT 1 FOR UPDATE
            ) AS j;
            EXIT WHEN coalesce(cardinality(places), 0) = cardinality(take_waiting.ids);
            -- A statement of its own: it sees what has been committed while the one before waited.
            EXIT WHEN coalesce(cardinality(places), 0) >= (
                SELECT count(*) FROM unnest(take_waiting.ids, take_waiting.since) AS asked (id, since)
                CROSS JOIN LATERAL (
                    SELECT FROM pgqueue.job j
                    WHERE j.id = asked.id AND j.enqueued_at = asked.since AND j.state IN ('available', 'scheduled', 'blocked') LIMIT 1
                ) AS j);
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            NULL;  -- With the block its locks are gone.
        END round;
    END LOOP;
    RETURN QUERY
    WITH waiting AS MATERIALIZED (
        SELECT w.part, w.place FROM unnest(parts, places) AS w (part, place)
    ), from_available AS (
        DELETE FROM pgqueue.job_available j
        WHERE j.ctid = ANY (ARRAY(SELECT w.place FROM waiting w WHERE w.part = 'pgqueue.job_available'::regclass)) RETURNING j.*
    ), from_scheduled AS (
        DELETE FROM pgqueue.job_scheduled j
        WHERE j.ctid = ANY (ARRAY(SELECT w.place FROM waiting w WHERE w.part = 'pgqueue.job_scheduled'::regclass)) RETURNING j.*
    ), from_blocked AS (
        DELETE FROM pgqueue.job_blocked j
        WHERE j.ctid = ANY (ARRAY(SELECT w.place FROM waiting w WHERE w.part = 'pgqueue.job_blocked'::regclass)) RETURNING j.*
    )
    TABLE from_available UNION ALL TABLE from_scheduled UNION ALL TABLE from_blocked;
END $$;

-- Those of these jobs that failed or were cancelled, locked in the order of their ids.
CREATE FUNCTION pgqueue.lock_dead(ids bigint[], since timestamptz[]) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT d.* FROM pgqueue.job_dead d
    WHERE d.id = ANY (lock_dead.ids) AND ((d.id, d.enqueued_at) IN (SELECT * FROM unnest(lock_dead.ids, lock_dead.since))) IS TRUE
    ORDER BY d.id FOR UPDATE;
END $$;

-- The same jobs, deleted, and what was asked of their last run.
CREATE FUNCTION pgqueue.take_dead(ids bigint[], since timestamptz[]) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    DELETE FROM pgqueue.job_signal s
    WHERE s.job_id = ANY (take_dead.ids)
      AND coalesce(((s.job_id, s.enqueued_at) IN (SELECT * FROM unnest(take_dead.ids, take_dead.since))), true);
    RETURN QUERY DELETE FROM pgqueue.job_dead d
    WHERE d.id = ANY (take_dead.ids) AND ((d.id, d.enqueued_at) IN (SELECT * FROM unnest(take_dead.ids, take_dead.since))) IS TRUE
    RETURNING d.*;
END $$;

-- It deletes rows of the tables of jobs, too, so it lets a trigger of the application have the path of its session.
ALTER FUNCTION pgqueue.take_back(bigint[], timestamptz[]) RESET search_path;

COMMENT ON FUNCTION pgqueue.take_running IS 'Part of a completion in a handler''s transaction: for no other caller.';
COMMENT ON FUNCTION pgqueue.lock_running IS 'Part of what a handler''s transaction does: for no other caller.';
COMMENT ON FUNCTION pgqueue.drop_cursors IS 'Part of an iteration: for no other caller.';
COMMENT ON FUNCTION pgqueue.take_waiting IS 'Part of a cancel: for no other caller.';
COMMENT ON FUNCTION pgqueue.lock_dead IS 'Part of a retry by hand: for no other caller.';
COMMENT ON FUNCTION pgqueue.take_dead IS 'Part of a retry by hand: for no other caller.';

-- Settings that others have emptied ---------------------------------------------------------------------------------------------------
--
-- A fixture that truncates all tables takes the rows of `ring` and `duty` along. Then no job can end, and nothing is swept. Each worker
-- puts back what is missing when it starts, as the owner of the tables. The leaf of a history that was written last is written on. The
-- lock keeps two that start at once from inserting the same row.
CREATE FUNCTION pgqueue.restore_settings() RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted record;
    last_bin smallint;
    restored integer := 0;
BEGIN
    IF (SELECT count(*) FROM pgqueue.ring) = 3 AND EXISTS (SELECT FROM pgqueue.duty WHERE name = 'sweep') THEN
        RETURN 0;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('pgqueue.restore_settings', 'pgqueue.ring'::regclass::oid::bigint));
    FOR wanted IN
        SELECT r.* FROM (VALUES ('done', 8, interval '1 day'), ('dead', 16, interval '14 days'), ('attempt', 16, interval '14 days'))
            AS r (kind, leaves, retention)
        WHERE NOT EXISTS (SELECT FROM pgqueue.ring WHERE ring.kind = r.kind)
    LOOP
        EXECUTE format('SELECT bin FROM pgqueue.%I ORDER BY finished_at DESC LIMIT 1',
                       CASE wanted.kind WHEN 'attempt' THEN 'attempt' ELSE 'job_' || wanted.kind END) INTO last_bin;
        INSERT INTO pgqueue.ring (kind, leaves, bin, retention)
        VALUES (wanted.kind, wanted.leaves, coalesce(last_bin, 0), wanted.retention);
        restored := restored + 1;
    END LOOP;
    IF NOT EXISTS (SELECT FROM pgqueue.duty WHERE name = 'sweep') THEN
        INSERT INTO pgqueue.duty (name, done_at) VALUES ('sweep', '-infinity');
        restored := restored + 1;
    END IF;
    RETURN restored;
END $$;
COMMENT ON FUNCTION pgqueue.restore_settings IS 'Put back the rows of `ring` and `duty` that are missing. Answers how many.';

-- A restore of the data alone (`pg_dump -a`) meets the rows that the migrations have made: those of the dump count.
CREATE FUNCTION pgqueue.replace_setting() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'ring' THEN
        DELETE FROM pgqueue.ring WHERE kind = NEW.kind;
    ELSIF TG_TABLE_NAME = 'duty' THEN
        DELETE FROM pgqueue.duty WHERE name = NEW.name;
    ELSIF TG_TABLE_NAME = 'migration' THEN
        DELETE FROM pgqueue.migration WHERE version = NEW.version;
    ELSE  -- A table with one row.
        EXECUTE format('DELETE FROM pgqueue.%I', TG_TABLE_NAME);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER replace_setting BEFORE INSERT ON pgqueue.ring      FOR EACH ROW EXECUTE FUNCTION pgqueue.replace_setting();
CREATE TRIGGER replace_setting BEFORE INSERT ON pgqueue.duty      FOR EACH ROW EXECUTE FUNCTION pgqueue.replace_setting();
CREATE TRIGGER replace_setting BEFORE INSERT ON pgqueue.migration FOR EACH ROW EXECUTE FUNCTION pgqueue.replace_setting();


-- Owned by the owner of the tables, whichever role applies this. Roles that could call `now` may call these.
DO $$
DECLARE
    model regprocedure := 'pgqueue.now()';
    made regprocedure;
    allowed record;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'pgqueue.take_running(bigint, integer, bigint)', 'pgqueue.lock_running(bigint, integer, bigint)',
        'pgqueue.drop_cursors(bigint, timestamptz, integer)', 'pgqueue.waiters(bigint[])', 'pgqueue.job_states(bigint[])',
        'pgqueue.job_rows(bigint[])', 'pgqueue.jobs_after(text[], bigint, integer)',
        'pgqueue.attempt_rows(bigint)', 'pgqueue.progress_row(bigint)', 'pgqueue.last_batch(bigint, timestamptz)',
        'pgqueue.take_waiting(bigint[], timestamptz[])', 'pgqueue.lock_dead(bigint[], timestamptz[])',
        'pgqueue.take_dead(bigint[], timestamptz[])', 'pgqueue.restore_settings()',
        'pgqueue.replace_setting()']::regprocedure[]
    LOOP
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
    END LOOP;
END $$;


-- Keys are compared by bytes ---------------------------------------------------------------------------------------------------------
--
-- An index in the order of a language is wrong when the server gets another version of that language's rules, as with a new image. A key
-- is then not found, and two jobs hold it. Bytes have no versions. No row is rewritten, and history has no index on these: what this
-- costs is the indexes of the jobs that wait or run, which are built anew while `job` is locked.
ALTER TABLE pgqueue.ring         ALTER COLUMN kind TYPE text COLLATE "C";
ALTER TABLE pgqueue.duty         ALTER COLUMN name TYPE text COLLATE "C";
ALTER TABLE pgqueue.unknown_task ALTER COLUMN task TYPE varchar(200) COLLATE "C";

-- A view of the application that names a column of `job` forbids to change it. Then the columns stay as they are, which is no worse than
-- before, and the message says what to run.
DO $$
DECLARE
    change text := 'ALTER TABLE pgqueue.job '
        'ALTER COLUMN task TYPE varchar(200) COLLATE "C", ALTER COLUMN lock_key TYPE text COLLATE "C", '
        'ALTER COLUMN limit_key TYPE text COLLATE "C", ALTER COLUMN rate_key TYPE text COLLATE "C", '
        'ALTER COLUMN key TYPE text COLLATE "C", ALTER COLUMN unique_key TYPE text COLLATE "C", '
        'ALTER COLUMN idempotency_key TYPE text COLLATE "C"';
    what text;
BEGIN
    EXECUTE change;
EXCEPTION WHEN feature_not_supported OR dependent_objects_still_exist THEN
    GET STACKED DIAGNOSTICS what = PG_EXCEPTION_DETAIL;
    RAISE WARNING 'the keys of jobs keep the collation of this database: % (%)', SQLERRM, what
        USING HINT = 'When its owner can do without it for a moment: drop it, run this, and make it again: ' || change;
END $$;


-- Publications ----------------------------------------------------------------------------------------------------------------------
--
-- With a publication of all tables PostgreSQL refuses each DELETE from a table that cannot name its rows: the queue stands still. A row
-- is named by a unique index where there is one, else by all its columns. That costs nothing until `wal_level` is logical.
DO $$
DECLARE
    nameless record;
BEGIN
    FOR nameless IN
        SELECT c.oid::regclass AS name, (
            SELECT ic.relname FROM pg_index i JOIN pg_class ic ON ic.oid = i.indexrelid
            WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL
              AND NOT EXISTS (SELECT FROM pg_attribute a
                              WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey) AND NOT a.attnotnull)
            ORDER BY ic.relname LIMIT 1) AS by_index
        FROM pg_class c
        WHERE c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'pgqueue.job'::regclass)
          AND c.relkind = 'r' AND c.relreplident = 'd'
          AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
        ORDER BY c.relname
    LOOP
        IF nameless.by_index IS NULL THEN
            EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', nameless.name);
        ELSE
            EXECUTE format('ALTER TABLE %s REPLICA IDENTITY USING INDEX %I', nameless.name, nameless.by_index);
        END IF;
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (19, 'surroundings', false);

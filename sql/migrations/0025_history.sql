-- breaking: no
--
-- History: what happened to jobs, counted by minute and by hour; and failures, grouped by where they come from.
--
-- A worker appends one part for each minute in which something happened (`history_part`). The leader folds the parts into
-- `history_minute`, and the minutes of a past hour into `history_hour`. Both are rings: old rows go by TRUNCATE of a leaf.


-- What workers append --------------------------------------------------------------------------------------------------------------

-- One row per worker process: the number of its last part. A part whose answer was lost is sent again, and counts once.
CREATE TABLE pgqueue.history_writer (
    writer     uuid        PRIMARY KEY,
    part       integer     NOT NULL,
    written_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.history_writer IS 'Which part of the history each worker process has written last.';

-- What has happened and is not folded yet. Rows are inserted and deleted, never changed.
CREATE TABLE pgqueue.history_part (
    writer     uuid        NOT NULL DEFAULT gen_random_uuid(),
    part       integer     NOT NULL DEFAULT 0,
    at         timestamptz NOT NULL,  -- the minute
    written_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    -- A list of objects: queue, task, and what is not 0 of the columns of `history_minute`.
    counts     jsonb       NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(counts) = 'array'),
    -- A list of objects: what `error_group` has; `first` and `last` are seconds before `written_at`.
    errors     jsonb       NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(errors) = 'array'),
    PRIMARY KEY (writer, part)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.history_part IS 'What workers have counted and the leader has not yet folded into the history.';


-- The history ----------------------------------------------------------------------------------------------------------------------

-- Rows are only appended. If a part comes late, its minute has one more row: a reader adds them up.
--
-- `wait` and `run` are histograms: the n-th number counts the times up to the n-th of `history_bounds()` and above the one before. The
-- numbers behind the last that is not 0 are left out.
CREATE TABLE pgqueue.history_minute (
    at           timestamptz NOT NULL,
    bin          smallint    NOT NULL,
    queue        varchar(40)  COLLATE "C" NOT NULL,
    task         varchar(200) COLLATE "C" NOT NULL,
    started      bigint      NOT NULL DEFAULT 0,
    completed    bigint      NOT NULL DEFAULT 0,
    failed       bigint      NOT NULL DEFAULT 0,
    retried      bigint      NOT NULL DEFAULT 0,
    snoozed      bigint      NOT NULL DEFAULT 0,
    cancelled    bigint      NOT NULL DEFAULT 0,
    expired      bigint      NOT NULL DEFAULT 0,
    skipped      bigint      NOT NULL DEFAULT 0,
    interrupted  bigint      NOT NULL DEFAULT 0,
    rescued      bigint      NOT NULL DEFAULT 0,
    wait_seconds float8      NOT NULL DEFAULT 0,
    run_seconds  float8      NOT NULL DEFAULT 0,
    wait         bigint[]    NOT NULL DEFAULT '{}',
    run          bigint[]    NOT NULL DEFAULT '{}'
) PARTITION BY LIST (bin);
COMMENT ON TABLE pgqueue.history_minute IS 'What happened to the jobs of each queue and task, by minute. Add up the rows of a minute.';

CREATE TABLE pgqueue.history_hour (LIKE pgqueue.history_minute INCLUDING DEFAULTS) PARTITION BY LIST (bin);
COMMENT ON TABLE pgqueue.history_hour IS 'What happened to the jobs of each queue and task, by hour. Add up the rows of an hour.';

DO $$
DECLARE
    ring record;
    leaf text;
BEGIN
    FOR ring IN SELECT 'history_' || kind AS parent, bin FROM unnest(ARRAY['minute', 'hour']) AS kind, generate_series(0, 7) AS bin
    LOOP
        leaf := format('%s_%s', ring.parent, ring.bin);
        EXECUTE format('CREATE TABLE pgqueue.%I PARTITION OF pgqueue.%I FOR VALUES IN (%s) WITH (
                            autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_analyze_scale_factor = 0.5)',
                       leaf, ring.parent, ring.bin);
        -- No column names a row. In a publication the whole row does.
        EXECUTE format('ALTER TABLE pgqueue.%I REPLICA IDENTITY FULL', leaf);
        EXECUTE format('CREATE INDEX %I ON pgqueue.%I (at)', leaf || '_at', leaf);
        EXECUTE format('CREATE INDEX %I ON pgqueue.%I (task, at)', leaf || '_task', leaf);
    END LOOP;
END $$;

INSERT INTO pgqueue.ring (kind, leaves, retention) VALUES ('minute', 8, interval '24 hours'), ('hour', 8, interval '30 days');
-- Its row is locked by the worker that folds. Minutes before `done_at` are in `history_hour`.
INSERT INTO pgqueue.duty (name, done_at) VALUES ('history', date_bin('1 hour', pgqueue.now(), '2000-01-01 00:00:00+00'));

-- The upper bounds of the histograms, in seconds. There is one more number for what is longer.
CREATE FUNCTION pgqueue.history_bounds() RETURNS float8[] LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN ARRAY[
    0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7,
    10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600, 900, 1200, 1800, 2700, 3600, 5400, 7200, 10800, 14400, 21600, 43200, 86400]::float8[];

-- How long attempts of a task have run in the last 24 hours: in seconds, the time that this share of them (0.95) has not exceeded. NULL:
-- none has ended. It lies between the same two bounds as the true one. Times beyond the last bound answer the last bound.
CREATE FUNCTION pgqueue.run_quantile(task text, share float8) RETURNS float8 LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    folded timestamptz := (SELECT d.done_at FROM pgqueue.duty d WHERE d.name = 'history');
    bounds float8[] := pgqueue.history_bounds();
    counts bigint[];
    wanted float8;
    before bigint := 0;
    low float8;
BEGIN
    SELECT array_agg(summed.n ORDER BY summed.place) INTO counts FROM (
        SELECT u.place, sum(u.n)::bigint AS n FROM (
            SELECT h.run FROM pgqueue.history_hour h
            WHERE h.task = run_quantile.task AND h.at > pgqueue.now() - interval '24 hours'
            UNION ALL
            SELECT m.run FROM pgqueue.history_minute m
            WHERE m.task = run_quantile.task AND m.at >= folded
        ) AS rows CROSS JOIN LATERAL unnest(rows.run) WITH ORDINALITY AS u (n, place) GROUP BY u.place
    ) AS summed;
    wanted := share * (SELECT sum(n) FROM unnest(counts) AS n);
    FOR place IN 1 .. coalesce(cardinality(counts), 0) LOOP
        IF before + counts[place] >= wanted AND counts[place] > 0 THEN
            low := CASE place WHEN 1 THEN 0 ELSE bounds[place - 1] END;
            RETURN low + (coalesce(bounds[place], low) - low) * (wanted - before) / counts[place];
        END IF;
        before := before + counts[place];
    END LOOP;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION pgqueue.run_quantile IS 'The run time in seconds that this share of a task''s attempts has not exceeded, in the last 24 hours.';


-- Failures -------------------------------------------------------------------------------------------------------------------------

-- Which task, which type of error, and where in the application: the same for failures that have one cause.
ALTER TABLE pgqueue.attempt ADD COLUMN fingerprint text;

CREATE TABLE pgqueue.error_group (
    fingerprint text        COLLATE "C" PRIMARY KEY,
    queue       varchar(40) COLLATE "C" NOT NULL,
    task        varchar(200) COLLATE "C" NOT NULL,
    error_type  text        NOT NULL,
    place       text,
    message     text,
    first_at    timestamptz NOT NULL,
    last_at     timestamptz NOT NULL,
    count       bigint      NOT NULL,
    job_ids     bigint[]    NOT NULL,
    version_tag text
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.error_group IS 'Failed attempts, grouped by task, type of error and place in the application.';


-- Rings ----------------------------------------------------------------------------------------------------------------------------

-- As in 0001, for five kinds.
CREATE OR REPLACE FUNCTION pgqueue.advance_ring(ring_kind text, forced boolean DEFAULT false) RETURNS boolean
    LANGUAGE plpgsql SET lock_timeout = '50ms' AS $$
DECLARE
    r pgqueue.ring;
    next_bin smallint;
BEGIN
    SELECT * INTO r FROM pgqueue.ring WHERE kind = ring_kind
        AND (forced OR since < pgqueue.now() - retention / (leaves - 2)) FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    next_bin := (r.bin + 1) % r.leaves;
    EXECUTE format('TRUNCATE pgqueue.%I', CASE WHEN r.kind = 'attempt' THEN 'attempt_'
                                               WHEN r.kind IN ('minute', 'hour') THEN 'history_' || r.kind || '_'
                                               ELSE 'job_' || r.kind || '_' END || next_bin);
    UPDATE pgqueue.ring SET bin = next_bin, since = pgqueue.now() WHERE kind = r.kind;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

-- As in 0019, for the rings and the duty of this file as well.
CREATE OR REPLACE FUNCTION pgqueue.restore_settings() RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted record;
    last_bin smallint;
    restored integer := 0;
BEGIN
    IF (SELECT count(*) FROM pgqueue.ring) = 5 AND (SELECT count(*) FROM pgqueue.duty WHERE name IN ('sweep', 'history')) = 2 THEN
        RETURN 0;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('pgqueue.restore_settings', 'pgqueue.ring'::regclass::oid::bigint));
    FOR wanted IN
        SELECT r.* FROM (VALUES ('done', 8, interval '1 day', 'job_done', 'finished_at'), ('dead', 16, interval '14 days', 'job_dead', 'finished_at'),
                                ('attempt', 16, interval '14 days', 'attempt', 'finished_at'),
                                ('minute', 8, interval '24 hours', 'history_minute', 'at'), ('hour', 8, interval '30 days', 'history_hour', 'at'))
            AS r (kind, leaves, retention, parent, latest)
        WHERE NOT EXISTS (SELECT FROM pgqueue.ring WHERE ring.kind = r.kind)
    LOOP
        EXECUTE format('SELECT bin FROM pgqueue.%I ORDER BY %I DESC LIMIT 1', wanted.parent, wanted.latest) INTO last_bin;
        INSERT INTO pgqueue.ring (kind, leaves, bin, retention)
        VALUES (wanted.kind, wanted.leaves, coalesce(last_bin, 0), wanted.retention);
        restored := restored + 1;
    END LOOP;
    FOR wanted IN
        SELECT d.* FROM (VALUES ('sweep', timestamptz '-infinity'),
                                ('history', date_bin('1 hour', pgqueue.now(), '2000-01-01 00:00:00+00'))) AS d (name, done_at)
        WHERE NOT EXISTS (SELECT FROM pgqueue.duty WHERE duty.name = d.name)
    LOOP
        INSERT INTO pgqueue.duty (name, done_at) VALUES (wanted.name, wanted.done_at);
        restored := restored + 1;
    END LOOP;
    RETURN restored;
END $$;


-- Rights ---------------------------------------------------------------------------------------------------------------------------
--
-- Owned by the owner of the tables, whichever role applies this. A role that does the same to an older table may do it to a new one:
-- 1. A role that may throw away history runs workers.
-- 2. A role that writes history by hand cancels: it counts what it has cancelled.
-- 3. A role that reads the attempts reads the history.
DO $$
DECLARE
    tables text := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass);
    made regclass;
    allowed record;
BEGIN
    FOR made IN SELECT oid FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'p')
                AND (relname LIKE 'history\_%' OR relname = 'error_group') LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO %I', made, tables);
    END LOOP;
    EXECUTE format('ALTER FUNCTION pgqueue.history_bounds() OWNER TO %I', tables);
    EXECUTE format('ALTER FUNCTION pgqueue.run_quantile(text, float8) OWNER TO %I', tables);
    IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = 'pgqueue.now()'::regprocedure) THEN
        REVOKE ALL ON FUNCTION pgqueue.history_bounds(), pgqueue.run_quantile(text, float8) FROM PUBLIC;
    END IF;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too, c.relname AS model, a.privilege_type AS what
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE a.grantee <> c.relowner AND (c.oid, a.privilege_type) IN (
            ('pgqueue.job_done_0'::regclass, 'TRUNCATE'), ('pgqueue.job_dead'::regclass, 'INSERT'), ('pgqueue.attempt'::regclass, 'SELECT'))
        GROUP BY a.grantee, c.relname, a.privilege_type
    LOOP
        CASE allowed.what
            WHEN 'TRUNCATE' THEN
                EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.history_writer, pgqueue.error_group TO %s %s', allowed.role, allowed.too);
                EXECUTE format('GRANT SELECT, INSERT, DELETE ON pgqueue.history_part TO %s %s', allowed.role, allowed.too);
                EXECUTE format('GRANT SELECT, INSERT ON pgqueue.history_minute, pgqueue.history_hour TO %s %s', allowed.role, allowed.too);
                FOR made IN SELECT oid FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace AND relkind = 'r'
                            AND relname ~ '^history_(minute|hour)_[0-7]$' LOOP
                    EXECUTE format('GRANT TRUNCATE ON %s TO %s %s', made, allowed.role, allowed.too);
                END LOOP;
            WHEN 'INSERT' THEN
                EXECUTE format('GRANT INSERT ON pgqueue.history_part TO %s %s', allowed.role, allowed.too);
            ELSE
                EXECUTE format('GRANT SELECT ON pgqueue.history_minute, pgqueue.history_hour, pgqueue.error_group, pgqueue.duty TO %s %s',
                               allowed.role, allowed.too);
                EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.history_bounds(), pgqueue.run_quantile(text, float8) TO %s %s',
                               allowed.role, allowed.too);
        END CASE;
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (25, 'history', false);

-- breaking: no
--
-- The ground: one table `job`, partitioned by state, and what workers need to agree on.
--
-- Why partitions: every state is a small heap with few indexes, and a move between states is a DELETE and an INSERT, so
-- that no index ever carries the dead versions of another state's churn. Why rings: history is thrown away by TRUNCATE of
-- a leaf that exists from the start, so that nothing at run time is DDL and nothing waits for a new partition.

CREATE SCHEMA IF NOT EXISTS pgqueue;

CREATE TABLE pgqueue.migration (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    breaking   boolean     NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE pgqueue.migration IS 'Which numbered files of sql/migrations have been applied here.';

-- The one place statements take the time from. Inlined by the planner, so it costs what clock_timestamp() costs;
-- tests replace it to set the clock.
CREATE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN clock_timestamp();


-- Jobs ---------------------------------------------------------------------------------------------------------------

CREATE SEQUENCE pgqueue.job_id_seq AS bigint;
-- CACHE 1: a position is drawn after its transaction has an id, and in the order the watermark's proof needs.
CREATE SEQUENCE pgqueue.job_pos_seq AS bigint CACHE 1;

CREATE TABLE pgqueue.job (
    id              bigint      NOT NULL DEFAULT nextval('pgqueue.job_id_seq'),
    -- The transaction takes its id before it draws a position; the watermark (docs/design/fetch.md) stands on this order.
    pos             bigint      DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('pgqueue.job_pos_seq') END,
    enqueued_at     timestamptz NOT NULL DEFAULT pgqueue.now(),
    run_at          timestamptz,
    started_at      timestamptz,
    finished_at     timestamptz,
    deadline        timestamptz,
    worker_id       bigint,
    claim           integer,
    lock_limit      integer,
    attempt         smallint    NOT NULL DEFAULT 0,
    max_attempts    smallint,
    crashes         smallint    NOT NULL DEFAULT 0,
    snoozes         smallint    NOT NULL DEFAULT 0,
    priority        smallint    NOT NULL DEFAULT 5,
    -- The lane within the queue: 2 * priority + 1; 2 * priority (the front) for a job that had been taken already; -2 and
    -- -1 for suspects, under which one or more workers died. No generated column: that costs every statement 20 µs.
    rank            smallint    NOT NULL DEFAULT 11,
    bin             smallint    NOT NULL DEFAULT 0,
    holds           boolean     NOT NULL DEFAULT false,
    state           text        NOT NULL DEFAULT 'available',
    -- Compared by bytes: the first column of the hottest index.
    queue           varchar(40) COLLATE "C" NOT NULL DEFAULT 'default',
    task            varchar(200) NOT NULL,
    args            jsonb       NOT NULL DEFAULT '{}',
    headers         jsonb,
    result          jsonb,
    progress        jsonb,
    reason          text,
    version_tag     text,
    lock_key        text,
    on_locked       text,
    limit_key       text,
    key             text,
    unique_key      text,
    idempotency_key text
) PARTITION BY LIST (state);
COMMENT ON TABLE pgqueue.job IS 'Every job, in the partition of its state. Read it freely; never UPDATE it.';

ALTER SEQUENCE pgqueue.job_id_seq  OWNED BY pgqueue.job.id;
ALTER SEQUENCE pgqueue.job_pos_seq OWNED BY pgqueue.job.pos;

-- What others write is checked where it enters: available and scheduled. Moves between our own states trust it. A
-- statement pays for every constraint anew (seven were a third of a one-row insert): hence one.
-- Time only goes forward, so a row that was due stays due: a check may ask the clock here.
CREATE TABLE pgqueue.job_available PARTITION OF pgqueue.job (
    pos NOT NULL,
    CONSTRAINT job_available_is_ready CHECK (
        priority BETWEEN 0 AND 9 AND (rank < 0 OR rank / 2 = priority) AND run_at <= pgqueue.now() IS NOT FALSE
        -- A claim looks behind 0; a channel's name has room for 40 bytes of queue, and a NOTIFY that fails stops a batch.
        AND pos > 0 AND octet_length(queue) BETWEEN 1 AND 40
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL)
) FOR VALUES IN ('available');

CREATE TABLE pgqueue.job_scheduled PARTITION OF pgqueue.job (
    run_at NOT NULL,
    CONSTRAINT job_scheduled_is_waiting CHECK (
        priority BETWEEN 0 AND 9 AND octet_length(queue) BETWEEN 1 AND 40 AND isfinite(run_at)
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL)
) FOR VALUES IN ('scheduled');

CREATE TABLE pgqueue.job_blocked PARTITION OF pgqueue.job (
    key NOT NULL,
    CONSTRAINT job_blocked_is_not_taken CHECK (worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL)
) FOR VALUES IN ('blocked');

CREATE TABLE pgqueue.job_running PARTITION OF pgqueue.job (
    worker_id NOT NULL,
    claim NOT NULL,
    started_at NOT NULL,
    CONSTRAINT job_running_is_not_finished CHECK (finished_at IS NULL)
) FOR VALUES IN ('running');

CREATE TABLE pgqueue.job_done PARTITION OF pgqueue.job (finished_at NOT NULL)
    FOR VALUES IN ('completed', 'skipped') PARTITION BY LIST (bin);

CREATE TABLE pgqueue.job_dead PARTITION OF pgqueue.job (
    finished_at NOT NULL,
    reason NOT NULL
) FOR VALUES IN ('failed', 'cancelled') PARTITION BY LIST (bin);

-- Only what enters `available` draws a position. Elsewhere it would be a lost nextval() per move.
ALTER TABLE pgqueue.job_scheduled ALTER pos DROP DEFAULT;
ALTER TABLE pgqueue.job_blocked   ALTER pos DROP DEFAULT;
ALTER TABLE pgqueue.job_running   ALTER pos DROP DEFAULT;
ALTER TABLE pgqueue.job_done      ALTER pos DROP DEFAULT;
ALTER TABLE pgqueue.job_dead      ALTER pos DROP DEFAULT;

CREATE UNIQUE INDEX job_available_id   ON pgqueue.job_available (id);
CREATE INDEX        job_available_lane ON pgqueue.job_available (queue, rank, pos);
CREATE INDEX        job_available_lock_holds  ON pgqueue.job_available (lock_key)  WHERE holds;
CREATE INDEX        job_available_limit_holds ON pgqueue.job_available (limit_key) WHERE holds;

CREATE UNIQUE INDEX job_scheduled_id   ON pgqueue.job_scheduled (id);
CREATE INDEX        job_scheduled_due  ON pgqueue.job_scheduled (run_at, id);
CREATE INDEX        job_scheduled_lock_holds  ON pgqueue.job_scheduled (lock_key)  WHERE holds;
CREATE INDEX        job_scheduled_limit_holds ON pgqueue.job_scheduled (limit_key) WHERE holds;

CREATE UNIQUE INDEX job_blocked_id     ON pgqueue.job_blocked (id);
CREATE INDEX        job_blocked_line   ON pgqueue.job_blocked (key, rank, id);
CREATE INDEX        job_blocked_lock_holds  ON pgqueue.job_blocked (lock_key)  WHERE holds;
CREATE INDEX        job_blocked_limit_holds ON pgqueue.job_blocked (limit_key) WHERE holds;

CREATE UNIQUE INDEX job_running_id     ON pgqueue.job_running (id);
CREATE INDEX        job_running_worker ON pgqueue.job_running (worker_id);
CREATE INDEX        job_running_lock   ON pgqueue.job_running (lock_key)  WHERE lock_key  IS NOT NULL;
CREATE INDEX        job_running_limit  ON pgqueue.job_running (limit_key) WHERE limit_key IS NOT NULL;

-- Attempts that did not complete: what happened, where, for how long. Appended, never changed, thrown away like history.
CREATE TABLE pgqueue.attempt (
    job_id      bigint      NOT NULL,
    attempt     smallint    NOT NULL,
    worker_id   bigint      NOT NULL,
    started_at  timestamptz NOT NULL,
    finished_at timestamptz NOT NULL,
    bin         smallint    NOT NULL,
    outcome     text        NOT NULL,
    error_type  text,
    message     text,
    traceback   text,
    version_tag text
) PARTITION BY LIST (bin);
COMMENT ON TABLE pgqueue.attempt IS 'One row per attempt that did not complete: outcome, error, worker, times.';

-- The rings. `bin` is the leaf being written, since `since`; nobody computes it, everybody reads it.
CREATE TABLE pgqueue.ring (
    kind      text        PRIMARY KEY,
    leaves    smallint    NOT NULL,
    bin       smallint    NOT NULL DEFAULT 0,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    retention interval    NOT NULL CHECK (retention > interval '0'),
    CHECK (bin BETWEEN 0 AND leaves - 1)
);
INSERT INTO pgqueue.ring (kind, leaves, retention)
VALUES ('done', 8, interval '1 day'), ('dead', 16, interval '14 days'), ('attempt', 16, interval '14 days');

DO $$
DECLARE
    ring record;
    leaf text;
BEGIN
    FOR ring IN SELECT r.kind, n AS bin,
                       CASE r.kind WHEN 'attempt' THEN 'attempt' ELSE 'job_' || r.kind END AS parent
                FROM pgqueue.ring r, generate_series(0, r.leaves - 1) n ORDER BY r.kind, n
    LOOP
        leaf := format('%s_%s', ring.parent, ring.bin);
        EXECUTE format('CREATE TABLE pgqueue.%I PARTITION OF pgqueue.%I FOR VALUES IN (%s) WITH (
                            autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_analyze_scale_factor = 0.5)',
                       leaf, ring.parent, ring.bin);
        IF ring.kind = 'attempt' THEN
            EXECUTE format('CREATE INDEX %I ON pgqueue.%I (job_id)', leaf || '_job', leaf);
        ELSE
            EXECUTE format('CREATE INDEX %I ON pgqueue.%I (id)', leaf || '_id', leaf);
            EXECUTE format('CREATE INDEX %I ON pgqueue.%I USING brin (finished_at)', leaf || '_finished', leaf);
        END IF;
    END LOOP;
END $$;

-- Advance a ring whose current leaf is old enough (always, when forced): throw away the oldest leaf and write there from
-- now on, or do neither. Waits 50 ms at most for readers of history. True: advanced; false: not due; NULL: a reader is in the way.
CREATE FUNCTION pgqueue.advance_ring(ring_kind text, forced boolean DEFAULT false) RETURNS boolean
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
    EXECUTE format('TRUNCATE pgqueue.%I', CASE r.kind WHEN 'attempt' THEN 'attempt_' ELSE 'job_' || r.kind || '_' END || next_bin);
    UPDATE pgqueue.ring SET bin = next_bin, since = pgqueue.now() WHERE kind = r.kind;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

-- Queue tables churn: vacuum them by count, not by share, and without pauses. They are small, so it is quick.
DO $$
DECLARE
    part text;
BEGIN
    FOREACH part IN ARRAY ARRAY['job_available', 'job_scheduled', 'job_blocked', 'job_running'] LOOP
        EXECUTE format('ALTER TABLE pgqueue.%I SET (
            autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
            autovacuum_vacuum_insert_scale_factor = 1, autovacuum_analyze_scale_factor = 0.2,
            autovacuum_analyze_threshold = 5000)', part);
    END LOOP;
END $$;

-- For statements that check themselves: raise instead of going on with half a move.
CREATE FUNCTION pgqueue.refuse(what text) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'pgqueue: %', what USING ERRCODE = 'data_corrupted';
END $$;

-- The table defends itself: a hand-written UPDATE of the state would strand the row (its position, its lane, its holder).
CREATE FUNCTION pgqueue.refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of %.% are moved between states, never updated', TG_TABLE_SCHEMA, TG_TABLE_NAME
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Use `pgqueue cancel`, `pgqueue retry`, `pgqueue pause` or their Python functions. '
                     'A waiting job can also be DELETEd and INSERTed anew in one transaction.';
END $$;

DO $$
DECLARE
    part regclass;
BEGIN
    FOR part IN SELECT relid FROM pg_partition_tree('pgqueue.job') LOOP
        EXECUTE format('CREATE TRIGGER refuse_update BEFORE UPDATE ON %s
                        FOR EACH STATEMENT EXECUTE FUNCTION pgqueue.refuse_update()', part);
    END LOOP;
END $$;

-- What is asked of running jobs. Appended by whoever asks, read by the worker that runs the job; nobody but that worker and
-- rescue ever locks a running row, so no request can hold up a completion. No unique index: two who ask wait for nobody.
CREATE TABLE pgqueue.job_signal (
    job_id     bigint      NOT NULL,
    kind       text        NOT NULL CHECK (kind = 'cancel'),
    reason     text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT pgqueue.now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_signal_job ON pgqueue.job_signal (job_id);
COMMENT ON TABLE pgqueue.job_signal IS 'What was asked of running jobs, until they have ended.';


-- Workers ------------------------------------------------------------------------------------------------------------

-- One row per worker process and boot; ids are never used again. Changed once a beat.
CREATE TABLE pgqueue.worker (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    beat        bigint      NOT NULL DEFAULT 0,
    lease       interval    NOT NULL CHECK (lease >= interval '1 second'),
    started_at  timestamptz NOT NULL DEFAULT pgqueue.now(),
    beat_at     timestamptz NOT NULL DEFAULT pgqueue.now(),
    dead_at     timestamptz,
    pid         integer     NOT NULL,
    concurrency integer     NOT NULL,
    -- Slots in which a handler goes on that did not stop at its timeout; its job was taken away.
    lost        integer     NOT NULL DEFAULT 0,
    state       text        NOT NULL DEFAULT 'running' CHECK (state IN ('starting', 'running', 'quiet', 'stopped')),
    host        text        NOT NULL,
    version_tag text        NOT NULL,
    queues      text[]      NOT NULL,
    -- The jobs that had really started at the last beat; a claimed job that is not among them carries no crash.
    running     bigint[]    NOT NULL DEFAULT '{}',
    -- Its sessions as {pid, backend_start} pairs, ended before its jobs are given to others.
    sessions    jsonb       NOT NULL DEFAULT '[]'
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.worker IS 'Worker processes, their sign of life and what they run.';

-- Queues have no rows of their own; a row here says what differs from the default.
CREATE TABLE pgqueue.queue (
    name      varchar(40) COLLATE "C" PRIMARY KEY CHECK (name <> ''),
    paused_at timestamptz
);
COMMENT ON TABLE pgqueue.queue IS 'Queues that are paused. A queue without a row is open.';


-- Enqueue from plain SQL ---------------------------------------------------------------------------------------------

CREATE FUNCTION pgqueue.enqueue(
    task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL, deadline timestamptz DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = '' AS $$
DECLARE
    new_id bigint;
    due boolean := enqueue.run_at IS NULL OR enqueue.run_at <= pgqueue.now();
BEGIN
    IF enqueue.task IS NULL OR enqueue.task !~ '^[^[:space:][:cntrl:]]{1,200}$' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: task % is not a task name', quote_nullable(left(enqueue.task, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 200 characters without spaces, such as billing.charge.';
    END IF;
    IF enqueue.queue !~ '^[A-Za-z0-9_.-]{1,40}$' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: queue % is not a queue name', quote_nullable(left(enqueue.queue, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 40 letters, digits, _ . or -.';
    END IF;
    IF enqueue.priority NOT BETWEEN 0 AND 9 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: priority % is outside 0 (first) to 9', enqueue.priority
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT isfinite(enqueue.run_at) THEN
        RAISE EXCEPTION 'pgqueue.enqueue: run_at is %, no time', enqueue.run_at USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.args IS NULL OR jsonb_typeof(enqueue.args) <> 'object' OR jsonb_typeof(enqueue.headers) <> 'object' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args and headers are JSON objects, by parameter name'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(enqueue.args::text) > 1048576 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args have % bytes, the limit is 1048576', octet_length(enqueue.args::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store the data in a table and pass its key.';
    END IF;

    INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline)
    VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
            coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
            enqueue.run_at, enqueue.headers, enqueue.deadline)
    RETURNING id INTO new_id;

    IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' THEN
        PERFORM pg_notify('pgqueue.' || CASE WHEN due THEN coalesce(enqueue.queue, 'default') ELSE ':scheduled' END, '');
    END IF;
    RETURN new_id;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue IS
    'Enqueue a job from any language, in the caller''s transaction. Returns its id. SET pgqueue.notify = off for two-phase commit.';

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (1, 'initial', false);

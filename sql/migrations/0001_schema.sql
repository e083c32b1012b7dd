-- breaking: no
--
-- All that a queue is: its tables, its functions, and which roles may call what. Each object stands here once, beside those of
-- its subject. Why it is made so: docs/design/database.md.
--
-- An id is not an identity for ever. After TRUNCATE … RESTART IDENTITY, a restored dump or a switchover to a server whose
-- sequences lag, an id is given again. So a job is named by its id and the time it was enqueued: a row of a table beside
-- `job` belongs to a job only if both agree.
--
-- The order of locks, for every statement that waits for one:
--
-- 1. unique keys, in the order of their bytes;
-- 2. then jobs that wait, in the order of their ids, whatever partition they are in.
--
-- Two transactions that lock in this order cannot wait for each other. What is found out of order is given back (see
-- `take_many_keys`). What workers do waits for no job: it passes over a locked row.
--
-- Functions that an application's session calls have settings of their own. Such a session plans as it likes: with what
-- it knew of the tables when they were empty, or with indexes off.


-- Ground --------------------------------------------------------------------------------------------------------------

CREATE SCHEMA IF NOT EXISTS pgqueue;

-- A partitioned table cannot be made while the default tablespace has the name of the database's own, which is the same.
DO $$
BEGIN
    PERFORM set_config('default_tablespace', '', true) FROM pg_database d JOIN pg_tablespace t ON t.oid = d.dattablespace
    WHERE d.datname = current_database() AND t.spcname = current_setting('default_tablespace');
END $$;

CREATE TABLE pgqueue.migration (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    breaking   boolean     NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE pgqueue.migration IS 'Which numbered files of sql/migrations have been applied here.';

-- For statements that check themselves: raise instead of going on with half a move.
CREATE FUNCTION pgqueue.refuse(what text) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'pgqueue: %', what USING ERRCODE = 'data_corrupted';
END $$;

-- The table defends itself: a hand-written UPDATE of the state would strand the row (its position, its lane, its
-- holder).
CREATE FUNCTION pgqueue.refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of %.% are moved between states, never updated', TG_TABLE_SCHEMA, TG_TABLE_NAME
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Use `pgqueue cancel`, `pgqueue retry`, `pgqueue pause` or their Python functions. '
                     'A waiting job can also be DELETEd and INSERTed anew in one transaction.';
END $$;

-- For a completion inside a transaction of a handler: raise instead of ending nothing, so that the transaction cannot
-- commit. Its SQLSTATE is one of our own, that no constraint and no trigger of an application uses.
CREATE FUNCTION pgqueue.refuse_lost(job_id bigint) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'job % is not this run''s any more: it was given to another worker, or has ended', job_id
        USING ERRCODE = 'PGQ01', HINT = 'Nothing of this transaction is kept. The other run counts.';
END $$;

-- The same where the transaction is not the one that the worker has begun: the handler has ended that one.
CREATE FUNCTION pgqueue.refuse_ended(job_id bigint) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the transaction of job % was ended before its worker came to end it', job_id
        USING ERRCODE = 'PGQ03', HINT = 'Nothing of the transaction that is open now is kept.';
END $$;

-- The text of a value; NULL if it is longer than a text may be. To find that out takes the server seconds, and 2 GB of
-- memory. So once it has met such a value, it first looks at the numbers of each further value of the same transaction.
-- That look takes up to ten times as long as an ordinary text, so it is not the rule.
CREATE FUNCTION pgqueue.text_of(value jsonb) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    said text;
BEGIN
    IF (pg_catalog.current_setting('pgqueue.long_text', true) OPERATOR(pg_catalog.=) 'met') IS TRUE AND pg_catalog.jsonb_path_exists(
        value, '$.** ? (@ > 1e400 || @ < -1e400 || @ != 0 && @ < 1e-400 && @ > -1e-400)'::pg_catalog.jsonpath)
    THEN
        RETURN NULL;
    END IF;
    <<made>>
    BEGIN
        said := value::pg_catalog.text;
    EXCEPTION WHEN program_limit_exceeded OR statement_too_complex OR internal_error OR out_of_memory THEN
        said := NULL;
    END made;
    IF value IS NOT NULL AND (pg_catalog.octet_length(said) OPERATOR(pg_catalog.<=) 16777216) IS NOT TRUE THEN
        PERFORM pg_catalog.set_config('pgqueue.long_text', 'met', true);
    END IF;
    RETURN said;
END $$;
COMMENT ON FUNCTION pgqueue.text_of IS
    'The text of a JSON value; NULL if it is longer than a text may be.';

-- The one place statements take the time from. Inlined by the planner, so it costs what clock_timestamp() costs;
-- tests replace it to set the clock.
CREATE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN clock_timestamp();


-- Jobs ----------------------------------------------------------------------------------------------------------------

CREATE FUNCTION pgqueue.keys_can_be(
    lock_key text, lock_limit integer, on_locked text, limit_key text, rate_key text
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN (lock_key IS NULL
            OR (pg_catalog.octet_length(lock_key) OPERATOR(pg_catalog.>=) 1)
            AND (pg_catalog.octet_length(lock_key) OPERATOR(pg_catalog.<=) 500)
            AND (lock_limit OPERATOR(pg_catalog.>=) 1) IS NOT FALSE
            AND (on_locked IS NULL
                 OR (on_locked OPERATOR(pg_catalog.=) 'wait'::pg_catalog.text)
                 OR (on_locked OPERATOR(pg_catalog.=) 'skip'::pg_catalog.text)
                 OR (on_locked OPERATOR(pg_catalog.=) 'once'::pg_catalog.text)))
        AND (pg_catalog.octet_length(limit_key) OPERATOR(pg_catalog.>=) 1) IS NOT FALSE
        AND (pg_catalog.octet_length(limit_key) OPERATOR(pg_catalog.<=) 200) IS NOT FALSE
        AND (pg_catalog.octet_length(rate_key) OPERATOR(pg_catalog.>=) 1) IS NOT FALSE
        AND (pg_catalog.octet_length(rate_key) OPERATOR(pg_catalog.<=) 500) IS NOT FALSE;
END $$;
COMMENT ON FUNCTION pgqueue.keys_can_be IS
    'For checks: keys of a length that an index holds, and what belongs to a lock.';

CREATE SEQUENCE pgqueue.job_id_seq AS bigint;

-- CACHE 1: a position is drawn after its transaction has an id, and in the order the watermark's proof needs.
CREATE SEQUENCE pgqueue.job_pos_seq AS bigint CACHE 1;

CREATE SEQUENCE pgqueue.job_hold_seq AS bigint CACHE 1;

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
    -- -1 for poison jobs, under which one or more workers died. No generated column: that costs every statement 20 µs.
    rank            smallint    NOT NULL DEFAULT 11,
    bin             smallint    NOT NULL DEFAULT 0,
    holds           boolean     NOT NULL DEFAULT false,
    state           text        NOT NULL DEFAULT 'available',
    -- Compared by bytes: the first column of the hottest index.
    queue           varchar(40) COLLATE "C" NOT NULL DEFAULT 'default',
    task            varchar(200) COLLATE "C" NOT NULL,
    args            jsonb       NOT NULL DEFAULT '{}',
    headers         jsonb,
    result          jsonb,
    progress        jsonb,
    reason          text,
    version_tag     text,
    lock_key        text COLLATE "C",
    on_locked       text,
    limit_key       text COLLATE "C",
    key             text COLLATE "C",
    unique_key      text COLLATE "C",
    idempotency_key text COLLATE "C",
    rate_key        text COLLATE "C",
    -- In which order holders have come: what enters `running` draws the next number, but for the plain jobs of a claim.
    hold_pos        bigint,
    -- The node of its flow (see `pgqueue.node`); NULL for a job of no flow. Negative until the job is released: until then
    -- it waits for other nodes, and is blocked. A job that never had to wait has a positive one. History keeps the sign.
    -- The lowest bigint has no positive twin.
    node            bigint CONSTRAINT job_node_has_a_twin CHECK (node <> '-9223372036854775808')
) PARTITION BY LIST (state);
COMMENT ON TABLE pgqueue.job IS 'Every job, in the partition of its state. Read it freely; never UPDATE it.';
ALTER SEQUENCE pgqueue.job_id_seq  OWNED BY pgqueue.job.id;
ALTER SEQUENCE pgqueue.job_pos_seq OWNED BY pgqueue.job.pos;

-- A job that waits for its release is in `job_blocked`, and nowhere else among the jobs that live: each table refuses it,
-- or what is no such job. NULL passes `node > 0`.
--
-- What others write is checked where it enters: available and scheduled. Moves between our own states trust it. A
-- statement pays for every constraint anew (seven were a third of a one-row insert): hence one for each table.
--
-- A check is a property of its row: what it let in at one server, it lets in at any other, at any time. So none asks a
-- clock, a setting, a right or another row. Else a restore or a subscriber would refuse rows that were right.
CREATE TABLE pgqueue.job_available PARTITION OF pgqueue.job (
    pos NOT NULL,
    CONSTRAINT job_available_is_ready CHECK (
        priority BETWEEN 0 AND 9 AND pos > 0 AND octet_length(queue) BETWEEN 1 AND 40
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND node > 0 AND run_at < 'infinity' AND (coalesce(lock_key, limit_key, rate_key) IS NULL
             OR pgqueue.keys_can_be(lock_key, lock_limit, on_locked, limit_key, rate_key)))
) FOR VALUES IN ('available');
CREATE UNIQUE INDEX job_available_id ON pgqueue.job_available (id);
CREATE INDEX job_available_lock_holds ON pgqueue.job_available (lock_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND lock_key IS NOT NULL;

-- Jobs with keys (a lock, a limit, a rate) have lanes of their own, and a claim of their own. So the claim of a plain
-- job knows nothing of keys, and no plain job waits behind one that needs a key. Each claim states the condition of its
-- index.
--
-- NULLS FIRST: no position is NULL, but the order has another name. While a table is empty all indexes cost the same,
-- and a plan made then is kept. No other index gives this order, so these two are taken however a statement was
-- planned.
CREATE INDEX job_available_plain ON pgqueue.job_available (queue, rank, pos NULLS FIRST)
    WHERE coalesce(lock_key, limit_key, rate_key) IS NULL;
CREATE INDEX job_available_keyed ON pgqueue.job_available (queue, rank, pos NULLS FIRST)
    WHERE coalesce(lock_key, limit_key, rate_key) IS NOT NULL;
CREATE INDEX job_available_limit_holds ON pgqueue.job_available (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND limit_key IS NOT NULL;

-- NULLS FIRST: as above. A node is read from its highest id, in an order that no other index gives.
CREATE INDEX job_available_node ON pgqueue.job_available (node, id NULLS FIRST) WHERE node IS NOT NULL;

CREATE TABLE pgqueue.job_scheduled PARTITION OF pgqueue.job (
    run_at NOT NULL,
    CONSTRAINT job_scheduled_is_waiting CHECK (
        priority BETWEEN 0 AND 9 AND octet_length(queue) BETWEEN 1 AND 40 AND isfinite(run_at)
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL AND node > 0
        AND (lock_key IS NULL AND limit_key IS NULL AND rate_key IS NULL
             OR pgqueue.keys_can_be(lock_key, lock_limit, on_locked, limit_key, rate_key)))
) FOR VALUES IN ('scheduled');
CREATE UNIQUE INDEX job_scheduled_id ON pgqueue.job_scheduled (id);
CREATE INDEX job_scheduled_due ON pgqueue.job_scheduled (run_at, id) WHERE run_at IS NOT NULL;
CREATE INDEX job_scheduled_lock_holds ON pgqueue.job_scheduled (lock_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND lock_key IS NOT NULL;
CREATE INDEX job_scheduled_limit_holds ON pgqueue.job_scheduled (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND limit_key IS NOT NULL;
CREATE INDEX job_scheduled_node ON pgqueue.job_scheduled (node, id NULLS FIRST) WHERE node IS NOT NULL;

CREATE TABLE pgqueue.job_blocked PARTITION OF pgqueue.job (
    key NOT NULL,
    -- The order is lock, limit, rate: a job that waits for a lock holds nothing,
    -- and one that holds something waits for what comes after it.
    CONSTRAINT job_blocked_is_not_taken CHECK (
        worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND NOT (holds AND starts_with(key, 'lock:')) AND (node < 0) IS TRUE = starts_with(key, 'node:'))
) FOR VALUES IN ('blocked');

-- The one on ids comes last: while a table is empty all indexes cost the same, and the one made last is taken.
CREATE UNIQUE INDEX job_blocked_id ON pgqueue.job_blocked (id);
CREATE INDEX job_blocked_queue_holds ON pgqueue.job_blocked (queue, task) WHERE holds AND queue <> '';
CREATE INDEX job_blocked_lock_holds ON pgqueue.job_blocked (lock_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND lock_key IS NOT NULL;

-- IS TRUE: says nothing of `key` that the planner could see.
CREATE INDEX job_blocked_limit_holds ON pgqueue.job_blocked (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND limit_key IS NOT NULL AND (substr(key, 1, 5) = 'rate:') IS TRUE;

-- Poison jobs that must run alone and wait for a rate: to find them without a look at every line. Mostly empty.
CREATE INDEX job_blocked_rate_suspects ON pgqueue.job_blocked (queue, id) WHERE crashes > 1 AND starts_with(key, 'rate:');
CREATE INDEX job_blocked_limit_line ON pgqueue.job_blocked (substr(key, 7), queue, rank, id) WHERE left(key, 6) = 'limit:';
CREATE INDEX job_blocked_line ON pgqueue.job_blocked (key, rank, id) WHERE key IS NOT NULL;

-- As those of limits: a column of its own, because no line of all queues will do.
CREATE INDEX job_blocked_rate_line ON pgqueue.job_blocked (substr(key, 6), queue, rank, id) WHERE left(key, 5) = 'rate:';
CREATE INDEX job_blocked_node ON pgqueue.job_blocked (node, id NULLS FIRST) WHERE node IS NOT NULL;

CREATE TABLE pgqueue.job_running PARTITION OF pgqueue.job (
    worker_id NOT NULL,
    claim NOT NULL,
    started_at NOT NULL,
    -- A job with a key runs only if it was let in: the table itself refuses a statement that would start one unasked.
    CONSTRAINT job_running_is_held CHECK (
        finished_at IS NULL AND node > 0 AND (coalesce(lock_key, limit_key, rate_key) IS NULL OR holds OR key IS NOT NULL))
) FOR VALUES IN ('running');
CREATE UNIQUE INDEX job_running_id ON pgqueue.job_running (id);
CREATE INDEX job_running_worker ON pgqueue.job_running (worker_id, claim);
CREATE INDEX job_running_lock ON pgqueue.job_running (lock_key, coalesce(hold_pos, 9223372036854775807)) WHERE lock_key IS NOT NULL;
CREATE INDEX job_running_limit ON pgqueue.job_running (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE limit_key IS NOT NULL;
CREATE INDEX job_running_node ON pgqueue.job_running (node, id NULLS FIRST) WHERE node IS NOT NULL;

CREATE TABLE pgqueue.job_done PARTITION OF pgqueue.job (
    finished_at NOT NULL
) FOR VALUES IN ('completed', 'skipped') PARTITION BY LIST (bin);

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
ALTER TABLE pgqueue.job_running ALTER hold_pos SET DEFAULT nextval('pgqueue.job_hold_seq');

CREATE FUNCTION pgqueue.refuse_lane(rank smallint, priority smallint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'pgqueue: rank % is no lane for this job of priority %', rank, priority
        USING ERRCODE = 'check_violation', HINT = 'Leave out the rank: it follows from the priority.';
END $$;

-- Whether a row that came into `available` belongs elsewhere: it has a priority and no lane, or has to wait. It asks the
-- clock only for a job that was never taken.
--
-- A lane that is not that of its priority is refused. The front, and the lanes of poison jobs, are for jobs that had been
-- taken, or hold a key. No column tells a job that was given back before it started. There it counts whether the
-- inserting role may say what a job holds, as only workers and operators may.
--
-- It is parsed in the session that inserts, by its search_path. So each operator and function has its full name. And it is
-- one expression: promotion pays for it.
CREATE FUNCTION pgqueue.is_out_of_place(
    rank smallint, priority smallint, run_at timestamptz, attempt smallint, crashes smallint, snoozes smallint, holds boolean
) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN rank OPERATOR(pg_catalog.=) 11 AND priority OPERATOR(pg_catalog.<>) 5
        OR rank OPERATOR(pg_catalog.>=) 0 AND (rank OPERATOR(pg_catalog./) 2 OPERATOR(pg_catalog.<>) priority) AND pgqueue.refuse_lane(rank, priority)
        OR attempt OPERATOR(pg_catalog.<=) 0 AND crashes OPERATOR(pg_catalog.<=) 0 AND snoozes OPERATOR(pg_catalog.<=) 0 AND NOT holds
        AND (run_at OPERATOR(pg_catalog.>) pgqueue.now()
             OR (rank OPERATOR(pg_catalog.<>) (2 OPERATOR(pg_catalog.*) priority OPERATOR(pg_catalog.+) 1))
             AND NOT pg_catalog.has_column_privilege(
                 'pgqueue.job_available'::pg_catalog.text, 'holds'::pg_catalog.text, 'INSERT'::pg_catalog.text)
             AND pgqueue.refuse_lane(rank, priority));
END $$;
COMMENT ON FUNCTION pgqueue.is_out_of_place IS
    'For a trigger: a job that is put in without a lane or before its time goes elsewhere.';

-- A plain INSERT may name a priority or a time, and knows nothing of lanes and states. Its row is written once more, where
-- it belongs, by the same transaction. A scheduled job needs no lane: that is worked out when it is due.
--
-- A job that was due stays due at a subscriber of logical replication, and in a restore without triggers, whatever the
-- clock says there: nothing fires. No row of our own statements is moved.
--
-- AFTER: a trigger before the insert would take the batches of COPY. FOR EACH ROW: one for each statement has to be
-- given all its rows, and would not hear of statements that name `job`. Each statement reads checks and conditions anew, at
-- 1 us a word: so what concerns few rows stands in a function.
CREATE FUNCTION pgqueue.put_in_place() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF TG_RELID <> 'pgqueue.job_available'::regclass THEN
        RAISE EXCEPTION 'pgqueue: put_in_place is the trigger of pgqueue.job_available, and of no other table'
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    DELETE FROM pgqueue.job_available j WHERE j.id = NEW.id AND j.rank = NEW.rank;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    NEW.rank := 2 * NEW.priority + 1;
    IF NEW.run_at > pgqueue.now() THEN
        NEW.state := 'scheduled';
        NEW.pos := NULL;
        INSERT INTO pgqueue.job_scheduled VALUES (NEW.*);
    ELSE
        INSERT INTO pgqueue.job_available VALUES (NEW.*);
    END IF;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION pgqueue.put_in_place IS
    'Where a job goes whose INSERT named a priority and no rank, or a time to come and no state.';
CREATE TRIGGER put_in_place AFTER INSERT ON pgqueue.job_available FOR EACH ROW
    WHEN ((NEW.rank <> 2 * NEW.priority + 1 OR NEW.run_at > NEW.enqueued_at) AND pgqueue.is_out_of_place(
        NEW.rank, NEW.priority, NEW.run_at, NEW.attempt, NEW.crashes, NEW.snoozes, NEW.holds))
    EXECUTE FUNCTION pgqueue.put_in_place();


-- Beside a job --------------------------------------------------------------------------------------------------------

-- What is asked of running jobs. Appended by the session that asks, read by the worker that runs the job. Only that
-- worker and rescue ever lock a running row, so no request can hold up a completion. No unique index: two sessions that
-- ask do not wait for each other.
CREATE TABLE pgqueue.job_signal (
    job_id      bigint      NOT NULL,
    kind        text        NOT NULL CHECK (kind = 'cancel'),
    reason      text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT pgqueue.now(),
    enqueued_at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE pgqueue.job_signal IS 'What was asked of running jobs, until they have ended.';
CREATE INDEX job_signal_job ON pgqueue.job_signal (job_id);

-- How far an iteration has come: appended in the transaction of each batch, the highest n counts. Deleted when its job
-- has completed; kept for a dead job, so that a retry by hand goes on where it stopped.
CREATE TABLE pgqueue.job_cursor (
    job_id      bigint      NOT NULL,
    n           integer     NOT NULL,
    cursor      jsonb       NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT pgqueue.now(),
    enqueued_at timestamptz NOT NULL,
    PRIMARY KEY (job_id, n)
);
COMMENT ON TABLE pgqueue.job_cursor IS 'Where a job that iterates goes on: one row per batch, the highest n counts.';

-- What the durable steps of a job have answered: one row a step, appended in the transaction of the step, never changed.
-- Kept as long as its job stands anywhere, history included: the next attempt takes the answer from here.
CREATE TABLE pgqueue.job_step (
    job_id      bigint      NOT NULL,
    enqueued_at timestamptz NOT NULL,
    name        text        COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 200),
    result      jsonb,
    created_at  timestamptz NOT NULL DEFAULT pgqueue.now(),
    PRIMARY KEY (job_id, enqueued_at, name)
);
COMMENT ON TABLE pgqueue.job_step IS 'What the durable steps of jobs have answered, for later attempts.';

-- How far running jobs say they are. Written at most once a second per job.
CREATE TABLE pgqueue.job_progress (
    job_id     bigint           PRIMARY KEY,
    done       double precision NOT NULL,
    total      double precision,
    updated_at timestamptz      NOT NULL DEFAULT pgqueue.now()
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.job_progress IS 'What running jobs say of how far they are.';

-- Which sessions wait for the end of which job: for them, and only then, completions notify.
CREATE TABLE pgqueue.job_waiter (
    job_id     bigint      NOT NULL,
    waiter     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    pid        integer     NOT NULL DEFAULT pg_backend_pid()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE pgqueue.job_waiter IS 'Which sessions wait for the result of which job.';
CREATE INDEX job_waiter_job ON pgqueue.job_waiter (job_id);

-- Attempts that did not complete: what happened, where, for how long. Appended, never changed, thrown away like
-- history.
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
    version_tag text,
    -- A snooze spends no attempt. So (job, attempt, worker) names no single run, and (job, worker, claim) does.
    enqueued_at timestamptz NOT NULL,
    claim       integer     NOT NULL,
    -- Which task, which type of error, and where in the application: the same for failures that have one cause.
    fingerprint text
) PARTITION BY LIST (bin);
COMMENT ON TABLE pgqueue.attempt IS 'One row per attempt that did not complete: outcome, error, worker, times.';


-- History -------------------------------------------------------------------------------------------------------------

-- What happened to jobs, counted by minute and by hour; and failures, grouped by where they come from. A worker appends
-- one part for each minute in which something happened (`history_part`). The leader folds the parts into
-- `history_minute`, and the minutes of a past hour into `history_hour`. Old rows go by TRUNCATE of a leaf.

-- The rings. `bin` is the leaf being written, since `since`. Statements read it, and none computes it.
--
-- Ages and deadlines are made of the times of this table, and of those below. So no row may have an infinite one, or one
-- that Python does not know. The constraint says it to the person who writes it; a reader could only hide it.
CREATE TABLE pgqueue.ring (
    kind      text COLLATE "C"        PRIMARY KEY,
    leaves    smallint    NOT NULL,
    bin       smallint    NOT NULL DEFAULT 0,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    retention interval    NOT NULL CHECK (retention > interval '0'),
    CHECK (bin BETWEEN 0 AND leaves - 1),
    CONSTRAINT ring_has_these_leaves CHECK (
        leaves = CASE WHEN kind IN ('dead', 'attempt') THEN 16 WHEN kind IN ('done', 'minute', 'hour') THEN 8 ELSE 0 END),
    CONSTRAINT ring_retention_is_1000_years_at_most CHECK (retention <= interval '1000 years'),
    CONSTRAINT ring_times_are_from_1970_to_9000 CHECK (since BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
);

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
    -- The minute.
    at         timestamptz NOT NULL,
    written_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    -- A list of objects: queue, task, and what is not 0 of the columns of `history_minute`.
    counts     jsonb       NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(counts) = 'array'),
    -- A list of objects: what `error_group` has; `first` and `last` are seconds before `written_at`.
    errors     jsonb       NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(errors) = 'array'),
    PRIMARY KEY (writer, part),
    CONSTRAINT history_part_times_are_from_1970_to_9000 CHECK (at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND written_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.history_part IS 'What workers have counted and the leader has not yet folded into the history.';

-- Rows are only appended. If a part comes late, its minute has one more row: a reader adds them up.
--
-- `wait` and `run` are histograms: the n-th number counts the times up to the n-th of `history_bounds()` and above the
-- one before. The numbers behind the last that is not 0 are left out.
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
    run          bigint[]    NOT NULL DEFAULT '{}',
    -- A row with a `state` is of a measurement (table `depth`), for a queue: `n` jobs, and `oldest`, for how many
    -- seconds the first of them could have run. Of blocked jobs that is since when one could have gone on. Its numbers
    -- of what happened are 0, and its task is ''. It lies in the same leaves, and goes with them.
    state        text        COLLATE "C",
    n            bigint,
    exact        boolean,
    oldest       float8,
    CONSTRAINT history_numbers_are_numbers CHECK (
        least(started, completed, failed, retried, snoozed, cancelled, expired, skipped, interrupted, rescued, n) >= 0
        AND greatest(started, completed, failed, retried, snoozed, cancelled, expired, skipped, interrupted, rescued, n)
            <= 1000000000000
        AND wait_seconds BETWEEN 0 AND 1e18 AND run_seconds BETWEEN 0 AND 1e18 AND oldest BETWEEN -1e18 AND 1e18 IS NOT FALSE
        AND array_position(wait, NULL) IS NULL AND array_position(run, NULL) IS NULL
        AND 0 <= ALL (wait || run) AND 1000000000000 >= ALL (wait || run)),
    CONSTRAINT history_times_are_from_1970_to_9000 CHECK (at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
) PARTITION BY LIST (bin);
COMMENT ON TABLE pgqueue.history_minute IS 'What happened to the jobs of each queue and task, by minute. Add up the rows of a minute.';

CREATE TABLE pgqueue.history_hour (LIKE pgqueue.history_minute INCLUDING DEFAULTS INCLUDING CONSTRAINTS) PARTITION BY LIST (bin);
COMMENT ON TABLE pgqueue.history_hour IS 'What happened to the jobs of each queue and task, by hour. Add up the rows of an hour.';

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
    version_tag text,
    -- The version that failed so first: `version_tag` is that of the last failure.
    first_version text,
    CONSTRAINT error_group_times_are_from_1970_to_9000 CHECK (first_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND last_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC'),
    CONSTRAINT error_group_names_jobs CHECK (array_position(job_ids, NULL) IS NULL)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.error_group IS 'Failed attempts, grouped by task, type of error and place in the application.';

-- For each history how many leaves it has, and how long a row is kept at least.
INSERT INTO pgqueue.ring (kind, leaves, retention)
VALUES ('done', 8, interval '1 day'), ('dead', 16, interval '14 days'), ('attempt', 16, interval '14 days'),
       ('minute', 8, interval '24 hours'), ('hour', 8, interval '30 days');

-- The leaves of every ring. No column of `history_*` names a row, so in a publication the whole row does.
DO $$
DECLARE
    ring record;
    leaf text;
BEGIN
    FOR ring IN SELECT r.kind, n AS bin, CASE WHEN r.kind IN ('done', 'dead') THEN 'job_' || r.kind
                                              WHEN r.kind IN ('minute', 'hour') THEN 'history_' || r.kind ELSE r.kind END AS parent
                FROM pgqueue.ring r, generate_series(0, r.leaves - 1) n ORDER BY r.kind, n
    LOOP
        leaf := format('%s_%s', ring.parent, ring.bin);
        EXECUTE format('CREATE TABLE pgqueue.%I PARTITION OF pgqueue.%I FOR VALUES IN (%s) WITH (
                            autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_analyze_scale_factor = 0.5)',
                       leaf, ring.parent, ring.bin);
        CASE ring.parent
            WHEN 'attempt' THEN
                EXECUTE format('CREATE INDEX %I ON pgqueue.%I (job_id)', leaf || '_job', leaf);
            WHEN 'history_minute', 'history_hour' THEN
                EXECUTE format('CREATE INDEX %I ON pgqueue.%I (at)', leaf || '_at', leaf);
                EXECUTE format('CREATE INDEX %I ON pgqueue.%I (task, at)', leaf || '_task', leaf);
            ELSE
                EXECUTE format('CREATE INDEX %I ON pgqueue.%I (id)', leaf || '_id', leaf);
                EXECUTE format('CREATE INDEX %I ON pgqueue.%I (node, id) WHERE node IS NOT NULL', leaf || '_node', leaf);
                EXECUTE format('CREATE INDEX %I ON pgqueue.%I (finished_at) WHERE isfinite(finished_at) IS NOT NULL',
                               leaf || '_finished', leaf);
        END CASE;
    END LOOP;
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

-- The upper bounds of the histograms, in seconds. There is one more number for what is longer.
CREATE FUNCTION pgqueue.history_bounds() RETURNS float8[] LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN ARRAY[
    0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7,
    10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600, 900, 1200, 1800, 2700, 3600, 5400, 7200, 10800, 14400, 21600, 43200, 86400]::float8[];

-- How long attempts of a task have run in the last 24 hours: in seconds, the time that this share of them (0.95) has
-- not exceeded. NULL: none has ended. It lies between the same two bounds as the true one. Times beyond the last bound
-- answer the last bound.
CREATE FUNCTION pgqueue.run_quantile(task text, share float8) RETURNS float8 LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
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
COMMENT ON FUNCTION pgqueue.run_quantile IS
    'The run time in seconds that this share of a task''s attempts has not exceeded, in the last 24 hours.';

-- Advance a ring whose current leaf is old enough (always, when forced): throw away the oldest leaf and write there
-- from now on, or do neither. What flows still need of it is kept. Waits 50 ms at most for readers of history. True: advanced; false: not due; NULL: a
-- reader is in the way.
CREATE FUNCTION pgqueue.advance_ring(ring_kind text, forced boolean DEFAULT false) RETURNS boolean
    LANGUAGE plpgsql SET lock_timeout = '50ms' SET enable_nestloop = off SET jit = off AS $$
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
    IF r.kind IN ('done', 'dead') THEN
        -- No row of the leaf is taken back by a retry between the two statements. Readers are not held up by this lock.
        -- The flows that may release a job yet (`flow_may_release`, but for what goes with this leaf), or read results
        -- (`flow_may_read`), are one set, which the leaf is joined with: a leaf may have millions of rows, and none of
        -- them is asked for by itself. The set costs what lives, however much history there is.
        EXECUTE format('LOCK TABLE pgqueue.%I IN SHARE ROW EXCLUSIVE MODE', 'job_' || r.kind || '_' || next_bin);
        EXECUTE format($keep$
            INSERT INTO pgqueue.flow_kept (node, id, state, result, reason)
            SELECT abs(j.node), j.id, j.state, j.result, j.reason FROM pgqueue.%1$I j
            WHERE j.bin = %2$s AND j.node IS NOT NULL AND abs(j.node) >> 20 IN (
                SELECT -b.node >> 20 FROM pgqueue.job_blocked b WHERE b.node < 0
                UNION SELECT -d.node >> 20 FROM pgqueue.job_dead d WHERE d.node < 0 AND d.bin <> %3$s
                UNION SELECT living.flow FROM (
                    SELECT a.node >> 20 AS flow FROM pgqueue.job_available a WHERE a.node > 0
                    UNION SELECT s.node >> 20 FROM pgqueue.job_scheduled s WHERE s.node > 0
                    UNION SELECT r.node >> 20 FROM pgqueue.job_running r WHERE r.node > 0
                    UNION SELECT b.node >> 20 FROM pgqueue.job_blocked b WHERE b.node > 0) AS living
                WHERE (SELECT true FROM pgqueue.node n WHERE n.id >> 20 = living.flow AND n.name IS NOT NULL LIMIT 1))
            ON CONFLICT DO NOTHING $keep$, 'job_' || r.kind, next_bin, CASE r.kind WHEN 'dead' THEN next_bin ELSE -1 END);
    END IF;
    EXECUTE format('TRUNCATE pgqueue.%I', CASE WHEN r.kind = 'attempt' THEN 'attempt_'
                                               WHEN r.kind IN ('minute', 'hour') THEN 'history_' || r.kind || '_'
                                               ELSE 'job_' || r.kind || '_' END || next_bin);
    UPDATE pgqueue.ring SET bin = next_bin, since = pgqueue.now() WHERE kind = r.kind;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

-- Delete rows, each by itself: one that the application keeps by a foreign key, or by a trigger, stays, and the others
-- go. Smaller parts are tried, in no order, until 20 rows were refused by themselves: the next call comes to the others.
-- Answers how many are gone, how many were refused, and what the server said to the first of these, and where.
CREATE FUNCTION pgqueue.forget_rows(of_table regclass, rows tid[])
    RETURNS TABLE (gone bigint, refused integer, error text, context text) LANGUAGE plpgsql AS $$
DECLARE
    parts integer[][] := ARRAY[[1, cardinality(rows)]];
    part integer[];
    middle integer;
    n bigint;
    said text;
    place text;
BEGIN
    gone := 0;
    refused := 0;
    -- A foreign key that is looked at when the transaction ends would refuse all of it.
    SET CONSTRAINTS ALL IMMEDIATE;
    WHILE cardinality(parts) > 0 AND refused < 20 LOOP
        part := ARRAY[parts[array_upper(parts, 1)][1], parts[array_upper(parts, 1)][2]];
        parts := parts[1 : array_upper(parts, 1) - 1];
        CONTINUE WHEN part[1] > part[2];
        BEGIN
            EXECUTE format('DELETE FROM %s WHERE ctid = ANY ($1)', of_table) USING rows[part[1] : part[2]];
            GET DIAGNOSTICS n = ROW_COUNT;
            gone := gone + n;
        EXCEPTION
            WHEN insufficient_privilege OR lock_not_available OR deadlock_detected THEN
                RAISE;
            WHEN OTHERS THEN
                GET STACKED DIAGNOSTICS said = MESSAGE_TEXT, place = PG_EXCEPTION_CONTEXT;
                IF part[1] = part[2] THEN
                    refused := refused + 1;
                    error := coalesce(error, said);
                    context := coalesce(context, place);
                ELSE
                    IF error IS NULL AND part = ARRAY[1, cardinality(rows)] THEN
                        rows := ARRAY(SELECT r FROM unnest(rows) AS r ORDER BY random());
                    END IF;
                    middle := (part[1] + part[2]) / 2;
                    parts := parts || ARRAY[[part[1], middle], [middle + 1, part[2]]];
                END IF; END;
    END LOOP;
    RETURN NEXT;
END $$;
COMMENT ON FUNCTION pgqueue.forget_rows IS
    'Delete these rows of a table of pgqueue; one that is refused stays, and the others go.';


-- Flows ---------------------------------------------------------------------------------------------------------------

-- Jobs that wait for jobs: docs/design/flows.md. A flow is written by one transaction. It has nodes; a node is a set of
-- jobs, and has ended when none of them lives. The jobs of node x are the rows of `job` with `node` x or -x.
CREATE SEQUENCE pgqueue.flow_id_seq AS bigint;

CREATE TABLE pgqueue.flow (
    id          bigint      PRIMARY KEY DEFAULT nextval('pgqueue.flow_id_seq'),
    name        text        NOT NULL,
    enqueued_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    -- The number of a node must fit beside it.
    CONSTRAINT flow_can_be CHECK (id BETWEEN 1 AND 8796093022207)
);
COMMENT ON TABLE pgqueue.flow IS 'Flows: sets of jobs of which some wait for others.';
ALTER SEQUENCE pgqueue.flow_id_seq OWNED BY pgqueue.flow.id;

-- A node of a flow, written once, with its flow. Its id: the flow's, shifted left by 20 bits, plus its number there from 1.
--
-- A node needs a row if it has a name, or waits. What it waits for are ids of nodes: of `after` all must complete, of
-- `after_end` all must end, of `after_failure` one must have a job that failed or was cancelled. Its jobs are judged once
-- none of these nodes lives. An id without a job counts as a node that has completed. So what waits for a node without
-- jobs is enqueued as waiting for what that node waits for.
--
-- `results`: results that become arguments at the release, by the name of the parameter. {"node": ID}: the result of the
-- only job of that node. {"node": ID, "many": true}: a list of the results of all its jobs, in the order of their ids.
--
-- A job that waits has the key `node:ID` of one of these nodes that lives. If it has a `run_at`, that is an absolute time. A
-- delay, which counts from the release, is in its headers as `pgqueue:delay`, in seconds; the release takes it from there.
CREATE TABLE pgqueue.node (
    id            bigint   PRIMARY KEY,
    name          text,
    after         bigint[] NOT NULL DEFAULT '{}',
    after_end     bigint[] NOT NULL DEFAULT '{}',
    after_failure bigint[] NOT NULL DEFAULT '{}',
    results       jsonb,
    CONSTRAINT node_can_be CHECK (id >> 20 > 0 AND id & 1048575 > 0)
);
COMMENT ON TABLE pgqueue.node IS 'Nodes of flows: sets of jobs, and which nodes they wait for.';
-- A handler reads the results of a node by its name. An index takes no long text: names of 200 letters and more are compared.
CREATE INDEX node_name ON pgqueue.node ((id >> 20), (left(name, 200)) COLLATE "C") WHERE name IS NOT NULL;

-- What became of jobs whose rows history has forgotten while another job of their flow waits, may wait again, or may read
-- their results.
CREATE TABLE pgqueue.flow_kept (
    node   bigint NOT NULL,
    id     bigint NOT NULL,
    state  text   NOT NULL,
    result jsonb,
    reason text,
    PRIMARY KEY (node, id)
);
COMMENT ON TABLE pgqueue.flow_kept IS 'How jobs of flows ended that history has forgotten, as long as a job of the flow waits, may wait again, or may read results.';

-- Whether a job of this flow waits for its release, or has ended while it waited: a retry lets that one wait again.
CREATE FUNCTION pgqueue.flow_may_release(flow bigint) RETURNS boolean LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pgqueue.job_blocked b
                   WHERE b.node BETWEEN -((flow_may_release.flow << 20) | 1048575) AND -((flow_may_release.flow << 20) | 1))
        OR EXISTS (SELECT FROM pgqueue.job_dead d
                   WHERE d.node BETWEEN -((flow_may_release.flow << 20) | 1048575) AND -((flow_may_release.flow << 20) | 1));
END $$;
COMMENT ON FUNCTION pgqueue.flow_may_release IS
    'Whether a job of this flow waits for another one, or would wait again after a retry.';

-- Whether a handler of this flow may read the results of a node, by its name: a node has one, and a job of the flow lives.
-- Without a name nothing reads results but a release. So a flow whose jobs add jobs for ever keeps no more than others do.
CREATE FUNCTION pgqueue.flow_may_read(flow bigint) RETURNS boolean LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    first bigint := flow << 20 | 1;
    last bigint := flow << 20 | 1048575;
BEGIN
    RETURN EXISTS (SELECT FROM pgqueue.node n WHERE n.id >> 20 = flow_may_read.flow AND n.name IS NOT NULL) AND (
        EXISTS (SELECT FROM pgqueue.job_running j WHERE j.node BETWEEN first AND last)
        OR EXISTS (SELECT FROM pgqueue.job_available j WHERE j.node BETWEEN first AND last)
        OR EXISTS (SELECT FROM pgqueue.job_scheduled j WHERE j.node BETWEEN first AND last)
        OR EXISTS (SELECT FROM pgqueue.job_blocked j WHERE j.node BETWEEN first AND last));
END $$;
COMMENT ON FUNCTION pgqueue.flow_may_read IS
    'Whether a node of this flow has a name, and a job of it lives, which may read the results of that node.';

-- The results of these nodes, each as an argument of a job: that of its first job that completed. Null if none has.
--
-- `bytes`: how long it is as text; beyond `most` both are NULL. `ended`: whether a job of the node has ended at all. Every
-- node had jobs, or it has no result that is waited for. One look into each index for all nodes: to ask for each node by
-- itself takes 10,000 nodes seconds, a third of a millisecond each.
CREATE FUNCTION pgqueue.node_results(nodes bigint[], most integer)
RETURNS TABLE (node bigint, value jsonb, bytes integer, ended boolean) LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    signed bigint[] := node_results.nodes || ARRAY(SELECT -n FROM unnest(node_results.nodes) AS n);
BEGIN
    RETURN QUERY
    SELECT asked.node, CASE WHEN sized.bytes <= most THEN said.value END, CASE WHEN sized.bytes <= most THEN sized.bytes END, first.node IS NOT NULL
    FROM unnest(node_results.nodes) AS asked (node)
    LEFT JOIN (
        SELECT DISTINCT ON (each.node) each.node, each.state, each.result FROM (
            SELECT abs(d.node) AS node, d.id, d.state, d.result FROM pgqueue.job_done d WHERE d.node = ANY (signed)
            UNION ALL SELECT abs(d.node), d.id, d.state, d.result FROM pgqueue.job_dead d WHERE d.node = ANY (signed)
            UNION ALL SELECT k.node, k.id, k.state, k.result FROM pgqueue.flow_kept k WHERE k.node = ANY (node_results.nodes)
        ) AS each ORDER BY each.node, each.state <> 'completed', each.id
    ) AS first ON first.node = asked.node
    CROSS JOIN LATERAL (SELECT coalesce(CASE WHEN first.state = 'completed' THEN first.result END, 'null') AS value OFFSET 0) AS said
    CROSS JOIN LATERAL (SELECT octet_length(pgqueue.text_of(said.value)) AS bytes OFFSET 0) AS sized;
END $$;
COMMENT ON FUNCTION pgqueue.node_results IS
    'The results of nodes of one job each, for what waits for them; NULL for one that is too long.';

-- The results of all jobs of a node, as an argument of a job: a list in the order of the ids, with null for a job that
-- did not complete.
--
-- `bytes`: how long it is as text. That is added up row by row, along the indexes, and no further than `most`: beyond it
-- both are NULL. What is stored says nothing of that length: 300 results of 1 MB may be stored in 3 MB. `ended`: as above.
CREATE FUNCTION pgqueue.node_result(node bigint, most integer, OUT value jsonb, OUT bytes integer, OUT ended boolean)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    one record;
    said text;
    texts text[] := '{}';
BEGIN
    ended := false;
    bytes := 2;
    FOR one IN
        -- Each part is in order, so that they are merged as they are read.
        (SELECT d.id, d.state, d.result FROM pgqueue.job_done d WHERE d.node = node_result.node ORDER BY d.id)
        UNION ALL (SELECT d.id, d.state, d.result FROM pgqueue.job_done d WHERE d.node = -node_result.node ORDER BY d.id)
        UNION ALL (SELECT d.id, d.state, d.result FROM pgqueue.job_dead d WHERE d.node = node_result.node ORDER BY d.id)
        UNION ALL (SELECT d.id, d.state, d.result FROM pgqueue.job_dead d WHERE d.node = -node_result.node ORDER BY d.id)
        UNION ALL (SELECT k.id, k.state, k.result FROM pgqueue.flow_kept k WHERE k.node = node_result.node ORDER BY k.id)
        ORDER BY 1
    LOOP
        ended := true;
        said := 'null';
        IF one.state = 'completed' AND one.result IS NOT NULL THEN
            said := pgqueue.text_of(one.result);
        END IF;
        bytes := bytes + octet_length(said) + 2;
        IF bytes <= most IS NOT TRUE THEN
            bytes := NULL;
            RETURN;
        END IF;
        texts := texts || said;
    END LOOP;
    value := '[' || array_to_string(texts, ', ') || ']';
END $$;
COMMENT ON FUNCTION pgqueue.node_result IS
    'The results of all jobs of a node, for what waits for it; NULL if that is too long.';

-- The results of these nodes, in their order; `many`: of all jobs of the node, as `node_result`, else as `node_results`.
-- Once they have more than `whole` bytes, no further ones are read, but for some that are read with the last one. One
-- that is longer than `most` counts that many. More than `most` bytes are read, if there are: that is too much for a job.
CREATE FUNCTION pgqueue.release_results(nodes bigint[], many_of boolean[], most integer, whole bigint)
RETURNS TABLE (node bigint, many boolean, value jsonb, bytes integer, ended boolean) LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    place integer := 1;
    upto integer;
    spent bigint := 0;
BEGIN
    WHILE place <= cardinality(nodes) AND spent <= greatest(whole, most) LOOP
        many := many_of[place];
        upto := place;
        IF many THEN
            node := nodes[place];
            SELECT r.value, r.bytes, r.ended INTO value, bytes, ended FROM pgqueue.node_result(nodes[place], most) AS r;
            spent := spent + coalesce(bytes, most);
            RETURN NEXT;
        ELSE
            -- 64 with one look into each index: 128 MB at most.
            WHILE upto < least(place + 63, cardinality(nodes)) AND NOT many_of[upto + 1] LOOP
                upto := upto + 1;
            END LOOP;
            FOR node, value, bytes, ended IN
                SELECT r.node, r.value, r.bytes, r.ended FROM pgqueue.node_results(nodes[place:upto], most) AS r
            LOOP
                spent := spent + coalesce(bytes, most);
                RETURN NEXT;
            END LOOP;
        END IF;
        place := upto + 1;
    END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.release_results IS
    'The results that a release gives to jobs, as many as it may read.';

-- The results of the jobs of a node that have ended, in the order of their ids, behind the id `after`: a page of `n` jobs
-- at most. It ends with the job whose result makes it longer than `most` bytes, as text. NULL: a job did not complete.
CREATE FUNCTION pgqueue.node_page(node bigint, after bigint, n integer, most integer)
RETURNS TABLE (id bigint, result text) LANGUAGE plpgsql STABLE ROWS 100
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    one record;
    bytes bigint := 0;
BEGIN
    FOR one IN
        -- Each part is in order, so that they are merged as they are read.
        (SELECT d.id, d.state, d.result FROM pgqueue.job_done d WHERE d.node = node_page.node AND d.id > after ORDER BY d.id)
        UNION ALL (SELECT d.id, d.state, d.result FROM pgqueue.job_done d WHERE d.node = -node_page.node AND d.id > after ORDER BY d.id)
        UNION ALL (SELECT d.id, d.state, d.result FROM pgqueue.job_dead d WHERE d.node = node_page.node AND d.id > after ORDER BY d.id)
        UNION ALL (SELECT d.id, d.state, d.result FROM pgqueue.job_dead d WHERE d.node = -node_page.node AND d.id > after ORDER BY d.id)
        UNION ALL (SELECT k.id, k.state, k.result FROM pgqueue.flow_kept k WHERE k.node = node_page.node AND k.id > after ORDER BY k.id)
        ORDER BY 1 LIMIT n
    LOOP
        id := one.id;
        result := CASE WHEN one.state = 'completed' THEN pgqueue.text_of(one.result) END;
        RETURN NEXT;
        bytes := bytes + coalesce(octet_length(result), 0);
        EXIT WHEN bytes > most;
    END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.node_page IS
    'The results of the jobs of a node, a page at a time, for a job of its flow.';


-- Unique keys ---------------------------------------------------------------------------------------------------------

-- Which job has a key. Written in the statement that inserts the job, never changed but for `expires_at`. Whether it
-- still holds is judged by the job it names (`key_state`), so no move of a job has to touch this table. A row that does
-- not hold is a leftover: the next job that wants the key removes it, or the sweep. The key itself is the primary key,
-- not a hash of it: no two keys can be taken for each other. Compared by bytes: all sessions take several keys in the
-- same order.
CREATE TABLE pgqueue.unique_key (
    key        text COLLATE "C" PRIMARY KEY,
    job_id     bigint           NOT NULL,
    -- How long it holds: while its job waits to start, while it lives, or so many seconds after its end.
    hold       text             NOT NULL,
    seconds    double precision NOT NULL DEFAULT 0,
    -- Written once its job has ended, for history does not stay for ever.
    expires_at timestamptz,
    enqueued_at timestamptz  NOT NULL,
    CONSTRAINT unique_key_can_be CHECK (
        octet_length(key) BETWEEN 1 AND 520 AND hold IN ('pending', 'live', 'after') AND seconds BETWEEN 0 AND 3153600000)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE pgqueue.unique_key IS 'Which job has which unique key. A row whose job has ended may be a leftover.';

-- Keys that hold on after their job was discarded. Nearly always empty.
CREATE TABLE pgqueue.discarded_key (
    -- Of the key as `unique_key` has it, with its kind.
    hash        bytea PRIMARY KEY,
    job_id      bigint      NOT NULL,
    enqueued_at timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    CONSTRAINT discarded_key_can_be CHECK (pg_catalog.octet_length(hash) OPERATOR(pg_catalog.=) 32)
);
COMMENT ON TABLE pgqueue.discarded_key IS 'Unique keys that hold on after their job was discarded, as hashes.';

-- A job to be, as an application says it. No attribute is added later: another column takes another type.
CREATE TYPE pgqueue.keyed_job AS (
    task            text,
    args            jsonb,
    queue           text,
    priority        smallint,
    headers         jsonb,
    max_attempts    smallint,
    run_at          timestamptz,
    deadline        timestamptz,
    lock_key        text,
    lock_limit      integer,
    on_locked       text,
    limit_key       text,
    rate_key        text,
    unique_key      text,
    idempotency_key text,
    -- For the unique key: `pending`, `live` or `after`, and then for so many seconds.
    hold            text,
    hold_seconds    double precision,
    -- Whether the job that has the key is to be written anew, if it has never started.
    replaces        boolean
);
COMMENT ON TYPE pgqueue.keyed_job IS 'A new job of which some have unique keys: for enqueue_keyed.';

CREATE FUNCTION pgqueue.key_hash(key text) RETURNS bytea LANGUAGE sql STABLE
    RETURN pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8'::pg_catalog.name));
COMMENT ON FUNCTION pgqueue.key_hash IS
    'What discarded_key keeps of a unique key.';

-- What a key is to a job that wants it, in one snapshot: `waiting` (its job has never started, and holds it), `held`,
-- or `free`. A job that is in no partition has ended so long ago that history has forgotten it, or was never made: its
-- key row was written by an enqueue that did not get all of its keys.
--
-- A job that was stopped in the middle, and given back unspent, has started if a step or a batch of it was committed:
-- written anew, it would take the answers for its old arguments.
CREATE FUNCTION pgqueue.key_state(k pgqueue.unique_key) RETURNS text LANGUAGE sql STABLE
    RETURN CASE (SELECT j.state <> 'running' AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
                     AND NOT EXISTS (SELECT FROM pgqueue.job_step s WHERE s.job_id = j.id AND s.enqueued_at = j.enqueued_at OFFSET 0)
                     AND NOT EXISTS (SELECT FROM pgqueue.job_cursor c WHERE c.job_id = j.id AND c.enqueued_at = j.enqueued_at OFFSET 0)
                 FROM pgqueue.job j
                 WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at
                   AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1)
        WHEN true THEN 'waiting'
        WHEN false THEN CASE k.hold WHEN 'pending' THEN 'free' ELSE 'held' END
        ELSE CASE WHEN k.hold = 'after' AND coalesce(k.expires_at, (
                      SELECT max(j.finished_at) + make_interval(secs => k.seconds) FROM pgqueue.job j
                      WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at
                        AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))) > pgqueue.now()
                  THEN 'held' ELSE 'free' END END;

-- What each of these keys is to a job that wants it, in the snapshot of the statement that calls this; a row for each,
-- in the order given. `state` is that of `key_state`, without a call for each key: 10,000 duplicates in 0.2 s instead
-- of 2.6. NULL: the key has no row.
--
-- `version` names the row that was judged. If that says `free`, this version of the row never holds again: a retry
-- writes the row anew. This and `keep_waiting` have the settings of the functions that call them.
CREATE FUNCTION pgqueue.key_states(keys text[]) RETURNS TABLE (
    n integer, key text, job_id bigint, enqueued_at timestamptz, hold text, expires_at timestamptz, version xid, state text
) LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT asked.n::integer, asked.key, k.job_id, coalesce(j.enqueued_at, k.enqueued_at), k.hold, k.expires_at, k.version,
        CASE
            WHEN k.job_id IS NULL THEN NULL
            WHEN j.fresh THEN 'waiting'
            WHEN NOT j.fresh THEN CASE k.hold WHEN 'pending' THEN 'free' ELSE 'held' END
            WHEN k.hold = 'after' AND coalesce(k.expires_at, (
                     SELECT max(j.finished_at) + make_interval(secs => k.seconds) FROM pgqueue.job j
                     WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at
                       AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))) > pgqueue.now()
                 THEN 'held'
            ELSE 'free' END
    FROM unnest(key_states.keys) WITH ORDINALITY AS asked (key, n)
    LEFT JOIN LATERAL (
        SELECT k.job_id, k.enqueued_at, k.hold, k.seconds, k.expires_at, k.xmin AS version
        FROM pgqueue.unique_key k WHERE k.key = asked.key LIMIT 1
    ) AS k ON true
    LEFT JOIN LATERAL (
        SELECT j.enqueued_at, j.state <> 'running' AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
            AND NOT EXISTS (SELECT FROM pgqueue.job_step s WHERE s.job_id = j.id AND s.enqueued_at = j.enqueued_at OFFSET 0)
            AND NOT EXISTS (SELECT FROM pgqueue.job_cursor c WHERE c.job_id = j.id AND c.enqueued_at = j.enqueued_at OFFSET 0) AS fresh
        FROM pgqueue.job j
        WHERE j.id = k.job_id AND k.enqueued_at = j.enqueued_at
          AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1
    ) AS j ON true
    ORDER BY asked.n;
END $$;
COMMENT ON FUNCTION pgqueue.key_states IS
    'What unique keys are to a job that wants them: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Lock those of these jobs that wait and have never started: a replaced one so that this transaction may write it anew,
-- another one so that it does not start before this transaction ends. Answers how many of them have moved.
--
-- In the order of their ids, whatever partition they are in, and each as strongly as is needed: a lock that is made
-- stronger later can deadlock. `patience` is for these waits: set by the statement itself, so that a wait for a table
-- (for DDL, say) comes before it.
CREATE FUNCTION pgqueue.keep_waiting(ids bigint[], since timestamptz[], replaced boolean[], patience text) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    before text := current_setting('lock_timeout');
    moved bigint;
BEGIN
    WITH patient AS MATERIALIZED (
        SELECT set_config('lock_timeout', keep_waiting.patience, true)
    ), asked AS MATERIALIZED (
        SELECT a.id, a.since, bool_or(a.replaced) AS replaced
        FROM patient CROSS JOIN unnest(keep_waiting.ids, keep_waiting.since, keep_waiting.replaced) AS a (id, since, replaced)
        GROUP BY a.id, a.since ORDER BY a.id, a.since
    ), kept AS MATERIALIZED (
        SELECT j.id FROM asked CROSS JOIN LATERAL (
            SELECT l.id FROM (
                SELECT j.id FROM pgqueue.job j
                WHERE asked.replaced AND j.id = asked.id AND asked.since = j.enqueued_at
                  AND j.state IN ('available', 'scheduled', 'blocked') AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
                  AND NOT EXISTS (SELECT FROM pgqueue.job_step s WHERE s.job_id = j.id AND s.enqueued_at = j.enqueued_at OFFSET 0)
                  AND NOT EXISTS (SELECT FROM pgqueue.job_cursor c WHERE c.job_id = j.id AND c.enqueued_at = j.enqueued_at OFFSET 0)
                LIMIT 1 FOR UPDATE
            ) AS l
            UNION ALL
            SELECT l.id FROM (
                SELECT j.id FROM pgqueue.job j
                WHERE NOT asked.replaced AND j.id = asked.id AND asked.since = j.enqueued_at
                  AND j.state IN ('available', 'scheduled', 'blocked') AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
                  AND NOT EXISTS (SELECT FROM pgqueue.job_step s WHERE s.job_id = j.id AND s.enqueued_at = j.enqueued_at OFFSET 0)
                  AND NOT EXISTS (SELECT FROM pgqueue.job_cursor c WHERE c.job_id = j.id AND c.enqueued_at = j.enqueued_at OFFSET 0)
                LIMIT 1 FOR KEY SHARE
            ) AS l
        ) AS j
    )
    SELECT (SELECT count(*) FROM asked) - (SELECT count(*) FROM kept) INTO moved;
    PERFORM set_config('lock_timeout', before, true);
    RETURN moved;
END $$;
COMMENT ON FUNCTION pgqueue.keep_waiting IS
    'Keep jobs from starting until COMMIT: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Which of these keys are held by jobs that were discarded, in the snapshot of the statement that calls this. A row for
-- each of them: its place among the keys, the job, and when that was enqueued. It has the settings of the functions
-- that call it.
--
-- Why no key is had by two jobs:
-- 1. A discard locks the row of the key. In one transaction it deletes that row, and inserts the hash.
-- 2. An enqueue inserts the row of the key, and looks for the hash afterwards, in a statement of its own. The insert
--    waits for a discard that has the row. So in READ COMMITTED the look sees the hash of each discard that has made
--    way for the insert.
-- 3. In a transaction with an older snapshot (REPEATABLE READ, SERIALIZABLE) it may not be seen. There `meet_discards`
--    inserts the hash itself, and the primary key raises a serialization failure.
-- 4. A hash is removed only when it has expired.
-- 5. Locks of hashes make no circle: a session that locks one has locked the row of its key before.
CREATE FUNCTION pgqueue.discarded_holders(keys text[]) RETURNS TABLE (n integer, job_id bigint, enqueued_at timestamptz)
LANGUAGE plpgsql STABLE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (SELECT FROM pgqueue.discarded_key) THEN
        RETURN QUERY
        SELECT asked.n::integer, d.job_id, d.enqueued_at
        FROM unnest(discarded_holders.keys) WITH ORDINALITY AS asked (key, n)
        CROSS JOIN LATERAL (
            SELECT d.job_id, d.enqueued_at FROM pgqueue.discarded_key d
            WHERE d.hash = pgqueue.key_hash(asked.key) AND d.expires_at > pgqueue.now() LIMIT 1
        ) AS d;
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.discarded_holders IS
    'Which unique keys are held by discarded jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- In a transaction that keeps its snapshot: raise a serialization failure if one of these keys was discarded after the
-- snapshot.
CREATE FUNCTION pgqueue.meet_discards(keys text[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        INSERT INTO pgqueue.discarded_key (hash, job_id, enqueued_at, expires_at)
        SELECT pgqueue.key_hash(asked.key), 0, '-infinity', '-infinity' FROM unnest(meet_discards.keys) AS asked (key) ORDER BY 1
        ON CONFLICT DO NOTHING;
        DELETE FROM pgqueue.discarded_key d
        WHERE d.hash = ANY (ARRAY(SELECT pgqueue.key_hash(asked.key) FROM unnest(meet_discards.keys) AS asked (key))) AND d.job_id = 0;
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.meet_discards IS
    'Part of an enqueue of pgqueue''s own, not to be called by others.';

-- Take the keys of one job or many, each with one key or two; no array at all stands for no job. Answers the jobs that
-- did not get theirs.
--
-- A single job needs no savepoint. Many enqueues in one transaction would make as many of them, which is slow for all
-- sessions. If it has one key, and that goes in, nothing is read. So this function needs no settings of its own: they
-- cost a tenth of an enqueue.
CREATE FUNCTION pgqueue.take_all_keys(
    idempotency_keys text[], unique_keys text[], holds text[], seconds double precision[], ids bigint[], since timestamptz[],
    replaces boolean[]
) RETURNS TABLE (job_id bigint, key text, holder bigint, holder_since timestamptz, waits boolean) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_column
DECLARE
    before pg_catalog.text;
    inserted pg_catalog.bool;
    ignored pg_catalog.text;
BEGIN
    IF ids IS NULL THEN
        RETURN;
    ELSIF pg_catalog.cardinality(ids) OPERATOR(pg_catalog.>) 1 THEN
        RETURN QUERY
        SELECT * FROM pgqueue.take_many_keys(idempotency_keys, unique_keys, holds, seconds, ids, since, replaces);
        RETURN;
    END IF;
    IF idempotency_keys[1] IS NULL AND holds[1] IS NOT NULL THEN
        before := pg_catalog.current_setting('lock_timeout');
        WITH patient AS MATERIALIZED (
            SELECT pg_catalog.set_config('lock_timeout', CASE WHEN before OPERATOR(pg_catalog.=) '0'::pg_catalog.text THEN '5s' ELSE before END, true)
        )
        INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
        SELECT 'unique:'::pg_catalog.text OPERATOR(pg_catalog.||) unique_keys[1], ids[1], since[1], holds[1], coalesce(seconds[1], 0) FROM patient
        WHERE NOT EXISTS (SELECT FROM pgqueue.discarded_key)
        ON CONFLICT DO NOTHING;
        inserted := FOUND;
        ignored := pg_catalog.set_config('lock_timeout', before, true);
        -- A statement of its own: it sees a discard that was committed while the one before waited. If there is one, `take_keys` finds the
        -- row that was inserted here.
        IF inserted AND pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'::pg_catalog.text
            AND NOT EXISTS (SELECT FROM pgqueue.discarded_key) THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY
    SELECT ids[1], taken.key, taken.holder, taken.holder_since, taken.waits
    FROM pgqueue.take_keys(
        idempotency_keys[1], unique_keys[1], holds[1], seconds[1], ids[1], since[1], coalesce(replaces[1], false), NULL) AS taken
    WHERE taken.holder IS NOT NULL;
END $$;
COMMENT ON FUNCTION pgqueue.take_all_keys IS
    'Take the unique keys of jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Take one or both of these keys for the job `for_job`, enqueued at `since`, which is about to be inserted by this
-- transaction; or neither. If a key is held: that key, the job that has it, when that was enqueued, and whether it has
-- never started. Else all NULL. A key of a discarded job is held, too.
--
-- `hold` NULL: as this job held it before, else while it lives. `replaces`: a holder that has never started is to be
-- written anew. A key that was taken for one of `others`, which this statement is about to insert or to move, is not
-- free. Waits for a transaction that is just taking the same key, 5 s at most if the session has no lock_timeout.
--
-- The order of locks is kept without giving any back: the keys come in their order, a free one is taken before the next
-- is asked for, and a job is locked only when no further key is. After 1,000 rounds something keeps rows out of the
-- table, and an error says so.
CREATE FUNCTION pgqueue.take_keys(
    idempotency_key text, unique_key text, hold text, seconds double precision, for_job bigint, since timestamptz, replaces boolean,
    others bigint[], OUT key text, OUT holder bigint, OUT holder_since timestamptz, OUT waits boolean
) LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    before text := current_setting('lock_timeout');
    patience text := CASE before WHEN '0' THEN '5s' ELSE before END;
    ignored text;
    rounds integer := 0;
    wanted text;
    idempotency boolean;
    inserted boolean;
    discarded boolean;
    seen record;
    had boolean := false;
    had_until timestamptz;
BEGIN
    FOREACH wanted IN ARRAY array_remove(ARRAY['idempotency:' || take_keys.idempotency_key, 'unique:' || take_keys.unique_key], NULL) LOOP
        idempotency := wanted LIKE 'idempotency:%';
        LOOP
            rounds := rounds + 1;
            IF rounds > 1000 THEN
                RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                    MESSAGE = format('pgqueue: unique key %L could neither be taken nor found held, 1,000 times', wanted),
                    HINT = 'Is there a trigger on pgqueue.unique_key that keeps rows out, or a policy that hides rows? Remove it.';
            END IF;
            -- Looked up before the insert, so that a duplicate of a discarded job locks nothing.
            SELECT d.job_id, d.enqueued_at, 'held' AS state, 'after' AS hold INTO seen FROM pgqueue.discarded_holders(ARRAY[wanted]) AS d;
            IF NOT FOUND THEN
                WITH patient AS MATERIALIZED (SELECT set_config('lock_timeout', patience, true))
                INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
                SELECT wanted, for_job, take_keys.since, CASE WHEN idempotency THEN 'after' ELSE coalesce(take_keys.hold, 'live') END,
                    CASE WHEN idempotency THEN 86400 ELSE coalesce(take_keys.seconds, 0) END
                FROM patient ON CONFLICT DO NOTHING;
                inserted := FOUND;
                ignored := set_config('lock_timeout', before, true);
                IF inserted THEN
                    -- And after it: the insert may have waited for the discard.
                    PERFORM pgqueue.meet_discards(ARRAY[wanted]);
                    SELECT d.job_id, d.enqueued_at, 'held' AS state, 'after' AS hold INTO seen FROM pgqueue.discarded_holders(ARRAY[wanted]) AS d;
                    EXIT WHEN NOT FOUND;
                    discarded := true;
                ELSE
                    -- A statement of its own: it sees what has been committed while the one before waited.
                    SELECT * INTO seen FROM pgqueue.key_states(ARRAY[wanted]);
                    CONTINUE WHEN seen.state IS NULL;
                    discarded := false;
                END IF;
            ELSE
                discarded := true;
            END IF;
            IF discarded THEN
                -- The row that this job may have is one that was inserted a moment ago.
                DELETE FROM pgqueue.unique_key k
                WHERE k.key = wanted AND k.job_id = for_job AND take_keys.since = k.enqueued_at;
            END IF;
            IF seen.job_id = for_job AND take_keys.since = seen.enqueued_at THEN
                -- Its own from before, kept as it is but for its end; written, so that it is not removed as a leftover.
                ignored := set_config('lock_timeout', patience, true);
                UPDATE pgqueue.unique_key k SET expires_at = NULL WHERE k.key = wanted AND k.xmin = seen.version;
                inserted := FOUND;
                ignored := set_config('lock_timeout', before, true);
                CONTINUE WHEN NOT inserted;
                had := had OR idempotency;
                had_until := CASE WHEN idempotency THEN seen.expires_at ELSE had_until END;
                PERFORM pgqueue.meet_discards(ARRAY[wanted]);
                EXIT;
            END IF;
            IF seen.state = 'free' AND (seen.job_id = ANY (others)) IS NOT TRUE THEN
                ignored := set_config('lock_timeout', patience, true);
                DELETE FROM pgqueue.unique_key k WHERE k.key = wanted AND k.xmin = seen.version;
                ignored := set_config('lock_timeout', before, true);
                CONTINUE;
            END IF;
            IF seen.state = 'waiting' AND (seen.hold = 'pending' OR replaces) THEN
                CONTINUE WHEN pgqueue.keep_waiting(ARRAY[seen.job_id], ARRAY[seen.enqueued_at], ARRAY[replaces], patience) > 0;
            END IF;
            -- Neither of them, then: the first is as it was.
            IF had THEN
                UPDATE pgqueue.unique_key k SET expires_at = had_until
                WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job;
            ELSIF NOT idempotency THEN
                DELETE FROM pgqueue.unique_key k
                WHERE k.key = 'idempotency:' || take_keys.idempotency_key AND k.job_id = for_job
                  AND take_keys.since = k.enqueued_at;
            END IF;
            key := wanted;
            holder := seen.job_id;
            holder_since := seen.enqueued_at;
            waits := seen.state = 'waiting';
            RETURN;
        END LOOP;
    END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, boolean, bigint[]) IS
    'Take the unique keys of one job: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Take the keys of many jobs that are about to be inserted or moved by this transaction, each with one key or two. In
-- the order given, a job gets both of its keys or none. Answers the jobs that did not get theirs, as `take_keys` does;
-- with the same bound of rounds.
--
-- The order of locks is kept by giving locks back. A block with an exception handler is a savepoint:
--
-- 1. All keys are inserted, in the order of their bytes, whichever job they are for.
-- 2. Where a key did not go in, its row is judged. If it is held, nothing more is to be locked for it.
-- 3. If one is free, it would have to be removed and inserted, after later keys. So the block is undone. The next round
--    goes key by key, and removes the row of this key when its turn comes. The same holds for a row of a job that is
--    retried.
-- 4. When all keys are taken or held, the holders that must not start before our COMMIT are locked, in the order of
--    their ids. If one has moved, its key may be free. So the block is undone here, too.
-- 5. What is done afterwards touches our own rows only: a job that lost one key gives the other one back, or to the
--    next job that wants it.
CREATE FUNCTION pgqueue.take_many_keys(
    idempotency_keys text[], unique_keys text[], holds text[], seconds double precision[], ids bigint[], since timestamptz[],
    replaces boolean[]
) RETURNS TABLE (job_id bigint, key text, holder bigint, holder_since timestamptz, waits boolean) LANGUAGE plpgsql ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    before text := current_setting('lock_timeout');
    patience text := CASE before WHEN '0' THEN '5s' ELSE before END;
    ignored text;
    rounds integer := 0;
    -- Of each key, in the order of their bytes: the first job that wants it, and whether some job is to replace the holder.
    keys text[];
    firsts integer[];
    replaced boolean[];
    inserted integer;
    -- What a round found of a key that has to be written in its turn: the version of its row, and the place of the job it is of, if that is ours.
    versions xid[] := '{}';
    owners integer[] := '{}';
    -- Whether the key is still held by that job of ours, which has ended: then no other job of the batch gets it.
    owner_holds boolean[] := '{}';
    until timestamptz[] := '{}';
    one_by_one boolean := holds IS NULL;
    written boolean;
    -- The keys that a round did not get, and what their rows are.
    lost integer[];
    lost_keys text[];
    states text[];
    holders bigint[];
    holders_since timestamptz[];
    found_holds text[];
    found_versions xid[];
    found_until timestamptz[];
    again boolean;
    moved bigint;
    -- Whether a job that was discarded may hold a key, and the keys of ours that one holds: no row is inserted for these.
    discards boolean;
    discarded integer[] := '{}';
    met integer[];
    all_in boolean;
    -- Which of the keys each job wants, and which job gets each. A job that lost did so on the key beside it.
    first_keys integer[];
    second_keys integer[];
    lost_at integer[];
    winners integer[];
    losers integer[] := '{}';
    loser_keys integer[] := '{}';
    place integer;
    first integer;
    second integer;
    n integer;
    m integer;
BEGIN
    LOOP
        rounds := rounds + 1;
        IF rounds > 1000 THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = format('pgqueue: unique key %L could neither be taken nor found held, 1,000 times', coalesce(lost_keys[1], keys[1])),
                HINT = 'Is there a trigger on pgqueue.unique_key that keeps rows out, or a policy that hides rows? Remove it.';
        END IF;
        <<round>>
        BEGIN
            lost := '{}';
            all_in := false;
            IF NOT one_by_one THEN
                -- Set by the statement itself: a wait for a table (for DDL, say) comes before it.
                WITH patient AS MATERIALIZED (SELECT set_config('lock_timeout', patience, true))
                INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
                SELECT w.key COLLATE "C", w.id, w.since, w.hold, w.seconds
                FROM patient CROSS JOIN LATERAL (
                    SELECT 'unique:' || u.key AS key, u.id, u.since, u.hold, coalesce(u.seconds, 0) AS seconds, u.place
                    FROM unnest(unique_keys, ids, since, holds, seconds) WITH ORDINALITY AS u (key, id, since, hold, seconds, place)
                    WHERE u.key IS NOT NULL
                    UNION ALL
                    SELECT 'idempotency:' || i.key, i.id, i.since, 'after', 86400, i.place
                    FROM unnest(idempotency_keys, ids, since) WITH ORDINALITY AS i (key, id, since, place) WHERE i.key IS NOT NULL
                ) AS w
                ORDER BY w.key COLLATE "C", w.place
                ON CONFLICT DO NOTHING;
                GET DIAGNOSTICS inserted = ROW_COUNT;
                ignored := set_config('lock_timeout', before, true);
                all_in := inserted = cardinality(array_remove(unique_keys, NULL)) + cardinality(array_remove(idempotency_keys, NULL));
                -- A statement of its own: it sees a discard that was committed while the one before waited.
                discards := EXISTS (SELECT FROM pgqueue.discarded_key) OR current_setting('transaction_isolation') <> 'read committed';
                IF all_in AND NOT discards THEN
                    RETURN;  -- Each job has its keys.
                END IF;
            END IF;
            IF keys IS NULL THEN
                SELECT array_agg(w.key), array_agg(w.first), array_agg(w.replaced) INTO keys, firsts, replaced
                FROM (
                    SELECT a.key COLLATE "C" AS key, min(a.place)::integer AS first, bool_or(a.replaces) IS TRUE AS replaced
                    FROM (
                        SELECT 'idempotency:' || i.key AS key, i.place, i.replaces
                        FROM unnest(idempotency_keys, replaces) WITH ORDINALITY AS i (key, replaces, place) WHERE i.key IS NOT NULL
                        UNION ALL
                        SELECT 'unique:' || u.key, u.place, u.replaces
                        FROM unnest(unique_keys, replaces) WITH ORDINALITY AS u (key, replaces, place) WHERE u.key IS NOT NULL
                    ) AS a
                    GROUP BY a.key COLLATE "C" ORDER BY a.key COLLATE "C"
                ) AS w;
            END IF;
            IF one_by_one THEN
                ignored := set_config('lock_timeout', patience, true);
                FOR n IN 1 .. cardinality(keys) LOOP
                    written := false;
                    IF n = ANY (discarded) THEN
                        lost := array_append(lost, n);
                        CONTINUE;
                    END IF;
                    IF owners[n] IS NOT NULL THEN
                        -- Its own from before, kept as it is but for its end; written, so that it is not removed as a leftover.
                        UPDATE pgqueue.unique_key k SET expires_at = NULL WHERE k.key = keys[n] AND k.xmin = versions[n];
                        written := FOUND;
                    ELSIF versions[n] IS NOT NULL THEN
                        DELETE FROM pgqueue.unique_key k WHERE k.key = keys[n] AND k.xmin = versions[n];
                    END IF;
                    IF NOT written THEN
                        owners[n] := NULL;
                        INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
                        SELECT keys[n], ids[firsts[n]], since[firsts[n]],
                            CASE WHEN keys[n] LIKE 'idempotency:%' THEN 'after' ELSE coalesce(holds[firsts[n]], 'live') END,
                            CASE WHEN keys[n] LIKE 'idempotency:%' THEN 86400 ELSE coalesce(seconds[firsts[n]], 0) END
                        ON CONFLICT DO NOTHING;
                        written := FOUND;
                    END IF;
                    IF NOT written THEN
                        lost := array_append(lost, n);
                    END IF;
                END LOOP;
                ignored := set_config('lock_timeout', before, true);
                discards := EXISTS (SELECT FROM pgqueue.discarded_key) OR current_setting('transaction_isolation') <> 'read committed';
            ELSIF inserted = 0 THEN
                lost := ARRAY(SELECT generate_subscripts(keys, 1));
            ELSIF inserted < cardinality(keys) THEN
                -- The ids are new: a row that names one of them was inserted here.
                lost := ARRAY(
                    SELECT w.n FROM unnest(keys, firsts) WITH ORDINALITY AS w (key, first, n)
                    WHERE NOT EXISTS (
                        SELECT FROM pgqueue.unique_key k
                        WHERE k.key = w.key AND k.job_id = ids[w.first] AND k.enqueued_at = since[w.first])
                    ORDER BY w.n);
            END IF;
            IF discards THEN
                PERFORM pgqueue.meet_discards(keys);
                met := ARRAY(SELECT d.n FROM pgqueue.discarded_holders(keys) AS d WHERE d.n <> ALL (discarded) ORDER BY d.n);
                IF cardinality(met) > 0 THEN
                    discarded := discarded || met;
                    one_by_one := true;
                    RAISE EXCEPTION 'not in the order of locks' USING ERRCODE = 'PGQ02';
                END IF;
                IF all_in THEN
                    RETURN;
                END IF;
            END IF;
            EXIT WHEN cardinality(lost) = 0;

            lost_keys := ARRAY(SELECT keys[l.n] FROM unnest(lost) WITH ORDINALITY AS l (n, place) ORDER BY l.place);
            SELECT array_agg(s.state), array_agg(s.job_id), array_agg(s.enqueued_at), array_agg(s.hold), array_agg(s.version),
                array_agg(s.expires_at), bool_or(s.state IN ('held', 'waiting') IS NOT TRUE)
            INTO states, holders, holders_since, found_holds, found_versions, found_until, again
            FROM pgqueue.key_states(lost_keys) AS s;
            IF cardinality(discarded) > 0 THEN
                discarded := '{}';  -- One may have expired meanwhile.
                FOR m, holder, holder_since IN SELECT d.n, d.job_id, d.enqueued_at FROM pgqueue.discarded_holders(lost_keys) AS d LOOP
                    discarded := array_append(discarded, lost[m]);
                    states[m] := 'held';
                    holders[m] := holder;
                    holders_since[m] := holder_since;
                    found_holds[m] := 'after';
                END LOOP;
                again := (SELECT bool_or(s.state IN ('held', 'waiting') IS NOT TRUE) FROM unnest(states) AS s (state));
            END IF;
            IF holds IS NULL THEN
                -- A retry: the row may be of a job of ours, whatever it is to others.
                FOR m IN 1 .. cardinality(lost) LOOP
                    place := array_position(ids, holders[m]);
                    IF since[place] = holders_since[m] THEN
                        owner_holds[lost[m]] := states[m] = 'held';
                        states[m] := 'own';
                        owners[lost[m]] := place;
                        again := true;
                    END IF;
                END LOOP;
            END IF;
            IF NOT again THEN
                moved := 0;
                IF 'pending' = ANY (found_holds) OR true = ANY (replaced) THEN
                    SELECT pgqueue.keep_waiting(array_agg(s.id), array_agg(s.since), array_agg(replaced[s.n]), patience) INTO moved
                    FROM unnest(lost, states, holders, holders_since, found_holds) AS s (n, state, id, since, hold)
                    WHERE s.state = 'waiting' AND (s.hold = 'pending' OR replaced[s.n]);
                END IF;
                EXIT WHEN moved = 0;
            ELSE
                FOR m IN 1 .. cardinality(lost) LOOP
                    IF states[m] IN ('held', 'waiting') IS NOT TRUE THEN
                        versions[lost[m]] := found_versions[m];
                        until[lost[m]] := found_until[m];
                    END IF;
                END LOOP;
            END IF;
            one_by_one := true;
            RAISE EXCEPTION 'not in the order of locks' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            NULL;  -- With the block its keys and its locks are gone.
        END round;
    END LOOP;

    WITH wanted AS MATERIALIZED (
        SELECT a.place, dense_rank() OVER (ORDER BY a.key COLLATE "C")::integer AS n
        FROM (
            SELECT 'idempotency:' || i.key AS key, i.place
            FROM unnest(idempotency_keys) WITH ORDINALITY AS i (key, place) WHERE i.key IS NOT NULL
            UNION ALL
            SELECT 'unique:' || u.key, u.place
            FROM unnest(unique_keys) WITH ORDINALITY AS u (key, place) WHERE u.key IS NOT NULL
        ) AS a
    )
    SELECT array_agg(w.first), array_agg(w.second) INTO first_keys, second_keys
    FROM (
        -- A job with one key has it twice here.
        SELECT min(wanted.n) AS first, max(wanted.n) AS second
        FROM wanted GROUP BY wanted.place ORDER BY wanted.place
    ) AS w;
    lost_at := array_fill(NULL::integer, ARRAY[cardinality(keys)]);
    winners := lost_at;
    FOR m IN 1 .. cardinality(lost) LOOP
        lost_at[lost[m]] := m;
    END LOOP;
    FOR place IN 1 .. cardinality(ids) LOOP
        first := first_keys[place];
        second := second_keys[place];
        n := CASE WHEN lost_at[first] IS NOT NULL OR winners[first] IS NOT NULL OR (owner_holds[first] AND owners[first] <> place) THEN first
                  WHEN lost_at[second] IS NOT NULL OR winners[second] IS NOT NULL OR (owner_holds[second] AND owners[second] <> place)
                      THEN second END;
        IF n IS NULL THEN
            winners[first] := place;
            winners[second] := place;
        ELSE
            losers := array_append(losers, place);
            loser_keys := array_append(loser_keys, n);
        END IF;
    END LOOP;
    FOR n IN 1 .. cardinality(keys) LOOP
        CONTINUE WHEN lost_at[n] IS NOT NULL OR winners[n] = coalesce(owners[n], firsts[n]);
        IF winners[n] IS NULL AND owners[n] IS NOT NULL THEN
            UPDATE pgqueue.unique_key k SET expires_at = until[n] WHERE k.key = keys[n];
            CONTINUE;
        END IF;
        DELETE FROM pgqueue.unique_key k WHERE k.key = keys[n];
        IF winners[n] IS NOT NULL THEN
            INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
            SELECT keys[n], ids[winners[n]], since[winners[n]],
                CASE WHEN keys[n] LIKE 'idempotency:%' THEN 'after' ELSE coalesce(holds[winners[n]], 'live') END,
                CASE WHEN keys[n] LIKE 'idempotency:%' THEN 86400 ELSE coalesce(seconds[winners[n]], 0) END;
        END IF;
    END LOOP;
    RETURN QUERY
    SELECT ids[l.place], keys[l.n],
        CASE WHEN lost_at[l.n] IS NULL THEN ids[coalesce(winners[l.n], owners[l.n])] ELSE holders[lost_at[l.n]] END,
        CASE WHEN lost_at[l.n] IS NULL THEN since[coalesce(winners[l.n], owners[l.n])] ELSE holders_since[lost_at[l.n]] END,
        CASE WHEN lost_at[l.n] IS NULL THEN winners[l.n] IS NOT NULL ELSE states[lost_at[l.n]] = 'waiting' END
    FROM unnest(losers, loser_keys) AS l (place, n);
END $$;
COMMENT ON FUNCTION pgqueue.take_many_keys IS
    'Take the unique keys of many jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Lock these keys in the order of their bytes, so that no other session takes one of them before this transaction ends.
-- Answers those that are of a job that lives: they are left to it.
--
-- 1. A key that a living job has is not locked, for nothing more is to be done with it.
-- 2. A key with a row that is free, or that is of a job that has ended, is locked by its row. The row stays as it is.
-- 3. A key without a row gets one. It names job 0, which is never there, so the key is free: what takes it writes the
--    row anew. If nothing does, the pruner removes the row.
-- 4. While a lock is waited for, the other transaction may have given the key to a job. So the keys are looked at once
--    more.
--
-- ON CONFLICT DO UPDATE with a condition that is never true locks the row that is there, in its turn, and writes
-- nothing. Waits for a transaction that is just taking one of the keys, 5 s at most if the session has no lock_timeout.
CREATE FUNCTION pgqueue.lock_keys(keys text[]) RETURNS TABLE (key text, holder bigint) LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    before text := current_setting('lock_timeout');
    ignored text;
    wanted text[] := ARRAY(SELECT DISTINCT k.key COLLATE "C" FROM unnest(lock_keys.keys) AS k (key) ORDER BY 1);
    lost text[];
    holders bigint[];
BEGIN
    SELECT coalesce(array_agg(s.key), '{}'), coalesce(array_agg(s.job_id), '{}') INTO lost, holders
    FROM pgqueue.key_states(wanted) AS s
    WHERE s.state = 'waiting' OR s.state = 'held' AND s.hold <> 'after';
    -- Set by the statement itself: a wait for a table (for DDL, say) comes before it.
    WITH patient AS MATERIALIZED (
        SELECT set_config('lock_timeout', CASE before WHEN '0' THEN '5s' ELSE before END, true)
    )
    INSERT INTO pgqueue.unique_key AS k (key, job_id, enqueued_at, hold, seconds)
    SELECT w.key COLLATE "C", 0, '-infinity', 'live', 0 FROM patient CROSS JOIN unnest(wanted) AS w (key)
    WHERE w.key <> ALL (lost) ORDER BY 1
    ON CONFLICT (key) DO UPDATE SET expires_at = k.expires_at WHERE false;
    ignored := set_config('lock_timeout', before, true);
    RETURN QUERY
    SELECT l.key, l.holder FROM unnest(lost, holders) AS l (key, holder)
    UNION ALL
    SELECT s.key, s.job_id FROM pgqueue.key_states(ARRAY(SELECT w.key FROM unnest(wanted) AS w (key) WHERE w.key <> ALL (lost))) AS s
    WHERE s.state = 'waiting' OR s.state = 'held' AND s.hold <> 'after';
END $$;
COMMENT ON FUNCTION pgqueue.lock_keys IS
    'Lock unique keys in one order: part of a retry by hand of many jobs, for no other caller.';


-- Limits and rates ----------------------------------------------------------------------------------------------------

-- What each limit allows now. `declared`: what the code of the last worker that has declared it said (NULL: only set by
-- hand); `set_at`: an operator has set `n` by hand, and no declaration changes it any more. Never removed: jobs that
-- wait name it.
CREATE TABLE pgqueue.key_limit (
    name        text        COLLATE "C" PRIMARY KEY,
    n           integer     NOT NULL,
    declared    integer,
    declared_at timestamptz,
    set_at      timestamptz,
    CONSTRAINT key_limit_can_be CHECK (
        octet_length(name) BETWEEN 1 AND 200 AND n >= 0 AND declared >= 1 IS NOT FALSE
        AND (set_at IS NOT NULL OR n = declared IS TRUE))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.key_limit IS 'How many jobs of each limit may run at once, over all workers.';

-- What each rate allows now: `count` starts in `period` seconds, `burst` of them at once. `declared_count` and
-- `declared_period`: what the code of the last worker that has declared it said (NULL: only set by hand); `set_at`: an
-- operator has set count and period by hand, and no declaration changes them any more. Never removed: jobs that wait
-- name it.
CREATE TABLE pgqueue.key_rate (
    name            text             COLLATE "C" PRIMARY KEY,
    count           integer          NOT NULL,
    period          double precision NOT NULL,
    burst           integer          NOT NULL DEFAULT 1,
    declared_count  integer,
    declared_period double precision,
    declared_at     timestamptz,
    set_at          timestamptz,
    CONSTRAINT key_rate_can_be CHECK (
        octet_length(name) BETWEEN 1 AND 200 AND strpos(name, ':') = 0
        AND count BETWEEN 1 AND 1000000 AND burst BETWEEN 1 AND 1000000 AND period BETWEEN 1 AND 31622400
        AND (set_at IS NOT NULL OR (count, period) = (declared_count, declared_period) IS TRUE))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.key_rate IS 'How many jobs of each rate may start in how many seconds, over all workers.';

-- One row for each key of a rate under which a job was let in: from `next_at` on it allows a whole burst. A time that
-- has passed says nothing: such rows are removed. `worker_id` is the worker that let in last.
CREATE TABLE pgqueue.limiter (
    key       text        COLLATE "C" PRIMARY KEY,
    next_at   timestamptz NOT NULL,
    worker_id bigint      NOT NULL,
    CONSTRAINT limiter_can_be CHECK (octet_length(key) BETWEEN 1 AND 500 AND isfinite(next_at))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.limiter IS 'When each key of a rate is at rest again. Changed when a job is let in.';


-- Schedules -----------------------------------------------------------------------------------------------------------

-- One row per schedule, changed when it ticks. No index on the times: the leader knows them all, and so a tick is a HOT
-- update, whose dead versions no index carries.
CREATE TABLE pgqueue.schedule (
    name        text        COLLATE "C" PRIMARY KEY,
    -- A cron line of five or six fields in the time of `tz`, or `every 900` (seconds since 1970-01-01 UTC).
    line        text        NOT NULL,
    tz          text        NOT NULL DEFAULT 'UTC',
    catch_up    text        NOT NULL DEFAULT 'latest',
    -- What its jobs are; `options`: headers, max_attempts, deadline (seconds), lock_key, lock_limit, on_locked.
    task        varchar(200) NOT NULL,
    args        jsonb       NOT NULL DEFAULT '{}',
    queue       varchar(40) COLLATE "C" NOT NULL DEFAULT 'default',
    priority    smallint    NOT NULL DEFAULT 5,
    options     jsonb       NOT NULL DEFAULT '{}',
    -- The next tick. NULL: not known yet, the first one after `since`. Infinity: none any more.
    next_at     timestamptz,
    since       timestamptz NOT NULL DEFAULT pgqueue.now(),
    last_at     timestamptz,
    last_job    bigint,
    -- When a live worker was last known to declare it; NULL: added at run time, by a row.
    declared_at timestamptz,
    paused_at   timestamptz,
    -- Why it makes no ticks: its line or its options cannot be.
    refused     text,
    CONSTRAINT schedule_is_one CHECK (
        octet_length(name) BETWEEN 1 AND 200 AND catch_up IN ('latest', 'all', 'none') AND priority BETWEEN 0 AND 9
        AND octet_length(queue) BETWEEN 1 AND 40 AND jsonb_typeof(args) = 'object' AND jsonb_typeof(options) = 'object'),
    -- A next time may be as late as a cron line can say.
    CONSTRAINT schedule_times_are_from_1970_to_9000 CHECK (
        next_at >= '1970-01-01 UTC' AND (next_at < '10000-01-01 UTC' OR next_at = 'infinity') IS NOT FALSE
        AND since BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC'
        AND last_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE
        AND declared_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE
        AND paused_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.schedule IS 'What recurs: when, which task, and its next time.';

-- The second belt: a time of a schedule becomes one job, however the row came to that time again (a clock that stepped
-- back, a schedule that was removed and added anew). Kept for a day.
CREATE TABLE pgqueue.tick (
    schedule text        COLLATE "C" NOT NULL,
    at       timestamptz NOT NULL,
    job_id   bigint      NOT NULL,
    PRIMARY KEY (schedule, at)
);
COMMENT ON TABLE pgqueue.tick IS 'The ticks of the last day, and the job that each of them has become.';
CREATE INDEX tick_at ON pgqueue.tick (at);

-- What each worker's code declares, written once when it starts. Equal ones have an equal hash.
CREATE TABLE pgqueue.declaration (
    worker_id bigint PRIMARY KEY,
    hash      text   NOT NULL,
    schedules jsonb  NOT NULL
);
COMMENT ON TABLE pgqueue.declaration IS 'The schedules that each worker''s code declares.';


-- Workers and supervisors ---------------------------------------------------------------------------------------------

-- One row per worker process and boot; ids are never used again. Changed once a beat.
CREATE TABLE pgqueue.worker (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    beat        bigint      NOT NULL DEFAULT 0,
    -- An age and a deadline are made of these times: no row may have an infinite one, or one that Python does not know.
    lease       interval    NOT NULL CHECK (lease BETWEEN interval '1 second' AND interval '100 years'),
    started_at  timestamptz NOT NULL DEFAULT pgqueue.now() CHECK (started_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC'),
    beat_at     timestamptz NOT NULL DEFAULT pgqueue.now() CHECK (beat_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC'),
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
    -- Those of them that waited for others of their batch, or for a slot with these, and had not begun.
    gathering   bigint[]    NOT NULL DEFAULT '{}',
    -- Its sessions as {pid, backend_start} pairs, ended before its jobs are given to others.
    sessions    jsonb       NOT NULL DEFAULT '[]',
    -- Bytes of memory at the last beat.
    rss         bigint,
    -- The supervisor that started it; NULL: it was started by itself.
    supervisor_id bigint,
    -- The names of its tasks, aliases too: it claims jobs of no other task.
    tasks       text[]      NOT NULL DEFAULT '{}',
    -- Beside each queue the slots of its own, NULL where it shares the worker's common slots.
    slots       integer[]   NOT NULL DEFAULT '{}',
    -- Whether it is set to LISTEN.
    listens     boolean     NOT NULL DEFAULT true,
    -- Beside each of its queues, the slots that were free for it at the last heartbeat.
    free        integer[]   NOT NULL DEFAULT '{}',
    -- What its duties have come to: [name, seconds since the last run, seconds that it took, the last error, seconds
    -- since that, seconds for which each run has failed]. All duties of a worker that leads; of another one those that
    -- fail, of what each worker does for itself. NULL: nothing to tell.
    duties      jsonb,
    CONSTRAINT worker_lists_are_lists CHECK (
        array_position(queues, NULL) IS NULL AND array_position(tasks, NULL) IS NULL AND array_position(running, NULL) IS NULL
        AND array_position(gathering, NULL) IS NULL
        AND jsonb_typeof(sessions) = 'array' AND NOT sessions @? 'strict $[*] ? (@.type() != "object")'
        AND (jsonb_typeof(duties) = 'array' AND NOT duties @? 'strict $[*] ? (@.type() != "array" || @.size() < 3 || @[0].type() != "string")')
            IS NOT FALSE),
    CHECK (dead_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.worker IS 'Worker processes, their sign of life and what they run.';

-- When the first worker of each version started. Rows of `worker` go with their processes, and this one stays.
CREATE TABLE pgqueue.version_start (
    version_tag text        COLLATE "C" PRIMARY KEY CHECK (octet_length(version_tag) <= 1000),
    first_at    timestamptz NOT NULL CHECK (first_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
);
COMMENT ON TABLE pgqueue.version_start IS 'When the first worker of each version of the application started.';

-- Tasks that have jobs and that no live worker of their queue knows: `since` when, and when they were seen last.
CREATE TABLE pgqueue.unknown_task (
    queue   varchar(40)  COLLATE "C" NOT NULL,
    task    varchar(200) COLLATE "C" NOT NULL,
    since   timestamptz  NOT NULL DEFAULT pgqueue.now(),
    seen_at timestamptz  NOT NULL DEFAULT pgqueue.now(),
    PRIMARY KEY (queue, task),
    CONSTRAINT unknown_task_times_are_from_1970_to_9000 CHECK (since BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND seen_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.unknown_task IS 'Tasks that have jobs and that no live worker knows, and since when.';

-- A measurement is the rows of one `at`; `next_at` is when the leader measures again. It is appended, and those before
-- it are deleted (see worker/leader/depth.py). `reason` says why the jobs wait. A queue '' is the whole of a history.
-- `oldest` is since when the first of the jobs could run, and `longest_blocked` since when a blocked job could have
-- gone on.
CREATE TABLE pgqueue.depth (
    at              timestamptz NOT NULL,
    next_at         timestamptz NOT NULL,
    queue           text        COLLATE "C" NOT NULL,
    state           text        COLLATE "C" NOT NULL,
    reason          text        COLLATE "C" NOT NULL DEFAULT '',
    task            text        COLLATE "C" NOT NULL DEFAULT '',
    n               bigint      NOT NULL,
    exact           boolean     NOT NULL,
    oldest          timestamptz,
    longest_blocked timestamptz,
    PRIMARY KEY (at, queue, state, reason, task),
    CONSTRAINT depth_times_are_from_1970_to_9000 CHECK (
        at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND next_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND oldest BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE
        AND longest_blocked BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.depth IS 'How many jobs each queue has in each state, and why they wait, as the leader has measured last.';

-- What any worker does now and then, and when it was done last. A worker that finds it overdue, and changes the row,
-- does it.
CREATE TABLE pgqueue.duty (
    name    text COLLATE "C"        PRIMARY KEY,
    done_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.duty IS 'What any worker does now and then, and when it was done last.';

-- A request for the stack of a running job, and the answer of its worker. Rows live for seconds: the session that asks
-- deletes its row, and each new request deletes rows that are older than a minute. Nothing else hangs on them.
CREATE TABLE pgqueue.stack_request (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id      bigint NOT NULL,
    asked_at    timestamptz NOT NULL DEFAULT pgqueue.now(),
    answered_at timestamptz,
    answer      text CHECK (octet_length(answer) <= 131072)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.stack_request IS 'Requests for the stacks of running jobs; a row lives for seconds.';

-- One row per supervisor and boot; ids are never used again. Changed once a beat. Nothing is judged by it: a supervisor
-- that dies takes no job with it.
CREATE TABLE pgqueue.supervisor (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    host       text        NOT NULL,
    pid        integer     NOT NULL,
    size       integer     NOT NULL,
    active     integer     NOT NULL DEFAULT 0,
    state      text        NOT NULL CHECK (state IN ('starting', 'running', 'restarting', 'quiet', 'stopping')),
    problem    text,
    started_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    beat_at    timestamptz NOT NULL DEFAULT pgqueue.now(),
    CONSTRAINT supervisor_times_are_from_1970_to_9000 CHECK (started_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND beat_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.supervisor IS 'Supervisors, and how many worker processes each shall keep.';

-- What supervisors are told; done when `done_at` is set, `problem` says why it could not be. Forgotten after a day.
CREATE TABLE pgqueue.supervisor_order (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    supervisor_id bigint      NOT NULL,
    kind          text        NOT NULL CHECK (kind IN ('restart', 'quiet', 'scale')),
    size          integer     CHECK (size BETWEEN 1 AND 1000),
    created_at    timestamptz NOT NULL DEFAULT pgqueue.now(),
    seen_at       timestamptz,
    done_at       timestamptz,
    problem       text,
    CHECK ((kind = 'scale') = (size IS NOT NULL)),
    CONSTRAINT supervisor_order_times_are_from_1970_to_9000 CHECK (
        created_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND seen_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE
        AND done_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE)
);
COMMENT ON TABLE pgqueue.supervisor_order IS 'What supervisors are told to do.';
CREATE INDEX supervisor_order_open ON pgqueue.supervisor_order (supervisor_id) WHERE done_at IS NULL;

INSERT INTO pgqueue.duty (name, done_at) VALUES ('sweep', '-infinity');

-- Its row is locked by the worker that folds. Minutes before `done_at` are in `history_hour`.
INSERT INTO pgqueue.duty (name, done_at) VALUES ('history', date_bin('1 hour', pgqueue.now(), '2000-01-01 00:00:00+00'));

-- The pairs of a queue and a task that a live worker takes jobs of. Few rows, for most workers serve the same: a
-- condition `(queue, task) IN (…)` on this is hashed, and read only when a row needs it.
CREATE FUNCTION pgqueue.served() RETURNS TABLE (queue text, task text) LANGUAGE sql STABLE ROWS 100 AS $$
    SELECT DISTINCT q.queue, t.task
    FROM (
        SELECT DISTINCT w.queues, w.tasks FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
    ) AS alike
    CROSS JOIN unnest(alike.queues) AS q (queue)
    CROSS JOIN unnest(alike.tasks) AS t (task)
$$;
COMMENT ON FUNCTION pgqueue.served IS
    'The queues and tasks that live workers take jobs of.';

-- How many workers there should be, for autoscalers: one number, within milliseconds however many jobs wait.
--
-- It counts jobs that are available or run. Those of paused queues and tasks are left out until they are resumed. Jobs
-- whose task no live worker knows count: their workers may have been scaled to nothing.
--
-- 1. While the tables of jobs are small (512 kB each, dead rows and all), all is counted now.
-- 2. Else the number is the one that the leading worker has measured last, 5 to 120 seconds ago.
-- 3. If that is overdue, no worker leads, and perhaps none is there. Then up to 100 workers' jobs are counted now. Jobs
--    that run are known from the heartbeats of workers.
--
-- Where no worker leads, nothing promotes jobs that have become due: these are counted, too. Blocked jobs start when a
-- key is free. No further worker helps them, but one must be there: if there are any, the answer is at least 1.
CREATE FUNCTION pgqueue.desired_workers(queue text, per_worker integer) RETURNS integer LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    wanted constant text := $1;
    moment constant timestamptz := pgqueue.now();
    paused_queues constant text[] := ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL);
    paused_tasks constant text[] := ARRAY(SELECT p.name FROM pgqueue.paused_task p);
    small constant boolean := greatest(pg_relation_size('pgqueue.job_available'), pg_relation_size('pgqueue.job_scheduled'),
                                       pg_relation_size('pgqueue.job_blocked'), pg_relation_size('pgqueue.job_running')) <= 524288;
    most bigint;
    last timestamptz;
    fresh boolean;
    jobs bigint;
    waits boolean;
BEGIN
    IF (per_worker >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'desired_workers: per_worker is %, and must be at least 1', coalesce(per_worker::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is how many jobs a worker runs at once.';
    END IF;
    SELECT d.at, d.next_at >= moment - interval '10 seconds' AND d.at <= moment + interval '1 second' INTO last, fresh
    FROM pgqueue.depth d ORDER BY d.at DESC LIMIT 1;
    IF fresh AND NOT small THEN
        SELECT coalesce(sum(d.n) FILTER (WHERE d.state = 'running' OR d.state = 'available' AND d.queue <> ALL (paused_queues)
                                               AND NOT (d.reason = 'task_paused' AND d.task = ANY (paused_tasks))), 0)
        INTO jobs FROM pgqueue.depth d WHERE d.at = last AND d.queue <> '' AND (wanted IS NULL OR d.queue = wanted);
    ELSE
        most := CASE WHEN small THEN 1000000 ELSE 100 * per_worker::bigint END;
        IF wanted IS NULL THEN
            jobs := (SELECT count(*) FROM (SELECT FROM pgqueue.job_available j
                     WHERE j.queue <> ALL (paused_queues) AND j.task <> ALL (paused_tasks) LIMIT most) AS available);
        ELSIF wanted <> ALL (paused_queues) THEN
            jobs := (SELECT count(*) FROM (SELECT FROM (
                     (SELECT FROM pgqueue.job_available j WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL AND j.queue = wanted
                      AND j.task <> ALL (paused_tasks) ORDER BY j.queue, j.rank, j.pos NULLS FIRST LIMIT most)
                     UNION ALL
                     (SELECT FROM pgqueue.job_available j WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL AND j.queue = wanted
                      AND j.task <> ALL (paused_tasks) ORDER BY j.queue, j.rank, j.pos NULLS FIRST LIMIT most)) AS kinds LIMIT most) AS available);
        END IF;
        jobs := coalesce(jobs, 0) + (
            SELECT count(*) FROM (SELECT FROM pgqueue.job_scheduled j
            WHERE j.run_at <= moment AND (wanted IS NULL OR j.queue = wanted) AND j.queue <> ALL (paused_queues)
              AND j.task <> ALL (paused_tasks) ORDER BY j.run_at LIMIT most) AS due);
        IF small THEN
            jobs := jobs + (SELECT count(*) FROM pgqueue.job_running j WHERE wanted IS NULL OR j.queue = wanted);
        ELSE
            jobs := jobs + (
                SELECT coalesce(sum(cardinality(w.running)), 0)
                FROM (SELECT w.queues, w.running, w.dead_at, w.beat_at, w.lease FROM pgqueue.worker w ORDER BY w.id DESC LIMIT 1000) AS w
                WHERE w.dead_at IS NULL AND w.beat_at >= moment - 3 * w.lease AND (wanted IS NULL OR wanted = ANY (w.queues)));
        END IF;
    END IF;
    IF jobs = 0 THEN
        waits := CASE WHEN small THEN EXISTS (SELECT FROM pgqueue.job_blocked j WHERE (wanted IS NULL OR j.queue = wanted)
                                              AND (j.node < 0) IS NOT TRUE AND j.queue <> ALL (paused_queues))
                      ELSE EXISTS (SELECT FROM pgqueue.depth d WHERE d.at = last AND d.state = 'blocked' AND d.reason <> 'flow' AND d.n > 0
                                   AND (wanted IS NULL OR d.queue = wanted) AND d.queue <> ALL (paused_queues)) END;
    END IF;
    RETURN CASE WHEN waits THEN 1 ELSE least(ceil(jobs::numeric / per_worker), 2147483647) END;
END $$;
COMMENT ON FUNCTION pgqueue.desired_workers IS
    'How many workers the jobs of this queue need that each run so many at once, for autoscalers; NULL: of all queues.';


-- Operators -----------------------------------------------------------------------------------------------------------

-- Queues have no rows of their own; a row here says what differs from the default.
CREATE TABLE pgqueue.queue (
    name      varchar(40) COLLATE "C" PRIMARY KEY CHECK (name <> ''),
    paused_at timestamptz,
    paused_by text,
    CONSTRAINT queue_times_are_from_1970_to_9000 CHECK (paused_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
);
COMMENT ON TABLE pgqueue.queue IS 'Queues that are paused. A queue without a row is open.';

-- Tasks that are paused, in all queues.
CREATE TABLE pgqueue.paused_task (
    name      text COLLATE "C" PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 800),
    paused_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    paused_by text,
    CONSTRAINT paused_task_times_are_from_1970_to_9000 CHECK (paused_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC')
);
COMMENT ON TABLE pgqueue.paused_task IS 'Tasks that are paused. A task without a row is open.';

-- The record. `actor` is what the writer says of itself; `role` is the role that was logged in. `jobs` are the jobs
-- that were changed, at most 1,000 in a row. The ids come from a sequence that may go back with a failover, so no
-- uniqueness hangs on them alone.
CREATE TABLE pgqueue.audit (
    id      bigint GENERATED ALWAYS AS IDENTITY,
    at      timestamptz NOT NULL DEFAULT pgqueue.now(),
    actor   text NOT NULL CHECK (octet_length(actor) BETWEEN 1 AND 800),
    role    text NOT NULL DEFAULT session_user,
    action  text NOT NULL CHECK (octet_length(action) BETWEEN 1 AND 40),
    target  jsonb NOT NULL DEFAULT '{}',
    jobs    bigint[] NOT NULL DEFAULT '{}',
    count   bigint NOT NULL DEFAULT 1,
    details jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (at, id),
    CONSTRAINT audit_can_be_shown CHECK (
        at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND jsonb_typeof(target) = 'object' AND jsonb_typeof(details) = 'object'
        AND array_position(jobs, NULL) IS NULL)
);
COMMENT ON TABLE pgqueue.audit IS 'Every write by hand: by which actor, what, on what, how many.';

-- Which write changed this job. Rows are only added, and taken from the old end.
CREATE INDEX audit_jobs ON pgqueue.audit USING gin (jobs);

-- Operations on all jobs that fit a filter, in steps that any process can go on with. The proof is at the head of
-- admin/bulk/steps.py.
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
    -- Only these jobs. NULL: all that fit.
    ids          bigint[]    CHECK (cardinality(ids) BETWEEN 1 AND 1000 AND array_position(ids, NULL) IS NULL),
    -- Only jobs with an attempt that has failed with this class of errors.
    error_type   text        COLLATE "C",
    -- Why it was begun, for the record.
    note         text        CHECK (octet_length(note) <= 2000),
    -- What else the action needs: a reason, a time, whether completed jobs are run again.
    options      jsonb       NOT NULL DEFAULT '{}',
    -- Ids above this one are not looked at.
    up_to        bigint      NOT NULL,
    -- Jobs a second at most. NULL: as many as there are.
    pace         float8      CHECK (pace BETWEEN 0.0001 AND 1000000000),
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
    audit_id     bigint,
    CONSTRAINT bulk_can_go_on CHECK (
        fence BETWEEN 0 AND 1000000000000000 AND round BETWEEN 0 AND 1000 AND changed BETWEEN 0 AND 1000000000000000
        AND after >= 0 AND up_to >= 0),
    CONSTRAINT bulk_can_be_shown CHECK (
        jsonb_typeof(target) = 'object' AND jsonb_typeof(options) = 'object' AND jsonb_typeof(counts) = 'object'
        AND NOT counts @? '$.* ? (@.type() != "number")' AND array_position(states, NULL) IS NULL),
    CONSTRAINT bulk_has_the_options_of_its_action CHECK (
        ended_at IS NOT NULL OR
        CASE action WHEN 'cancel' THEN jsonb_typeof(options -> 'reason') = 'string'
                    WHEN 'retry' THEN jsonb_typeof(options -> 'again') = 'boolean'
                    WHEN 'reschedule' THEN jsonb_typeof(options -> 'at') = 'string' ELSE true END IS TRUE),
    CONSTRAINT bulk_times_are_from_1970_to_9000 CHECK (
        started_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND next_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' AND ended_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE)
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

-- Whether a job fits a filter. This is the one place that says so: lists, changes and operations ask it. The first five
-- values are those of the job, the others those of the filter; NULL: any queue, any task, any time of its end. The state
-- `retrying` stands for scheduled jobs that wait for another attempt. The server puts this text into each plan: it has no
-- settings, and names each value that stands twice.
CREATE FUNCTION pgqueue.fits(
    state text, retrying boolean, queue text, task text, finished_at timestamptz,
    states text[], of_queue text, of_task text, ended_before timestamptz
) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (state = ANY (states) OR state = 'scheduled' AND retrying AND 'retrying' = ANY (states))
    AND (of_queue IS NULL OR queue = of_queue) AND (of_task IS NULL OR task = of_task)
    AND (ended_before IS NULL OR finished_at < ended_before);

-- The next `most` jobs after one id and up to another, in order, in the partitions that hold these states; another
-- state of the same partition is among them. The state `retrying` stands for scheduled jobs that wait for another
-- attempt. No condition on rows but the ids: so `most` is a limit of the work. With `chosen`, which are few, those of
-- these jobs, in whatever state.
CREATE FUNCTION pgqueue.jobs_after(states text[], chosen bigint[], after bigint, up_to bigint, most integer)
RETURNS TABLE (
    id bigint, state text, queue varchar, task varchar, finished_at timestamptz, retrying boolean, enqueued_at timestamptz
) LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    IF chosen IS NOT NULL THEN
        RETURN QUERY
        SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt > 0 OR j.crashes > 0, j.enqueued_at
        FROM (SELECT DISTINCT each.id FROM unnest(jobs_after.chosen) AS each (id)
              WHERE each.id > jobs_after.after AND each.id <= jobs_after.up_to) AS asked
        CROSS JOIN LATERAL (SELECT j.* FROM pgqueue.job j WHERE j.id = asked.id OFFSET 0) AS j
        ORDER BY j.id LIMIT jobs_after.most;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT w.id, w.state, w.queue, w.task, w.finished_at, w.attempt > 0 OR w.crashes > 0, w.enqueued_at FROM (
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes, j.enqueued_at FROM pgqueue.job_scheduled j
         WHERE jobs_after.states && ARRAY['scheduled', 'retrying'] AND j.id > jobs_after.after AND j.id <= jobs_after.up_to
         ORDER BY j.id LIMIT jobs_after.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes, j.enqueued_at FROM pgqueue.job_available j
         WHERE 'available' = ANY (jobs_after.states) AND j.id > jobs_after.after AND j.id <= jobs_after.up_to ORDER BY j.id LIMIT jobs_after.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes, j.enqueued_at FROM pgqueue.job_blocked j
         WHERE 'blocked' = ANY (jobs_after.states) AND j.id > jobs_after.after AND j.id <= jobs_after.up_to ORDER BY j.id LIMIT jobs_after.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes, j.enqueued_at FROM pgqueue.job_running j
         WHERE 'running' = ANY (jobs_after.states) AND j.id > jobs_after.after AND j.id <= jobs_after.up_to ORDER BY j.id LIMIT jobs_after.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes, j.enqueued_at FROM pgqueue.job_done j
         WHERE jobs_after.states && ARRAY['completed', 'skipped'] AND j.id > jobs_after.after AND j.id <= jobs_after.up_to
         ORDER BY j.id LIMIT jobs_after.most)
        UNION ALL
        (SELECT j.id, j.state, j.queue, j.task, j.finished_at, j.attempt, j.crashes, j.enqueued_at FROM pgqueue.job_dead j
         WHERE jobs_after.states && ARRAY['failed', 'cancelled'] AND j.id > jobs_after.after AND j.id <= jobs_after.up_to
         ORDER BY j.id LIMIT jobs_after.most)
    ) AS w ORDER BY w.id LIMIT jobs_after.most;
END $$;
COMMENT ON FUNCTION pgqueue.jobs_after IS
    'Part of a change by filter: for no other caller.';

-- The highest id, up to this one, in the partitions that hold these states.
CREATE FUNCTION pgqueue.bulk_last(states text[], up_to bigint) RETURNS bigint LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN greatest(
        (SELECT j.id FROM pgqueue.job_scheduled j WHERE states && ARRAY['scheduled', 'retrying'] AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_available j WHERE 'available' = ANY (states) AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_blocked j WHERE 'blocked' = ANY (states) AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_running j WHERE 'running' = ANY (states) AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_done j WHERE states && ARRAY['completed', 'skipped'] AND j.id <= up_to ORDER BY j.id DESC LIMIT 1),
        (SELECT j.id FROM pgqueue.job_dead j WHERE states && ARRAY['failed', 'cancelled'] AND j.id <= up_to ORDER BY j.id DESC LIMIT 1));
END $$;
COMMENT ON FUNCTION pgqueue.bulk_last IS
    'Part of an operation by filter: for no other caller.';

-- Lock those of these jobs that fit this operation, and that no other transaction has. It waits for none, so their
-- order does not matter. What it compares is the row that it locks. Running jobs are answered and not locked: only
-- their worker and a rescue may do that.
CREATE FUNCTION pgqueue.bulk_lock(bulk bigint, ids bigint[]) RETURNS SETOF bigint LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    b pgqueue.bulk;
BEGIN
    SELECT * INTO b FROM pgqueue.bulk WHERE bulk.id = bulk_lock.bulk;
    RETURN QUERY SELECT j.id FROM pgqueue.job j
    WHERE j.id = ANY (bulk_lock.ids) AND j.state <> 'running'
      AND pgqueue.fits(j.state, j.attempt > 0 OR j.crashes > 0, j.queue, j.task, j.finished_at, b.states, b.queue, b.task, b.ended_before)
    FOR UPDATE SKIP LOCKED;  -- what its attempts have failed with was asked before: no attempt goes
    IF 'running' = ANY (b.states) THEN
        RETURN QUERY SELECT r.id FROM pgqueue.job_running r
        WHERE r.id = ANY (bulk_lock.ids)
          AND pgqueue.fits(r.state, false, r.queue, r.task, r.finished_at, b.states, b.queue, b.task, b.ended_before);
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.bulk_lock(bigint, bigint[]) IS
    'Part of an operation by filter: for no other caller.';

-- A worker goes on with operations, and has no right to delete what has ended but by whole leaves. So these act as the
-- owner of the tables, on jobs that an open operation of this action means. A worker cannot begin one.
CREATE FUNCTION pgqueue.bulk_meant(bulk bigint, action text, ids bigint[]) RETURNS TABLE (id bigint, enqueued_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    b pgqueue.bulk;
BEGIN
    SELECT * INTO b FROM pgqueue.bulk WHERE bulk.id = bulk_meant.bulk AND bulk.action = bulk_meant.action AND bulk.ended_at IS NULL;
    RETURN QUERY
    WITH meant AS MATERIALIZED (
        SELECT j.id, j.enqueued_at FROM pgqueue.job j
        WHERE j.id = ANY (bulk_meant.ids) AND j.id <= b.up_to AND j.state IN ('completed', 'skipped', 'failed', 'cancelled')
          AND (b.ids IS NULL OR j.id = ANY (b.ids))
          AND pgqueue.fits(j.state, false, j.queue, j.task, j.finished_at, b.states, b.queue, b.task, b.ended_before)
    )
    SELECT m.id, m.enqueued_at FROM meant AS m
    WHERE b.error_type IS NULL OR m.id IN (
        SELECT pgqueue.attempted(array_agg(each.id), array_agg(each.enqueued_at), NULL, b.error_type, NULL) FROM meant AS each);
END $$;
COMMENT ON FUNCTION pgqueue.bulk_meant IS
    'Part of an operation by filter: for no other caller.';

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
COMMENT ON FUNCTION pgqueue.bulk_take_dead IS
    'Part of an operation by filter: for no other caller.';

-- Jobs that are to be discarded, as by `discard_ended`. One that lives is answered, and left alone.
CREATE FUNCTION pgqueue.bulk_discard(bulk bigint, ids bigint[]) RETURNS TABLE (id bigint, state text, discarded boolean) LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT * FROM pgqueue.discard_ended(
        ARRAY(SELECT DISTINCT m.id FROM pgqueue.bulk_meant(bulk_discard.bulk, 'discard', bulk_discard.ids) AS m ORDER BY m.id));
END $$;
COMMENT ON FUNCTION pgqueue.bulk_discard IS
    'Part of an operation by filter: for no other caller.';

-- One row of the record for each operation, whose number of jobs is that of the steps that were committed. A trigger
-- writes it, as the owner of the tables: an operator has no right to change the record. A row that names one already
-- comes from a dump.
CREATE FUNCTION pgqueue.record_bulk() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_RELID <> 'pgqueue.bulk'::regclass THEN
        RAISE EXCEPTION 'pgqueue: record_bulk is the trigger of pgqueue.bulk, and of no other table' USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF TG_OP = 'INSERT' THEN
        INSERT INTO pgqueue.audit (actor, action, target, count, details)
        VALUES (NEW.actor, 'bulk ' || NEW.action, NEW.target, 0, NEW.options || jsonb_strip_nulls(jsonb_build_object('bulk', NEW.id, 'up_to', NEW.up_to, 'note', NEW.note)))
        RETURNING at, id INTO NEW.audit_at, NEW.audit_id;
    ELSE
        UPDATE pgqueue.audit a SET count = NEW.changed WHERE a.at = NEW.audit_at AND a.id = NEW.audit_id;
    END IF;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION pgqueue.record_bulk IS
    'The row of the record of an operation by filter.';
CREATE TRIGGER record_bulk BEFORE INSERT ON pgqueue.bulk
    FOR EACH ROW WHEN (NEW.audit_id IS NULL) EXECUTE FUNCTION pgqueue.record_bulk();
CREATE TRIGGER record_changed AFTER UPDATE ON pgqueue.bulk
    FOR EACH ROW WHEN (NEW.changed IS DISTINCT FROM OLD.changed) EXECUTE FUNCTION pgqueue.record_bulk();


-- Relays --------------------------------------------------------------------------------------------------------------

-- One row: which queue this is, and where it lies. An outbox remembers it.
CREATE TABLE pgqueue.relay_target (
    one    boolean PRIMARY KEY DEFAULT true CHECK (one),
    target uuid    NOT NULL DEFAULT gen_random_uuid(),
    -- The cluster and the database: a copy of this row lies elsewhere.
    home   text
);
COMMENT ON TABLE pgqueue.relay_target IS 'The name of this queue, for the outboxes whose jobs come here.';

-- For each outbox: the only session that may deliver its jobs is the one that has raised `epoch` last.
CREATE TABLE pgqueue.relay_fence (
    source uuid        PRIMARY KEY,
    epoch  bigint      NOT NULL,
    -- The session that has raised it: it is ended if it holds this row and stands still.
    pid           integer,
    backend_start timestamptz,
    -- When two looks at the whole outbox began, and when the second ended: at least the memory's age after the first had. What was
    -- delivered before the first began, and was not found by it, may be forgotten.
    look    timestamptz NOT NULL DEFAULT '-infinity',
    next    timestamptz NOT NULL DEFAULT '-infinity',
    next_at timestamptz NOT NULL DEFAULT '-infinity',
    -- The source, for people: host and database.
    name        text,
    waiting     integer,
    -- Seconds that the oldest of them has waited.
    oldest      double precision,
    refused     integer,
    reported_at timestamptz,
    -- Why the relay delivers nothing until a person says so: a copy, or another queue's outbox.
    stopped     text,
    -- The name under which this outbox goes on, as after pg_upgrade: its relay prunes this memory, too.
    heir        uuid,
    CONSTRAINT relay_fence_can_be_shown CHECK (
        reported_at BETWEEN '1970-01-01 UTC' AND '9000-01-01 UTC' IS NOT FALSE AND oldest BETWEEN 0 AND 1e12 IS NOT FALSE AND waiting >= 0 IS NOT FALSE
        AND refused >= 0 IS NOT FALSE)
) WITH (fillfactor = 50);
COMMENT ON TABLE pgqueue.relay_fence IS 'Which session of a relay may deliver the jobs of each outbox.';

-- The memory: which staged jobs have come here. `relayed_at` is when the row was last found in the outbox.
CREATE TABLE pgqueue.relayed (
    uid        uuid        PRIMARY KEY,
    source     uuid        NOT NULL,
    staged_id  bigint      NOT NULL,
    job_id     bigint      NOT NULL,
    relayed_at timestamptz NOT NULL DEFAULT pgqueue.now()
);
COMMENT ON TABLE pgqueue.relayed IS 'Which staged jobs have been delivered here, and which jobs they became. Kept for about two hours.';
CREATE INDEX relayed_age ON pgqueue.relayed (source, relayed_at);

INSERT INTO pgqueue.relay_target DEFAULT VALUES;


-- Enqueue -------------------------------------------------------------------------------------------------------------

-- Enqueue a job from any language. It does all with the rights of its caller, but for unique keys. A job with a unique
-- key gets its time before it takes the key.
CREATE FUNCTION pgqueue.enqueue(
    task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL, deadline timestamptz DEFAULT NULL,
    lock_key text DEFAULT NULL, unique_key text DEFAULT NULL, idempotency_key text DEFAULT NULL,
    lock_limit integer DEFAULT NULL, on_locked text DEFAULT NULL, limit_key text DEFAULT NULL, rate_key text DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    new_id bigint;
    holder bigint;
    due boolean := enqueue.run_at IS NULL OR enqueue.run_at <= pgqueue.now();
    heard text := CASE WHEN due THEN coalesce(enqueue.queue, 'default') ELSE ':scheduled' END;
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
    IF octet_length(enqueue.args::text) > 1048576 OR octet_length(enqueue.headers::text) > 1048576 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args have % bytes and headers %, the limit is 1048576 each', octet_length(enqueue.args::text),
            coalesce(octet_length(enqueue.headers::text), 0)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store the data in a table and pass its key.';
    END IF;
    IF octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 OR octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500
        OR octet_length(enqueue.idempotency_key) NOT BETWEEN 1 AND 500 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: % has % bytes, use 1 to 500',
            CASE WHEN octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 THEN 'lock_key'
                 WHEN octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500 THEN 'unique_key' ELSE 'idempotency_key' END,
            CASE WHEN octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 THEN octet_length(enqueue.lock_key)
                 WHEN octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500 THEN octet_length(enqueue.unique_key)
                 ELSE octet_length(enqueue.idempotency_key) END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    IF enqueue.lock_limit < 1 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: lock_limit % lets no job run, use 1 or more', enqueue.lock_limit
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.on_locked NOT IN ('wait', 'skip', 'once') THEN
        RAISE EXCEPTION 'pgqueue.enqueue: on_locked is %, use wait, skip or once', quote_literal(left(enqueue.on_locked, 80))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.limit_key !~ '^[^[:space:][:cntrl:]]+$' OR octet_length(enqueue.limit_key) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: limit_key % is not the name of a limit', quote_literal(left(enqueue.limit_key, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 200 bytes without spaces, such as warehouse.';
    END IF;
    -- Up to the first colon it is a name; behind that whatever a key may be, but not nothing.
    IF split_part(enqueue.rate_key, ':', 1) !~ '^[^[:space:][:cntrl:]]+$'
        OR octet_length(split_part(enqueue.rate_key, ':', 1)) > 200 OR strpos(enqueue.rate_key, ':') = length(enqueue.rate_key)
        OR octet_length(enqueue.rate_key) > 500 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: rate_key % is not the name of a rate, with or without a key',
            quote_literal(left(enqueue.rate_key, 80))
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Use a name of 1 to 200 bytes without spaces, such as mail, or name:key, such as crm:customer:7, of up to 500.';
    END IF;

    IF enqueue.unique_key IS NOT NULL OR enqueue.idempotency_key IS NOT NULL THEN
        SELECT put.id, put.holder, put.heard INTO new_id, holder, heard
        FROM pgqueue.enqueue_keyed(ARRAY[ROW(
            enqueue.task, enqueue.args, coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), enqueue.headers, NULL,
            enqueue.run_at, enqueue.deadline, enqueue.lock_key, CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.lock_limit END,
            CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.on_locked END, enqueue.limit_key, enqueue.rate_key,
            enqueue.unique_key, enqueue.idempotency_key, 'live', 0, false)::pgqueue.keyed_job]) AS put;
        IF holder IS NOT NULL THEN
            RETURN holder;
        END IF;
    -- A column that is named in an INSERT needs its right: a role whose grants are older than the schema enqueues as ever.
    ELSIF enqueue.limit_key IS NOT NULL OR enqueue.rate_key IS NOT NULL
        OR enqueue.lock_key IS NOT NULL AND (enqueue.lock_limit IS NOT NULL OR enqueue.on_locked IS NOT NULL) THEN
        INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key, lock_limit, on_locked,
                                 limit_key, rate_key)
        VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.lock_limit END,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.on_locked END, enqueue.limit_key, enqueue.rate_key)
        RETURNING id INTO new_id;
    ELSE
        INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key)
        VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key)
        RETURNING id INTO new_id;
    END IF;

    -- If the server's NOTIFY queue is full, a transaction that notifies fails at its COMMIT, the application's too (see `may_notify`).
    IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' AND pg_notification_queue_usage() < 0.9 THEN
        PERFORM pg_notify('pgqueue.' || heard, '');
    END IF;
    RETURN new_id;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue IS
    'Enqueue a job from any language, in the caller''s transaction. Returns its id, or that of the job that has its key. SET pgqueue.notify = off for two-phase commit.';

-- The door for unique keys: `put_keyed` as the owner, for roles that have no right on the table of keys. What it is
-- given comes from a stranger. It checks what no table does.
CREATE FUNCTION pgqueue.enqueue_keyed(jobs pgqueue.keyed_job[]) RETURNS TABLE (
    place bigint, task text, id bigint, heard text, key text, holder bigint, holder_since timestamptz, waits boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM unnest(jobs) AS job WHERE job.replaces) THEN
        RAISE EXCEPTION 'pgqueue.enqueue_keyed replaces no job' USING ERRCODE = 'insufficient_privilege',
            HINT = 'A role that may replace jobs calls pgqueue.enqueue_replacing; see `pgqueue grants --for operate`.';
    END IF;
    PERFORM pgqueue.check_keys(jobs);
    RETURN QUERY SELECT * FROM pgqueue.put_keyed(jobs);
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_keyed IS
    'Enqueue jobs with unique keys: part of an enqueue of pgqueue''s own. From SQL call pgqueue.enqueue.';

-- The same for roles that may move jobs that wait: a job that is to be replaced is locked, so that it does not start
-- meanwhile.
CREATE FUNCTION pgqueue.enqueue_replacing(jobs pgqueue.keyed_job[]) RETURNS TABLE (
    place bigint, task text, id bigint, heard text, key text, holder bigint, holder_since timestamptz, waits boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pgqueue.check_keys(jobs);
    RETURN QUERY SELECT * FROM pgqueue.put_keyed(jobs);
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_replacing IS
    'Enqueue jobs with unique keys that replace jobs: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Raise if a job has a unique key that cannot be, or would hold it for longer than a time can be.
CREATE FUNCTION pgqueue.check_keys(jobs pgqueue.keyed_job[]) RETURNS void LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wrong record;
BEGIN
    SELECT job.unique_key, job.idempotency_key, job.hold, job.hold_seconds INTO wrong FROM unnest(jobs) AS job
    WHERE octet_length(job.unique_key) NOT BETWEEN 1 AND 500 OR octet_length(job.idempotency_key) NOT BETWEEN 1 AND 500
       OR job.unique_key IS NOT NULL AND (
           job.hold IN ('pending', 'live', 'after') IS NOT TRUE OR job.hold_seconds BETWEEN 0 AND 3153600000 IS FALSE)
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'pgqueue: a unique key has 1 to 500 bytes; it is held pending, live, or after its job for 0 seconds to 100 years'
            USING ERRCODE = 'invalid_parameter_value',
                  DETAIL = format('The keys have %s and %s bytes; hold is %L, for %s seconds.', octet_length(wrong.unique_key),
                                  octet_length(wrong.idempotency_key), left(wrong.hold, 80), wrong.hold_seconds);
    END IF;
END $$;
COMMENT ON FUNCTION pgqueue.check_keys IS
    'What enqueue_keyed is given: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Insert those of these jobs that get all of their unique keys, or have none. A row for each job, in their order: its
-- id and the channel that is to hear of it; or, without these, a key that another job has, that job, when it was
-- enqueued, and whether it has never started.
--
-- The keys name the id and the time of a job, so both are made here, before the keys are taken. See `take_all_keys` for
-- the order of locks.
CREATE FUNCTION pgqueue.put_keyed(jobs pgqueue.keyed_job[]) RETURNS TABLE (
    place bigint, task text, id bigint, heard text, key text, holder bigint, holder_since timestamptz, waits boolean
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    job pgqueue.keyed_job;
    job_id bigint;
    since timestamptz;
BEGIN
    IF cardinality(jobs) = 1 THEN -- the usual call; a batch of one would cost a third more
        job := jobs[1];
        job_id := nextval('pgqueue.job_id_seq');
        since := pgqueue.now();
        place := 1;
        task := job.task;
        IF job.unique_key IS NOT NULL OR job.idempotency_key IS NOT NULL THEN
            SELECT taken.key, taken.holder, taken.holder_since, taken.waits INTO key, holder, holder_since, waits
            FROM pgqueue.take_all_keys(ARRAY[job.idempotency_key], ARRAY[job.unique_key], ARRAY[job.hold], ARRAY[job.hold_seconds],
                                       ARRAY[job_id], ARRAY[since], ARRAY[job.replaces]) AS taken;
        END IF;
        IF holder IS NULL THEN
            INSERT INTO pgqueue.job (
                id, enqueued_at, state, rank, task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit,
                on_locked, limit_key, rate_key, unique_key, idempotency_key)
            VALUES (job_id, since, CASE WHEN job.run_at > since THEN 'scheduled' ELSE 'available' END, 2 * job.priority + 1,
                job.task, job.args, job.queue, job.priority, job.headers, job.max_attempts, job.run_at, job.deadline, job.lock_key,
                job.lock_limit, job.on_locked, job.limit_key, job.rate_key, job.unique_key, job.idempotency_key)
            RETURNING id, CASE state WHEN 'available' THEN queue::text ELSE ':scheduled' END INTO id, heard;
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT job.*, nextval('pgqueue.job_id_seq') AS id, pgqueue.now() AS enqueued_at
        FROM unnest(jobs) WITH ORDINALITY AS job (
            task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit, on_locked, limit_key, rate_key,
            unique_key, idempotency_key, hold, hold_seconds, replaces, place)
    ), keyed AS MATERIALIZED (
        SELECT array_agg(a.idempotency_key) AS idempotency_keys, array_agg(a.unique_key) AS unique_keys, array_agg(a.hold) AS holds,
            array_agg(a.hold_seconds) AS seconds, array_agg(a.id) AS ids, array_agg(a.enqueued_at) AS since, array_agg(a.replaces) AS replaces
        FROM asked a WHERE a.unique_key IS NOT NULL OR a.idempotency_key IS NOT NULL
    ), lost AS MATERIALIZED (
        SELECT taken.* FROM keyed k CROSS JOIN LATERAL pgqueue.take_all_keys(
            k.idempotency_keys, k.unique_keys, k.holds, k.seconds, k.ids, k.since, k.replaces) AS taken
    ), judged AS MATERIALIZED (
        SELECT a.*, lost.key AS lost_key, lost.holder, lost.holder_since, lost.waits
        FROM asked a LEFT JOIN lost ON lost.job_id = a.id
    ), added AS (
        INSERT INTO pgqueue.job (
            id, enqueued_at, state, rank, task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit,
            on_locked, limit_key, rate_key, unique_key, idempotency_key)
        SELECT j.id, j.enqueued_at, CASE WHEN j.run_at > pgqueue.now() THEN 'scheduled' ELSE 'available' END, 2 * j.priority + 1,
            j.task, j.args, j.queue, j.priority, j.headers, j.max_attempts, j.run_at, j.deadline, j.lock_key, j.lock_limit,
            j.on_locked, j.limit_key, j.rate_key, j.unique_key, j.idempotency_key
        FROM judged j WHERE j.holder IS NULL ORDER BY j.place
        RETURNING id, CASE state WHEN 'available' THEN queue::text ELSE ':scheduled' END AS heard
    )
    SELECT j.place, j.task, CASE WHEN j.holder IS NULL THEN j.id END, added.heard, j.lost_key, j.holder, j.holder_since, j.waits
    FROM judged j LEFT JOIN added ON added.id = j.id
    ORDER BY j.place;
END $$;
COMMENT ON FUNCTION pgqueue.put_keyed IS
    'The body of enqueue_keyed and enqueue_replacing: for no other caller.';

-- The door for flows: enqueue all of its jobs and nodes as the owner, or nothing. `numbers` has the number of the node of
-- each job, and `nodes` the nodes that have a name or wait:
-- {"number": 2, "name": "sent", "after": [1], "after_end": [], "after_failure": [], "results": {"parcels": {"node": 1}}}.
--
-- One row: the flow, the ids of the jobs in their order, and the channels that are to hear of them. Or, if another job
-- has a key: the place of the job that wants it, the key, and that other job; then nothing was written.
--
-- What it is given comes from a stranger. Numbers are those of this flow, and a node waits only for nodes before it, so
-- no flow can touch another one, and none waits for itself. It checks what no table does: a job that waits enters
-- `job_blocked`, which trusts what comes from available and scheduled.
CREATE FUNCTION pgqueue.enqueue_flow(name text, nodes jsonb, numbers integer[], jobs pgqueue.keyed_job[]) RETURNS TABLE (
    flow bigint, ids bigint[], heard text[], place bigint, key text, holder bigint
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    since timestamptz := pgqueue.now();
    base bigint;
    wrong text;
BEGIN
    PERFORM pgqueue.check_keys(jobs);
    SELECT CASE
        WHEN cardinality(numbers) <> cardinality(jobs) OR octet_length(enqueue_flow.name) NOT BETWEEN 1 AND 800 OR enqueue_flow.name IS NULL
            THEN 'it has a name of 1 to 800 bytes, and a node for each job'
        WHEN EXISTS (SELECT FROM unnest(numbers) AS n WHERE n BETWEEN 1 AND 1048575 IS NOT TRUE)
            OR EXISTS (SELECT FROM jsonb_to_recordset(nodes) AS node (number integer, name text)
                       WHERE node.number BETWEEN 1 AND 1048575 IS NOT TRUE OR octet_length(node.name) NOT BETWEEN 1 AND 800)
            THEN 'a node has a number from 1 to 1048575, and a name of 1 to 800 bytes or none'
        WHEN EXISTS (
            SELECT FROM jsonb_to_recordset(nodes) AS node (number integer, after integer[], after_end integer[], after_failure integer[])
            WHERE cardinality(node.after || node.after_end || node.after_failure) > 10000
               OR EXISTS (SELECT FROM unnest(node.after || node.after_end || node.after_failure) AS n
                          WHERE n BETWEEN 1 AND node.number - 1 IS NOT TRUE))
            THEN 'a node waits for at most 10000 nodes, all of them before it'
        WHEN EXISTS (
            SELECT FROM jsonb_to_recordset(nodes) AS node (number integer, results jsonb)
            CROSS JOIN jsonb_each(node.results) AS result
            WHERE (result.value ->> 'node')::integer BETWEEN 1 AND node.number - 1 IS NOT TRUE
               OR jsonb_typeof(result.value -> 'many') <> 'boolean')
            THEN 'a result is that of a node before it, of one job or of many'
        WHEN EXISTS (
            SELECT FROM unnest(jobs) AS job
            WHERE (job.priority BETWEEN 0 AND 9 AND octet_length(job.queue) BETWEEN 1 AND 40 AND isfinite(job.run_at) IS NOT FALSE
                   AND pgqueue.keys_can_be(job.lock_key, job.lock_limit, job.on_locked, job.limit_key, job.rate_key)) IS NOT TRUE)
            THEN 'a job has a queue, a priority from 0 to 9, keys that can be, and a time that is one'
        END INTO wrong;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'pgqueue: this is no flow: %', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ids := ARRAY(SELECT nextval('pgqueue.job_id_seq') FROM generate_series(1, cardinality(jobs)));
    IF EXISTS (SELECT FROM unnest(jobs) AS job WHERE job.unique_key IS NOT NULL OR job.idempotency_key IS NOT NULL) THEN
        BEGIN
            SELECT array_position(enqueue_flow.ids, taken.job_id), taken.key, taken.holder INTO place, key, holder
            FROM (
                SELECT array_agg(a.idempotency_key ORDER BY a.id) AS idempotency_keys, array_agg(a.unique_key ORDER BY a.id) AS unique_keys,
                    array_agg(a.hold ORDER BY a.id) AS holds, array_agg(a.hold_seconds ORDER BY a.id) AS seconds,
                    array_agg(a.id ORDER BY a.id) AS ids, array_agg(since) AS since, array_agg(false) AS replaces
                FROM ROWS FROM (unnest(jobs), unnest(ids)) AS a (
                    task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit, on_locked, limit_key,
                    rate_key, unique_key, idempotency_key, hold, hold_seconds, replaces, id)
                WHERE a.unique_key IS NOT NULL OR a.idempotency_key IS NOT NULL
            ) AS asked CROSS JOIN LATERAL pgqueue.take_all_keys(
                asked.idempotency_keys, asked.unique_keys, asked.holds, asked.seconds, asked.ids, asked.since, asked.replaces) AS taken
            LIMIT 1;
            IF holder IS NOT NULL THEN
                RAISE EXCEPTION 'a key is held' USING ERRCODE = 'PGQ05';
            END IF;
        EXCEPTION WHEN SQLSTATE 'PGQ05' THEN -- the savepoint is undone, and with it the keys that were free
            ids := NULL;
            RETURN NEXT;
            RETURN; END;
    END IF;
    INSERT INTO pgqueue.flow (name, enqueued_at) VALUES (enqueue_flow.name, since) RETURNING id INTO flow;
    base := flow << 20;
    INSERT INTO pgqueue.node (id, name, after, after_end, after_failure, results)
    SELECT base | node.number, node.name, ARRAY(SELECT base | n FROM unnest(node.after) AS n), ARRAY(SELECT base | n FROM unnest(node.after_end) AS n),
        ARRAY(SELECT base | n FROM unnest(node.after_failure) AS n),
        (SELECT jsonb_object_agg(result.key, jsonb_set(result.value, '{node}', to_jsonb(base | (result.value ->> 'node')::bigint)))
         FROM jsonb_each(node.results) AS result)
    FROM jsonb_to_recordset(nodes) AS node (
        number integer, name text, after integer[], after_end integer[], after_failure integer[], results jsonb);
    -- Of the nodes that a job waits for it watches the last: as a rule that ends last.
    WITH waiting AS MATERIALIZED (
        SELECT node.number, (SELECT max(n) FROM unnest(node.after || node.after_end || node.after_failure) AS n) AS last
        FROM jsonb_to_recordset(nodes) AS node (number integer, after integer[], after_end integer[], after_failure integer[])
        WHERE cardinality(node.after || node.after_end || node.after_failure) > 0
    ), asked AS MATERIALIZED (
        SELECT a.*, since AS enqueued_at, waiting.last,
            CASE WHEN waiting.last IS NULL THEN base | a.number ELSE -(base | a.number) END AS node
        FROM ROWS FROM (unnest(jobs), unnest(ids), unnest(numbers)) AS a (
            task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit, on_locked, limit_key, rate_key,
            unique_key, idempotency_key, hold, hold_seconds, replaces, id, number)
        LEFT JOIN waiting ON waiting.number = a.number
        ORDER BY a.id
    ), blocked AS (
        INSERT INTO pgqueue.job_blocked (
            state, key, id, enqueued_at, rank, task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit,
            on_locked, limit_key, rate_key, unique_key, idempotency_key, node)
        SELECT 'blocked', 'node:' || (base | a.last), a.id, a.enqueued_at, 2 * a.priority + 1, a.task, a.args, a.queue, a.priority, a.headers,
            a.max_attempts, a.run_at, a.deadline, a.lock_key, a.lock_limit, a.on_locked, a.limit_key, a.rate_key, a.unique_key,
            a.idempotency_key, a.node
        FROM asked a WHERE a.last IS NOT NULL
    ), ready AS (
        INSERT INTO pgqueue.job (
            state, id, enqueued_at, rank, task, args, queue, priority, headers, max_attempts, run_at, deadline, lock_key, lock_limit,
            on_locked, limit_key, rate_key, unique_key, idempotency_key, node)
        SELECT CASE WHEN a.run_at > since THEN 'scheduled' ELSE 'available' END, a.id, a.enqueued_at, 2 * a.priority + 1, a.task, a.args,
            a.queue, a.priority, a.headers, a.max_attempts, a.run_at, a.deadline, a.lock_key, a.lock_limit, a.on_locked, a.limit_key,
            a.rate_key, a.unique_key, a.idempotency_key, a.node
        FROM asked a WHERE a.last IS NULL
        RETURNING CASE state WHEN 'available' THEN queue::text ELSE ':scheduled' END AS channel
    )
    SELECT array_agg(DISTINCT ready.channel) INTO heard FROM ready;
    RETURN NEXT;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_flow IS
    'Enqueue a flow as a whole: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Take back those of these jobs that have never started, so that this transaction may write them anew. `since`: when
-- each was enqueued. Waits for a transaction that has locked one, as `keep_waiting` does; locks in the order of the
-- ids. `was_due`: its time had come. `waits_for`: it waits for its release, with this key. Others are on the move, or have started.
CREATE FUNCTION pgqueue.take_back(ids bigint[], since timestamptz[]) RETURNS TABLE (
    id bigint, enqueued_at timestamptz, unique_key text, idempotency_key text, holds boolean, was_due boolean, node bigint, waits_for text
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    patience text := current_setting('lock_timeout');
BEGIN
    RETURN QUERY
    WITH patient AS MATERIALIZED (
        SELECT set_config('lock_timeout', CASE patience WHEN '0' THEN '5s' ELSE patience END, true)
    ), asked AS MATERIALIZED (
        SELECT DISTINCT a.id, a.since FROM patient CROSS JOIN unnest(take_back.ids, take_back.since) AS a (id, since)
        ORDER BY a.id, a.since
    ), found AS MATERIALIZED (
        SELECT j.part, j.ctid FROM asked CROSS JOIN LATERAL (
            SELECT j.tableoid AS part, j.ctid FROM pgqueue.job j
            WHERE j.id = asked.id AND asked.since = j.enqueued_at
              AND j.state IN ('available', 'scheduled', 'blocked') AND j.attempt = 0 AND j.snoozes = 0 AND j.crashes = 0
              AND NOT EXISTS (SELECT FROM pgqueue.job_step s WHERE s.job_id = j.id AND s.enqueued_at = j.enqueued_at OFFSET 0)
              AND NOT EXISTS (SELECT FROM pgqueue.job_cursor c WHERE c.job_id = j.id AND c.enqueued_at = j.enqueued_at OFFSET 0)
            LIMIT 1 FOR UPDATE) AS j
    ), from_available AS (
        DELETE FROM pgqueue.job_available j
        WHERE j.ctid = ANY (ARRAY(SELECT found.ctid FROM found WHERE found.part = 'pgqueue.job_available'::regclass))
        RETURNING j.id, j.enqueued_at, j.unique_key, j.idempotency_key, j.holds, true, j.node, NULL::text
    ), from_scheduled AS (
        DELETE FROM pgqueue.job_scheduled j
        WHERE j.ctid = ANY (ARRAY(SELECT found.ctid FROM found WHERE found.part = 'pgqueue.job_scheduled'::regclass))
        RETURNING j.id, j.enqueued_at, j.unique_key, j.idempotency_key, j.holds, false, j.node, NULL::text
    ), from_blocked AS (
        DELETE FROM pgqueue.job_blocked j
        WHERE j.ctid = ANY (ARRAY(SELECT found.ctid FROM found WHERE found.part = 'pgqueue.job_blocked'::regclass))
        RETURNING j.id, j.enqueued_at, j.unique_key, j.idempotency_key, j.holds, true, j.node,
            CASE WHEN j.node < 0 THEN j.key END
    )
    TABLE from_available UNION ALL TABLE from_blocked UNION ALL TABLE from_scheduled;
    PERFORM set_config('lock_timeout', patience, true);
END $$;
COMMENT ON FUNCTION pgqueue.take_back(bigint[], timestamptz[]) IS
    'Take back jobs that a duplicate replaces: part of an enqueue of pgqueue''s own, not to be called by others.';

-- Forget what was asked of these jobs, which an enqueue has just replaced; each is named by its id and the time of its
-- enqueue. Requests to jobs that run are left alone. Acts as the owner of the tables: a role that replaces jobs may not
-- read or delete requests.
CREATE FUNCTION pgqueue.forget_requests(ids bigint[], since timestamptz[]) RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    forgotten integer;
BEGIN
    DELETE FROM pgqueue.job_signal s
    WHERE s.job_id = ANY (forget_requests.ids)
      AND (s.job_id, s.enqueued_at) IN (SELECT * FROM unnest(forget_requests.ids, forget_requests.since))
      AND NOT EXISTS (SELECT FROM pgqueue.job_running r WHERE r.id = s.job_id OFFSET 0);
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END $$;
COMMENT ON FUNCTION pgqueue.forget_requests IS
    'Part of an enqueue that replaces jobs: for no other caller.';


-- Jobs by id: moved ---------------------------------------------------------------------------------------------------

-- The row of a job that runs under this claim, deleted. No row: the job is not this run's any more.
CREATE FUNCTION pgqueue.take_running(id bigint, claim integer, worker_id bigint) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY DELETE FROM pgqueue.job_running r
    WHERE r.id = take_running.id AND r.claim + 0 = take_running.claim AND r.worker_id + 0 = take_running.worker_id RETURNING r.*;
END $$;
COMMENT ON FUNCTION pgqueue.take_running IS
    'Part of a completion in a handler''s transaction: for no other caller.';

-- The same row, locked until the transaction ends. While another transaction has it, this waits.
CREATE FUNCTION pgqueue.lock_running(id bigint, claim integer, worker_id bigint) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT r.* FROM pgqueue.job_running r
    WHERE r.id = lock_running.id AND r.claim + 0 = lock_running.claim AND r.worker_id + 0 = lock_running.worker_id FOR UPDATE;
END $$;
COMMENT ON FUNCTION pgqueue.lock_running IS
    'Part of what a handler''s transaction does: for no other caller.';

-- Locks the rows of jobs that run under these claims until the transaction ends, in the order of their ids; how many
-- there are. While another transaction has one, this waits.
CREATE FUNCTION pgqueue.lock_running_batch(ids bigint[], claims integer[], worker_id bigint) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN (
        SELECT count(*)
        FROM (SELECT * FROM unnest(lock_running_batch.ids, lock_running_batch.claims) AS asked (id, claim) ORDER BY asked.id) AS mine
        CROSS JOIN LATERAL (
            SELECT r.id FROM pgqueue.job_running r
            WHERE r.id = mine.id AND r.claim + 0 = mine.claim AND r.worker_id + 0 = lock_running_batch.worker_id
            LIMIT 1 FOR UPDATE
        ) AS r
    );
END $$;
COMMENT ON FUNCTION pgqueue.lock_running_batch IS
    'Part of the end of a batch in its handler''s transaction: for no other caller.';

-- Those of these jobs that wait, deleted; each is named by its id and the time of its enqueue. Only jobs of this queue
-- and this task (NULL: of any): what is compared is the row that is locked. While another transaction has one, this
-- waits.
--
-- Locks them in the order of their ids, whatever partition they are in. If one has moved to another partition
-- meanwhile, it would be locked after jobs with higher ids. So the locks are given back, and all begins anew.
CREATE FUNCTION pgqueue.take_waiting(ids bigint[], since timestamptz[], queue text, task text) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
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
                  AND (take_waiting.queue IS NULL OR j.queue = take_waiting.queue)
                  AND (take_waiting.task IS NULL OR j.task = take_waiting.task)
                LIMIT 1 FOR UPDATE
            ) AS j;
            EXIT WHEN coalesce(cardinality(places), 0) = cardinality(take_waiting.ids);
            -- A statement of its own: it sees what has been committed while the one before waited.
            EXIT WHEN coalesce(cardinality(places), 0) >= (
                SELECT count(*) FROM unnest(take_waiting.ids, take_waiting.since) AS asked (id, since)
                CROSS JOIN LATERAL (
                    SELECT FROM pgqueue.job j
                    WHERE j.id = asked.id AND j.enqueued_at = asked.since AND j.state IN ('available', 'scheduled', 'blocked')
                      AND (take_waiting.queue IS NULL OR j.queue = take_waiting.queue)
                      AND (take_waiting.task IS NULL OR j.task = take_waiting.task)
                    LIMIT 1
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
COMMENT ON FUNCTION pgqueue.take_waiting(bigint[], timestamptz[], text, text) IS
    'Part of a cancel: for no other caller.';

-- Those of these jobs that failed or were cancelled, deleted, and what was asked of their last run.
CREATE FUNCTION pgqueue.take_dead(ids bigint[], since timestamptz[]) RETURNS SETOF pgqueue.job LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    DELETE FROM pgqueue.job_signal s
    WHERE s.job_id = ANY (take_dead.ids)
      AND (s.job_id, s.enqueued_at) IN (SELECT * FROM unnest(take_dead.ids, take_dead.since));
    RETURN QUERY DELETE FROM pgqueue.job_dead d
    WHERE d.id = ANY (take_dead.ids) AND ((d.id, d.enqueued_at) IN (SELECT * FROM unnest(take_dead.ids, take_dead.since))) IS TRUE
    RETURNING d.*;
END $$;
COMMENT ON FUNCTION pgqueue.take_dead IS
    'Part of a retry by hand: for no other caller.';

-- Lock those of these jobs that have ended in one of these states, and answer where all of them stand: a row for each
-- that there is, and whether it is `locked` in the state that is answered. While another transaction has one, this
-- waits.
--
-- Locks them in the order of their ids. If one has lived and ended again meanwhile, it would be locked after jobs with
-- higher ids. So the locks are given back, and all begins anew, a hundred times at most.
CREATE FUNCTION pgqueue.lock_ended(ids bigint[], states text[]) RETURNS TABLE (
    id bigint, state text, enqueued_at timestamptz, locked boolean, finished_at timestamptz, unique_key text, idempotency_key text
) LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    held bigint[];
    held_since timestamptz[];
    ends timestamptz[];
    unique_keys text[];
    idempotency_keys text[];
    stand bigint[];
    stand_states text[];
    stand_since timestamptz[];
BEGIN
    FOR times IN 1..100 LOOP
        <<round>>
        BEGIN
            SELECT array_agg(j.id), array_agg(j.enqueued_at), array_agg(j.finished_at), array_agg(j.unique_key), array_agg(j.idempotency_key)
            INTO held, held_since, ends, unique_keys, idempotency_keys
            FROM (
                SELECT found.id FROM pgqueue.job_states(lock_ended.ids) AS found GROUP BY found.id
                HAVING bool_or(found.state = ANY (lock_ended.states))
                   AND NOT bool_or(found.state IN ('available', 'scheduled', 'blocked', 'running'))
                ORDER BY found.id
            ) AS mine
            CROSS JOIN LATERAL (
                SELECT j.id, j.enqueued_at, j.finished_at, j.unique_key, j.idempotency_key FROM pgqueue.job j
                WHERE j.id = mine.id AND j.state IN ('completed', 'skipped', 'failed', 'cancelled') AND j.state = ANY (lock_ended.states)
                FOR UPDATE
            ) AS j;
            -- A statement of its own: it sees what has been committed while the one before waited.
            SELECT array_agg(one.id), array_agg(one.state), array_agg(one.enqueued_at) INTO stand, stand_states, stand_since
            FROM (
                SELECT DISTINCT ON (found.id) found.id, found.state, found.enqueued_at FROM pgqueue.job_states(lock_ended.ids) AS found
                -- A job that lives is not started a second time for a row of its id that was put aside. Else the job that has ended last is meant.
                ORDER BY found.id, found.state IN ('available', 'scheduled', 'blocked', 'running') DESC,
                    found.state = ANY (lock_ended.states) DESC, found.finished_at DESC
            ) AS one;
            EXIT WHEN NOT EXISTS (
                SELECT n.id, n.since FROM unnest(stand, stand_states, stand_since) AS n (id, state, since) WHERE n.state = ANY (lock_ended.states)
                EXCEPT
                SELECT h.id, h.since FROM unnest(held, held_since) AS h (id, since));
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'PGQ02';
        EXCEPTION WHEN SQLSTATE 'PGQ02' THEN
            held := NULL;  -- With the block its locks are gone.
        END round;
    END LOOP;
    RETURN QUERY
    SELECT n.id, n.state, n.since, h.id IS NOT NULL, h.finished_at, h.unique_key, h.idempotency_key
    FROM unnest(stand, stand_states, stand_since) AS n (id, state, since)
    LEFT JOIN unnest(held, held_since, ends, unique_keys, idempotency_keys) AS h (id, since, finished_at, unique_key, idempotency_key)
      ON n.state = ANY (lock_ended.states) AND h.id = n.id AND h.since = n.since;
END $$;
COMMENT ON FUNCTION pgqueue.lock_ended IS
    'Part of a retry or a discard by hand: for no other caller.';

-- Delete jobs that have ended, with their attempts, cursors and progress. A row for each id: its state as this
-- statement's snapshot had it (NULL: in none), and whether it was deleted. See `actions_discard`. A job that a flow needs
-- (`needed_by_flows`) is left alone, and its state is answered as `needed`.
--
-- A key is deleted by its name. Once it is locked, the row of the key names this job, whichever version of it there is;
-- no other job gets the key before this transaction ends. If it holds on, its hash is kept.
CREATE FUNCTION pgqueue.discard_ended(ids bigint[]) RETURNS TABLE (id bigint, state text, discarded boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT a.id FROM unnest(discard_ended.ids) AS a (id)
    ), needed AS MATERIALIZED (
        SELECT n.id FROM pgqueue.needed_by_flows(discard_ended.ids) AS n (id)
    ), seen AS MATERIALIZED (
        SELECT DISTINCT ON (found.id) found.id, found.state
        FROM pgqueue.job_states(discard_ended.ids) AS found
        ORDER BY found.id, found.state IN ('available', 'scheduled', 'blocked', 'running') DESC, found.finished_at DESC
    ), ended AS MATERIALIZED (
        SELECT j.*
        FROM (
            SELECT seen.id FROM seen
            WHERE seen.state IN ('completed', 'skipped', 'failed', 'cancelled') AND seen.id NOT IN (SELECT needed.id FROM needed)
            ORDER BY seen.id
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
            WHERE k.key = mine.key AND k.job_id = mine.id AND k.enqueued_at = mine.enqueued_at
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
    ), steps AS (
        DELETE FROM pgqueue.job_step s WHERE s.job_id = ANY (ARRAY(SELECT ended.id FROM ended))
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
    SELECT asked.id, CASE WHEN asked.id IN (SELECT needed.id FROM needed) THEN 'needed' ELSE seen.state::text END,
        asked.id IN (SELECT done.id FROM done UNION ALL SELECT dead.id FROM dead)
    FROM asked LEFT JOIN seen ON seen.id = asked.id
    ORDER BY asked.id;
END $$;
COMMENT ON FUNCTION pgqueue.discard_ended IS
    'Part of a discard by hand: for no other caller.';


-- Jobs by id: read ----------------------------------------------------------------------------------------------------

-- The states of these jobs. An id has two rows here if one of them was put aside in history, or the id was given again.
CREATE FUNCTION pgqueue.job_states(ids bigint[]) RETURNS TABLE (id bigint, state text, enqueued_at timestamptz, finished_at timestamptz)
LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT j.id, j.state, j.enqueued_at, j.finished_at FROM unnest(job_states.ids) AS asked (id)
    CROSS JOIN LATERAL (SELECT j.id, j.state, j.enqueued_at, j.finished_at FROM pgqueue.job j WHERE j.id = asked.id OFFSET 0) AS j;
END $$;

-- The rows of these jobs, as `job_states`.
CREATE FUNCTION pgqueue.job_rows(ids bigint[]) RETURNS SETOF pgqueue.job LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT j.* FROM unnest(job_rows.ids) AS asked (id)
    CROSS JOIN LATERAL (SELECT j.* FROM pgqueue.job j WHERE j.id = asked.id OFFSET 0) AS j;
END $$;

-- The jobs of a flow with an id below `before`: `most` with the highest ids; NULL: all. With the `number` of a node only its
-- own, of each table and sign so many. Without it no index has the order, so all rows of the flow are read: a walk by nodes
-- would miss jobs that were added to an early node, whose ids are high.
CREATE FUNCTION pgqueue.flow_rows(flow bigint, number bigint, before bigint, most integer)
RETURNS SETOF pgqueue.job LANGUAGE plpgsql STABLE ROWS 1000
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    below bigint := coalesce(before, 9223372036854775807);
    signed bigint;
BEGIN
    IF number IS NOT NULL THEN
        FOREACH signed IN ARRAY ARRAY[flow_rows.flow << 20 | number, -(flow_rows.flow << 20 | number)] LOOP
            -- Each in the order of its index, which puts NULL where no other one of that table does.
            RETURN QUERY
            (SELECT j.* FROM pgqueue.job_available j WHERE j.node = signed AND j.id < below ORDER BY j.id DESC NULLS LAST LIMIT most)
            UNION ALL (SELECT j.* FROM pgqueue.job_scheduled j WHERE j.node = signed AND j.id < below ORDER BY j.id DESC NULLS LAST LIMIT most)
            UNION ALL (SELECT j.* FROM pgqueue.job_blocked j WHERE j.node = signed AND j.id < below ORDER BY j.id DESC NULLS LAST LIMIT most)
            UNION ALL (SELECT j.* FROM pgqueue.job_running j WHERE j.node = signed AND j.id < below ORDER BY j.id DESC NULLS LAST LIMIT most)
            UNION ALL (SELECT j.* FROM pgqueue.job_done j WHERE j.node = signed AND j.id < below ORDER BY j.id DESC LIMIT most)
            UNION ALL (SELECT j.* FROM pgqueue.job_dead j WHERE j.node = signed AND j.id < below ORDER BY j.id DESC LIMIT most);
        END LOOP;
        RETURN;
    END IF;
    -- OFFSET 0: else a plan may walk the index of all ids, for their order.
    RETURN QUERY
    SELECT part.* FROM (
        SELECT j.* FROM pgqueue.job j
        WHERE j.node BETWEEN flow_rows.flow << 20 AND (flow_rows.flow << 20 | 1048575) AND j.id < below
        UNION ALL
        SELECT j.* FROM pgqueue.job j
        WHERE j.node BETWEEN -(flow_rows.flow << 20 | 1048575) AND -(flow_rows.flow << 20) AND j.id < below OFFSET 0
    ) AS part ORDER BY part.id DESC LIMIT most;
END $$;
COMMENT ON FUNCTION pgqueue.flow_rows IS
    'The jobs of a flow, for people.';

-- In which states that decide the state of a flow it has jobs: all of those that live, and those of `most` that failed or
-- were cancelled, of each sign. One look for each state, where `flow_rows` would read all that have ended.
CREATE FUNCTION pgqueue.flow_states(flow bigint, most integer) RETURNS SETOF text LANGUAGE plpgsql STABLE STRICT ROWS 5
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    lowest bigint := flow_states.flow << 20;
    highest bigint := flow_states.flow << 20 | 1048575;
BEGIN
    RETURN QUERY
    SELECT 'available' WHERE EXISTS (SELECT FROM pgqueue.job_available j WHERE j.node BETWEEN lowest AND highest)
    UNION ALL SELECT 'scheduled' WHERE EXISTS (SELECT FROM pgqueue.job_scheduled j WHERE j.node BETWEEN lowest AND highest)
    UNION ALL SELECT 'running' WHERE EXISTS (SELECT FROM pgqueue.job_running j WHERE j.node BETWEEN lowest AND highest)
    UNION ALL SELECT 'blocked' WHERE EXISTS (SELECT FROM pgqueue.job_blocked j WHERE j.node BETWEEN lowest AND highest)
                                  OR EXISTS (SELECT FROM pgqueue.job_blocked j WHERE j.node BETWEEN -highest AND -lowest)
    UNION ALL SELECT DISTINCT dead.state::text FROM (
        (SELECT j.state FROM pgqueue.job_dead j WHERE j.node BETWEEN lowest AND highest LIMIT most)
        UNION ALL
        (SELECT j.state FROM pgqueue.job_dead j WHERE j.node BETWEEN -highest AND -lowest LIMIT most)) AS dead;
END $$;
COMMENT ON FUNCTION pgqueue.flow_states IS
    'In which states that decide its own a flow has jobs, for people.';

-- How many jobs of a flow are in each of these states, which are those of `flow_states`: of each table and sign `most` are
-- counted.
CREATE FUNCTION pgqueue.flow_counts(flow bigint, states text[], most integer)
RETURNS TABLE (state text, n bigint) LANGUAGE plpgsql STABLE STRICT ROWS 6
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    lowest bigint := flow_counts.flow << 20;
    highest bigint := flow_counts.flow << 20 | 1048575;
BEGIN
    RETURN QUERY
    SELECT found.state::text, count(*) FROM (
        (SELECT j.state FROM pgqueue.job_available j WHERE 'available' = ANY (states) AND j.node BETWEEN lowest AND highest LIMIT most)
        UNION ALL (SELECT j.state FROM pgqueue.job_scheduled j WHERE 'scheduled' = ANY (states) AND j.node BETWEEN lowest AND highest LIMIT most)
        UNION ALL (SELECT j.state FROM pgqueue.job_running j WHERE 'running' = ANY (states) AND j.node BETWEEN lowest AND highest LIMIT most)
        UNION ALL (SELECT j.state FROM pgqueue.job_blocked j WHERE 'blocked' = ANY (states) AND j.node BETWEEN lowest AND highest LIMIT most)
        UNION ALL (SELECT j.state FROM pgqueue.job_blocked j WHERE 'blocked' = ANY (states) AND j.node BETWEEN -highest AND -lowest LIMIT most)
        UNION ALL (SELECT j.state FROM pgqueue.job_dead j WHERE j.state::text = ANY (states) AND j.node BETWEEN lowest AND highest LIMIT most)
        UNION ALL (SELECT j.state FROM pgqueue.job_dead j WHERE j.state::text = ANY (states) AND j.node BETWEEN -highest AND -lowest LIMIT most)
    ) AS found GROUP BY found.state;
END $$;
COMMENT ON FUNCTION pgqueue.flow_counts IS
    'How many jobs of a flow can be cancelled, or retried, for people.';

-- Those of these jobs that have ended and that their flow needs, because what they were is judged at a release, or read:
--
-- 1. a job of the flow waits, or may read results (`flow_may_read`);
-- 2. or a job of a later node has ended while it waited, and is none of these jobs: a retry lets it wait again. Without
--    these jobs it would start although one of them failed, or without their results.
--
-- A later node is enough: what waits for a node has a higher number. So if one of these jobs is left where it is, those
-- of the nodes before it are left, too.
CREATE FUNCTION pgqueue.needed_by_flows(ids bigint[]) RETURNS SETOF bigint LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY
    WITH ended AS MATERIALIZED (
        SELECT j.id, abs(j.node) AS node, abs(j.node) >> 20 AS flow FROM unnest(needed_by_flows.ids) AS asked (id)
        CROSS JOIN LATERAL (
            SELECT j.id, j.node FROM pgqueue.job j
            WHERE j.id = asked.id AND j.node IS NOT NULL AND j.state IN ('completed', 'skipped', 'failed', 'cancelled') OFFSET 0) AS j
    ), judged AS MATERIALIZED (
        SELECT f.flow, coalesce(
            (SELECT 9223372036854775807 FROM pgqueue.job_blocked w
             WHERE w.node BETWEEN -(f.flow << 20 | 1048575) AND -(f.flow << 20) LIMIT 1),
            CASE WHEN pgqueue.flow_may_read(f.flow) THEN 9223372036854775807 END,
            (SELECT -w.node FROM pgqueue.job_dead w
             WHERE w.node BETWEEN -(f.flow << 20 | 1048575) AND -(f.flow << 20) AND w.id <> ALL (needed_by_flows.ids)
             ORDER BY w.node LIMIT 1)) AS last
        FROM (SELECT DISTINCT ended.flow FROM ended) AS f
    )
    SELECT ended.id FROM ended JOIN judged ON judged.flow = ended.flow AND ended.node < judged.last;
END $$;
COMMENT ON FUNCTION pgqueue.needed_by_flows IS
    'Part of a discard by hand: for no other caller.';

-- The attempts of a job that did not complete.
CREATE FUNCTION pgqueue.attempt_rows(job_id bigint) RETURNS SETOF pgqueue.attempt LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT a.* FROM pgqueue.attempt a WHERE a.job_id = attempt_rows.job_id;
END $$;

-- Those of these jobs, which were enqueued at these times, that have an attempt which did not complete and fits: made
-- by this worker, of this class of errors (else its outcome), with this text in its error. What is NULL is not asked
-- for.
--
-- Each leaf is read by its index, for the ids alone. What was found is compared with the times afterwards: attempts of
-- a job that had the id before are of another time. The settings keep the first from reading whole leaves, and the
-- second from comparing each with each.
CREATE FUNCTION pgqueue.attempted(ids bigint[], since timestamptz[], worker bigint, error_type text, error text)
RETURNS SETOF bigint LANGUAGE plpgsql STABLE ROWS 100
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_nestloop = off SET enable_hashjoin = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT a.job_id, a.enqueued_at FROM pgqueue.attempt a
        WHERE a.job_id = ANY (attempted.ids) AND (attempted.worker IS NULL OR a.worker_id = attempted.worker)
          AND (attempted.error_type IS NULL OR coalesce(a.error_type, a.outcome) = attempted.error_type)
          AND (attempted.error IS NULL OR position(lower(attempted.error) IN lower(concat_ws(': ', a.error_type, a.message))) > 0)
    )
    SELECT DISTINCT f.job_id FROM found f JOIN unnest(attempted.ids, attempted.since) AS asked (id, since) ON asked.id = f.job_id
    WHERE f.enqueued_at = asked.since;
END $$;
COMMENT ON FUNCTION pgqueue.attempted IS
    'Which of these jobs have an attempt that fits a search.';

-- The highest number of a batch of a job with this id, and the cursor of the last batch of the job that was enqueued at
-- `since`.
CREATE FUNCTION pgqueue.last_batch(job_id bigint, since timestamptz) RETURNS TABLE (n integer, cursor jsonb) LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT
        (SELECT c.n FROM pgqueue.job_cursor c WHERE c.job_id = last_batch.job_id ORDER BY c.n DESC LIMIT 1),
        (SELECT c.cursor FROM pgqueue.job_cursor c
         WHERE c.job_id = last_batch.job_id AND c.enqueued_at = last_batch.since ORDER BY c.n DESC LIMIT 1);
END $$;

-- Delete the cursors of the job enqueued `since` then whose number is below this one.
CREATE FUNCTION pgqueue.drop_cursors(job_id bigint, since timestamptz, below integer) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    DELETE FROM pgqueue.job_cursor c
    WHERE c.job_id = drop_cursors.job_id AND c.enqueued_at = since AND c.n < drop_cursors.below;
END $$;
COMMENT ON FUNCTION pgqueue.drop_cursors IS
    'Part of an iteration: for no other caller.';

-- The durable steps of the job enqueued `since` then, in the order of their ends.
CREATE FUNCTION pgqueue.step_rows(job_id bigint, since timestamptz) RETURNS SETOF pgqueue.job_step LANGUAGE plpgsql STABLE ROWS 10
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT s.* FROM pgqueue.job_step s
    WHERE s.job_id = step_rows.job_id AND s.enqueued_at = step_rows.since ORDER BY s.created_at, s.name;
END $$;

-- Whether this step of the job enqueued at `since` is recorded. Reads its row alone.
CREATE FUNCTION pgqueue.step_is_recorded(job_id bigint, since timestamptz, name text) RETURNS boolean LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pgqueue.job_step s
                   WHERE s.job_id = step_is_recorded.job_id AND s.enqueued_at = step_is_recorded.since AND s.name = step_is_recorded.name);
END $$;

-- What a job says of how far it is.
CREATE FUNCTION pgqueue.progress_row(job_id bigint) RETURNS SETOF pgqueue.job_progress LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT p.* FROM pgqueue.job_progress p WHERE p.job_id = progress_row.job_id;
END $$;

-- The successors of the job `parent` that ended at `ended`: 100 at most, the first ones first.
--
-- Ids are given in the order of time, as far as two seconds go. So the first id of that time is found by halving: each
-- step reads the next jobs behind an id, 500 ids far at most. Where none is left, the ids are taken for older: history
-- goes the oldest first. Then 20,000 ids from there on are looked at, and as many behind the parent: a task that works
-- in batches enqueues successors before its end. No step reads more than a span of ids, however many rows are dead.
CREATE FUNCTION pgqueue.successors(parent bigint, ended timestamptz) RETURNS TABLE (id bigint, state text, queue varchar, task varchar)
LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    low bigint := successors.parent;
    high bigint := successors.parent;
    middle bigint;
    since timestamptz := successors.ended - interval '2 seconds';
    seen timestamptz;
BEGIN
    IF has_sequence_privilege('pgqueue.job_id_seq', 'SELECT') THEN
        high := (SELECT s.last_value FROM pgqueue.job_id_seq s);
    END IF;
    WHILE high - low > 500 LOOP
        middle := low + (high - low) / 2;
        seen := (SELECT min(n.enqueued_at) FROM (
            (SELECT j.enqueued_at FROM pgqueue.job_available j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_scheduled j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_blocked j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_running j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_done j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
            UNION ALL
            (SELECT j.enqueued_at FROM pgqueue.job_dead j WHERE j.id > middle AND j.id <= middle + 500 ORDER BY j.id LIMIT 1)
        ) AS n);
        IF seen >= since THEN
            high := middle;
        ELSE
            low := middle;
        END IF;
    END LOOP;
    RETURN QUERY
    SELECT j.id, j.state, j.queue, j.task
    FROM (SELECT DISTINCT span.first FROM (VALUES (successors.parent), (low)) AS span (first)) AS span
    CROSS JOIN LATERAL (
        SELECT j.id, j.state, j.queue, j.task, j.headers FROM pgqueue.job j WHERE j.id > span.first AND j.id <= span.first + 20000 OFFSET 0
    ) AS j
    WHERE j.headers ->> 'pgqueue:parent' = successors.parent::text AND (span.first = successors.parent OR j.id > successors.parent + 20000)
    ORDER BY j.id LIMIT 100;
END $$;
COMMENT ON FUNCTION pgqueue.successors IS
    'The jobs that a job has enqueued with its end, as far as they are found near that time.';

-- The waiters for the end of these jobs: the id of the job, once for each waiter.
CREATE FUNCTION pgqueue.waiters(ids bigint[]) RETURNS SETOF bigint LANGUAGE plpgsql STABLE ROWS 1
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT w.job_id FROM pgqueue.job_waiter w WHERE w.job_id = ANY (waiters.ids);
END $$;

-- This session waits for the end of the job. Answers the number of its row.
CREATE FUNCTION pgqueue.begin_wait(job_id bigint) RETURNS bigint LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO pgqueue.job_waiter (job_id) VALUES (begin_wait.job_id) RETURNING waiter
$$;
COMMENT ON FUNCTION pgqueue.begin_wait IS
    'Part of a wait for the end of a job: for no other caller.';

-- This session no longer waits, or one that has ended: a wait goes on with another session when its own breaks. The row
-- of another session stays.
CREATE FUNCTION pgqueue.leave_wait(waiter bigint) RETURNS void LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM pgqueue.job_waiter w
    WHERE w.waiter = leave_wait.waiter AND (w.pid = pg_backend_pid() OR NOT EXISTS (SELECT FROM pg_stat_get_activity(w.pid)))
$$;
COMMENT ON FUNCTION pgqueue.leave_wait IS
    'Part of a wait for the end of a job: for no other caller.';


-- Why -----------------------------------------------------------------------------------------------------------------

-- What `pgqueue why` reads. Each part looks up an index, and reads no more of it than a LIMIT or a span of numbers
-- allows. Where a table has many dead rows (`few_dead`), only the span is left: while an old snapshot is held, a scan
-- from the head of a lane would walk over every row that was ever taken from there.

-- What decides whether a waiting job may be claimed, as one JSON object:
-- * `place`: where the job is now. NULL: it waits no more.
-- * `queue_paused`, `task_paused`: since when and by which operator; NULL: open.
-- * `workers`: those of the queue that are not known to be dead, the newest 1,000. A worker whose jobs were not all
--   read says how many it runs (`running`).
-- * `held`: what those of them hold that know the task, up to 1,000 jobs of each of 50 workers, and 5,000 in all.
--   `whole`: all jobs of the workers that were `looked` at were read.
CREATE FUNCTION pgqueue.why_waiting(id bigint, queue text, task text) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH few_dead AS MATERIALIZED (
        SELECT pg_stat_get_dead_tuples('pgqueue.job_running'::regclass) < 50000 AS yes
    ), serving AS MATERIALIZED (
        SELECT w.id, w.host, w.pid, w.state, w.concurrency, w.lost, w.version_tag, w.running,
               extract(epoch FROM pgqueue.now() - w.beat_at)::float8 AS beat_age, extract(epoch FROM w.lease)::float8 AS lease,
               why_waiting.task = ANY (w.tasks) AS knows,
               w.slots[array_position(w.queues, why_waiting.queue)] AS slots,
               ARRAY(SELECT own.queue FROM unnest(w.queues, w.slots) AS own (queue, slots) WHERE own.slots IS NOT NULL) AS apart
        FROM pgqueue.worker w
        WHERE w.dead_at IS NULL AND why_waiting.queue = ANY (w.queues)
        ORDER BY w.id DESC LIMIT 1000
    ), able AS MATERIALIZED (
        SELECT id, running FROM serving WHERE knows AND state IN ('starting', 'running') ORDER BY id LIMIT 50
    ), held AS MATERIALIZED (
        SELECT * FROM (
            SELECT r.* FROM able CROSS JOIN LATERAL (
                SELECT r.id, r.task, r.queue, r.worker_id, r.crashes, r.started_at AS since FROM pgqueue.job_running r
                WHERE (SELECT yes FROM few_dead) AND r.worker_id = able.id ORDER BY r.claim DESC LIMIT 1000
            ) AS r
            UNION ALL
            SELECT r.* FROM able CROSS JOIN LATERAL unnest(able.running) AS ran (id) CROSS JOIN LATERAL (
                SELECT r.id, r.task, r.queue, r.worker_id, r.crashes, r.started_at AS since FROM pgqueue.job_running r
                WHERE NOT (SELECT yes FROM few_dead) AND r.id = ran.id AND r.worker_id + 0 = able.id LIMIT 1
            ) AS r
        ) AS found LIMIT 5000
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'place', (SELECT to_json(place) FROM (
            SELECT a.state, a.rank, a.pos, a.holds, a.crashes, a.lock_limit FROM pgqueue.job_available a WHERE a.id = why_waiting.id
            UNION ALL
            SELECT s.state, s.rank, s.pos, s.holds, s.crashes, s.lock_limit FROM pgqueue.job_scheduled s WHERE s.id = why_waiting.id
            UNION ALL
            SELECT b.state, b.rank, b.pos, b.holds, b.crashes, b.lock_limit FROM pgqueue.job_blocked b WHERE b.id = why_waiting.id
            LIMIT 1) AS place),
        'queue_paused', (SELECT json_build_object('at', q.paused_at, 'by', q.paused_by) FROM pgqueue.queue q
                         WHERE q.name = why_waiting.queue AND q.paused_at IS NOT NULL),
        'task_paused', (SELECT json_build_object('at', t.paused_at, 'by', t.paused_by) FROM pgqueue.paused_task t
                        WHERE t.name = why_waiting.task),
        'workers', (SELECT coalesce(json_agg(json_build_object(
            'id', s.id, 'host', s.host, 'pid', s.pid, 'state', s.state, 'concurrency', s.concurrency, 'lost', s.lost,
            'beat_age', s.beat_age, 'lease', s.lease, 'knows', s.knows, 'slots', s.slots, 'apart', s.apart,
            'running', cardinality(s.running), 'looked', s.id IN (SELECT able.id FROM able)) ORDER BY s.id), '[]') FROM serving s),
        'whole', (SELECT count(*) < 5000 FROM held),
        'held', (SELECT coalesce(json_agg(to_json(held) ORDER BY held.since, held.id), '[]') FROM held)
    )::text;
END $$;

-- What a job with this rank and id waits for, of this key (`lock:…`, `limit:…`, `rate:…`), as one JSON object:
-- * `most`: how many jobs may hold a limit. NULL: it is not declared, or it is no limit.
-- * `holders`: the jobs that hold a lock or a limit, up to as many as may, the oldest first; of a limit that was set
--   lower all of them, up to 100 more. Of a chain (see chains.py) only the first.
-- * `before`: how many jobs wait for the key before it, counted to 1,001; `whole`: none was left out for many dead
--   rows. Jobs that are passed over are left out: those of other paused queues and tasks, and those that no live worker
--   takes.
-- * `rate`: what is declared of a rate; in how many seconds its next job may start (`pause`), and the seconds from one
--   start to the next. After a rate was changed, or the clock was, no job waits for longer than that (see
--   `rates_move`).
CREATE FUNCTION pgqueue.why_key(id bigint, rank integer, key text, lock_limit integer) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT why_key.key AS whole, split_part(why_key.key, ':', 1) AS kind, substr(why_key.key, strpos(why_key.key, ':') + 1) AS key,
               pg_stat_get_dead_tuples('pgqueue.job_running'::regclass) < 50000 AS few_run,
               pg_stat_get_dead_tuples('pgqueue.job_blocked'::regclass) < 50000 AS few_wait
    ), alike AS MATERIALIZED (
        SELECT DISTINCT w.queues, w.tasks FROM pgqueue.worker w WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running')
    ), me AS MATERIALIZED (
        SELECT mine.queue, mine.task, EXISTS (SELECT FROM alike WHERE mine.queue = ANY (alike.queues)) AS served FROM (
            (SELECT b.queue, b.task FROM pgqueue.job_blocked b WHERE b.id = why_key.id LIMIT 1)
            UNION ALL
            (SELECT a.queue, a.task FROM pgqueue.job_available a WHERE a.id = why_key.id LIMIT 1)
        ) AS mine LIMIT 1
    ), most AS MATERIALIZED (
        SELECT CASE asked.kind WHEN 'lock' THEN why_key.lock_limit
                               WHEN 'limit' THEN (SELECT l.n FROM pgqueue.key_limit l WHERE l.name = asked.key) END AS n
        FROM asked
    ), counted AS MATERIALIZED (
        SELECT least(greatest(coalesce(most.n, 1), 1), 1000) AS n,
               least(greatest(coalesce(most.n, 1), 1), 1000) + CASE WHEN asked.few_run THEN 100 ELSE 0 END AS running
        FROM most CROSS JOIN asked
    ), holding AS MATERIALIZED (
        SELECT of_lock.* FROM asked CROSS JOIN counted CROSS JOIN LATERAL (
            (SELECT r.id, r.task, r.queue, r.state, r.worker_id, r.started_at, r.rank, r.holds, r.key FROM pgqueue.job_running r
             WHERE asked.kind = 'lock' AND r.lock_key = asked.key
             ORDER BY coalesce(r.hold_pos, 9223372036854775807) DESC LIMIT counted.running)
            UNION ALL
            (SELECT a.id, a.task, a.queue, a.state, NULL, NULL, a.rank, a.holds, NULL FROM pgqueue.job_available a
             WHERE asked.kind = 'lock' AND a.lock_key = asked.key AND a.holds
             ORDER BY coalesce(a.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT s.id, s.task, s.queue, s.state, NULL, NULL, s.rank, s.holds, NULL FROM pgqueue.job_scheduled s
             WHERE asked.kind = 'lock' AND s.lock_key = asked.key AND s.holds
             ORDER BY coalesce(s.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT b.id, b.task, b.queue, b.state, NULL, NULL, b.rank, b.holds, NULL FROM pgqueue.job_blocked b
             WHERE asked.kind = 'lock' AND b.lock_key = asked.key AND b.holds
             ORDER BY coalesce(b.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
        ) AS of_lock
        UNION ALL
        SELECT of_limit.* FROM asked CROSS JOIN counted CROSS JOIN LATERAL (
            (SELECT r.id, r.task, r.queue, r.state, r.worker_id, r.started_at, r.rank, r.holds, NULL AS key FROM pgqueue.job_running r
             WHERE asked.kind = 'limit' AND r.limit_key = asked.key
             ORDER BY coalesce(r.hold_pos, 9223372036854775807) DESC LIMIT counted.running)
            UNION ALL
            (SELECT a.id, a.task, a.queue, a.state, NULL, NULL, a.rank, a.holds, NULL FROM pgqueue.job_available a
             WHERE asked.kind = 'limit' AND a.limit_key = asked.key AND a.holds
             ORDER BY coalesce(a.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT s.id, s.task, s.queue, s.state, NULL, NULL, s.rank, s.holds, NULL FROM pgqueue.job_scheduled s
             WHERE asked.kind = 'limit' AND s.limit_key = asked.key AND s.holds
             ORDER BY coalesce(s.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
            UNION ALL
            (SELECT b.id, b.task, b.queue, b.state, NULL, NULL, b.rank, b.holds, NULL FROM pgqueue.job_blocked b
             WHERE asked.kind = 'limit' AND b.limit_key = asked.key AND b.holds AND (substr(b.key, 1, 5) = 'rate:') IS TRUE
             ORDER BY coalesce(b.hold_pos, 9223372036854775807) DESC LIMIT counted.n)
        ) AS of_limit
    ), holder AS (
        SELECT h.id, h.task, h.queue, h.state, h.worker_id AS worker, w.host, w.pid, h.started_at AS since
        FROM (SELECT *, key IS NOT NULL AND row_number() OVER (PARTITION BY worker_id ORDER BY holds DESC, rank, id) > 1 AS behind
              FROM holding) AS h
        LEFT JOIN pgqueue.worker w ON w.id = h.worker_id
        WHERE NOT h.behind AND h.id <> why_key.id
        ORDER BY h.started_at, h.id LIMIT 1000
    ), line AS MATERIALIZED (
        SELECT waiting.* FROM asked CROSS JOIN generate_series(-2, why_key.rank) AS lane (rank) CROSS JOIN LATERAL (
            SELECT b.queue, b.task FROM pgqueue.job_blocked b
            WHERE b.key = asked.whole
              AND (b.rank, b.id) > (lane.rank::smallint, CASE WHEN asked.few_wait THEN 0 ELSE why_key.id - 10000 END)
              AND (b.rank, b.id) < (lane.rank::smallint, CASE WHEN lane.rank = why_key.rank THEN why_key.id
                                                              ELSE 9223372036854775807 END)
            ORDER BY b.rank DESC, b.id DESC LIMIT 2000
        ) AS waiting LIMIT 2000
    ), before AS MATERIALIZED (
        SELECT line.n FROM (SELECT l.queue, l.task, count(*) AS n FROM line l GROUP BY l.queue, l.task) AS line CROSS JOIN me
        WHERE (line.queue = me.queue OR line.queue <> ALL (ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL)))
          AND (line.task = me.task OR line.task <> ALL (ARRAY(SELECT p.name FROM pgqueue.paused_task p)))
          AND (line.queue = me.queue AND (line.task = me.task OR NOT me.served)
               OR EXISTS (SELECT FROM alike WHERE line.queue = ANY (alike.queues) AND coalesce(line.task = ANY (alike.tasks), true)))
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'most', (SELECT n FROM most),
        'holders', (SELECT coalesce(json_agg(to_json(holder) ORDER BY holder.since, holder.id), '[]') FROM holder),
        'before', (SELECT least(coalesce(sum(n), 0), 1001) FROM before),
        'whole', (SELECT few_wait FROM asked) AND (SELECT count(*) < 2000 FROM line),
        'rate', (SELECT to_json(rate) FROM (
            SELECT k.count, k.period, k.burst, r.gap, l.next_at,
                   least(greatest(coalesce(extract(epoch FROM l.next_at - pgqueue.now())::float8, 0) - r.depth, 0), r.gap) AS pause
            FROM asked
            CROSS JOIN LATERAL (SELECT t.late, t.gap, least((p.burst - 1) * t.gap + t.early, 1e11) AS depth
            FROM pgqueue.key_rate p
            CROSS JOIN LATERAL (SELECT least(greatest(0.2::float8, least(5, p.period / p.count / 100)), p.period / 20) AS late,
                                       least(0.05::float8, p.period / 40) AS early) AS e
            CROSS JOIN LATERAL (SELECT e.late, e.early, (p.period + e.late + e.early) / p.count AS gap) AS t
            WHERE p.name = split_part(asked.key, ':', 1)) AS r
            CROSS JOIN LATERAL (SELECT k.* FROM pgqueue.key_rate k WHERE k.name = split_part(asked.key, ':', 1)) AS k
            LEFT JOIN LATERAL (SELECT l.next_at FROM pgqueue.limiter l WHERE l.key = asked.key LIMIT 1) AS l ON true
            WHERE asked.kind = 'rate') AS rate)
    )::text;
END $$;

-- What a job waits for before its release, as one JSON object; no row: it does not wait for that.
-- * `node`: its own. `nodes`: how many nodes it waits for, `living`: how many of them have a job that lives.
-- * `first`: the oldest of those, with the number of its jobs that live (`living`, counted to `most`; `more`: there are
--   more), and the oldest of these jobs.
-- * `ended_at`: when the last job of the node ended that it has waited for. NULL: history does not know.
CREATE FUNCTION pgqueue.why_node(id bigint) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH mine AS MATERIALIZED (
        SELECT -b.node AS node, CASE WHEN b.key ~ '^node:[1-9][0-9]{0,17}$' THEN substr(b.key, 6)::bigint END AS watched
        FROM pgqueue.job_blocked b WHERE b.id = why_node.id AND b.node < 0
    ), named AS MATERIALIZED (
        SELECT u.node FROM mine JOIN pgqueue.node n ON n.id = mine.node
        CROSS JOIN LATERAL unnest(n.after || n.after_end || n.after_failure) AS u (node)
        UNION SELECT mine.watched FROM mine WHERE mine.watched IS NOT NULL
    ), living AS MATERIALIZED (
        SELECT named.node FROM named WHERE EXISTS (
            SELECT FROM pgqueue.job j WHERE j.node IN (named.node, -named.node) AND j.state IN ('available', 'scheduled', 'blocked', 'running'))
    ), first AS MATERIALIZED (
        SELECT f.node, n.name FROM (SELECT living.node FROM living ORDER BY living.node LIMIT 1) AS f LEFT JOIN pgqueue.node n ON n.id = f.node
    ), alive AS MATERIALIZED (
        SELECT j.id, j.task, j.queue, j.state, j.worker_id AS worker, j.started_at AS since FROM first CROSS JOIN LATERAL (
            SELECT j.id, j.task, j.queue, j.state, j.worker_id, j.started_at FROM pgqueue.job j
            WHERE j.node IN (first.node, -first.node) AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1001) AS j
    )
    SELECT json_build_object(
        'now', pgqueue.now(), 'node', mine.node, 'nodes', (SELECT count(*) FROM named), 'living', (SELECT count(*) FROM living),
        'first', (SELECT json_build_object(
            'node', first.node, 'number', first.node & 1048575, 'name', first.name, 'most', 1000,
            'living', (SELECT least(count(*), 1000) FROM alive), 'more', (SELECT count(*) > 1000 FROM alive),
            'job', (SELECT json_build_object('id', a.id, 'task', a.task, 'queue', a.queue, 'state', a.state, 'worker', a.worker,
                                             'host', w.host, 'pid', w.pid, 'since', a.since)
                    FROM alive a LEFT JOIN pgqueue.worker w ON w.id = a.worker ORDER BY a.id LIMIT 1)) FROM first),
        'ended_at', (SELECT max(j.finished_at) FROM pgqueue.job j
                     WHERE j.node IN (mine.watched, -mine.watched) AND j.state IN ('completed', 'skipped', 'failed', 'cancelled'))
    )::text FROM mine;
END $$;

-- How many available jobs a claim of this queue takes before this job, counted to 1,001: those of more urgent lanes,
-- and those before it in its own (`jobs`); and more urgent ones of other queues that share the slots (`urgent`). And
-- how many jobs of the queue have started in a second, in those of the last five minutes in which any did (NULL: none
-- did, or the history does not know them yet). Where there are many dead rows, only the last 10,000 positions before
-- it, and before the head, are looked at: then not `whole`.
CREATE FUNCTION pgqueue.why_lane(id bigint) RETURNS TABLE (jobs bigint, whole boolean, pace float8, urgent bigint) LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH me AS MATERIALIZED (
        SELECT a.queue, a.rank, a.pos, a.task, few.yes AS whole,
               CASE WHEN few.yes THEN 0 ELSE a.pos - 10000 END AS low,
               CASE WHEN few.yes THEN 0 ELSE coalesce(head.pos, a.pos) - 10000 END AS higher_low,
               ARRAY(SELECT q.name FROM pgqueue.queue q WHERE q.paused_at IS NOT NULL) AS paused
        FROM pgqueue.job_available a
        CROSS JOIN (SELECT pg_stat_get_dead_tuples('pgqueue.job_available'::regclass) < 50000 AS yes) AS few
        CROSS JOIN (SELECT CASE WHEN has_sequence_privilege('pgqueue.job_pos_seq', 'USAGE, SELECT')
                                THEN pg_sequence_last_value('pgqueue.job_pos_seq') END AS pos) AS head
        WHERE a.id = why_lane.id
    ), able AS MATERIALIZED (
        -- Workers that may take the job, those that are alike once: their tasks, and the other open queues that share the slots.
        SELECT alike.tasks, alike.beside, row_number() OVER () AS place FROM (
            SELECT w.tasks, ARRAY(
                SELECT own.queue FROM unnest(w.queues, w.slots) AS own (queue, slots)
                WHERE own.queue <> me.queue AND own.slots IS NULL AND w.slots[array_position(w.queues, me.queue)] IS NULL
                  AND own.queue <> ALL (me.paused) ORDER BY own.queue LIMIT 20) AS beside
            FROM me CROSS JOIN LATERAL (
                SELECT DISTINCT w.queues, w.slots, w.tasks FROM pgqueue.worker w
                WHERE w.dead_at IS NULL AND w.state IN ('starting', 'running') AND me.queue = ANY (w.queues)
                  AND w.beat_at > (SELECT pgqueue.now()) - w.lease AND me.task = ANY (w.tasks) LIMIT 50
            ) AS w
        ) AS alike
    ), lane AS MATERIALIZED (
        SELECT true AS own, me.queue, r.rank::smallint AS rank, CASE WHEN r.rank = me.rank THEN me.low ELSE me.higher_low END AS low,
               CASE WHEN r.rank = me.rank THEN me.pos ELSE 9223372036854775807 END AS upto
        FROM me CROSS JOIN generate_series(-2, me.rank) AS r (rank)
        UNION ALL
        SELECT false, other.queue, r.rank::smallint, me.higher_low, 9223372036854775807
        FROM me CROSS JOIN (SELECT DISTINCT unnest(able.beside) AS queue FROM able LIMIT 20) AS other
        CROSS JOIN generate_series(-2, me.rank - 1) AS r (rank)
    ), walked AS MATERIALIZED (
        SELECT found.* FROM (VALUES (true), (false)) AS kind (own) CROSS JOIN LATERAL (
            SELECT lane.own, lane.queue, j.task FROM lane CROSS JOIN LATERAL (
                (SELECT j.task FROM pgqueue.job_available j
                 WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos < lane.upto AND j.pos > lane.low
                   AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
                 ORDER BY j.pos DESC NULLS LAST LIMIT 2000)
                UNION ALL
                (SELECT j.task FROM pgqueue.job_available j
                 WHERE j.queue = lane.queue AND j.rank = lane.rank AND j.pos < lane.upto AND j.pos > lane.low
                   AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
                 ORDER BY j.pos DESC NULLS LAST LIMIT 2000)
            ) AS j WHERE lane.own = kind.own LIMIT 2000
        ) AS found
    ), by_task AS MATERIALIZED (
        SELECT walked.own, walked.queue, walked.task, count(*) AS n FROM walked CROSS JOIN me
        WHERE walked.task = me.task OR walked.task <> ALL (ARRAY(SELECT p.name FROM pgqueue.paused_task p))
        GROUP BY 1, 2, 3
    ), ahead AS MATERIALIZED (
        -- Before the job are those that come before it wherever it comes first.
        SELECT coalesce(sum(t.n) FILTER (WHERE t.own), 0)::bigint AS jobs, coalesce(sum(t.n) FILTER (WHERE NOT t.own), 0)::bigint AS urgent
        FROM (SELECT able.place, able.tasks, able.beside FROM able
              UNION ALL SELECT 0, NULL, '{}' WHERE NOT EXISTS (SELECT FROM able)) AS worker
        LEFT JOIN by_task t ON (worker.tasks IS NULL OR t.task = ANY (worker.tasks)) AND (t.own OR t.queue = ANY (worker.beside))
        GROUP BY worker.place ORDER BY coalesce(sum(t.n), 0) LIMIT 1
    )
    SELECT least(ahead.jobs, 1001), me.whole AND NOT EXISTS (SELECT FROM walked GROUP BY walked.own HAVING count(*) >= 2000), (
        SELECT (sum(m.started) / (60.0 * count(DISTINCT m.at)))::float8
        FROM pgqueue.history_minute m
        WHERE m.queue = me.queue AND m.at >= pgqueue.now() - interval '6 minutes' AND m.started > 0), least(ahead.urgent, 1001)
    FROM ahead LEFT JOIN me ON true;
END $$;

-- What can be said of a running job, as one JSON object; NULL: it does not run.
-- * `worker`: the worker that has it; `begun`: whether its handler had started at that worker's last heartbeat, NULL:
--   too young to tell.
-- * `behind`: the job of the same chain that runs before it (see chains.py).
-- * `p95`: the seconds that 95 of 100 runs of its task have not exceeded in the last 24 hours. NULL: none has ended.
-- * `requests`: what was asked of it.
-- * `sessions`: its own sessions, with what each waits for, and the sessions that keep it waiting. Which session keeps
--   another one waiting may be seen of any session, what it waits for may not.
CREATE FUNCTION pgqueue.why_running(id bigint) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH run AS MATERIALIZED (
        SELECT r.id, r.claim, r.task, r.started_at, r.worker_id, r.rank, r.holds, r.key, r.lock_key, r.enqueued_at
        FROM pgqueue.job_running r WHERE r.id = why_running.id LIMIT 1
    ), worker AS MATERIALIZED (
        SELECT w.id, w.host, w.pid, w.state, w.dead_at, w.version_tag, w.beat_at, extract(epoch FROM pgqueue.now() - w.beat_at)::float8 AS beat_age,
               extract(epoch FROM w.lease)::float8 AS lease, w.sessions,
               CASE WHEN run.id = ANY (w.running) THEN true WHEN run.started_at < w.beat_at THEN false END AS begun,
               run.id = ANY (w.gathering) AS gathers
        FROM run JOIN pgqueue.worker w ON w.id = run.worker_id
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'started_at', run.started_at,
        'p95', pgqueue.run_quantile(run.task, 0.95),
        'worker', (SELECT to_json(shown) FROM (
            SELECT id, host, pid, state, dead_at, version_tag, beat_at, beat_age, lease, begun, gathers FROM worker) AS shown),
        'behind', CASE WHEN run.key IS NOT NULL AND NOT run.holds THEN (
            SELECT json_build_object('id', first.id, 'task', first.task, 'queue', first.queue, 'state', 'running', 'worker', first.worker_id,
                                     'host', w.host, 'pid', w.pid, 'since', first.started_at)
            FROM (
                SELECT c.id, c.task, c.queue, c.worker_id, c.started_at, c.holds, c.rank FROM pgqueue.job_running c
                WHERE c.lock_key = run.lock_key AND c.worker_id + 0 = run.worker_id
                ORDER BY coalesce(c.hold_pos, 9223372036854775807) DESC LIMIT 200
            ) AS first LEFT JOIN worker w ON w.id = first.worker_id
            WHERE first.holds OR (first.rank, first.id) < (run.rank, run.id)
            ORDER BY first.holds DESC, first.rank, first.id LIMIT 1) END,
        'requests', (SELECT coalesce(json_agg(json_build_object('reason', left(s.reason, 10000), 'at', s.created_at) ORDER BY s.created_at), '[]')
                     FROM pgqueue.job_signal s
                     WHERE s.job_id = run.id AND s.kind = 'cancel' AND s.enqueued_at = run.enqueued_at),
        'sessions', (
            SELECT coalesce(json_agg(json_build_object(
                'pid', a.pid, 'application', a.application_name, 'state', a.state, 'since', a.xact_start, 'wait_type', a.wait_event_type,
                'wait', a.wait_event,
                'blocked_by', (
                    SELECT coalesce(json_agg(json_build_object(
                        'pid', blocking.pid, 'application', b.application_name, 'state', b.state, 'since', b.xact_start)
                        ORDER BY blocking.pid), '[]')
                    FROM (SELECT DISTINCT each.pid FROM unnest(
                              CASE WHEN a.wait_event_type = 'Lock' OR a.state IS NULL THEN pg_blocking_pids(a.pid) ELSE '{}' END) AS each (pid)) AS blocking
                    LEFT JOIN pg_stat_activity b ON b.pid = blocking.pid)
                ) ORDER BY a.pid), '[]')
            FROM worker
            CROSS JOIN LATERAL jsonb_to_recordset(worker.sessions) AS s (pid integer, backend_start timestamptz, job bigint)
            JOIN pg_stat_activity a ON a.pid = s.pid AND coalesce(a.backend_start = s.backend_start, true)
            WHERE s.job = run.id)
    )::text
    FROM run;
END $$;

-- What can be told of an id without a job, as one JSON object:
-- * `last`: the last id that was given. NULL: this role may not see it.
-- * `after`: when the next job with a higher id was enqueued, as far as it is near; NULL: none is known.
-- * `older`: whether a job with a lower id is still there.
-- * `done_kept`, `dead_kept`: for how many seconds ended jobs are kept at least.
-- * `open`: transactions of other sessions that have written something, prepared ones among them.
CREATE FUNCTION pgqueue.why_missing(id bigint) RETURNS SETOF text LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET enable_indexonlyscan = on SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH near AS MATERIALIZED (
        (SELECT a.enqueued_at, a.id FROM pgqueue.job_available a
         WHERE a.id > why_missing.id AND a.id < why_missing.id + 3000 ORDER BY a.id LIMIT 1)
        UNION ALL
        (SELECT s.enqueued_at, s.id FROM pgqueue.job_scheduled s
         WHERE s.id > why_missing.id AND s.id < why_missing.id + 3000 ORDER BY s.id LIMIT 1)
        UNION ALL
        (SELECT b.enqueued_at, b.id FROM pgqueue.job_blocked b
         WHERE b.id > why_missing.id AND b.id < why_missing.id + 3000 ORDER BY b.id LIMIT 1)
        UNION ALL
        (SELECT r.enqueued_at, r.id FROM pgqueue.job_running r
         WHERE r.id > why_missing.id AND r.id < why_missing.id + 3000 ORDER BY r.id LIMIT 1)
        UNION ALL
        (SELECT d.enqueued_at, d.id FROM pgqueue.job_done d WHERE d.id > why_missing.id ORDER BY d.id LIMIT 1)
        UNION ALL
        (SELECT d.enqueued_at, d.id FROM pgqueue.job_dead d WHERE d.id > why_missing.id ORDER BY d.id LIMIT 1)
    )
    SELECT json_build_object(
        'now', pgqueue.now(),
        'last', CASE WHEN has_sequence_privilege('pgqueue.job_id_seq', 'USAGE, SELECT')
                     THEN coalesce(pg_sequence_last_value('pgqueue.job_id_seq'), 0) END,
        'after', (SELECT n.enqueued_at FROM near n ORDER BY n.id LIMIT 1),
        'older', EXISTS (SELECT FROM pgqueue.job_done d WHERE d.id < why_missing.id)
              OR EXISTS (SELECT FROM pgqueue.job_dead d WHERE d.id < why_missing.id),
        'done_kept', (SELECT extract(epoch FROM r.retention)::float8 FROM pgqueue.ring r WHERE r.kind = 'done'),
        'dead_kept', (SELECT extract(epoch FROM r.retention)::float8 FROM pgqueue.ring r WHERE r.kind = 'dead'),
        'open', (SELECT coalesce(json_agg(to_json(one) ORDER BY one.since), '[]') FROM (
            (SELECT a.pid, a.application_name AS application, a.state, a.xact_start AS since FROM pg_stat_activity a
             WHERE a.datname = current_database() AND a.backend_xid IS NOT NULL AND a.pid <> pg_backend_pid()
             ORDER BY a.xact_start LIMIT 100)
            UNION ALL
            (SELECT NULL, p.gid, 'prepared', p.prepared FROM pg_prepared_xacts p WHERE p.database = current_database()
             ORDER BY p.prepared LIMIT 100)
        ) AS one)
    )::text;
END $$;


-- Sequences and settings ----------------------------------------------------------------------------------------------

-- The highest id of a job below `below` in any table; unique keys are read only if `whole`.
CREATE FUNCTION pgqueue.highest_job_id(below bigint, whole boolean) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    keyed bigint;
BEGIN
    IF whole THEN
        -- No index of unique keys has the ids; reading along the one on keys would visit the table at random.
        PERFORM set_config('enable_seqscan', 'on', true);
        keyed := (SELECT max(k.job_id) FROM pgqueue.unique_key k WHERE k.job_id < below);
        PERFORM set_config('enable_seqscan', 'off', true);
    END IF;
    RETURN greatest(
        (SELECT max(j.id) FROM pgqueue.job_available j WHERE j.id < below),
        (SELECT max(j.id) FROM pgqueue.job_scheduled j WHERE j.id < below),
        (SELECT max(j.id) FROM pgqueue.job_blocked j WHERE j.id < below),
        (SELECT max(j.id) FROM pgqueue.job_running j WHERE j.id < below),
        (SELECT max(j.id) FROM pgqueue.job_done j WHERE j.id < below), (SELECT max(j.id) FROM pgqueue.job_dead j WHERE j.id < below),
        (SELECT max(c.job_id) FROM pgqueue.job_cursor c WHERE c.job_id < below),
        (SELECT max(s.job_id) FROM pgqueue.job_signal s WHERE s.job_id < below),
        (SELECT max(p.job_id) FROM pgqueue.job_progress p WHERE p.job_id < below),
        (SELECT max(t.job_id) FROM pgqueue.job_step t WHERE t.job_id < below),
        (SELECT max(w.job_id) FROM pgqueue.job_waiter w WHERE w.job_id < below),
        (SELECT max(a.job_id) FROM pgqueue.attempt a WHERE a.job_id < below), keyed);
END $$;
COMMENT ON FUNCTION pgqueue.highest_job_id IS
    'The highest id of a job below another one, in any table.';

-- How high the numbers are that the tables have, beside what each sequence has given. Every maximum is a few steps into
-- an index, but for the holders of keys, of which there are few, and for unique keys: these are read, if `whole`.
--
-- - Ids of jobs begin where this database's own ids do (`set_number`). Those of other databases, whose rows may have been
--   copied here, count for nothing, if they are higher.
-- - What a sequence has given is read from it. After a RESTART pg_sequence_last_value() is NULL, wherever it goes on.
-- - Positions: two indexes have them by queue and rank, so each of these is asked for its last.
-- - A number of 2^62 or more was never given: a row that was made by hand counts for nothing here. Else no sequence
--   could be advanced beyond a row with 2^63 - 1, and no worker would start.
-- - The sequence of `audit` is left out: no uniqueness hangs on its numbers. So is that of `stack_request`, whose rows
--   live for seconds.
CREATE FUNCTION pgqueue.lagging_sequences(whole boolean) RETURNS TABLE (sequence regclass, given bigint, highest bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_indexscan = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    most constant bigint := 4611686018427387904;
    first bigint := (SELECT q.seqstart FROM pg_sequence q WHERE q.seqrelid = 'pgqueue.job_id_seq'::regclass);
BEGIN
    RETURN QUERY
    WITH RECURSIVE plain (queue) AS (
        (SELECT j.queue FROM pgqueue.job_available j
         WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL ORDER BY j.queue LIMIT 1)
        UNION ALL
        SELECT (SELECT j.queue FROM pgqueue.job_available j
                WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL AND j.queue > plain.queue ORDER BY j.queue LIMIT 1)
        FROM plain WHERE plain.queue IS NOT NULL
    ), with_keys (queue) AS (
        (SELECT j.queue FROM pgqueue.job_available j
         WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL ORDER BY j.queue LIMIT 1)
        UNION ALL
        SELECT (SELECT j.queue FROM pgqueue.job_available j
                WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL AND j.queue > with_keys.queue ORDER BY j.queue LIMIT 1)
        FROM with_keys WHERE with_keys.queue IS NOT NULL
    ), mark (sequence, highest) AS (
        VALUES ('pgqueue.job_id_seq', greatest(pgqueue.highest_job_id(first + (1::bigint << 43), whole), nullif(first - 1, 0))),
        ('pgqueue.job_pos_seq', (
            SELECT max(last.pos) FROM generate_series(-2, 19) AS r (rank) CROSS JOIN LATERAL (
                (SELECT j.pos FROM plain CROSS JOIN LATERAL (
                    SELECT j.pos FROM pgqueue.job_available j
                    WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
                      AND j.queue = plain.queue AND j.rank = r.rank::smallint AND j.pos < most
                    ORDER BY j.queue DESC, j.rank DESC, j.pos DESC NULLS LAST LIMIT 1) AS j)
                UNION ALL
                (SELECT j.pos FROM with_keys CROSS JOIN LATERAL (
                    SELECT j.pos FROM pgqueue.job_available j
                    WHERE coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
                      AND j.queue = with_keys.queue AND j.rank = r.rank::smallint AND j.pos < most
                    ORDER BY j.queue DESC, j.rank DESC, j.pos DESC NULLS LAST LIMIT 1) AS j)
            ) AS last)),
        ('pgqueue.job_hold_seq', greatest(
            (SELECT max(j.hold_pos) FROM pgqueue.job_running j WHERE j.hold_pos < most AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_running j WHERE j.hold_pos < most AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_available j WHERE j.hold_pos < most AND j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_available j WHERE j.hold_pos < most AND j.holds AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_scheduled j WHERE j.hold_pos < most AND j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_scheduled j WHERE j.hold_pos < most AND j.holds AND j.limit_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_blocked j WHERE j.hold_pos < most AND j.holds AND j.lock_key IS NOT NULL),
            (SELECT max(j.hold_pos) FROM pgqueue.job_blocked j
             WHERE j.hold_pos < most AND j.holds AND j.limit_key IS NOT NULL AND (substr(j.key, 1, 5) = 'rate:') IS TRUE))),
        ('pgqueue.worker_id_seq', greatest(
            (SELECT max(w.id) FROM pgqueue.worker w WHERE w.id < most),
            (SELECT max(j.worker_id) FROM pgqueue.job_running j WHERE j.worker_id < most),
            (SELECT max(d.worker_id) FROM pgqueue.declaration d WHERE d.worker_id < most))),
        ('pgqueue.supervisor_id_seq', greatest(
            (SELECT max(s.id) FROM pgqueue.supervisor s WHERE s.id < most),
            (SELECT max(w.supervisor_id) FROM pgqueue.worker w WHERE w.supervisor_id < most),
            (SELECT max(o.supervisor_id) FROM pgqueue.supervisor_order o WHERE o.supervisor_id < most))),
        ('pgqueue.supervisor_order_id_seq', (SELECT max(o.id) FROM pgqueue.supervisor_order o WHERE o.id < most)),
        ('pgqueue.job_waiter_waiter_seq', (SELECT max(w.waiter) FROM pgqueue.job_waiter w WHERE w.waiter < most)),
        ('pgqueue.bulk_id_seq', (SELECT max(b.id) FROM pgqueue.bulk b WHERE b.id < most)),
        ('pgqueue.flow_id_seq', greatest(
            (SELECT max(f.id) FROM pgqueue.flow f WHERE f.id < most >> 20),
            (SELECT max(n.id) >> 20 FROM pgqueue.node n WHERE n.id < most)))
    ), given (sequence, given) AS (
        SELECT 'pgqueue.job_id_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.job_id_seq s UNION ALL
        SELECT 'pgqueue.job_pos_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.job_pos_seq s UNION ALL
        SELECT 'pgqueue.job_hold_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.job_hold_seq s UNION ALL
        SELECT 'pgqueue.worker_id_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.worker_id_seq s UNION ALL
        SELECT 'pgqueue.supervisor_id_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.supervisor_id_seq s UNION ALL
        SELECT 'pgqueue.supervisor_order_id_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.supervisor_order_id_seq s UNION ALL
        SELECT 'pgqueue.job_waiter_waiter_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.job_waiter_waiter_seq s UNION ALL
        SELECT 'pgqueue.bulk_id_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.bulk_id_seq s UNION ALL
        SELECT 'pgqueue.flow_id_seq', s.last_value - (NOT s.is_called)::integer FROM pgqueue.flow_id_seq s
    )
    SELECT each.sequence, each.given, each.highest FROM (
        SELECT m.sequence::regclass AS sequence, g.given, m.highest FROM mark m JOIN given g ON g.sequence = m.sequence
    ) AS each
    WHERE each.given < each.highest;
END $$;
COMMENT ON FUNCTION pgqueue.lagging_sequences IS
    'Which sequences have given less than the tables have: after a restore, or a switchover.';

-- Advance the sequences that lag, well beyond the highest number, so that what is being enqueued meanwhile stays below.
-- Answers which these were. Any number of callers may do so at once: under one lock each looks again. A caller that set
-- what it had read before would set back what another one had advanced, and numbers would be given twice.
CREATE FUNCTION pgqueue.advance_sequences(whole boolean) RETURNS TABLE (sequence text, given bigint, highest bigint, advanced_to bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one record;
BEGIN
    IF NOT EXISTS (SELECT FROM pgqueue.lagging_sequences(whole)) THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('pgqueue.sequences', 7));
    FOR one IN SELECT * FROM pgqueue.lagging_sequences(whole) LOOP
        sequence := one.sequence;
        given := one.given;
        highest := one.highest;
        advanced_to := setval(one.sequence, one.highest + 1048576);
        RETURN NEXT;
    END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.advance_sequences IS
    'Advance the sequences that lag behind the tables. Called by `pgqueue migrate` and by each worker.';

-- Give this database a number: its jobs' ids begin at number << 43 plus one from now on. NULL if that is so now, else the
-- highest id that there is already, above all ids of this number, and nothing is changed: below it ids would be given twice.
-- If there are ids of this number, in rows that were copied from the database that had it, the next id is above these.
--
-- 1. The first statement takes the lock that each nextval() waits for, until the end of its transaction. What others were
--    given before is read after it, also if it is not committed yet.
-- 2. START is kept by a dump, and by a TRUNCATE with RESTART IDENTITY. A number below it counts as a lag.
CREATE FUNCTION pgqueue.set_number(number integer) RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    first constant bigint := (number::bigint << 43) + 1;
    given bigint;
BEGIN
    ALTER SEQUENCE pgqueue.job_id_seq NO CYCLE;
    IF first = (SELECT q.seqstart FROM pg_sequence q WHERE q.seqrelid = 'pgqueue.job_id_seq'::regclass) THEN
        RETURN NULL;
    END IF;
    given := greatest(
        (SELECT s.last_value - (NOT s.is_called)::integer FROM pgqueue.job_id_seq s),
        pgqueue.highest_job_id(4611686018427387904, true));
    IF given >= first + (1::bigint << 43) - 1 THEN
        RETURN given;
    END IF;
    EXECUTE format('ALTER SEQUENCE pgqueue.job_id_seq START WITH %s', first);
    PERFORM setval('pgqueue.job_id_seq', greatest(given, first - 1));
    RETURN NULL;
END $$;
COMMENT ON FUNCTION pgqueue.set_number IS
    'Have the ids of new jobs begin where no other database''s do.';

-- The same for roles that only look, and may not see what a sequence has given.
CREATE FUNCTION pgqueue.sequences_behind() RETURNS TABLE (sequence text, given bigint, highest bigint) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT l.sequence::text, l.given, l.highest FROM pgqueue.lagging_sequences(false) AS l
$$;
COMMENT ON FUNCTION pgqueue.sequences_behind IS
    'Which sequences would give a number that a row has already. Read by `pgqueue doctor`.';

-- A fixture that truncates all tables takes the rows of `ring` and `duty` along. Then no job can end, and nothing is
-- swept. Each worker puts back what is missing when it starts, as the owner of the tables. The leaf of a history that
-- was written last is written on. The lock keeps two that start at once from inserting the same row.
CREATE FUNCTION pgqueue.restore_settings() RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
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
COMMENT ON FUNCTION pgqueue.restore_settings IS
    'Put back the rows of `ring` and `duty` that are missing. Answers how many.';

-- A restore of the data alone (`pg_dump -a`) meets the rows that this file has made: those of the dump count.
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
CREATE TRIGGER replace_setting BEFORE INSERT ON pgqueue.relay_target FOR EACH ROW EXECUTE FUNCTION pgqueue.replace_setting();


-- Updates, publications and rights ------------------------------------------------------------------------------------

DO $$
DECLARE
    part regclass;
BEGIN
    FOR part IN SELECT relid FROM pg_partition_tree('pgqueue.job') LOOP
        EXECUTE format('CREATE TRIGGER refuse_update BEFORE UPDATE ON %s
                        FOR EACH STATEMENT EXECUTE FUNCTION pgqueue.refuse_update()', part);
    END LOOP;
END $$;

-- With a publication of all tables PostgreSQL refuses each DELETE from a table that cannot name its rows: the queue
-- stands still. A row is named by a unique index where there is one, else by all its columns. That costs nothing until
-- `wal_level` is logical.
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

-- What acts as the owner of the tables, or only workers call: `pgqueue grants` says which roles may.
REVOKE ALL ON FUNCTION
    pgqueue.highest_job_id(bigint, boolean),
    pgqueue.lagging_sequences(boolean),
    pgqueue.set_number(integer),
    pgqueue.advance_sequences(boolean),
    pgqueue.restore_settings(),
    pgqueue.put_in_place(),
    pgqueue.put_keyed(pgqueue.keyed_job[]),
    pgqueue.enqueue_keyed(pgqueue.keyed_job[]),
    pgqueue.enqueue_replacing(pgqueue.keyed_job[]),
    pgqueue.enqueue_flow(text, jsonb, integer[], pgqueue.keyed_job[]),
    pgqueue.check_keys(pgqueue.keyed_job[]),
    pgqueue.begin_wait(bigint),
    pgqueue.leave_wait(bigint),
    pgqueue.record_bulk(),
    pgqueue.bulk_take_dead(bigint, bigint[], timestamptz[]),
    pgqueue.bulk_discard(bigint, bigint[]),
    pgqueue.sequences_behind(),
    pgqueue.forget_requests(bigint[], timestamptz[])
FROM PUBLIC;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (1, 'schema', false);

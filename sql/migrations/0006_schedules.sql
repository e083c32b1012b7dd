-- breaking: no
--
-- Schedules: what recurs is a row, whose next time is compared and set by whoever makes its tick.

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
        AND octet_length(queue) BETWEEN 1 AND 40 AND jsonb_typeof(args) = 'object' AND jsonb_typeof(options) = 'object')
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.schedule IS 'What recurs: when, which task, and its next time.';

-- The second belt: a time of a schedule becomes one job, however the row came to that time again (a clock that stepped back,
-- a schedule that was removed and added anew). Kept for a day.
CREATE TABLE pgqueue.tick (
    schedule text        COLLATE "C" NOT NULL,
    at       timestamptz NOT NULL,
    job_id   bigint      NOT NULL,
    PRIMARY KEY (schedule, at)
);
CREATE INDEX tick_at ON pgqueue.tick (at);
COMMENT ON TABLE pgqueue.tick IS 'The ticks of the last day, and the job that each of them has become.';

-- What each worker's code declares, written once when it starts. Equal ones have an equal hash.
CREATE TABLE pgqueue.declaration (
    worker_id bigint PRIMARY KEY,
    hash      text   NOT NULL,
    schedules jsonb  NOT NULL
);
COMMENT ON TABLE pgqueue.declaration IS 'The schedules that each worker''s code declares.';

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (6, 'schedules', false);

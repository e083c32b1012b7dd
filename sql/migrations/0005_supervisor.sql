-- breaking: no
--
-- Supervisors: who keeps how many worker processes on which host, and what they are told to do.

-- How much memory a worker has, as of its last beat.
ALTER TABLE pgqueue.worker ADD COLUMN rss bigint;
-- The supervisor that started it; NULL: nobody, it was started by itself.
ALTER TABLE pgqueue.worker ADD COLUMN supervisor_id bigint;

-- One row per supervisor and boot; ids are never used again. Changed once a beat. Nobody is judged by it: a supervisor
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
    beat_at    timestamptz NOT NULL DEFAULT pgqueue.now()
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
    CHECK ((kind = 'scale') = (size IS NOT NULL))
);
CREATE INDEX supervisor_order_open ON pgqueue.supervisor_order (supervisor_id) WHERE done_at IS NULL;
COMMENT ON TABLE pgqueue.supervisor_order IS 'What supervisors are told to do.';

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (5, 'supervisor', false);

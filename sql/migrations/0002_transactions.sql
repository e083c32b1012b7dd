-- breaking: no
--
-- What handlers do while they run: end their job in their own transaction, go through a long list in batches, say how far
-- they are; and what callers do who wait for a result.

-- For a completion inside a transaction of a handler: raise instead of ending nothing, so that the transaction cannot
-- commit. Its SQLSTATE is one of our own, that no constraint and no trigger of an application uses.
CREATE FUNCTION pgqueue.refuse_lost(job_id bigint) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'job % is not this run''s any more: it was given to another worker, or has ended', job_id
        USING ERRCODE = 'PGQ01', HINT = 'Nothing of this transaction is kept. The other run counts.';
END $$;

-- How far an iteration has come: appended in the transaction of each batch, the highest n counts. Deleted when its job
-- has completed; kept for a dead job, so that a retry by hand goes on where it stopped.
CREATE TABLE pgqueue.job_cursor (
    job_id     bigint      NOT NULL,
    n          integer     NOT NULL,
    cursor     jsonb       NOT NULL,
    created_at timestamptz NOT NULL DEFAULT pgqueue.now(),
    PRIMARY KEY (job_id, n)
);
COMMENT ON TABLE pgqueue.job_cursor IS 'Where a job that iterates goes on: one row per batch, the highest n counts.';

-- How far running jobs say they are. Written at most once a second per job.
CREATE TABLE pgqueue.job_progress (
    job_id     bigint           PRIMARY KEY,
    done       double precision NOT NULL,
    total      double precision,
    updated_at timestamptz      NOT NULL DEFAULT pgqueue.now()
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.job_progress IS 'What running jobs say of how far they are.';

-- Who waits for the end of which job: for them, and only then, completions notify.
CREATE TABLE pgqueue.job_waiter (
    job_id     bigint      NOT NULL,
    waiter     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT pgqueue.now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_waiter_job ON pgqueue.job_waiter (job_id);
COMMENT ON TABLE pgqueue.job_waiter IS 'Who waits for the result of which job.';

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (2, 'transactions', false);

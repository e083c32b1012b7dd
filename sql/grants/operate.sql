-- What a role needs to operate by hand: `pgqueue pause`, `resume`, and the Python functions of these names. It
-- looks at everything, and enqueues nothing.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT SELECT ON pgqueue.job, pgqueue.job_available, pgqueue.job_scheduled, pgqueue.job_blocked, pgqueue.job_running,
    pgqueue.job_done, pgqueue.job_dead, pgqueue.attempt, pgqueue.ring, pgqueue.worker, pgqueue.migration
    TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.queue TO :"role";

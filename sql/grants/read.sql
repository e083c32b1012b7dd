-- What a role needs to look: `pgqueue status`, `pgqueue jobs`, JobHandle, get, find, queues. It changes nothing.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT SELECT ON pgqueue.job, pgqueue.job_available, pgqueue.job_scheduled, pgqueue.job_blocked, pgqueue.job_running,
    pgqueue.job_done, pgqueue.job_dead, pgqueue.attempt, pgqueue.job_signal, pgqueue.ring, pgqueue.worker, pgqueue.queue,
    pgqueue.job_cursor, pgqueue.job_step, pgqueue.job_progress, pgqueue.job_waiter, pgqueue.unique_key, pgqueue.discarded_key, pgqueue.supervisor,
    pgqueue.supervisor_order, pgqueue.schedule, pgqueue.tick, pgqueue.declaration, pgqueue.key_limit, pgqueue.key_rate,
    pgqueue.limiter, pgqueue.migration, pgqueue.relay_fence, pgqueue.paused_task, pgqueue.audit, pgqueue.history_minute,
    pgqueue.history_hour, pgqueue.error_group, pgqueue.duty, pgqueue.depth, pgqueue.version_start, pgqueue.bulk,
    pgqueue.bulk_job, pgqueue.flow, pgqueue.node, pgqueue.flow_kept
    TO :"role";
-- Which ids and positions were given: `pgqueue why`.
GRANT SELECT ON SEQUENCE pgqueue.job_id_seq, pgqueue.job_pos_seq TO :"role";
-- Every function that this takes: a database may have taken EXECUTE from PUBLIC.
GRANT EXECUTE ON FUNCTION pgqueue.now(), pgqueue.key_state(pgqueue.unique_key), pgqueue.job_states(bigint[]),
    pgqueue.job_rows(bigint[]), pgqueue.flow_rows(bigint, bigint, bigint, integer), pgqueue.flow_states(bigint, integer), pgqueue.flow_counts(bigint, text[], integer), pgqueue.attempt_rows(bigint),
    pgqueue.progress_row(bigint), pgqueue.step_rows(bigint, timestamptz), pgqueue.served(), pgqueue.text_of(jsonb), pgqueue.history_bounds(),
    pgqueue.run_quantile(text, double precision), pgqueue.fits(text, boolean, text, text, timestamptz, text[], text, text, timestamptz),
    pgqueue.jobs_after(text[], bigint[], bigint, bigint, integer), pgqueue.bulk_last(text[], bigint),
    pgqueue.sequences_behind(), pgqueue.why_waiting(bigint, text, text), pgqueue.why_lane(bigint),
    pgqueue.why_key(bigint, integer, text, integer), pgqueue.why_node(bigint), pgqueue.why_running(bigint), pgqueue.why_missing(bigint), pgqueue.desired_workers(text, integer),
    pgqueue.successors(bigint, timestamptz), pgqueue.attempted(bigint[], timestamptz[], bigint, text, text)
    TO :"role";

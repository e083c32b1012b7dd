-- What a role needs to operate by hand: `pgqueue pause`, `resume`, `cancel`, `retry`, `discard`, `locks release`, and the Python
-- functions of these names. It looks at everything, and enqueues nothing new. UPDATE (id) is the least that lets it lock rows; the tables
-- refuse the UPDATE itself.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT SELECT ON pgqueue.job, pgqueue.job_available, pgqueue.job_scheduled, pgqueue.job_blocked, pgqueue.job_running,
    pgqueue.job_done, pgqueue.job_dead, pgqueue.attempt, pgqueue.job_progress, pgqueue.ring, pgqueue.worker, pgqueue.supervisor, pgqueue.migration,
    pgqueue.depth, pgqueue.flow, pgqueue.node, pgqueue.flow_kept
    TO :"role";
GRANT USAGE ON SEQUENCE pgqueue.job_id_seq, pgqueue.job_pos_seq TO :"role";
GRANT DELETE, UPDATE (id) ON pgqueue.job_available, pgqueue.job_scheduled, pgqueue.job_blocked, pgqueue.job_dead TO :"role";
GRANT INSERT ON pgqueue.job_available, pgqueue.job_scheduled, pgqueue.job_blocked, pgqueue.job_dead TO :"role";
-- What it cancels is counted in the history.
GRANT INSERT ON pgqueue.history_part TO :"role";
GRANT SELECT ON pgqueue.history_minute, pgqueue.history_hour, pgqueue.error_group, pgqueue.duty TO :"role";
GRANT UPDATE (id) ON pgqueue.job TO :"role";
-- `pgqueue discard`.
GRANT DELETE ON pgqueue.job_done, pgqueue.attempt, pgqueue.job_progress TO :"role";
GRANT SELECT, DELETE ON pgqueue.job_cursor, pgqueue.job_step TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (expires_at) ON pgqueue.unique_key TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.discarded_key TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.job_signal TO :"role";
GRANT SELECT ON pgqueue.job_waiter TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.queue TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.paused_task TO :"role";
-- The record of what is done by hand. The time and the role of a row are not the writer's to say, and no row is changed or taken away.
GRANT SELECT, INSERT (actor, action, target, jobs, count, details) ON pgqueue.audit TO :"role";
GRANT SELECT, INSERT ON pgqueue.supervisor_order TO :"role";
-- `pgqueue bulk`: begin operations, take part in them, stop them. What names the row of the record is written by a trigger only.
GRANT SELECT, INSERT (actor, action, target, states, queue, task, ended_before, ids, error_type, options, up_to, pace, note),
    UPDATE (fence, round, after, counts, changed, holder, leased_until, next_at, ended_at, stopped_by) ON pgqueue.bulk TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.bulk_job TO :"role";
-- `pgqueue stack`.
GRANT SELECT, INSERT (job_id), DELETE ON pgqueue.stack_request TO :"role";
-- `pgqueue schedules`, and what an application needs that adds schedules.
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.schedule TO :"role";
GRANT SELECT ON pgqueue.declaration, pgqueue.tick TO :"role";
-- `pgqueue limits set`.
GRANT SELECT, INSERT, UPDATE ON pgqueue.key_limit TO :"role";
GRANT SELECT, UPDATE ON pgqueue.key_rate TO :"role";
-- With the rights to enqueue: `on_duplicate="replace"`.
GRANT USAGE ON TYPE pgqueue.keyed_job TO :"role";
-- Every function that this takes: a database may have taken EXECUTE from PUBLIC.
GRANT EXECUTE ON FUNCTION pgqueue.now(), pgqueue.keys_can_be(text, integer, text, text, text),
    pgqueue.is_out_of_place(smallint, smallint, timestamptz, smallint, smallint, smallint, boolean),
    pgqueue.refuse_lane(smallint, smallint),
    pgqueue.enqueue_replacing(pgqueue.keyed_job[]), pgqueue.begin_wait(bigint), pgqueue.leave_wait(bigint),
    pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, boolean, bigint[]),
    pgqueue.take_many_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[]),
    pgqueue.take_all_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[]),
    pgqueue.lock_keys(text[]), pgqueue.key_states(text[]), pgqueue.keep_waiting(bigint[], timestamptz[], boolean[], text),
    pgqueue.job_states(bigint[]), pgqueue.job_rows(bigint[]), pgqueue.flow_rows(bigint, bigint, bigint, integer), pgqueue.flow_states(bigint, integer), pgqueue.flow_counts(bigint, text[], integer), pgqueue.needed_by_flows(bigint[]), pgqueue.flow_may_read(bigint),
    pgqueue.attempt_rows(bigint), pgqueue.progress_row(bigint), pgqueue.waiters(bigint[]),
    pgqueue.take_waiting(bigint[], timestamptz[], text, text), pgqueue.lock_ended(bigint[], text[]),
    pgqueue.take_dead(bigint[], timestamptz[]), pgqueue.refuse(text), pgqueue.served(), pgqueue.text_of(jsonb),
    pgqueue.take_back(bigint[], timestamptz[]), pgqueue.forget_requests(bigint[], timestamptz[]), pgqueue.history_bounds(), pgqueue.run_quantile(text, double precision),
    pgqueue.key_hash(text), pgqueue.discarded_holders(text[]), pgqueue.meet_discards(text[]), pgqueue.discard_ended(bigint[]),
    pgqueue.fits(text, boolean, text, text, timestamptz, text[], text, text, timestamptz),
    pgqueue.jobs_after(text[], bigint[], bigint, bigint, integer), pgqueue.bulk_last(text[], bigint), pgqueue.bulk_lock(bigint, bigint[]),
    pgqueue.attempted(bigint[], timestamptz[], bigint, text, text),
    pgqueue.bulk_take_dead(bigint, bigint[], timestamptz[]), pgqueue.bulk_discard(bigint, bigint[]),
    pgqueue.sequences_behind(), pgqueue.why_waiting(bigint, text, text), pgqueue.why_lane(bigint),
    pgqueue.why_key(bigint, integer, text, integer), pgqueue.why_node(bigint), pgqueue.why_running(bigint), pgqueue.why_missing(bigint), pgqueue.desired_workers(text, integer)
    TO :"role";

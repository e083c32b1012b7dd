-- What a role needs to run a worker: move jobs between the states, beat, rescue, advance the rings, and whatever its
-- handlers may do with pgqueue: enqueue, look. Rescue ends the sessions of dead workers, so all workers use one role.
-- UPDATE (id) is the least that lets it lock rows; the tables refuse the UPDATE itself.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT USAGE ON SEQUENCE pgqueue.job_id_seq, pgqueue.job_pos_seq, pgqueue.job_hold_seq TO :"role";
GRANT SELECT ON pgqueue.migration, pgqueue.queue, pgqueue.paused_task TO :"role";
GRANT SELECT, DELETE, UPDATE (id) ON pgqueue.flow, pgqueue.node TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.flow_kept TO :"role";
GRANT UPDATE (id) ON pgqueue.job TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (expires_at) ON pgqueue.unique_key TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (expires_at) ON pgqueue.discarded_key TO :"role";
GRANT SELECT, INSERT ON pgqueue.job, pgqueue.job_done, pgqueue.job_dead, pgqueue.attempt TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (id) ON pgqueue.job_available, pgqueue.job_scheduled, pgqueue.job_blocked,
    pgqueue.job_running TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (job_id) ON pgqueue.job_signal TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.worker, pgqueue.job_progress TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.job_cursor, pgqueue.job_step, pgqueue.version_start TO :"role";
GRANT SELECT, DELETE ON pgqueue.job_waiter TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.supervisor, pgqueue.supervisor_order TO :"role";
GRANT SELECT, UPDATE (answered_at, answer) ON pgqueue.stack_request TO :"role";
GRANT SELECT, UPDATE (bin, since) ON pgqueue.ring TO :"role";
GRANT SELECT, INSERT, UPDATE ON pgqueue.key_limit, pgqueue.key_rate TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.limiter TO :"role";
GRANT SELECT, UPDATE (done_at) ON pgqueue.duty TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.depth TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.unknown_task TO :"role";
-- A handler may cancel jobs, add schedules, set limits: each is a row of the record. The leader deletes old ones.
GRANT SELECT, DELETE, INSERT (actor, action, target, jobs, count, details) ON pgqueue.audit TO :"role";
-- Any worker goes on with an operation by filter, and begins none.
GRANT SELECT, DELETE,
    UPDATE (fence, round, after, counts, changed, holder, leased_until, next_at, ended_at, stopped_by) ON pgqueue.bulk TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.bulk_job TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.history_writer, pgqueue.error_group TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.history_part TO :"role";
GRANT SELECT, INSERT ON pgqueue.history_minute, pgqueue.history_hour TO :"role";
GRANT TRUNCATE ON
    pgqueue.history_minute_0, pgqueue.history_minute_1, pgqueue.history_minute_2, pgqueue.history_minute_3,
    pgqueue.history_minute_4, pgqueue.history_minute_5, pgqueue.history_minute_6, pgqueue.history_minute_7,
    pgqueue.history_hour_0, pgqueue.history_hour_1, pgqueue.history_hour_2, pgqueue.history_hour_3, pgqueue.history_hour_4,
    pgqueue.history_hour_5, pgqueue.history_hour_6, pgqueue.history_hour_7,
    pgqueue.job_done_0, pgqueue.job_done_1, pgqueue.job_done_2, pgqueue.job_done_3, pgqueue.job_done_4,
    pgqueue.job_done_5, pgqueue.job_done_6, pgqueue.job_done_7, pgqueue.job_dead_0, pgqueue.job_dead_1,
    pgqueue.job_dead_2, pgqueue.job_dead_3, pgqueue.job_dead_4, pgqueue.job_dead_5, pgqueue.job_dead_6,
    pgqueue.job_dead_7, pgqueue.job_dead_8, pgqueue.job_dead_9, pgqueue.job_dead_10, pgqueue.job_dead_11,
    pgqueue.job_dead_12, pgqueue.job_dead_13, pgqueue.job_dead_14, pgqueue.job_dead_15, pgqueue.attempt_0,
    pgqueue.attempt_1, pgqueue.attempt_2, pgqueue.attempt_3, pgqueue.attempt_4, pgqueue.attempt_5,
    pgqueue.attempt_6, pgqueue.attempt_7, pgqueue.attempt_8, pgqueue.attempt_9, pgqueue.attempt_10,
    pgqueue.attempt_11, pgqueue.attempt_12, pgqueue.attempt_13, pgqueue.attempt_14, pgqueue.attempt_15
    TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.schedule, pgqueue.tick, pgqueue.declaration TO :"role";
GRANT USAGE ON TYPE pgqueue.keyed_job TO :"role";
-- Every function that this takes: a database may have taken EXECUTE from PUBLIC.
GRANT EXECUTE ON FUNCTION pgqueue.now(), pgqueue.keys_can_be(text, integer, text, text, text),
    pgqueue.is_out_of_place(smallint, smallint, timestamptz, smallint, smallint, smallint, boolean),
    pgqueue.refuse_lane(smallint, smallint),
    pgqueue.enqueue_keyed(pgqueue.keyed_job[]), pgqueue.enqueue_flow(text, jsonb, integer[], pgqueue.keyed_job[]), pgqueue.enqueue_replacing(pgqueue.keyed_job[]),
    pgqueue.begin_wait(bigint), pgqueue.leave_wait(bigint),
    pgqueue.enqueue(text, jsonb, text, integer, timestamptz, jsonb, timestamptz, text, text, text, integer, text, text, text),
    pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, boolean, bigint[]),
    pgqueue.take_many_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[]),
    pgqueue.take_all_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[]),
    pgqueue.key_states(text[]), pgqueue.keep_waiting(bigint[], timestamptz[], boolean[], text),
    pgqueue.key_hash(text), pgqueue.discarded_holders(text[]), pgqueue.meet_discards(text[]),
    pgqueue.key_state(pgqueue.unique_key), pgqueue.take_back(bigint[], timestamptz[]),
    pgqueue.forget_requests(bigint[], timestamptz[]), pgqueue.job_states(bigint[]), pgqueue.job_rows(bigint[]), pgqueue.flow_rows(bigint, bigint, bigint, integer), pgqueue.flow_states(bigint, integer), pgqueue.flow_counts(bigint, text[], integer), pgqueue.needed_by_flows(bigint[]), pgqueue.attempt_rows(bigint), pgqueue.progress_row(bigint), pgqueue.step_rows(bigint, timestamptz),
    pgqueue.step_is_recorded(bigint, timestamptz, text), pgqueue.last_batch(bigint, timestamptz),
    pgqueue.waiters(bigint[]), pgqueue.take_running(bigint, integer, bigint),
    pgqueue.lock_running(bigint, integer, bigint), pgqueue.lock_running_batch(bigint[], integer[], bigint), pgqueue.drop_cursors(bigint, timestamptz, integer), pgqueue.refuse(text),
    pgqueue.refuse_lost(bigint), pgqueue.refuse_ended(bigint), pgqueue.advance_ring(text, boolean), pgqueue.flow_may_release(bigint), pgqueue.flow_may_read(bigint), pgqueue.node_result(bigint, integer), pgqueue.node_results(bigint[], integer), pgqueue.release_results(bigint[], boolean[], integer, bigint), pgqueue.node_page(bigint, bigint, integer, integer), pgqueue.forget_rows(regclass, tid[]), pgqueue.served(), pgqueue.restore_settings(), pgqueue.text_of(jsonb),
    pgqueue.history_bounds(), pgqueue.run_quantile(text, double precision),
    pgqueue.fits(text, boolean, text, text, timestamptz, text[], text, text, timestamptz),
    pgqueue.jobs_after(text[], bigint[], bigint, bigint, integer), pgqueue.bulk_last(text[], bigint), pgqueue.bulk_lock(bigint, bigint[]),
    pgqueue.attempted(bigint[], timestamptz[], bigint, text, text),
    pgqueue.take_waiting(bigint[], timestamptz[], text, text), pgqueue.bulk_take_dead(bigint, bigint[], timestamptz[]),
    pgqueue.bulk_discard(bigint, bigint[]),
    -- Before its first claim a worker advances sequences that lag behind the tables. It may not set them itself.
    pgqueue.advance_sequences(boolean), pgqueue.sequences_behind(), pgqueue.why_waiting(bigint, text, text),
    pgqueue.why_lane(bigint), pgqueue.why_key(bigint, integer, text, integer), pgqueue.why_node(bigint), pgqueue.why_running(bigint), pgqueue.why_missing(bigint),
    pgqueue.desired_workers(text, integer)
    TO :"role";

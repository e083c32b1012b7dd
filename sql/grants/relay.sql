-- What a role needs to run a relay, in the database of the queue: put jobs in, with all that belongs to unique keys, and keep the memory
-- of what it has delivered. It runs no job and ends none.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT USAGE ON SEQUENCE pgqueue.job_id_seq, pgqueue.job_pos_seq TO :"role";
GRANT SELECT, INSERT, UPDATE (id) ON pgqueue.job TO :"role";
-- A unique key may replace a job that waits, and has committed no step and no batch.
GRANT SELECT, INSERT, DELETE, UPDATE (id) ON pgqueue.job_available, pgqueue.job_scheduled, pgqueue.job_blocked TO :"role";
GRANT SELECT (job_id, enqueued_at) ON pgqueue.job_step, pgqueue.job_cursor TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.relay_target TO :"role";
GRANT SELECT, INSERT, UPDATE ON pgqueue.relay_fence TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (relayed_at) ON pgqueue.relayed TO :"role";
GRANT SELECT ON pgqueue.migration TO :"role";
GRANT USAGE ON TYPE pgqueue.keyed_job TO :"role";
-- Every function that this takes: a database may have taken EXECUTE from PUBLIC.
GRANT EXECUTE ON FUNCTION pgqueue.now(), pgqueue.keys_can_be(text, integer, text, text, text),
    pgqueue.is_out_of_place(smallint, smallint, timestamptz, smallint, smallint, smallint, boolean),
    pgqueue.refuse_lane(smallint, smallint),
    pgqueue.enqueue_keyed(pgqueue.keyed_job[]), pgqueue.enqueue_replacing(pgqueue.keyed_job[]),
    pgqueue.take_back(bigint[], timestamptz[]), pgqueue.forget_requests(bigint[], timestamptz[]), pgqueue.job_states(bigint[]), pgqueue.advance_sequences(boolean)
    TO :"role";

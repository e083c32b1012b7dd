-- What a role needs to enqueue, and nothing else: it puts jobs in, and sees ids, queues and states. It can neither read arguments nor
-- change or lock a row, and cannot write a column that only workers may. Unique keys are taken by `enqueue_keyed`, as the owner of the schema.
-- It may say that it waits for a job; to read the result it needs the rights of read.sql, too.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT USAGE ON SEQUENCE pgqueue.job_id_seq, pgqueue.job_pos_seq TO :"role";
GRANT INSERT (state, queue, priority, rank, task, args, headers, run_at, deadline, max_attempts, lock_key, lock_limit,
    on_locked, limit_key, rate_key)
    ON pgqueue.job, pgqueue.job_available TO :"role";
GRANT SELECT (id, queue, state) ON pgqueue.job, pgqueue.job_available TO :"role";
GRANT USAGE ON TYPE pgqueue.keyed_job TO :"role";
-- Every function that this takes: a database may have taken EXECUTE from PUBLIC.
GRANT EXECUTE ON FUNCTION pgqueue.now(), pgqueue.keys_can_be(text, integer, text, text, text),
    pgqueue.is_out_of_place(smallint, smallint, timestamptz, smallint, smallint, smallint, boolean),
    pgqueue.refuse_lane(smallint, smallint),
    pgqueue.enqueue(text, jsonb, text, integer, timestamptz, jsonb, timestamptz, text, text, text, integer, text, text, text),
    pgqueue.enqueue_keyed(pgqueue.keyed_job[]), pgqueue.enqueue_flow(text, jsonb, integer[], pgqueue.keyed_job[]), pgqueue.begin_wait(bigint), pgqueue.leave_wait(bigint)
    TO :"role";

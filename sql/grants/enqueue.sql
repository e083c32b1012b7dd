-- What a role needs to enqueue, and nothing else: it puts jobs in, and sees ids, queues and states. It can neither read
-- arguments nor delete jobs, and cannot write a column that only workers may. It may say that it waits for a job; to read the
-- result it needs the rights of read.sql, too.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT USAGE ON SEQUENCE pgqueue.job_id_seq, pgqueue.job_pos_seq TO :"role";
GRANT INSERT (state, queue, priority, rank, task, args, headers, run_at, deadline, max_attempts, lock_key, lock_limit,
    on_locked, limit_key, rate_key)
    ON pgqueue.job, pgqueue.job_available TO :"role";
GRANT SELECT (id, queue, state) ON pgqueue.job, pgqueue.job_available TO :"role";
-- With a unique key: the id and the time are made before the job is written, for the row of the key names both; whether a key still holds
-- is seen
-- by its job; and a job that is to wait for our COMMIT is locked.
GRANT INSERT (id, enqueued_at, unique_key, idempotency_key),
    SELECT (attempt, snoozes, crashes, enqueued_at, finished_at), UPDATE (id)
    ON pgqueue.job TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (expires_at) ON pgqueue.unique_key TO :"role";
GRANT SELECT, INSERT, DELETE ON pgqueue.job_waiter TO :"role";
-- Every function that this takes: a database may have taken EXECUTE from PUBLIC.
GRANT EXECUTE ON FUNCTION pgqueue.now(), pgqueue.is_due(timestamptz),
    pgqueue.keys_can_be(text, integer, text, text, text),
    pgqueue.rank_can_be(smallint, smallint, smallint, smallint, smallint, boolean),
    pgqueue.enqueue(text, jsonb, text, integer, timestamptz, jsonb, timestamptz, text, text, text, integer, text, text, text),
    pgqueue.take_keys(text, text, text, double precision, bigint, timestamptz, boolean, bigint[]),
    pgqueue.take_many_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[]),
    pgqueue.take_all_keys(text[], text[], text[], double precision[], bigint[], timestamptz[], boolean[]),
    pgqueue.key_states(text[]), pgqueue.keep_waiting(bigint[], timestamptz[], boolean[], text),
    pgqueue.take_keys(text, text, text, double precision, bigint, bigint[]), pgqueue.key_state(pgqueue.unique_key),
    pgqueue.judge_keys(text[], text[]), pgqueue.job_states(bigint[])
    TO :"role";

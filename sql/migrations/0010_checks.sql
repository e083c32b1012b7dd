-- breaking: no
--
-- The same rules for what enters, at a lower price. Every statement prepares every expression of a check anew, so that a one-row INSERT
-- paid more for rules about columns it does not write than for writing. What is asked only of a row that has a time or a key moves
-- into functions: until one is called it costs next to nothing. PL/pgSQL, because a function in SQL is inlined, which is that price
-- again; and its functions by their full names instead of SET search_path, which each keyed row of a batch would pay for.

CREATE FUNCTION pgqueue.is_due(run_at timestamptz) RETURNS boolean LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
BEGIN
    RETURN run_at <= pgqueue.now();
END $$;
COMMENT ON FUNCTION pgqueue.is_due IS 'For checks: a job that may run has no time to start, or one that has come.';

CREATE FUNCTION pgqueue.keys_can_be(
    lock_key text, lock_limit integer, on_locked text, limit_key text, rate_key text
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN (lock_key IS NULL OR pg_catalog.octet_length(lock_key) BETWEEN 1 AND 500 AND lock_limit >= 1 IS NOT FALSE
            AND on_locked IN ('wait', 'skip', 'once') IS NOT FALSE)
        AND pg_catalog.octet_length(limit_key) BETWEEN 1 AND 200 IS NOT FALSE
        AND pg_catalog.octet_length(rate_key) BETWEEN 1 AND 500 IS NOT FALSE;
END $$;
COMMENT ON FUNCTION pgqueue.keys_can_be IS 'For checks: keys of a length that an index holds, and what belongs to a lock.';

-- NOT VALID: what is there was let in by the same rules.
ALTER TABLE pgqueue.job_available
    DROP CONSTRAINT job_available_is_ready,
    ADD CONSTRAINT job_available_is_ready CHECK (
        priority BETWEEN 0 AND 9 AND (rank < 0 OR rank / 2 = priority) AND pos > 0 AND octet_length(queue) BETWEEN 1 AND 40
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND (run_at IS NULL OR pgqueue.is_due(run_at))
        AND (lock_key IS NULL AND limit_key IS NULL AND rate_key IS NULL
             OR pgqueue.keys_can_be(lock_key, lock_limit, on_locked, limit_key, rate_key))) NOT VALID;
ALTER TABLE pgqueue.job_scheduled
    DROP CONSTRAINT job_scheduled_is_waiting,
    ADD CONSTRAINT job_scheduled_is_waiting CHECK (
        priority BETWEEN 0 AND 9 AND octet_length(queue) BETWEEN 1 AND 40 AND isfinite(run_at)
        AND worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL
        AND (lock_key IS NULL AND limit_key IS NULL AND rate_key IS NULL
             OR pgqueue.keys_can_be(lock_key, lock_limit, on_locked, limit_key, rate_key))) NOT VALID;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (10, 'checks', false);

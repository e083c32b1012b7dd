-- breaking: no
--
-- The SQL function enqueues under limits and rates, and says what becomes of a job whose lock has no room. All calls that worked go on;
-- workers and the Python side do not call it.

-- The same function with four more parameters, at the end. The new one stands beside the old for as long as this transaction lasts,
-- and takes over who may call it.
CREATE FUNCTION pgqueue.enqueue(
    task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL, deadline timestamptz DEFAULT NULL,
    lock_key text DEFAULT NULL, unique_key text DEFAULT NULL, idempotency_key text DEFAULT NULL,
    lock_limit integer DEFAULT NULL, on_locked text DEFAULT NULL, limit_key text DEFAULT NULL, rate_key text DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SET search_path = '' AS $$
DECLARE
    new_id bigint;
    holder bigint;
    due boolean := enqueue.run_at IS NULL OR enqueue.run_at <= pgqueue.now();
BEGIN
    IF enqueue.task IS NULL OR enqueue.task !~ '^[^[:space:][:cntrl:]]{1,200}$' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: task % is not a task name', quote_nullable(left(enqueue.task, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 200 characters without spaces, such as billing.charge.';
    END IF;
    IF enqueue.queue !~ '^[A-Za-z0-9_.-]{1,40}$' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: queue % is not a queue name', quote_nullable(left(enqueue.queue, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 40 letters, digits, _ . or -.';
    END IF;
    IF enqueue.priority NOT BETWEEN 0 AND 9 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: priority % is outside 0 (first) to 9', enqueue.priority
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT isfinite(enqueue.run_at) THEN
        RAISE EXCEPTION 'pgqueue.enqueue: run_at is %, no time', enqueue.run_at USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.args IS NULL OR jsonb_typeof(enqueue.args) <> 'object' OR jsonb_typeof(enqueue.headers) <> 'object' THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args and headers are JSON objects, by parameter name'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(enqueue.args::text) > 1048576 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: args have % bytes, the limit is 1048576', octet_length(enqueue.args::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store the data in a table and pass its key.';
    END IF;
    IF octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 OR octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500
        OR octet_length(enqueue.idempotency_key) NOT BETWEEN 1 AND 500 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: % has % bytes, use 1 to 500',
            CASE WHEN octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 THEN 'lock_key'
                 WHEN octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500 THEN 'unique_key' ELSE 'idempotency_key' END,
            CASE WHEN octet_length(enqueue.lock_key) NOT BETWEEN 1 AND 500 THEN octet_length(enqueue.lock_key)
                 WHEN octet_length(enqueue.unique_key) NOT BETWEEN 1 AND 500 THEN octet_length(enqueue.unique_key)
                 ELSE octet_length(enqueue.idempotency_key) END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    IF enqueue.lock_limit < 1 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: lock_limit % lets nobody run, use 1 or more', enqueue.lock_limit
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.on_locked NOT IN ('wait', 'skip', 'once') THEN
        RAISE EXCEPTION 'pgqueue.enqueue: on_locked is %, use wait, skip or once', quote_literal(left(enqueue.on_locked, 80))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue.limit_key !~ '^[^[:space:][:cntrl:]]+$' OR octet_length(enqueue.limit_key) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: limit_key % is not the name of a limit', quote_literal(left(enqueue.limit_key, 80))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use 1 to 200 bytes without spaces, such as warehouse.';
    END IF;
    -- Up to the first colon it is a name; behind that whatever a key may be, but not nothing.
    IF split_part(enqueue.rate_key, ':', 1) !~ '^[^[:space:][:cntrl:]]+$'
        OR octet_length(split_part(enqueue.rate_key, ':', 1)) > 200 OR strpos(enqueue.rate_key, ':') = length(enqueue.rate_key)
        OR octet_length(enqueue.rate_key) > 500 THEN
        RAISE EXCEPTION 'pgqueue.enqueue: rate_key % is not the name of a rate, with or without a key',
            quote_literal(left(enqueue.rate_key, 80))
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Use a name of 1 to 200 bytes without spaces, such as mail, or name:key, such as crm:customer:7, of up to 500.';
    END IF;

    IF enqueue.unique_key IS NOT NULL OR enqueue.idempotency_key IS NOT NULL THEN
        new_id := nextval('pgqueue.job_id_seq');
        holder := pgqueue.take_keys(enqueue.idempotency_key, enqueue.unique_key, 'live', 0, new_id);
        IF holder <> new_id THEN
            RETURN holder;
        END IF;
    END IF;
    -- A column that is named in an INSERT needs its right: so who was granted before there were limits enqueues as ever.
    IF enqueue.limit_key IS NOT NULL OR enqueue.rate_key IS NOT NULL
        OR enqueue.lock_key IS NOT NULL AND (enqueue.lock_limit IS NOT NULL OR enqueue.on_locked IS NOT NULL) THEN
        new_id := coalesce(new_id, nextval('pgqueue.job_id_seq'));
        INSERT INTO pgqueue.job (id, state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key, lock_limit,
                                 on_locked, limit_key, rate_key, unique_key, idempotency_key)
        VALUES (new_id, CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.lock_limit END,
                CASE WHEN enqueue.lock_key IS NOT NULL THEN enqueue.on_locked END,
                enqueue.limit_key, enqueue.rate_key, enqueue.unique_key, enqueue.idempotency_key);
    ELSIF new_id IS NOT NULL THEN
        INSERT INTO pgqueue.job (id, state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key, unique_key,
                                 idempotency_key)
        VALUES (new_id, CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key, enqueue.unique_key,
                enqueue.idempotency_key);
    ELSE
        INSERT INTO pgqueue.job (state, task, args, queue, priority, rank, run_at, headers, deadline, lock_key)
        VALUES (CASE WHEN due THEN 'available' ELSE 'scheduled' END, enqueue.task, enqueue.args,
                coalesce(enqueue.queue, 'default'), coalesce(enqueue.priority, 5), 2 * coalesce(enqueue.priority, 5) + 1,
                enqueue.run_at, enqueue.headers, enqueue.deadline, enqueue.lock_key)
        RETURNING id INTO new_id;
    END IF;

    IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' THEN
        PERFORM pg_notify('pgqueue.' || CASE WHEN due THEN coalesce(enqueue.queue, 'default') ELSE ':scheduled' END, '');
    END IF;
    RETURN new_id;
END $$;

DO $$
DECLARE
    old_one regprocedure := 'pgqueue.enqueue(text, jsonb, text, integer, timestamptz, jsonb, timestamptz, text, text, text)';
    new_one regprocedure := (SELECT oid FROM pg_proc WHERE oid <> old_one AND (proname, pronamespace) = (
        SELECT proname, pronamespace FROM pg_proc WHERE oid = old_one));
    allowed record;
BEGIN
    IF (SELECT proacl IS NOT NULL FROM pg_proc WHERE oid = old_one) THEN
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', new_one);
    END IF;
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        WHERE p.oid = old_one AND a.grantee <> p.proowner GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s %s', new_one, allowed.role, allowed.too);
    END LOOP;
END $$;

DROP FUNCTION pgqueue.enqueue(text, jsonb, text, integer, timestamptz, jsonb, timestamptz, text, text, text);

COMMENT ON FUNCTION pgqueue.enqueue IS
    'Enqueue a job from any language, in the caller''s transaction. Returns its id, or that of the job that has its key. SET pgqueue.notify = off for two-phase commit.';

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (9, 'enqueue', false);

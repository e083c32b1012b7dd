-- Which job starts next under a rate. One row per key of a rate says when it is at rest again (`next_at`). Every transaction that
-- would change it locks the key first (`rates_lock`), and reads it in a statement of its own after it. Lock order: keys, our
-- worker's row, blocked rows with SKIP LOCKED. Of a rate of count/period with a burst, all in seconds (why so: at the head of
-- pgqueue/worker/concurrency/rate_limiter.py):
--     late  = least(0.2, period / 20)    may pass between being let in and the start
--     early = least(0.05, period / 40)   may be anticipated, so that a fast rate lets in several at a time
--     gap   = (period + late + early) / count
--     depth = (burst - 1) * gap + early

-- name: declared_limits_put
-- What a worker's code says of limits: holds for each that was not set by hand. No row for one of which it said the same before.
-- Which jobs could be let in now, a sweep finds; it hears of that. Answers the names that are new or were changed.
WITH said AS (
    INSERT INTO pgqueue.key_limit AS l (name, n, declared, declared_at)
    SELECT given.name, given.n, given.n, pgqueue.now()
    FROM unnest(%(names)s::text[], %(ns)s::integer[]) AS given (name, n)
    -- Not left to the ON CONFLICT: that locks the row first, and waits for a transaction that has just set it and not committed.
    WHERE NOT EXISTS (SELECT FROM pgqueue.key_limit l WHERE l.name = given.name AND l.declared = given.n)
    ORDER BY given.name COLLATE "C"
    ON CONFLICT (name) DO UPDATE
        SET declared = excluded.declared, declared_at = excluded.declared_at,
            n = CASE WHEN l.set_at IS NULL THEN excluded.n ELSE l.n END
        WHERE l.declared IS DISTINCT FROM excluded.declared
    RETURNING name
)
SELECT array_agg(name), CASE WHEN %(notify)s::boolean AND count(*) > 0 THEN pg_notify('pgqueue.:control', 'sweep')::text END
FROM said;

-- name: declared_limits_put_rates
-- What a worker's code says of rates: holds for each that was not set by hand; its burst in either case. No row for one of which
-- it said the same before. Which jobs could start now, a sweep finds; it hears of that. Answers the names that are new or were
-- changed.
WITH said AS (
    INSERT INTO pgqueue.key_rate AS r (name, count, period, burst, declared_count, declared_period, declared_at)
    SELECT given.name, given.count, given.period, given.burst, given.count, given.period, pgqueue.now()
    FROM unnest(%(names)s::text[], %(counts)s::integer[], %(periods)s::float8[], %(bursts)s::integer[])
        AS given (name, count, period, burst)
    -- Not left to the ON CONFLICT: that locks the row first, and waits for a transaction that has just set it and not committed.
    WHERE NOT EXISTS (
        SELECT FROM pgqueue.key_rate r WHERE r.name = given.name AND r.burst = given.burst
            AND (r.declared_count, r.declared_period) = (given.count, given.period))
    ORDER BY given.name COLLATE "C"
    ON CONFLICT (name) DO UPDATE
        SET declared_count = excluded.count, declared_period = excluded.period, declared_at = excluded.declared_at,
            burst = excluded.burst,
            count = CASE WHEN r.set_at IS NULL THEN excluded.count ELSE r.count END,
            period = CASE WHEN r.set_at IS NULL THEN excluded.period ELSE r.period END
        WHERE (r.declared_count, r.declared_period, r.burst) IS DISTINCT FROM (excluded.count, excluded.period, excluded.burst)
    RETURNING name
)
SELECT array_agg(name), CASE WHEN %(notify)s::boolean AND count(*) > 0 THEN pg_notify('pgqueue.:control', 'sweep')::text END
FROM said;

-- What a worker's code declares of limits and rates.

-- name: declared_limits_put
-- Write the limits that a worker's code declares. They hold if they were not set by hand. A limit that was declared
-- alike before has no row in the answer. A sweep is notified: it finds the jobs that could start now. Answers the names
-- that are new or were changed.
WITH said AS (
    INSERT INTO pgqueue.key_limit AS l (name, n, declared, declared_at)
    SELECT given.name, given.n, given.n, pgqueue.now()
    FROM unnest(%(names)s::text[], %(ns)s::integer[]) AS given (name, n)
    -- Not left to the ON CONFLICT: that locks the row first, and waits for a transaction that has just set it.
    WHERE NOT EXISTS (SELECT FROM pgqueue.key_limit l WHERE l.name = given.name AND l.declared = given.n)
    ORDER BY given.name COLLATE "C"
    ON CONFLICT (name) DO UPDATE
        SET declared = excluded.declared, declared_at = excluded.declared_at,
            n = CASE WHEN l.set_at IS NULL THEN excluded.n ELSE l.n END
        WHERE l.declared IS DISTINCT FROM excluded.declared
    RETURNING name
)
SELECT array_agg(name),
       CASE WHEN %(notify)s::boolean AND count(*) > 0 AND {{may_notify}} THEN pg_notify('pgqueue.:control', 'sweep')::text END
FROM said;

-- name: declared_limits_put_rates
-- Write the rates that a worker's code declares. They hold if they were not set by hand; the burst always holds. A rate
-- that was declared alike before has no row in the answer. A sweep is notified: it finds the jobs that could start now.
-- Answers the names that are new or were changed.
WITH said AS (
    INSERT INTO pgqueue.key_rate AS r (name, count, period, burst, declared_count, declared_period, declared_at)
    SELECT given.name, given.count, given.period, given.burst, given.count, given.period, pgqueue.now()
    FROM unnest(%(names)s::text[], %(counts)s::integer[], %(periods)s::float8[], %(bursts)s::integer[])
        AS given (name, count, period, burst)
    -- Not left to the ON CONFLICT: that locks the row first, and waits for a transaction that has just set it.
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
SELECT array_agg(name),
       CASE WHEN %(notify)s::boolean AND count(*) > 0 AND {{may_notify}} THEN pg_notify('pgqueue.:control', 'sweep')::text END
FROM said;

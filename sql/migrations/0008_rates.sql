-- breaking: no
--
-- Rates: so many starts in a period, over all workers. Here is what each allows, and when each of its keys may next let somebody in.
-- The column `rate_key` is there since 0007.

-- What each rate allows now: `count` starts in `period` seconds, `burst` of them at once. `declared_count` and `declared_period`: what
-- the code of the last worker that has declared it said (NULL: only set by hand); `set_at`: somebody has set count and period
-- by hand, and no declaration changes them any more. Never removed: jobs that wait name it.
CREATE TABLE pgqueue.key_rate (
    name            text             COLLATE "C" PRIMARY KEY,
    count           integer          NOT NULL,
    period          double precision NOT NULL,
    burst           integer          NOT NULL DEFAULT 1,
    declared_count  integer,
    declared_period double precision,
    declared_at     timestamptz,
    set_at          timestamptz,
    CONSTRAINT key_rate_can_be CHECK (
        octet_length(name) BETWEEN 1 AND 200 AND strpos(name, ':') = 0
        AND count BETWEEN 1 AND 1000000 AND burst BETWEEN 1 AND 1000000 AND period BETWEEN 1 AND 31622400
        AND (set_at IS NOT NULL OR (count, period) = (declared_count, declared_period) IS TRUE))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.key_rate IS 'How many jobs of each rate may start in how many seconds, over all workers.';

-- One row for each key of a rate that somebody was let in under: from `next_at` on it allows a whole burst. A time that has passed says
-- nothing: such rows are removed. `worker_id` is who let in last.
CREATE TABLE pgqueue.limiter (
    key       text        COLLATE "C" PRIMARY KEY,
    next_at   timestamptz NOT NULL,
    worker_id bigint      NOT NULL,
    CONSTRAINT limiter_can_be CHECK (octet_length(key) BETWEEN 1 AND 500 AND isfinite(next_at))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE pgqueue.limiter IS 'When each key of a rate is at rest again. Changed when somebody is let in.';

-- Suspects that must run alone and wait for a rate: to find them without a look at every line. Mostly empty.
CREATE INDEX job_blocked_rate_suspects ON pgqueue.job_blocked (queue, id) WHERE crashes > 1 AND starts_with(key, 'rate:');
-- The lines of rates by queue, as those of limits. In words of its own: a planner that knows nothing would take it for
-- job_blocked_limit_holds, and walk all lines for the holders of one limit. The one on ids still comes last.
CREATE INDEX job_blocked_rate_line     ON pgqueue.job_blocked (key, queue, rank, id) WHERE left(key, 5) = 'rate:';
DROP INDEX pgqueue.job_blocked_id;
CREATE UNIQUE INDEX job_blocked_id     ON pgqueue.job_blocked (id);

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (8, 'rates', false);

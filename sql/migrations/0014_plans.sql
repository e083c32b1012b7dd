-- breaking: no
--
-- A statement that is planned while a table is empty, just after a VACUUM, finds all its indexes cheap, and is kept until the next
-- VACUUM or ANALYZE of that table. Then any index will do that has its rows and their order, also one that has to be read as a whole,
-- or past the jobs of other queues. So each of these has a condition, or a column, that only those ask for whom it was made.
DROP INDEX pgqueue.job_blocked_queue_holds, pgqueue.job_blocked_limit_holds, pgqueue.job_blocked_limit_line, pgqueue.job_blocked_id;
CREATE INDEX job_blocked_limit_holds ON pgqueue.job_blocked (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND limit_key IS NOT NULL AND substr(key, 1, 5) = 'rate:';
CREATE INDEX job_blocked_limit_line  ON pgqueue.job_blocked (substr(key, 7), queue, rank, id) WHERE left(key, 6) = 'limit:';
CREATE INDEX job_blocked_queue_holds ON pgqueue.job_blocked (queue) WHERE holds AND queue <> '';
-- The one on ids still comes last (see 0008).
CREATE UNIQUE INDEX job_blocked_id   ON pgqueue.job_blocked (id);

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (14, 'plans', false);

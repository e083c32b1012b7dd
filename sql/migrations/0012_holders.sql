-- breaking: no
--
-- All holders of a key are read from where nobody held it last, wherever they are, and those of a limit, too, from the oldest one there
-- is: not from the first that ever was (pgqueue/starts.py says why that is exact). A row elsewhere than in `running` draws its
-- number when it enters as a holder; one of a worker of the version before has none, and stands behind all others: it is always read.
DROP INDEX pgqueue.job_running_limit, pgqueue.job_available_lock_holds, pgqueue.job_available_limit_holds,
    pgqueue.job_scheduled_lock_holds, pgqueue.job_scheduled_limit_holds,
    pgqueue.job_blocked_lock_holds, pgqueue.job_blocked_limit_holds, pgqueue.job_blocked_id;
CREATE INDEX job_running_limit         ON pgqueue.job_running   (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE limit_key IS NOT NULL;
CREATE INDEX job_available_lock_holds  ON pgqueue.job_available (lock_key,  coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND lock_key  IS NOT NULL;
CREATE INDEX job_available_limit_holds ON pgqueue.job_available (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND limit_key IS NOT NULL;
CREATE INDEX job_scheduled_lock_holds  ON pgqueue.job_scheduled (lock_key,  coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND lock_key  IS NOT NULL;
CREATE INDEX job_scheduled_limit_holds ON pgqueue.job_scheduled (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND limit_key IS NOT NULL;
CREATE INDEX job_blocked_lock_holds    ON pgqueue.job_blocked   (lock_key,  coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND lock_key  IS NOT NULL;
CREATE INDEX job_blocked_limit_holds   ON pgqueue.job_blocked   (limit_key, coalesce(hold_pos, 9223372036854775807))
    WHERE holds AND limit_key IS NOT NULL AND starts_with(key, 'rate:');
-- The one on ids still comes last (see 0008).
CREATE UNIQUE INDEX job_blocked_id     ON pgqueue.job_blocked (id);

-- Who reads back whom it has let in reads these, and not all that this worker ever ran.
DROP INDEX pgqueue.job_running_worker;
CREATE INDEX job_running_worker ON pgqueue.job_running (worker_id, claim);

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (12, 'holders', false);

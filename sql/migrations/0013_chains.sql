-- breaking: no
--
-- Chains: an admit lets a job in with a lock, and behind it those next in its line that will run after it in the same worker, one
-- at a time. Those behind it do not hold the lock, and are in `running` all the same: `key` says what they wait for, and whoever
-- moves them elsewhere puts them back into that line. A worker of the version before moves them to their lane, without
-- the lock, and the next claim parks them. Still no keyed job is there that was not let in. NOT VALID: what is there holds.
ALTER TABLE pgqueue.job_running
    DROP CONSTRAINT job_running_is_held,
    ADD CONSTRAINT job_running_is_held CHECK (
        finished_at IS NULL AND (coalesce(lock_key, limit_key, rate_key) IS NULL OR holds OR key IS NOT NULL)) NOT VALID;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (13, 'chains', false);

-- breaking: no
--
-- The history also says how many jobs each queue had in each state, and for how long they waited, as the leader has measured it.

-- A row with a `state` is of a measurement (table `depth`), for a queue: `n` jobs, and `oldest`, for how many seconds the first of them
-- could have run. Of blocked jobs that is since when one could have gone on. Its numbers of what happened are 0, and its task is ''. It
-- lies in the same leaves, and goes with them. No row is rewritten.
ALTER TABLE pgqueue.history_minute
    ADD COLUMN state text COLLATE "C", ADD COLUMN n bigint, ADD COLUMN exact boolean, ADD COLUMN oldest float8;
ALTER TABLE pgqueue.history_hour
    ADD COLUMN state text COLLATE "C", ADD COLUMN n bigint, ADD COLUMN exact boolean, ADD COLUMN oldest float8;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (33, 'history_depth', false);

-- breaking: no
--
-- How far each relay is behind, for those that look at the queue: a relay tells it every few seconds.

ALTER TABLE pgqueue.relay_fence
    -- The source, for people: host and database.
    ADD COLUMN name        text,
    ADD COLUMN waiting     integer,
    -- Seconds that the oldest of them has waited.
    ADD COLUMN oldest      double precision,
    ADD COLUMN refused     integer,
    ADD COLUMN reported_at timestamptz;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (21, 'relay_lag', false);

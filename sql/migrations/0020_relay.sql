-- breaking: no
--
-- Where a relay delivers to: which staged jobs have come here already, and which relay may deliver.

-- One row: which queue this is, and where it lies. An outbox remembers it.
CREATE TABLE pgqueue.relay_target (
    one    boolean PRIMARY KEY DEFAULT true CHECK (one),
    target uuid    NOT NULL DEFAULT gen_random_uuid(),
    -- The cluster and the database: a copy of this row lies elsewhere.
    home   text
);
COMMENT ON TABLE pgqueue.relay_target IS 'The name of this queue, for the outboxes whose jobs come here.';
INSERT INTO pgqueue.relay_target DEFAULT VALUES;
CREATE TRIGGER replace_setting BEFORE INSERT ON pgqueue.relay_target FOR EACH ROW EXECUTE FUNCTION pgqueue.replace_setting();

-- For each outbox: the only session that may deliver its jobs is the one that has raised `epoch` last.
CREATE TABLE pgqueue.relay_fence (
    source uuid        PRIMARY KEY,
    epoch  bigint      NOT NULL,
    -- When two looks at the whole outbox began, and when the second ended: at least the memory's age after the first had. What was
    -- delivered before the first began, and was not found by it, may be forgotten.
    look    timestamptz NOT NULL DEFAULT '-infinity',
    next    timestamptz NOT NULL DEFAULT '-infinity',
    next_at timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);
COMMENT ON TABLE pgqueue.relay_fence IS 'Which session of a relay may deliver the jobs of each outbox.';

-- The memory: which staged jobs have come here. `relayed_at` is when the row was last found in the outbox.
CREATE TABLE pgqueue.relayed (
    uid        uuid        PRIMARY KEY,
    source     uuid        NOT NULL,
    staged_id  bigint      NOT NULL,
    job_id     bigint      NOT NULL,
    relayed_at timestamptz NOT NULL DEFAULT pgqueue.now()
);
CREATE INDEX relayed_age ON pgqueue.relayed (source, relayed_at);
COMMENT ON TABLE pgqueue.relayed IS 'Which staged jobs have been delivered here, and which jobs they became. Kept for about two hours.';

-- Owned by the owner of the tables, whichever role applies this.
DO $$
DECLARE
    made text;
BEGIN
    FOREACH made IN ARRAY ARRAY['relay_target', 'relay_fence', 'relayed'] LOOP
        EXECUTE format('ALTER TABLE pgqueue.%I OWNER TO %I', made, (
            SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    END LOOP;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (20, 'relay', false);

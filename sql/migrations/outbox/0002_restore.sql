-- breaking: no
--
-- A restore of the data alone (`pg_dump -a`) meets the rows that the migrations have made: those of the dump count.

CREATE FUNCTION pgqueue.outbox_replace_setting() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'outbox_migration' THEN
        DELETE FROM pgqueue.outbox_migration WHERE version = NEW.version;
    ELSE  -- a table with one row
        DELETE FROM pgqueue.outbox_source;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER replace_setting BEFORE INSERT ON pgqueue.outbox_source
    FOR EACH ROW EXECUTE FUNCTION pgqueue.outbox_replace_setting();
CREATE TRIGGER replace_setting BEFORE INSERT ON pgqueue.outbox_migration
    FOR EACH ROW EXECUTE FUNCTION pgqueue.outbox_replace_setting();

-- Owned by the owner of the tables, whichever role applies this.
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION pgqueue.outbox_replace_setting() OWNER TO %I', (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.outbox'::regclass));
END $$;

INSERT INTO pgqueue.outbox_migration (version, name, breaking) VALUES (2, 'restore', false);

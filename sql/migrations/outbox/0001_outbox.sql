-- breaking: no
--
-- The outbox: jobs that an application stages in its own database, until a relay has delivered them to the database of the queue.
-- A line of migrations of its own: the application's database needs nothing else of pgqueue.

CREATE SCHEMA IF NOT EXISTS pgqueue;

CREATE TABLE pgqueue.outbox_migration (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    breaking   boolean     NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE pgqueue.outbox_migration IS 'Which numbered files of sql/migrations/outbox have been applied here.';

-- The one place where statements of the outbox take the time from.
CREATE FUNCTION pgqueue.outbox_now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN clock_timestamp();

-- CACHE 1: an id is drawn after its transaction has one of its own, in the order that the relay's cursor needs.
CREATE SEQUENCE pgqueue.outbox_id_seq AS bigint CACHE 1;

CREATE TABLE pgqueue.outbox (
    -- The transaction takes its id before it draws this number; the relay's cursor stands on this order. Not unique: after TRUNCATE …
    -- RESTART IDENTITY, or a restore of the data alone, numbers come again. An application's INSERT must not fail for that.
    id        bigint      NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('pgqueue.outbox_id_seq') END,
    task      text        NOT NULL,
    args      jsonb       NOT NULL DEFAULT '{}',
    options   jsonb,
    -- How `options` is to be read. A relay that does not know the format delivers nothing, and refuses nothing.
    format    smallint    NOT NULL DEFAULT 1,
    order_key text,
    -- What tells the row from all others for ever: it is made once, and delivered once.
    uid       uuid        NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    staged_at timestamptz NOT NULL DEFAULT pgqueue.outbox_now()
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_vacuum_insert_scale_factor = 1);
COMMENT ON TABLE pgqueue.outbox IS 'Jobs that were staged here, until a relay has delivered them. INSERT (task, args) is a valid job.';
ALTER SEQUENCE pgqueue.outbox_id_seq OWNED BY pgqueue.outbox.id;
CREATE INDEX outbox_id ON pgqueue.outbox (id);
-- Which row is before a row with the same order key. Of a longer key only the first 500 characters count: more may not fit an index.
CREATE INDEX outbox_order ON pgqueue.outbox (left(order_key, 500), id) WHERE order_key IS NOT NULL;

CREATE TABLE pgqueue.outbox_refused (
    id         bigint      NOT NULL,
    task       text        NOT NULL,
    args       jsonb       NOT NULL,
    options    jsonb,
    format     smallint    NOT NULL,
    order_key  text,
    uid        uuid        PRIMARY KEY,
    staged_at  timestamptz NOT NULL,
    reason     text        NOT NULL,
    refused_at timestamptz NOT NULL DEFAULT pgqueue.outbox_now()
);
COMMENT ON TABLE pgqueue.outbox_refused IS 'Staged jobs that cannot be delivered as they are, each with its reason.';
CREATE INDEX outbox_refused_order ON pgqueue.outbox_refused (left(order_key, 500), id) WHERE order_key IS NOT NULL;

-- One row: which outbox this is, where it lies, which queue its jobs go to. A relay writes it.
CREATE TABLE pgqueue.outbox_source (
    one    boolean PRIMARY KEY DEFAULT true CHECK (one),
    source uuid    NOT NULL DEFAULT gen_random_uuid(),
    -- The cluster and the database: a copy of this row lies elsewhere.
    home   text,
    target uuid,
    epoch  bigint  NOT NULL DEFAULT 0
);
COMMENT ON TABLE pgqueue.outbox_source IS 'The name of this outbox, and the queue that it belongs to.';
INSERT INTO pgqueue.outbox_source DEFAULT VALUES;

INSERT INTO pgqueue.outbox_migration (version, name, breaking) VALUES (1, 'outbox', false);

-- What a role needs to run a relay, in the database of the outbox: read, delete, put aside and bring back. UPDATE (id) is the least that
-- lets it lock rows. All relays of a source use one role, because one ends the session of another that stands still.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT USAGE, SELECT ON SEQUENCE pgqueue.outbox_id_seq TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (id) ON pgqueue.outbox TO :"role";
GRANT SELECT, INSERT, DELETE, UPDATE (reason, refused_at) ON pgqueue.outbox_refused TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.outbox_source TO :"role";
GRANT SELECT ON pgqueue.outbox_migration TO :"role";
GRANT EXECUTE ON FUNCTION pgqueue.outbox_now() TO :"role";

-- What a role needs to stage jobs in the outbox of an application's database, and nothing else: it reads neither arguments nor options,
-- and deletes nothing.
GRANT USAGE ON SCHEMA pgqueue TO :"role";
GRANT USAGE ON SEQUENCE pgqueue.outbox_id_seq TO :"role";
GRANT INSERT (task, args, options, format, order_key), SELECT (id, uid) ON pgqueue.outbox TO :"role";
GRANT EXECUTE ON FUNCTION pgqueue.outbox_now() TO :"role";

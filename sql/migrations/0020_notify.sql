-- breaking: no
--
-- The SQL function notifies only while the server's NOTIFY queue has room, as every statement of pgqueue does (`may_notify` in
-- sql/fragments.sql). If that queue is full, a transaction that notifies fails at its COMMIT, the application's too; and NOTIFY is only a
-- hint. One condition of the function changes: the rest of its body stays as the migrations before this one have left it.
DO $$
DECLARE
    it regprocedure := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = 'pgqueue'::regnamespace AND p.proname = 'enqueue');
    asked text := $if$IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' THEN$if$;
    room text := $if$IF coalesce(current_setting('pgqueue.notify', true), '') <> 'off' AND pg_notification_queue_usage() < 0.9 THEN$if$;
    guarded text := replace(pg_get_functiondef(it), asked, room);
BEGIN
    IF strpos(guarded, room) = 0 THEN
        RAISE EXCEPTION 'pgqueue.enqueue is not as the migrations before this one have made it';
    END IF;
    EXECUTE guarded;
END $$;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (20, 'notify', false);

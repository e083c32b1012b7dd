-- What the transactions of handlers need beside the completion itself (complete.sql).

-- name: transactions_end_session
-- End this session of our own, so that its transaction comes to its end: after a COMMIT without an answer, or when its connection has
-- broken on our side. Answers whether it has ended within 5 s, and nothing if it is gone.
SELECT {{ended_session}} FROM pg_stat_activity a
WHERE a.pid = %(pid)s::integer AND a.backend_start = %(backend_start)s::text::timestamptz AND a.datname = current_database();

-- name: transactions_too_long
-- After a COMMIT without an answer: a row if a timeout of the server may have ended that session, for its transaction was
-- `lasted` milliseconds old. The end of a session does not say why where the driver sees it. `transaction_timeout` is of
-- PostgreSQL 17.
SELECT FROM pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
  AND setting::bigint BETWEEN 1 AND %(lasted)s::bigint
LIMIT 1;

-- name: transactions_own_role
-- Take the role that the session began with, until the transaction ends or it is put back. Answers the user of the
-- session and the role that were in effect, and both as they are now.
SELECT current_setting('session_authorization'), current_setting('role'),
       ARRAY[set_config('session_authorization', NULL, true), set_config('role', NULL, true)];

-- name: transactions_put_back_role
-- Before COMMIT: what the handler has left in effect, for its deferred triggers.
SELECT set_config('session_authorization', %(session)s::text, true), set_config('role', %(role)s::text, true);

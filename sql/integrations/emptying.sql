-- name: emptying_deletes
-- What empties the queue in a test: a DELETE for each table that may have a row, one after the other. NULL if there is none.
-- Kept are the rows of the migrations: versions, how long history is kept, duties. A file without a page is not looked at.
SELECT string_agg('DELETE FROM ' || c.oid::regclass, '; ')
FROM pg_class c
WHERE c.relnamespace = to_regnamespace('pgqueue')
  AND c.relkind = 'r'
  AND c.relname <> ALL ('{migration,ring,duty,relay_target,outbox_migration,outbox_source}'::name[])
  AND pg_relation_size(c.oid) > 0;

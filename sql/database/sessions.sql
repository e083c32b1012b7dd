-- name: sessions_settings
-- A worker's transaction depends on no setting of role, database or pooler: it sets its own, for itself only. On a session of our
-- own it does so once (`sessions_keep`): these cost the server 0.1 ms, as much as all else in a message that ends one job.
-- Written out with pg_catalog: until it has run, the search_path is the role's. Times travel as text, in ISO.
-- One plan per statement, made without looking at values: planning by value probes the ends of indexes, and those are
-- where a queue's dead rows lie. And by index, whatever statistics say: a table that was empty is full a second later.
-- Never compiled: up to PostgreSQL 17 what must be scanned all the same is priced at 1e10, so a server with JIT (on by
-- default) would compile heartbeats, probes and admissions at each run: 0.1 s of CPU for a heartbeat, 3.5 s for `unblock_move`.
-- If row level security would hide rows of a table, the server refuses instead: hidden jobs look as if there were none.
SELECT pg_catalog.set_config('search_path', '', true),
       pg_catalog.set_config('lock_timeout', '2s', true),
       pg_catalog.set_config('statement_timeout', '30s', true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true),
       pg_catalog.set_config('idle_session_timeout', '0', true),
       pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true),
       pg_catalog.set_config('enable_indexscan', 'on', true),
       pg_catalog.set_config('enable_seqscan', 'off', true),
       pg_catalog.set_config('enable_bitmapscan', 'off', true),
       pg_catalog.set_config('jit', 'off', true),
       pg_catalog.set_config('array_nulls', 'on', true),
       CASE WHEN pg_catalog.current_setting('server_version_num')::pg_catalog.int4 OPERATOR(pg_catalog.>=) 170000
            THEN pg_catalog.set_config('transaction_timeout', '0', true) END,
       pg_catalog.set_config('row_security', 'off', true),
       pg_catalog.set_config('datestyle', 'ISO', true);

-- name: sessions_keep
-- What `sessions_settings` has just set in this transaction, from now on for all of the session; answers rows if so. It must be
-- ours alone: of our pid, and no older than the connection. A pooler that numbers its clients may come upon a pid by chance.
SELECT pg_catalog.set_config(name, pg_catalog.current_setting(name), false)
FROM pg_catalog.unnest(ARRAY['search_path', 'lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout',
                             'idle_session_timeout', 'plan_cache_mode', 'enable_indexscan', 'enable_seqscan', 'enable_bitmapscan',
                             'jit', 'array_nulls', 'transaction_timeout', 'row_security', 'datestyle']) AS kept (name)
WHERE pg_catalog.current_setting(name, true) IS NOT NULL AND pg_backend_pid() = %(pid)s::integer
  AND EXISTS (SELECT FROM pg_stat_activity a
              WHERE a.pid = pg_backend_pid() AND a.backend_start > a.xact_start - make_interval(secs => %(seconds)s::float8));

-- name: sessions_idle
-- A session that is ours alone and waits, as for notifications, is not ended for that.
SELECT pg_catalog.set_config('idle_session_timeout', '0', false);

-- name: sessions_identity
-- This session, unmistakably: a pid alone may be another backend's tomorrow. Another session reads the time, under other settings: JSON
-- writes each time in one way, and `::text` as DateStyle says.
SELECT pid, to_jsonb(backend_start) #>> '{}' FROM pg_stat_activity WHERE pid = pg_backend_pid();

-- name: sessions_server
-- When this server began: another one began at another time. Sessions with other settings must answer the same, so it is a number.
-- And whether nothing may be written here, by order or as on a standby.
SELECT extract(epoch FROM pg_postmaster_start_time())::text, current_setting('transaction_read_only') = 'on';

-- name: sessions_end
-- End a session of ours in this database, and wait until it has ended, 5 s at most: whatever it was doing is committed or undone
-- then. Answers whether it has, nothing if it is gone, NULL if it is not ours to end, or even to see as it is: another role's (the role that
-- SET ROLE gives is not the one a session came with), or a superuser's, if we are none.
SELECT CASE WHEN {{ours_to_end}} THEN {{ended_session}} END
FROM pg_stat_activity a JOIN pg_roles me ON me.rolname = current_user
WHERE a.pid = %(pid)s::integer AND coalesce(a.backend_start = %(backend_start)s::text::timestamptz, true)
  AND a.datname = current_database();

-- name: sessions_tell
-- Tell a session of ours again to end that has not ended in time, and do not wait for that. Answers a row as long as it is there;
-- NULL in it if it is not ours to end any more.
SELECT CASE WHEN {{ours_to_end}} THEN pg_terminate_backend(a.pid) END
FROM pg_stat_activity a JOIN pg_roles me ON me.rolname = current_user
WHERE a.pid = %(pid)s::integer AND a.backend_start = %(backend_start)s::text::timestamptz AND a.datname = current_database();

-- name: session_settings
-- A worker's transaction depends on no setting of role, database or pooler: it sets its own, for itself only.
-- Written out with pg_catalog: until it has run, the search_path is the role's. Times travel as text, in ISO.
-- One plan per statement, made without looking at values: planning by value probes the ends of indexes, and those are
-- where a queue's dead rows lie. And by index, whatever statistics say: a table that was empty is full a second later.
-- Never compiled: up to PostgreSQL 17 what must be scanned all the same is priced at 1e10, so a server with JIT (on by
-- default) would compile heartbeats, probes and admissions at each run: 0.1 s of CPU for a heartbeat, 3.5 s for `admit_move`.
SELECT pg_catalog.set_config('search_path', '', true),
       pg_catalog.set_config('lock_timeout', '2s', true),
       pg_catalog.set_config('statement_timeout', '30s', true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true),
       pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true),
       pg_catalog.set_config('enable_indexscan', 'on', true),
       pg_catalog.set_config('enable_seqscan', 'off', true),
       pg_catalog.set_config('enable_bitmapscan', 'off', true),
       pg_catalog.set_config('jit', 'off', true),
       pg_catalog.set_config('datestyle', 'ISO', true);

-- name: session_identity
-- This session, unmistakably: a pid alone may be another backend's tomorrow.
SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid();

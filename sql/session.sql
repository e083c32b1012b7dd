-- name: session_settings
-- A worker's transaction depends on no setting of role, database or pooler: it sets its own, for itself only.
-- One plan per statement, made without looking at values: planning by value probes the ends of indexes, and those are
-- where a queue's dead rows lie.
SELECT set_config('search_path', '', true),
       set_config('lock_timeout', '2s', true),
       set_config('statement_timeout', '30s', true),
       set_config('plan_cache_mode', 'force_generic_plan', true),
       set_config('idle_in_transaction_session_timeout', '60s', true);

-- name: session_identity
-- This session, unmistakably: a pid alone may be another backend's tomorrow.
SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid();

-- Whether something has changed in the queue, for what shows it again and again.

-- name: activity_mark
-- A text that is another one after a change. Jobs that were enqueued, started or ended change it at once; the rest when the
-- server has counted it, which is mostly within a second, and ten at most. Heartbeats and history alone do not change it.
SELECT concat_ws(' ',
    pg_sequence_last_value('pgqueue.job_id_seq'), pg_sequence_last_value('pgqueue.job_pos_seq'),
    (SELECT concat_ws(' ', count(*), sum(id), sum(claim)) FROM pgqueue.job_running),
    (SELECT sum(t.n_tup_ins + t.n_tup_upd + t.n_tup_del) FROM pg_stat_user_tables t
     WHERE t.schemaname = 'pgqueue'
       AND t.relname !~ '^(worker|supervisor|duty|history_.*|limiter|ring|declaration)$'),
    (SELECT sum(t.n_tup_ins + t.n_tup_del) FROM pg_stat_user_tables t
     WHERE t.schemaname = 'pgqueue' AND t.relname IN ('worker', 'supervisor')));

-- name: activity_channels
-- Whether LISTEN is of use here: no pooler between us (it makes up the pid that it tells its clients), and no standby. And
-- the names of up to a hundred queues whose channels tell of new jobs.
SELECT pg_backend_pid() = %(pid)s::integer AND current_setting('transaction_read_only') = 'off',
    (SELECT coalesce(array_agg(name), '{}') FROM (
        SELECT queue AS name FROM pgqueue.depth WHERE queue IS NOT NULL
        UNION SELECT unnest(queues) FROM pgqueue.worker WHERE dead_at IS NULL
        ORDER BY name LIMIT 100) AS known);

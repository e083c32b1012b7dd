-- The leader folds what workers have appended into the history. Why each part counts once: the head of `history_fold.py`.

-- name: history_fold_lock
-- Take the right to fold, until this transaction ends. The statements after it ask for the setting. Without the row, or beside another
-- session that folds, they do nothing.
SELECT set_config('pgqueue.folds', 'on', true)
FROM (SELECT FROM pgqueue.duty WHERE name = 'history' FOR UPDATE SKIP LOCKED) AS mine;

-- name: history_fold_parts
-- Fold up to n parts, the oldest first: delete them, and append their sums to the minutes. Hours before `done_at` have been made already:
-- what belongs to them goes to these hours as well. Answers how many parts there were, and how many rows were appended.
WITH part AS MATERIALIZED (
    DELETE FROM pgqueue.history_part WHERE (writer, part) IN (
        SELECT writer, part FROM pgqueue.history_part WHERE current_setting('pgqueue.folds', true) = 'on'
        ORDER BY written_at, writer, part LIMIT %(n)s::integer)
    RETURNING at, written_at, counts, errors
), line AS MATERIALIZED (
    SELECT part.at, c.queue, c.task, c.started, c.completed, c.failed, c.retried, c.snoozed, c.cancelled, c.expired, c.skipped,
        c.interrupted, c.rescued, c.wait_seconds, c.run_seconds, c.wait, c.run
    FROM part CROSS JOIN LATERAL jsonb_to_recordset(part.counts) AS c (
        queue text, task text, started bigint, completed bigint, failed bigint, retried bigint, snoozed bigint, cancelled bigint,
        expired bigint, skipped bigint, interrupted bigint, rescued bigint, wait_seconds float8, run_seconds float8, wait bigint[],
        run bigint[])
), {{history_summed}}, minutes AS (
    INSERT INTO pgqueue.history_minute (bin, {{history_columns}})
    SELECT (SELECT bin FROM pgqueue.ring WHERE kind = 'minute'), at, queue, task, coalesce(started, 0), coalesce(completed, 0),
        coalesce(failed, 0), coalesce(retried, 0), coalesce(snoozed, 0), coalesce(cancelled, 0), coalesce(expired, 0),
        coalesce(skipped, 0), coalesce(interrupted, 0), coalesce(rescued, 0), coalesce(wait_seconds, 0), coalesce(run_seconds, 0), wait, run
    FROM summed
    RETURNING {{history_columns}}
), late AS (
    INSERT INTO pgqueue.history_hour (bin, {{history_columns}})
    SELECT (SELECT bin FROM pgqueue.ring WHERE kind = 'hour'), date_bin('1 hour', at, '2000-01-01 00:00:00+00'), queue, task,
        {{happenings}}, wait_seconds, run_seconds, wait, run
    FROM minutes WHERE at < (SELECT done_at FROM pgqueue.duty WHERE name = 'history')
), failure AS MATERIALIZED (
    SELECT f.fingerprint, f.queue, f.task, f.error_type, f.place, f.message, f.version_tag, f.count, f.ids,
        part.written_at - make_interval(secs => f.first) AS first_at, part.written_at - make_interval(secs => f.last) AS last_at
    FROM part CROSS JOIN LATERAL jsonb_to_recordset(part.errors) AS f (
        fingerprint text, queue text, task text, error_type text, place text, message text, version_tag text, count bigint, ids bigint[],
        first float8, last float8)
), newest AS MATERIALIZED (
    SELECT DISTINCT ON (fingerprint) fingerprint, queue, task, error_type, place, message, version_tag, ids
    FROM failure ORDER BY fingerprint, last_at DESC
), oldest AS MATERIALIZED (
    SELECT DISTINCT ON (fingerprint) fingerprint, version_tag AS first_version FROM failure ORDER BY fingerprint, first_at
), grouped AS (
    INSERT INTO pgqueue.error_group AS g (
        fingerprint, queue, task, error_type, place, message, version_tag, job_ids, first_version, first_at, last_at, count)
    SELECT newest.fingerprint, newest.queue, newest.task, newest.error_type, newest.place, newest.message, newest.version_tag,
        newest.ids, oldest.first_version, min(failure.first_at), max(failure.last_at), sum(failure.count)
    FROM newest JOIN oldest USING (fingerprint) JOIN failure USING (fingerprint)
    GROUP BY newest.fingerprint, newest.queue, newest.task, newest.error_type, newest.place, newest.message, newest.version_tag, newest.ids,
        oldest.first_version
    ON CONFLICT (fingerprint) DO UPDATE SET
        queue = excluded.queue, message = excluded.message, version_tag = excluded.version_tag, count = g.count + excluded.count,
        first_version = CASE WHEN excluded.first_at < g.first_at THEN excluded.first_version ELSE g.first_version END,
        first_at = least(g.first_at, excluded.first_at), last_at = greatest(g.last_at, excluded.last_at),
        job_ids = ARRAY(SELECT DISTINCT u.id FROM unnest(excluded.job_ids || g.job_ids) AS u (id) ORDER BY u.id DESC LIMIT %(ids)s::integer)
    RETURNING g.fingerprint
)
SELECT (SELECT count(*) FROM part), (SELECT count(*) FROM minutes), (SELECT count(*) FROM grouped);

-- name: history_fold_drop
-- Delete the oldest part: it cannot be folded.
DELETE FROM pgqueue.history_part WHERE (writer, part) IN (
    SELECT writer, part FROM pgqueue.history_part WHERE current_setting('pgqueue.folds', true) = 'on'
    ORDER BY written_at, writer, part LIMIT 1);

-- name: history_fold_depth
-- Note what table `depth` has: how many jobs each queue has in each state, as a row of the minute of that measurement. A minute that has
-- such rows gets no others. A measurement that is old, or of a time to come, is left out. Answers how many rows.
WITH newest AS MATERIALIZED (
    SELECT d.at, date_bin('1 minute', d.at, '2000-01-01 00:00:00+00') AS minute
    FROM (SELECT d.at FROM pgqueue.depth d ORDER BY d.at DESC LIMIT 1) AS d CROSS JOIN (SELECT pgqueue.now() AS now) AS clock
    WHERE current_setting('pgqueue.folds', true) = 'on' AND d.at BETWEEN clock.now - interval '5 minutes' AND clock.now + interval '1 second'
), wanted AS MATERIALIZED (
    SELECT newest.at, newest.minute FROM newest
    WHERE NOT EXISTS (SELECT FROM pgqueue.history_minute m WHERE m.at = newest.minute AND m.state IS NOT NULL)
), line AS MATERIALIZED (
    SELECT wanted.minute AS at, d.queue, d.state, sum(d.n)::bigint AS n, bool_and(d.exact) AS exact,
        extract(epoch FROM wanted.at - min(CASE WHEN d.state = 'blocked' THEN d.longest_blocked
                                                WHEN d.state = 'scheduled' AND d.queue = {{paused}} THEN NULL
                                                WHEN NOT d.reason IN ('unknown', 'paused', 'task_paused') THEN d.oldest END))::float8 AS oldest
    FROM wanted CROSS JOIN LATERAL (SELECT d.* FROM pgqueue.depth d WHERE d.at = wanted.at AND d.queue <> '') AS d
    GROUP BY wanted.at, wanted.minute, d.queue, d.state
), minutes AS (
    INSERT INTO pgqueue.history_minute (bin, at, queue, task, state, n, exact, oldest)
    SELECT (SELECT bin FROM pgqueue.ring WHERE kind = 'minute'), at, queue, '', state, n, exact, oldest FROM line WHERE n > 0
    RETURNING at, queue, state, n, exact, oldest
), late AS (
    INSERT INTO pgqueue.history_hour (bin, at, queue, task, state, n, exact, oldest)
    SELECT (SELECT bin FROM pgqueue.ring WHERE kind = 'hour'), date_bin('1 hour', at, '2000-01-01 00:00:00+00'), queue, '', state, n, exact, oldest
    FROM minutes WHERE at < (SELECT done_at FROM pgqueue.duty WHERE name = 'history')
)
SELECT count(*) FROM minutes;

-- name: history_fold_hours
-- Make the hours that have been over for ten minutes from their minutes, and note up to which hour that is done. What happened is added up;
-- of what was measured an hour has the largest number of jobs and the longest time. Answers how many rows.
WITH span AS MATERIALIZED (
    SELECT d.done_at AS since, date_bin('1 hour', pgqueue.now() - interval '10 minutes', '2000-01-01 00:00:00+00') AS upto
    FROM pgqueue.duty d WHERE d.name = 'history' AND current_setting('pgqueue.folds', true) = 'on'
), line AS MATERIALIZED (
    SELECT date_bin('1 hour', m.at, '2000-01-01 00:00:00+00') AS at, m.queue, m.task, {{happenings}}, wait_seconds, run_seconds, wait, run
    FROM pgqueue.history_minute m
    WHERE m.at >= (SELECT since FROM span) AND m.at < (SELECT upto FROM span) AND m.state IS NULL
), deepest AS (
    INSERT INTO pgqueue.history_hour (bin, at, queue, task, state, n, exact, oldest)
    SELECT (SELECT bin FROM pgqueue.ring WHERE kind = 'hour'), date_bin('1 hour', m.at, '2000-01-01 00:00:00+00'), m.queue, '', m.state,
        max(m.n), bool_and(m.exact), max(m.oldest)
    FROM pgqueue.history_minute m
    WHERE m.at >= (SELECT since FROM span) AND m.at < (SELECT upto FROM span) AND m.state IS NOT NULL
    GROUP BY 2, m.queue, m.state
    RETURNING 1
), {{history_summed}}, hours AS (
    INSERT INTO pgqueue.history_hour (bin, {{history_columns}})
    SELECT (SELECT bin FROM pgqueue.ring WHERE kind = 'hour'), {{history_columns}} FROM summed
    RETURNING 1
), noted AS (
    UPDATE pgqueue.duty d SET done_at = span.upto FROM span WHERE d.name = 'history' AND span.since < span.upto
    RETURNING 1
)
SELECT (SELECT count(*) FROM hours) + (SELECT count(*) FROM deepest), (SELECT count(*) FROM noted);

-- name: history_fold_forget
-- Forget the writers that have been silent for a day, the groups of errors that have not occurred for 30 days, and of more than n groups
-- those that occurred longest ago.
WITH silent AS (
    DELETE FROM pgqueue.history_writer WHERE written_at < (SELECT pgqueue.now()) - interval '1 day'
      AND current_setting('pgqueue.folds', true) = 'on' RETURNING 1
), old AS (
    DELETE FROM pgqueue.error_group WHERE current_setting('pgqueue.folds', true) = 'on' AND (
        last_at < (SELECT pgqueue.now()) - interval '30 days'
        OR fingerprint IN (SELECT g.fingerprint FROM pgqueue.error_group g ORDER BY g.last_at DESC, g.fingerprint OFFSET %(n)s::integer))
    RETURNING 1
)
SELECT (SELECT count(*) FROM silent), (SELECT count(*) FROM old);

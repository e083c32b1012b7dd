-- What a worker has counted goes into the history. One row for each minute in which something happened.

-- name: counters_clock
-- The time of the database, in seconds since 1970.
SELECT extract(epoch FROM pgqueue.now())::float8;

-- name: counters_append
-- Append one part of this writer. If its number is not higher than that of the last one, it is there already: it came twice because its
-- answer was lost. Its minute is the one in which it was `ago` seconds ago: the middle of the time that it covers. By the database's clock.
-- Answers the time, as `counters_clock`.
WITH mine AS (
    INSERT INTO pgqueue.history_writer AS w (writer, part, written_at)
    VALUES (%(writer)s::text::uuid, %(part)s::integer, pgqueue.now())
    ON CONFLICT (writer) DO UPDATE SET part = excluded.part, written_at = excluded.written_at WHERE w.part < excluded.part
    RETURNING w.writer, w.part, w.written_at
), appended AS (
    INSERT INTO pgqueue.history_part (writer, part, at, written_at, counts, errors)
    SELECT writer, part, date_bin('1 minute', written_at - make_interval(secs => %(ago)s::float8), '2000-01-01 00:00:00+00'), written_at, %(counts)s::text::jsonb,
        %(errors)s::text::jsonb
    FROM mine
)
SELECT extract(epoch FROM pgqueue.now())::float8;

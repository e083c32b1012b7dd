-- name: passed_over
-- The rows of these tasks in ranges that claims have passed, in order, `most` at most. Answers the number of the range
-- (from 0) and the position. Read-only, and without locks: it looks for locked rows. Each half states the condition of
-- its index.
SELECT passed.place, available.pos
FROM (SELECT l.queue, l.rank, l.keyed, l.low, l.high, l.number - 1 AS place
      FROM unnest(%(queues)s::text[], %(ranks)s::smallint[], %(keyed)s::boolean[], %(lows)s::bigint[], %(highs)s::bigint[])
           WITH ORDINALITY AS l (queue, rank, keyed, low, high, number)
      ORDER BY number) AS passed
CROSS JOIN LATERAL (
    (SELECT j.pos FROM pgqueue.job_available j
     WHERE NOT passed.keyed AND j.queue = passed.queue AND j.rank = passed.rank AND j.pos > passed.low AND j.pos <= passed.high
       AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NULL
       AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
     ORDER BY j.pos NULLS FIRST LIMIT %(most)s::integer)
    UNION ALL
    (SELECT j.pos FROM pgqueue.job_available j
     WHERE passed.keyed AND j.queue = passed.queue AND j.rank = passed.rank AND j.pos > passed.low AND j.pos <= passed.high
       AND coalesce(j.lock_key, j.limit_key, j.rate_key) IS NOT NULL
       AND (j.task IN (SELECT unnest(%(tasks)s::text[]))) IS TRUE
     ORDER BY j.pos NULLS FIRST LIMIT %(most)s::integer)
) AS available
LIMIT %(most)s::integer;

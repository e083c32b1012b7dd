-- What a worker that does not lead knows of what is due (see leader/lead_watch.py).

-- name: lead_watch_next
-- Seconds until the next job is due, and until the next tick; NULL if there is none. Not more than 0 if one is due and the leader has not
-- done it yet. What has been due for a minute is left out: its row is locked, or refused.
SELECT extract(epoch FROM (SELECT j.run_at FROM pgqueue.job_scheduled j WHERE j.run_at > clock.past ORDER BY j.run_at LIMIT 1) - clock.now)::float8,
       extract(epoch FROM (SELECT min(s.next_at) FROM pgqueue.schedule s
                           WHERE s.next_at > clock.past AND s.next_at < timestamptz 'infinity' AND s.paused_at IS NULL AND s.refused IS NULL)
                          - clock.now)::float8
FROM (SELECT now, now - interval '60 seconds' AS past FROM (SELECT pgqueue.now() AS now) AS one OFFSET 0) AS clock;

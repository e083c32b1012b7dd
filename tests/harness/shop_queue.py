"""The queue of a shop, for tests that look at pages: jobs in every state, workers, limits, schedules,
    what happened.

All of it is written as rows. So nothing in it says on which machine it was made,
    and no worker changes it meanwhile.
"""

from __future__ import annotations

import psycopg

import pgqueue
from pgqueue import Cron

WORKERS = """
INSERT INTO pgqueue.supervisor (host, pid, size, state) VALUES ('worker-1', 4100, 2, 'running'), ('worker-2',
    3980, 1, 'running');
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, tasks, started_at,
    beat_at, rss, supervisor_id)
SELECT '1 hour', 4100 + n, 10, CASE WHEN n < 3 THEN 'worker-1' ELSE 'worker-2' END, '2026.11.2',
       CASE WHEN n < 3 THEN ARRAY['default', 'mail'] ELSE ARRAY['images', 'reports'] END, 'running',
       ARRAY['mail.send_receipt', 'mail.newsletter', 'cards.charge', 'orders.ship', 'images.thumbnail',
    'reports.monthly'],
       now() - interval '25 minutes', now(), 88080384 + n * 4194304, CASE WHEN n < 3 THEN 1 ELSE 2 END
FROM generate_series(1, 3) AS n;
"""
WAITING = """
INSERT INTO pgqueue.job (task, queue, args, enqueued_at)
SELECT 'mail.newsletter', 'mail', jsonb_build_object('customer_id', 2000 + n), now() - n * interval '2 seconds'
FROM generate_series(1, 40) AS n;
INSERT INTO pgqueue.job (task, queue, args, state, run_at, attempt, max_attempts)
SELECT 'cards.charge', 'default', jsonb_build_object('order_id', 3000 + n, 'amount', '19.90'), 'scheduled',
       now() + n * interval '5 minutes', CASE WHEN n % 2 = 0 THEN 2 ELSE 0 END, 5
FROM generate_series(1, 8) AS n;
INSERT INTO pgqueue.job_blocked (state, task, queue, args, lock_key, key)
SELECT 'blocked', 'orders.ship', 'default', jsonb_build_object('order_id', 3100 + n), 'warehouse:north',
    'lock:warehouse:north'
FROM generate_series(1, 3) AS n;
"""
RUNNING = """
WITH made AS (
    INSERT INTO pgqueue.job_running (state, task, queue, args, worker_id, claim, started_at, lock_key, holds,
    attempt)
    SELECT 'running', task, queue, args::jsonb, worker, 1, now() - ago::interval, lock_key, lock_key IS NOT NULL, 1
    FROM (VALUES ('orders.ship', 'default', '{"order_id": 3100}', 1, '42 seconds', 'warehouse:north'),
                 ('images.thumbnail', 'images', '{"image": "cover.png", "width": 640}', 3, '2 seconds', NULL),
                 ('reports.monthly', 'reports', '{"month": "2026-10"}', 3, '4 minutes', NULL))
        AS given (task, queue, args, worker, ago, lock_key)
    RETURNING id, worker_id
)
UPDATE pgqueue.worker w SET running = ARRAY(SELECT id FROM made WHERE worker_id = w.id);
"""
ENDED = """
INSERT INTO pgqueue.job_done (state, task, queue, args, result, started_at, finished_at, enqueued_at, bin,
    attempt, worker_id)
SELECT 'completed', task, queue, jsonb_build_object('order_id', 2900 + n), '"sent"',
    now() - n * interval '20 seconds' - interval '1 second',
       now() - n * interval '20 seconds', now() - n * interval '20 seconds' - interval '2 seconds',
       (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), 1, 1 + n % 3
FROM generate_series(1, 60) AS n,
     LATERAL (SELECT (ARRAY['mail.send_receipt', 'images.thumbnail', 'orders.ship'])[1 + n % 3] AS task,
                     (ARRAY['mail', 'images', 'default'])[1 + n % 3] AS queue) AS of;
INSERT INTO pgqueue.job_dead (state, task, queue, args, reason, started_at, finished_at, enqueued_at, bin,
    attempt, max_attempts, worker_id)
SELECT CASE WHEN n < 10 THEN 'failed' ELSE 'cancelled' END, 'cards.charge', 'default',
       jsonb_build_object('order_id', 2800 + n, 'amount', '24.50', 'card', jsonb_build_object('token', 'tok_91x7')),
       CASE WHEN n < 10 THEN 'error' ELSE 'cancelled by hand' END,
    now() - n * interval '3 minutes' - interval '1 second',
       now() - n * interval '3 minutes', now() - n * interval '9 minutes',
    (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), 3, 3, 1
FROM generate_series(1, 12) AS n;
INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, outcome,
    error_type, message, traceback, version_tag)
SELECT j.id, j.enqueued_at, 1, n, 1, j.finished_at - (3 - n) * interval '90 seconds' - interval '1.4 seconds',
       j.finished_at - (3 - n) * interval '90 seconds', (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'),
       CASE WHEN n < 3 THEN 'retry' ELSE 'error' END, 'CardDeclined', 'the bank has declined the card',
       E'Traceback (most recent call last):\\n'
       '  File "/srv/shop/cards.py", line 41, in charge\\n    bank.debit(card, amount)\\n'
       '  File "/srv/shop/bank.py", line 17, in debit\\n    raise CardDeclined(answer.reason)\\n'
       'shop.bank.CardDeclined: the bank has declined the card', '2026.11.2'
FROM pgqueue.job_dead j, generate_series(1, 3) AS n WHERE j.state = 'failed';
INSERT INTO pgqueue.error_group VALUES
    ('a1', 'default', 'cards.charge', 'CardDeclined', 'shop.bank.debit', 'the bank has declined the card',
    now() - interval '5 hours',
     now() - interval '3 minutes', 27, ARRAY(SELECT id FROM pgqueue.job_dead
    WHERE state = 'failed' ORDER BY finished_at DESC LIMIT 5),
    '2026.11.2'),
    ('b2', 'mail', 'mail.send_receipt', 'SMTPServerDisconnected', 'shop.mail.send',
    'Connection unexpectedly closed',
     now() - interval '2 days', now() - interval '40 minutes', 4, '{}', '2026.11.1');
"""
SETTINGS = """
INSERT INTO pgqueue.key_limit (name, n, declared) VALUES ('printer', 2, 2), ('warehouse', 5, 5);
INSERT INTO pgqueue.queue (name, paused_at, paused_by) VALUES ('reports', now() - interval '12 minutes', 'ann');
INSERT INTO pgqueue.audit (at, actor, action, target, count) VALUES
    (now() - interval '35 minutes', 'ann', 'retry', '{"states": ["failed"]}', 14),
    (now() - interval '12 minutes', 'ann', 'pause', '{"queue": "reports"}', 1);
INSERT INTO pgqueue.bulk (actor, action, target, states, queue, up_to, after, changed, started_at, ended_at, counts)
SELECT 'ann', 'retry', '{"states": ["failed"], "queue": "mail"}', '{failed}', 'mail', 100, 100, 14,
    now() - interval '35 minutes',
       now() - interval '34 minutes', '{"retried": 14}';
"""
HAPPENED = """
INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, failed, retried, wait, run)
SELECT date_bin('1 minute', now() - n * interval '1 minute', '2000-01-01 00:00+00'),
       (SELECT bin FROM pgqueue.ring WHERE kind = 'minute'), queue, task, c + f + 1, c, f,
    CASE WHEN n % 4 = 0 THEN 2 ELSE 0 END,
       array_fill(0, ARRAY[12 + n / 12]) || ARRAY[c, f + 1] || array_fill(0, ARRAY[35 - n / 12]),
       array_fill(0, ARRAY[15]) || ARRAY[c, f + 1] || array_fill(0, ARRAY[32])
FROM generate_series(3, 59) AS n,
     (VALUES ('mail', 'mail.send_receipt', 40), ('default', 'cards.charge', 12)) AS of (queue, task, base),
     LATERAL (SELECT base + (base * (1 + sin(n / 7.0)))::int AS c,
                     CASE WHEN task = 'cards.charge' AND n % 9 = 0 THEN 3 ELSE 0 END AS f) AS made;
INSERT INTO pgqueue.history_minute (at, bin, queue, task, state, n, exact, oldest)
SELECT date_bin('1 minute', now() - n * interval '1 minute', '2000-01-01 00:00+00'),
       (SELECT bin FROM pgqueue.ring WHERE kind = 'minute'), 'mail', '', 'available',
       30 + (25 * (1 + cos(n / 9.0)))::int, true, 4 + n % 7
FROM generate_series(3, 59) AS n;
"""


def fill(dsn: str) -> None:
    """Write all of it into a migrated database."""
    with psycopg.connect(dsn) as conn:
        for part in (WORKERS, WAITING, RUNNING, ENDED, SETTINGS, HAPPENED):
            conn.execute(part.encode())
        pgqueue.schedules.add(conn, "monthly reports", Cron("0 6 1 * *", tz="Europe/Berlin"), "reports.monthly")
        pgqueue.schedules.add(conn, "newsletter", Cron("30 9 * * mon", tz="Europe/Berlin"), "mail.newsletter")

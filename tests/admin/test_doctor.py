"""`doctor`: every cause is provoked for real, and exactly that one is named; healthy queues have no finding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import notify_queues
import psycopg
import pytest
from commands import pgqueue
from servers import VERSION, embedded_server
from workers import Eyes, work

import pgqueue as api
from pgqueue.admin import doctor, lag
from pgqueue.database import migrations
from pgqueue.manual import Symptom, at_night

Conn = psycopg.Connection[Any]
Provoke = Callable[[str, Eyes, ExitStack, pytest.MonkeyPatch], None]
ROOT = Path(__file__).parents[2]
NOTIFY_PAGES = {"max_notify_queue_pages": str(notify_queues.PAGES)} if int(VERSION) >= notify_queues.FIRST else {}


def findings(dsn: str) -> list[doctor.Finding]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        return list(api.doctor(conn).findings)


def worker(eyes: Eyes, *, version: str = "1", tasks: str = "{t}", started: str = "1 h", running: int = 0) -> None:
    eyes.do(
        "INSERT INTO pgqueue.worker "
        "(lease, pid, concurrency, host, version_tag, queues, state, tasks, started_at, beat_at, running) "
        "VALUES ('1 h', 1, 2, 'h', %s, '{default}', 'running', %s, now() - %s::interval, now(), "
        "        ARRAY(SELECT generate_series(1, %s)::bigint))",
        version,
        tasks,
        started,
        running,
    )


@contextmanager
def leading(dsn: str, eyes: Eyes) -> Iterator[None]:
    """A session holds the leader's lock, and has just measured, as that of a live worker does."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SELECT pg_advisory_lock(hashtextextended('pgqueue.leader', 7))")
        measured(eyes)
        yield


def measured(eyes: Eyes, **columns: Any) -> None:
    eyes.do(
        "INSERT INTO pgqueue.depth (at, next_at, queue, state, reason, n, exact, longest_blocked) "
        "VALUES (now(), now() + interval '100 s', 'default', 'blocked', 'lock', 1, true, now() - %s::interval)",
        columns.get("blocked"),
    )


def opened(dsn: str, stack: ExitStack, **options: Any) -> Conn:
    return stack.enter_context(psycopg.connect(dsn, **options))


# Each cause ----------------------------------------------------------------------------------------------------------


def a_snapshot(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "OLD_SECONDS", 0.0)
    conn = opened(dsn, stack, application_name="report")
    conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    conn.execute("SELECT 'my secret'::text, $x$another one$x$")


def a_slot(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "OLD_SECONDS", 0.0)
    eyes.do("SELECT pg_create_physical_replication_slot('doctor_slot', true)")
    stack.callback(lambda: eyes.do("SELECT pg_drop_replication_slot('doctor_slot')"))


def dead_rows(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "VACUUM_SECONDS", 0.0)
    eyes.do("ALTER TABLE pgqueue.limiter SET (autovacuum_enabled = off)")
    eyes.do("INSERT INTO pgqueue.limiter SELECT 'k' || g, now(), 1 FROM generate_series(1, 100001) g")
    eyes.do("DELETE FROM pgqueue.limiter")
    eyes.do("SELECT pg_stat_force_next_flush()")


def an_invalid_index(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    eyes.do("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'pgqueue.job_blocked_rate_suspects'::regclass")


def a_missing_index(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    eyes.do("DROP INDEX pgqueue.job_running_limit")


def sequences_behind(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    worker(eyes)
    stack.enter_context(leading(dsn, eyes))
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 't' FROM generate_series(1, 5)")
    eyes.do("SELECT setval('pgqueue.job_id_seq', 2)")


def an_older_schema(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    eyes.do("DELETE FROM pgqueue.migration WHERE version = (SELECT max(version) FROM pgqueue.migration)")


def a_newer_schema(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    eyes.do("INSERT INTO pgqueue.migration (version, name, breaking) VALUES (9000, 'later', false)")


def another_history(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    eyes.do("UPDATE pgqueue.migration SET name = 'initial' WHERE version = 1")


def few_connections(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    [(most, used)] = eyes.all(
        "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int, "
        "(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')"
    )
    patch.setattr(doctor, "CONNECTIONS_SHARE", (used + 6) / most)
    for _ in range(8):
        opened(dsn, stack)


def several_versions(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.enter_context(leading(dsn, eyes))
    worker(eyes)
    worker(eyes, version="2")


def no_leader(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    worker(eyes)
    measured(eyes)


def no_measurement(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.enter_context(leading(dsn, eyes))
    worker(eyes)
    eyes.do("DELETE FROM pgqueue.depth")


def an_orphan(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    eyes.do(
        "INSERT INTO pgqueue.schedule (name, line, task, declared_at) "
        "VALUES ('nightly', '0 3 * * *', 't', now() - interval '1 h')"
    )


def an_undeclared_limit(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, state, limit_key, key) VALUES ('t', 'blocked', 'typo', 'limit:typo')")


def an_unserved_queue(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    waiting(eyes, 1, "nobody", seconds=31)


def overdue_jobs_and_no_worker(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    late(eyes, 31)


def a_dead_worker_with_jobs(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    dies(eyes, 46)


def blocked_jobs_and_no_worker(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    blocked(eyes, 31)


def a_worker_that_is_gone_since_the_measurement(
    dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch
) -> None:
    measured_before(eyes)


def late(eyes: Eyes, seconds: float, queue: str = "default") -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, queue, state, run_at) "
        "VALUES ('t', %s, 'scheduled', now() - make_interval(secs => %s))",
        queue, seconds,
    )  # fmt: skip


def dies(eyes: Eyes, seconds: float) -> None:
    """A worker with a lease of 15 s that has a job has given no sign of life for so long."""
    worker(eyes)
    eyes.do("UPDATE pgqueue.worker SET lease = '15 s', beat_at = now() - make_interval(secs => %s)", seconds)
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at) "
        "SELECT 't', 'running', id, 1, now() - interval '1 h' FROM pgqueue.worker"
    )


def blocked(eyes: Eyes, seconds: float) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, lock_key, key, enqueued_at, run_at) "
        "SELECT 't', 'blocked', 'k', 'lock:k', at, at FROM (SELECT now() - make_interval(secs => %s) AS at) AS t",
        seconds,
    )


def measured_before(eyes: Eyes) -> None:
    """Large tables, and numbers of a time when a worker served the queue."""
    eyes.do("INSERT INTO pgqueue.job (task, args) SELECT 'x', to_jsonb(repeat('x', 900)) FROM generate_series(1, 600)")
    eyes.do("DELETE FROM pgqueue.job_available")
    assert eyes.one("SELECT pg_relation_size('pgqueue.job_available')") > 524_288
    eyes.do(
        "INSERT INTO pgqueue.depth (at, next_at, queue, state, reason, n, exact, oldest) "
        "VALUES (now() - interval '60 s', now() + interval '60 s', 'default', 'available', 'slot', 7, true, "
        "now() - interval '2 min')"
    )


def an_unknown_task(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.enter_context(leading(dsn, eyes))
    worker(eyes)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('typo')")


def a_silent_relay(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    """One that works, one that runs now and then, one that works no more, and one whose application is gone."""
    for name, ago in (("works", "140 s"), ("once an hour", "55 min"), ("db/shop", "61 min"), ("gone", "8 days")):
        eyes.do(
            "INSERT INTO pgqueue.relay_fence (source, epoch, name, waiting, refused, reported_at) "
            "VALUES (gen_random_uuid(), 1, %s, 0, 0, now() - %s::interval)",
            name, ago,
        )  # fmt: skip


def a_held_fence(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lag, "HELD_SECONDS", 0.0)
    eyes.do("INSERT INTO pgqueue.relay_fence (source, epoch, name) VALUES (gen_random_uuid(), 1, 'db/shop')")
    opened(dsn, stack).execute("SELECT FROM pgqueue.relay_fence FOR UPDATE")


def a_stuck_job(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.enter_context(leading(dsn, eyes))
    worker(eyes)
    measured(eyes, blocked="40 s")


def overdue_jobs_although_a_worker_lives(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.enter_context(leading(dsn, eyes))
    worker(eyes)
    late(eyes, 61)


def noted(eyes: Eyes, numbers: Iterable[int], *, queue: str = "default", state: str = "available") -> None:
    """What the history has of a queue: a number for each two minutes, the last one of now."""
    for ago, n in enumerate(reversed([*numbers])):
        eyes.do(
            "INSERT INTO pgqueue.history_minute (at, bin, queue, task, state, n, exact) VALUES "
            "(date_bin('1 minute', now() - make_interval(mins => %s), '2000-01-01 00:00+00'), 0, %s, '', %s, %s, true)",
            2 * ago, queue, state, n,
        )  # fmt: skip


def waiting(eyes: Eyes, n: int = 300, queue: str = "default", task: str = "t", seconds: float = 60) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, queue, enqueued_at, run_at) SELECT %s, %s, t.at, t.at "
        "FROM generate_series(1, %s), (SELECT now() - make_interval(secs => %s) AS at) AS t",
        task, queue, n, seconds,
    )  # fmt: skip


def served(dsn: str, eyes: Eyes, stack: ExitStack) -> None:
    """A healthy queue: a worker whose slots are busy, which leads."""
    worker(eyes, running=2)
    stack.enter_context(leading(dsn, eyes))


def growth(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    served(dsn, eyes, stack)
    waiting(eyes)
    noted(eyes, range(0, 20 * 30, 20))  # for an hour
    noted(eyes, [7] * 30, state="blocked")


def a_duty_that_fails(dsn: str, eyes: Eyes, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    """For longer than a minute: a lock for seconds is no finding."""
    served(dsn, eyes, stack)
    eyes.do(
        "UPDATE pgqueue.worker SET duties = %s::jsonb",
        '[["rings", 5, 0.1], ["record", 200, 0.1, "permission denied for table audit", 5, 180],'
        ' ["depth", 9, 0.1, "no", 8, 50], ["history", 9, 0.1, "no", 500, null]]',
    )


CAUSES: dict[str, tuple[Provoke, str, str]] = {
    "a duty that fails": (a_duty_that_fails, "duty", "record fails each time: permission denied for table audit"),
    "a snapshot": (a_snapshot, "snapshot", "report"),
    "a slot": (a_slot, "slot", "doctor_slot"),
    "dead rows": (dead_rows, "vacuum", "limiter"),
    "an invalid index": (an_invalid_index, "index", "job_blocked_rate_suspects"),
    "a missing index": (a_missing_index, "index", "job_running_limit"),
    "sequences behind": (sequences_behind, "sequences", "5"),
    "an older schema": (an_older_schema, "schema", "needs"),
    "a newer schema": (a_newer_schema, "schema", "9000"),
    "another history": (another_history, "schema", "not of this pgqueue: migration 1 is 0001_initial there"),
    "few connections": (few_connections, "connections", "connections"),
    "several versions": (several_versions, "versions", "1 of 2"),
    "no leader": (no_leader, "listen", "leader's lock"),
    "no measurement": (no_measurement, "leader", "measured"),
    "an orphan": (an_orphan, "schedule", "nightly"),
    "an undeclared limit": (an_undeclared_limit, "undeclared", "typo"),
    "an unserved queue": (an_unserved_queue, "unserved", "nobody"),
    "overdue jobs and no worker": (
        overdue_jobs_and_no_worker,
        "unserved",
        "scheduled jobs are overdue in queue default",
    ),
    "a dead worker with jobs": (a_dead_worker_with_jobs, "unserved", "1 job is left by a dead worker in queue default"),
    "blocked jobs and no worker": (blocked_jobs_and_no_worker, "unserved", "1 job waits in queue default"),
    "a worker that is gone since the measurement": (
        a_worker_that_is_gone_since_the_measurement,
        "unserved",
        "7 jobs wait in queue default",
    ),
    "an unknown task": (an_unknown_task, "unknown", "typo"),
    "a silent relay": (a_silent_relay, "relay", "db/shop"),
    "a held fence": (a_held_fence, "fence", "holds the fence of outbox db/shop"),
    "overdue jobs although a worker lives": (overdue_jobs_although_a_worker_lives, "overdue", "of queue default are"),
    "a stuck job": (a_stuck_job, "stuck", "default"),
    "growth": (growth, "growth", "queue default grows: 300 jobs wait"),
}


@pytest.mark.promise("F83")
@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named_and_no_other(cause: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    provoke, name, word = CAUSES[cause]
    with ExitStack() as stack:
        provoke(dsn, eyes, stack, monkeypatch)
        found = [each for each in findings(dsn) if not foreign(each)]
        assert [(each.name, word in each.what) for each in found] == [(name, True)], found
        [finding] = found
        assert finding.severity in doctor.SEVERITIES and finding.todo
        assert there(finding.page), finding.page


def foreign(finding: doctor.Finding) -> bool:
    """Whether the finding is about a session of the harness: with no age at all, its looks and copies count."""
    return finding.name == "snapshot" and "report" not in finding.what


def there(page: str) -> bool:
    file, _, anchor = page.partition("#")
    heads = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return not anchor or anchor in anchors


# Healthy -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F83")
def test_an_idle_queue_has_no_finding_nor_one_that_is_empty(dsn: str, eyes: Eyes) -> None:
    assert findings(dsn) == []
    with leading(dsn, eyes):
        worker(eyes)
        assert findings(dsn) == []


SLOTS: dict[str, tuple[str, int, int, bool]] = {
    # free slots by queue at the last heartbeat, how many jobs run, lost slots; whether a slot is free for the queue
    "one is free for it": ("{1,0}", 0, 0, True),
    "only another queue has one": ("{0,5}", 0, 0, False),
    "it has one, though as many run as are common": ("{1,0}", 2, 0, True),
    "its worker has not said so yet": ("{}", 1, 0, True),
    "its worker has not said so yet, and is full": ("{}", 2, 0, False),
    "its worker has not said so yet, and the free one is lost": ("{}", 1, 1, False),
}


@pytest.mark.promise("F83")
@pytest.mark.parametrize("case", SLOTS)
def test_a_slot_is_free_for_a_queue_only_if_the_queue_may_fill_it(case: str, dsn: str, eyes: Eyes) -> None:
    slots, running, lost, free = SLOTS[case]
    with leading(dsn, eyes):
        worker(eyes, running=running)
        measured(eyes, blocked="40 s")
        eyes.do("UPDATE pgqueue.worker SET queues = '{default,mail}', free = %s::integer[], lost = %s", slots, lost)
        assert [each.name for each in findings(dsn)] == (["stuck"] if free else [])


KNOWN = {
    # the tasks of the worker with a free slot; whether it may take the job that is stuck
    "it knows another task": ("{u}", False),
    "it knows the task": ("{u,t}", True),
}


@pytest.mark.promise("F83")
@pytest.mark.parametrize("case", KNOWN)
def test_a_job_is_stuck_only_if_the_worker_with_the_free_slot_knows_its_task(case: str, dsn: str, eyes: Eyes) -> None:
    """The worker that knows it is full. A job of the other task waits, too, for a lock that is held."""
    tasks, stuck = KNOWN[case]
    with leading(dsn, eyes):
        worker(eyes, running=2)
        measured(eyes, blocked="40 s")
        blocked(eyes, 40)
        worker(eyes)
        eyes.do("UPDATE pgqueue.worker SET tasks = %s WHERE id = 2", tasks)
        eyes.do(
            "INSERT INTO pgqueue.job (task, state, lock_key, key, holds, worker_id, claim, started_at) "
            "VALUES ('u', 'running', 'held', NULL, true, 1, 1, now()), "
            "       ('u', 'blocked', 'held', 'lock:held', false, NULL, NULL, NULL)"
        )
        assert [each.name for each in findings(dsn)] == (["stuck"] if stuck else [])


@pytest.mark.promise("F83")
def test_due_jobs_are_overdue_only_after_a_minute_and_where_a_worker_serves(dsn: str, eyes: Eyes) -> None:
    with leading(dsn, eyes):
        worker(eyes)
        late(eyes, 50)
        late(eyes, -3600)
        assert findings(dsn) == []
        late(eyes, 70, "elsewhere")
        assert [each.name for each in findings(dsn)] == ["unserved"]
        late(eyes, 80)
        [finding] = [each for each in findings(dsn) if each.name != "unserved"]
        assert (finding.name, finding.severity) == ("overdue", "warning")
        assert finding.seconds is not None and 80 <= finding.seconds < 200


@pytest.mark.promise("F83")
def test_jobs_that_a_worker_may_be_about_to_take_are_no_finding(dsn: str, eyes: Eyes) -> None:
    """They were enqueued, or became due, a moment ago; their worker is just being replaced, or ends what it has."""
    waiting(eyes, 2, seconds=20)
    late(eyes, 20, "later")
    late(eyes, -3600, "tomorrow")
    blocked(eyes, 20)
    assert findings(dsn) == []
    dies(eyes, 20)
    eyes.do("UPDATE pgqueue.worker SET state = 'quiet'")
    assert findings(dsn) == []


@pytest.mark.promise("F83")
def test_jobs_of_a_paused_queue_or_task_want_no_worker(dsn: str, eyes: Eyes) -> None:
    waiting(eyes, 2)
    late(eyes, 60)
    waiting(eyes, 2, "other", "paused")
    eyes.do("INSERT INTO pgqueue.queue VALUES ('default', now())")
    eyes.do("INSERT INTO pgqueue.paused_task VALUES ('paused', now())")
    assert findings(dsn) == []


@pytest.mark.promise("F83")
def test_a_worker_of_another_queue_only_is_not_enough(dsn: str, eyes: Eyes) -> None:
    with leading(dsn, eyes):
        worker(eyes)
        waiting(eyes, 3, "mail", seconds=90)
        [finding] = findings(dsn)
        assert finding.what == "3 jobs wait in queue mail, which no live worker serves"
        assert finding.todo == "start a worker with -q mail" and finding.severity == "critical"
        assert finding.seconds is not None and 90 <= finding.seconds < 900


@pytest.mark.promise("F83")
def test_dead_workers_do_not_hide_the_one_that_lives(dsn: str, eyes: Eyes) -> None:
    """Rows of dead workers are kept for an hour: a process that crashes at its start, again and again, leaves many."""
    with leading(dsn, eyes):
        worker(eyes)
        eyes.do(
            "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, beat_at, dead_at) "
            "SELECT '15 s', 1, 2, 'h', '1', '{default}', 'stopped', now(), now() FROM generate_series(1, 1001)"
        )
        waiting(eyes, 2)
        assert findings(dsn) == []


@pytest.mark.promise("F83")
def test_a_worker_that_serves_the_queue_again_ends_the_finding(dsn: str, eyes: Eyes) -> None:
    """Even if the measurement is of the time before."""
    measured_before(eyes)
    eyes.do("UPDATE pgqueue.depth SET reason = 'unserved'")
    assert [each.name for each in findings(dsn)] == ["unserved"]
    worker(eyes, started="1 s")
    assert findings(dsn) == []


@pytest.mark.promise("F83")
def test_a_busy_queue_has_no_finding(dsn: str, eyes: Eyes) -> None:
    """All slots are busy, jobs wait for them, for keys that others hold, for their time and their next attempt."""
    with leading(dsn, eyes):
        worker(eyes, running=2)
        worker(eyes, version="2", started="1 min", running=2)  # a deploy
        measured(eyes, blocked="40 s")  # its key has room, but no slot is free
        for columns in (
            "task) SELECT 't' FROM generate_series(1, 100) AS g (n",
            "task, state, run_at, attempt) "
            "SELECT 't', 'scheduled', now() + interval '1 min', 1 FROM generate_series(1, 9",
        ):
            eyes.do(f"INSERT INTO pgqueue.job ({columns})")
        eyes.do(
            "INSERT INTO pgqueue.job (task, state, lock_key, holds, worker_id, claim, started_at) "
            "VALUES ('t', 'running', 'k', true, 1, 1, now())"
        )
        eyes.do("INSERT INTO pgqueue.job (task, state, lock_key, key) VALUES ('t', 'blocked', 'k', 'lock:k')")
        assert findings(dsn) == []
        with psycopg.connect(dsn, autocommit=True) as conn:
            reasons = {(each.state, each.reason): each.jobs.n for each in api.doctor(conn).reasons}
        assert reasons == {
            ("available", "slot"): 100,
            ("blocked", "lock"): 1,
            ("running", ""): 1,
            ("scheduled", "retry"): 9,
        }


SHAPES: dict[str, Iterable[int]] = {
    "steady": [500, 520, 490, 510, 505] * 8,
    "a burst that drains": [0] * 20 + [100_000 - 5_000 * n for n in range(20)],
    "a burst that goes on": [0] * 30 + [10_000 * n for n in range(10)],
    "bursts": [0, 400, 200, 0] * 10,
    "a burst each ten minutes, each larger": [0, 100, 0, 0, 0, 0, 300, 0, 0, 0, 0, 900, 0, 0, 0],
    "a backlog that drains": range(40_000, 0, -1_000),
    "slow growth of a few": range(40),
    "it has grown, and drains": [*range(0, 3_000, 100), *range(3_000, 2_500, -100)],
    "nothing was measured for long": [0, 500, 1_000],
}


@pytest.mark.promise("F98")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_queue_that_drains_or_stays_has_no_finding(shape: str, dsn: str, eyes: Eyes) -> None:
    with ExitStack() as stack:
        served(dsn, eyes, stack)
        waiting(eyes)
        noted(eyes, SHAPES[shape])
        assert findings(dsn) == []


@pytest.mark.promise("F98")
def test_growth_says_since_when_and_from_how_many(dsn: str, eyes: Eyes) -> None:
    with ExitStack() as stack:
        served(dsn, eyes, stack)
        waiting(eyes)
        noted(eyes, [*([50] * 20), *range(60, 60 + 20 * 18, 20)])  # since 36 minutes
        [finding] = findings(dsn)
        assert finding.seconds in (1800.0, 2400.0) and finding.severity == "warning"
        assert re.search(r"300 jobs wait, \d+ did (30|40) minutes ago", finding.what) and "slots" in finding.todo


@pytest.mark.promise("F98")
def test_growth_that_a_pause_or_another_finding_explains_is_not_named(dsn: str, eyes: Eyes) -> None:
    with ExitStack() as stack:
        served(dsn, eyes, stack)
        for queue in ("default", "paused", "unserved"):
            noted(eyes, range(0, 20 * 30, 20), queue=queue)
            waiting(eyes, queue=queue, task="u" if queue == "unserved" else "t")
        eyes.do("INSERT INTO pgqueue.queue VALUES ('paused', now())")
        eyes.do("INSERT INTO pgqueue.paused_task VALUES ('t', now())")
        assert [each.name for each in findings(dsn)] == ["unserved"]


@pytest.mark.promise("F98")
def test_a_queue_that_grows_by_a_task_that_no_worker_knows_is_no_want_of_slots(dsn: str, eyes: Eyes) -> None:
    with ExitStack() as stack:
        served(dsn, eyes, stack)
        noted(eyes, range(0, 20 * 30, 20))
        eyes.do("INSERT INTO pgqueue.job (task) SELECT 'typo' FROM generate_series(1, 300)")
        assert [each.name for each in findings(dsn)] == ["unknown"]


@pytest.mark.promise("F99")
@pytest.mark.parametrize("number", [20, 21, 2_000])
def test_of_many_findings_of_a_kind_the_worst_are_listed_and_the_others_counted(
    dsn: str, eyes: Eyes, number: int
) -> None:
    """Naive is a finding for each: 24,005 lines for 10,000 names of tasks that were made from data."""
    with ExitStack() as stack:
        served(dsn, eyes, stack)
        eyes.do("INSERT INTO pgqueue.job (task) SELECT 'typo.' || g FROM generate_series(1, %s) AS g", number)
        eyes.do("INSERT INTO pgqueue.job (task) SELECT 'worst' FROM generate_series(1, 3)")
        found = findings(dsn)
    assert {each.name for each in found} == {"unknown"} and "3 jobs wait in queue default for task worst" in found[
        0
    ].what
    if number == 2_000:
        assert len(found) == 21
    else:
        assert len(found) == 21 and (number == 20 or found[-1].what == "2 more findings of this kind are not listed")
        assert number == 21 or found[-1].what == "1 more finding of this kind is not listed"


@pytest.mark.promise("F99")
@pytest.mark.parametrize("listens", [False, True])
def test_where_listen_is_off_on_purpose_no_leader_is_missed(dsn: str, eyes: Eyes, listens: bool) -> None:
    worker(eyes)
    measured(eyes)
    eyes.do("UPDATE pgqueue.worker SET listens = %s", listens)
    assert [each.name for each in findings(dsn)] == (["listen"] if listens else [])


@pytest.mark.promise("F99")
async def test_a_worker_says_whether_it_listens(dsn: str, eyes: Eyes) -> None:
    for listen_dsn, says in (("off", False), (dsn, True)):
        async with work(dsn, listen_dsn=listen_dsn):
            assert eyes.one("SELECT listens FROM pgqueue.worker ORDER BY id DESC LIMIT 1") is says


SEQUENCES = {
    "job_id_seq": "INSERT INTO pgqueue.job (task) VALUES ('t'), ('t')",
    "job_pos_seq": "INSERT INTO pgqueue.job (task) VALUES ('t'), ('t')",
    "worker_id_seq": (
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state) "
        "SELECT '1 h', 1, 1, 'h', '1', '{default}', 'running' FROM generate_series(1, 2)"
    ),
    "bulk_id_seq": (
        "INSERT INTO pgqueue.bulk (actor, action, target, states, queue, up_to) "
        "SELECT 'a', 'discard', '{}', '{failed}', 'q', 1 FROM generate_series(1, 2)"
    ),
    "job_hold_seq": (
        "INSERT INTO pgqueue.job (task, state, lock_key, holds, hold_pos, worker_id, claim, started_at) "
        "SELECT 't', 'running', 'k' || g, true, nextval('pgqueue.job_hold_seq'), 1, 1, now() "
        "FROM generate_series(1, 2) AS g"
    ),
}


@pytest.mark.promise("F99")
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_each_sequence_that_lags_is_named_and_migrate_helps(sequence: str, dsn: str, eyes: Eyes) -> None:
    eyes.do(SEQUENCES[sequence])
    if sequence != "worker_id_seq":
        worker(eyes, started="1 min")
    assert findings(dsn) == []
    eyes.do("SELECT setval('pgqueue.' || %s, 1)", sequence)
    [finding] = findings(dsn)
    assert (finding.name, finding.severity) == ("sequences", "critical")
    assert f"pgqueue.{sequence} goes on from 1" in finding.what
    assert pgqueue("migrate", dsn=dsn).returncode == 0
    assert findings(dsn) == []


@pytest.mark.second
@pytest.mark.promise("F99")
def test_a_prepared_transaction_and_a_full_notify_queue_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for real, on a server of their own."""
    monkeypatch.setattr(doctor, "OLD_SECONDS", 0.0)
    server = embedded_server(max_prepared_transactions="2", **NOTIFY_PAGES)
    try:
        dsn = server.dsn("postgres")
        with psycopg.connect(dsn, autocommit=True) as conn:
            migrations.migrate(conn, "pgqueue")
            assert [each.name for each in findings(dsn)] == []
            conn.execute("BEGIN")
            conn.execute("INSERT INTO pgqueue.job (task) VALUES ('t')")
            conn.execute("PREPARE TRANSACTION 'of the application'")
            [finding] = findings(dsn)
            assert (finding.name, finding.severity) == ("prepared", "warning")
            assert "'of the application'" in finding.what and finding.seconds is not None
            conn.execute("ROLLBACK PREPARED 'of the application'")
            assert findings(dsn) == []
        if NOTIFY_PAGES:
            with notify_queues.held(dsn) as pid:
                notify_queues.fill(dsn, 0.1)
                assert "notify" not in {each.name for each in findings(dsn)}
                notify_queues.fill(dsn, 0.5)
                [full] = [each for each in findings(dsn) if each.name == "notify"]
                assert re.search(r"queue is [5-9]\d % full", full.what) and there(full.page), pid
    finally:
        server.end()


# What is shown -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F84")
def test_of_a_foreign_query_little_is_shown_and_no_text_in_quotes(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        a_snapshot(dsn, eyes, stack, monkeypatch)
        [finding] = [each for each in findings(dsn) if each.name == "snapshot" and "report" in each.what]
        assert "SELECT …" in finding.what and "secret" not in finding.what and "another" not in finding.what
        assert finding.seconds is not None and 0 <= finding.seconds < 600


@pytest.mark.promise("F84")
def test_a_role_that_only_reads_may_ask(dsn: str, eyes: Eyes) -> None:
    role = f"doctor_{eyes.one('SELECT pg_backend_pid()')}"
    eyes.do(f"CREATE ROLE {role} LOGIN")
    try:
        pgqueue("grants", role, "--for", "read", dsn=dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(f"SET ROLE {role}".encode())
            assert api.doctor(conn).findings == ()
    finally:
        eyes.do(f"DROP OWNED BY {role}")
        eyes.do(f"DROP ROLE {role}")


@pytest.mark.promise("F84")
async def test_it_is_there_for_async_connections_too(aconn: Any, eyes: Eyes) -> None:
    an_orphan("", eyes, ExitStack(), pytest.MonkeyPatch())
    assert [finding.name for finding in (await api.adoctor(aconn)).findings] == ["schedule"]


@pytest.mark.promise("F84")
def test_the_command_says_what_since_when_and_what_to_do(dsn: str, eyes: Eyes) -> None:
    healthy = pgqueue("doctor", dsn=dsn)
    assert (healthy.returncode, healthy.stdout) == (0, "No finding.\n")
    waiting(eyes, 1, "nobody")
    an_orphan(dsn, eyes, ExitStack(), pytest.MonkeyPatch())
    ill = pgqueue("doctor", dsn=dsn)
    assert ill.returncode == 1
    lines = ill.stdout.splitlines()
    assert lines[0].split() == ["JOBS", "STATE", "REASON"] and lines[1].split() == ["1", "available", "unserved"]
    assert (
        lines[3].startswith("CRITICAL unserved: 1 job waits in queue nobody")
        and at_night(Symptom.STANDS_STILL) in lines[4]
    )
    assert lines[3].endswith("which no live worker serves (for 60s)") and "no worker lives at all" in lines[4]
    assert lines[5].startswith("WARNING schedule:") and lines[5].endswith("(for 60m)")


@pytest.mark.promise("F466")
def test_the_command_says_from_when_on_unserved_jobs_are_a_finding(dsn: str, eyes: Eyes) -> None:
    """A table of unserved jobs above "No finding." needs the reason: their worker may just be starting."""
    said = "Jobs without a live worker are a finding once one has waited for 30s."
    waiting(eyes, 1, "nobody", seconds=11)
    young = pgqueue("doctor", dsn=dsn)
    assert (young.returncode, young.stdout.splitlines()[-2:]) == (0, ["No finding.", said])
    an_orphan(dsn, eyes, ExitStack(), pytest.MonkeyPatch())
    beside = pgqueue("doctor", dsn=dsn)
    assert (beside.returncode, beside.stdout.splitlines()[-1]) == (1, said)
    waiting(eyes, 1, "nobody", seconds=31)
    old = pgqueue("doctor", dsn=dsn).stdout
    assert "CRITICAL unserved: 2 jobs wait in queue nobody" in old and said not in old


@pytest.mark.promise("F466")
def test_the_command_says_nothing_of_unserved_jobs_where_there_are_none(dsn: str, eyes: Eyes) -> None:
    """The only ones wait in a paused queue, or for a slot."""
    eyes.do("INSERT INTO pgqueue.queue VALUES ('nobody', now())")
    waiting(eyes, 1, "nobody", seconds=11)
    with leading(dsn, eyes):
        worker(eyes)
        waiting(eyes, 1, seconds=11)
        lines = pgqueue("doctor", dsn=dsn).stdout.splitlines()
    assert lines[-1] == "No finding." and [line.split()[-1] for line in lines[1:3]] == ["paused", "slot"]


@pytest.mark.promise("F184")
def test_the_command_shows_how_the_duties_go(dsn: str, eyes: Eyes) -> None:
    with ExitStack() as stack:
        a_duty_that_fails(dsn, eyes, stack, pytest.MonkeyPatch())
        lines = [line.split() for line in pgqueue("doctor", dsn=dsn).stdout.splitlines()]
    assert ["DUTY", "LAST", "TOOK", "ERROR"] in lines
    assert sorted(line[0] for line in lines if line[2:4] == ["ago", "100ms"]) == ["depth", "history", "record", "rings"]
    [record] = [line for line in lines if line[:1] == ["record"]]
    assert " ".join(record[5:]) == "ago: permission denied for table audit"


@pytest.mark.promise("F83")
def test_the_indexes_that_are_looked_for_are_those_of_the_schema(conn: Conn) -> None:
    rows = conn.execute(
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid IN "
        "('pgqueue.job_available'::regclass, 'pgqueue.job_blocked'::regclass, 'pgqueue.job_running'::regclass, "
        "'pgqueue.job_scheduled'::regclass) ORDER BY 1"
    ).fetchall()
    assert [name for (name,) in rows] == sorted(doctor.INDEXES)

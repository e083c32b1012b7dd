"""An application keeps a row, or a leaf, that pgqueue would delete: all else goes, and a finding says what to do."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import psycopg
import pytest
from commands import pgqueue as command
from workers import Eyes, until, work

import pgqueue
from pgqueue.admin import doctor
from pgqueue.client.tasks import task
from pgqueue.database.row_errors import Kept
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.cron import Every
from pgqueue.worker.leader import pruner
from pgqueue.worker.leader.pruner import Pruner

REFUSES = (
    "CREATE FUNCTION public.keeps() RETURNS trigger LANGUAGE plpgsql AS "
    "$$BEGIN RAISE EXCEPTION 'nothing is deleted here'; END$$;"
)
REFERENCE = (
    "CREATE TABLE public.effect (worker bigint CONSTRAINT done_by REFERENCES pgqueue.worker (id) {});"
    "INSERT INTO public.effect SELECT id FROM pgqueue.worker WHERE id % 7 = 0"
)
KEEPS = {
    "a foreign key": (REFERENCE.format(""), "done_by"),
    "a foreign key that is looked at late": (REFERENCE.format("DEFERRABLE INITIALLY DEFERRED"), "done_by"),
    "a trigger": (
        REFUSES + "CREATE TRIGGER keeps BEFORE DELETE ON pgqueue.worker FOR EACH ROW WHEN (OLD.id % 7 = 0) "
        "EXECUTE FUNCTION public.keeps()",
        "nothing is deleted here",
    ),
}
DEAD = (
    "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, dead_at) "
    "SELECT '1 s', 1, 1, 'h', 'v', '{default}', 'stopped', now() - interval '2 hours' FROM generate_series(1, %s)"
)

ran: list[int] = []


@task(name="kept.job")
async def job(n: int) -> None:
    ran.append(n)


@pytest.fixture
async def housekeeper(dsn: str) -> AsyncIterator[Pruner]:
    session = Session(Link(dsn, "pgqueue"), "housekeeping")
    yield Pruner(session)
    await session.close()


@pytest.mark.promise("F209")
async def test_a_leaf_that_cannot_be_emptied_stops_no_other_history(dsn: str, eyes: Eyes, housekeeper: Pruner) -> None:
    """Naive is to raise at once: `attempt` comes first, and all five histories grow."""
    eyes.do(REFUSES + "CREATE TRIGGER keeps BEFORE TRUNCATE ON pgqueue.attempt_1 EXECUTE FUNCTION public.keeps()")
    eyes.do("UPDATE pgqueue.ring SET since = now() - interval '60 days'")
    with pytest.raises(Kept, match=r"TRUNCATE of leaf 1 of history attempt is refused: .*keeps.*nothing is deleted"):
        await housekeeper.rings()
    bins = "SELECT kind, bin FROM pgqueue.ring ORDER BY kind"
    assert eyes.all(bins) == [("attempt", 0), ("dead", 1), ("done", 1), ("hour", 1), ("minute", 1)]
    by_hand = command("prune", "--all", dsn=dsn)
    assert by_hand.returncode == 1 and "refused: " in by_hand.stdout and by_hand.stdout.count("advanced") == 4
    eyes.do("DROP TRIGGER keeps ON pgqueue.attempt_1")
    await housekeeper.rings()
    assert dict(eyes.all(bins))["attempt"] == 1


@pytest.mark.promise("F210")
@pytest.mark.parametrize("how", KEEPS)
async def test_a_row_that_is_kept_keeps_no_other(eyes: Eyes, housekeeper: Pruner, how: str) -> None:
    """Naive is one DELETE: it is refused as a whole, each time. Of 300 rows 42 are kept, more than one call tries."""
    eyes.do(DEAD, 300)
    keep, why = KEEPS[how]
    eyes.do(keep)
    kept = eyes.one("SELECT count(*) FROM pgqueue.worker WHERE id % 7 = 0")
    for _ in range(50):
        with pytest.raises(Kept, match=why):
            await housekeeper.forget("dead_workers")
        if eyes.one("SELECT count(*) FROM pgqueue.worker") == kept:
            return
    pytest.fail("rows are left that nothing keeps")


def findings(eyes: Eyes) -> dict[str, str]:
    """What doctor finds of duties, and what is to be done."""
    return {each.what: each.todo for each in pgqueue.doctor(eyes.conn).findings if each.name == "duty"}


@pytest.mark.promise("F209")
async def test_what_is_kept_stops_no_other_duty_and_doctor_names_it(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to forget in the message that finds strays, or the schedules: these stay, too."""
    monkeypatch.setattr(pruner, "ROUND_SECONDS", 0.1)
    monkeypatch.setattr(pruner, "TIDY_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "DUTY_SECONDS", 0.0)
    eyes.do(DEAD, 7)
    eyes.do(REFERENCE.format("") + ";" + REFUSES)
    eyes.do("INSERT INTO pgqueue.declaration VALUES (1, 'h', '{}')")
    eyes.do("INSERT INTO pgqueue.tick VALUES ('old', now() - interval '2 days', 1)")
    eyes.do("INSERT INTO pgqueue.unknown_task VALUES ('default', 'kept.job')")
    eyes.do("INSERT INTO pgqueue.audit (actor, action, at) VALUES ('a', 'x', now() - interval '200 days')")
    for table in ("declaration", "tick", "unknown_task", "audit"):
        eyes.do(f"CREATE TRIGGER keeps BEFORE DELETE ON pgqueue.{table} FOR EACH ROW EXECUTE FUNCTION public.keeps()")
    eyes.do(
        "INSERT INTO pgqueue.job (state, task, args, worker_id, claim, started_at) "
        "VALUES ('running', 'kept.job', '{\"n\": 1}', 7, 1, now())"
    )
    pgqueue.schedules.add(eyes.conn, "each second", Every(1), job, n=2)
    ran.clear()
    duties = {"dead_workers", "declarations", "old_ticks", "unknown_tasks", "record"}
    async with work(dsn, job, poll=0.5):
        await until(lambda: 1 in ran and ran.count(2) >= 2)
        await until(lambda: {word for what in findings(eyes) for word in what.split()} >= duties)
        found = findings(eyes)
    [of_workers] = [what for what in found if "dead_workers" in what]
    assert "a DELETE in worker is refused for 1 row" in of_workers and '"done_by"' in of_workers
    assert "drop this foreign key" in found[of_workers]
    [of_record] = [what for what in found if "record" in what]
    assert "function keeps, in a trigger" in of_record and "drop this trigger" in found[of_record]


@pytest.mark.promise("F210")
async def test_a_worker_whose_row_is_kept_ends_as_a_dead_one(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive is to leave the row as it is: others wait for its lease, and take it for one that was killed."""
    with caplog.at_level(logging.WARNING, "pgqueue"):
        async with work(dsn, job) as worker:
            eyes.do(REFERENCE.format("").replace("id % 7 = 0", "true"))
            mine = worker.worker_id
    assert eyes.all("SELECT id, state, dead_at <= pgqueue.now() FROM pgqueue.worker") == [(mine, "stopped", True)]
    assert "stays as that of a dead one" in caplog.text
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        eyes.do("DELETE FROM pgqueue.worker")

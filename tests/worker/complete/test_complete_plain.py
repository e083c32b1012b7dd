"""The statement that ends most jobs: by the fence of each, by ids whatever the plan, and waiting for no lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
from statement_plans import nodes
from workers import Eyes

from pgqueue.database.pipeline import compiled
from pgqueue.database.statements import text

ME, OTHER = 7, 8
SQL = text("complete_plain", "pgqueue")
RUNNING = """
    INSERT INTO pgqueue.job_running (state, id, task, worker_id, claim, started_at)
    SELECT 'running', id, 't', %s, claim, pgqueue.now() FROM unnest(%s::bigint[], %s::integer[]) AS mine (id, claim)
"""
CHURN = """
    INSERT INTO pgqueue.job_running (state, id, task, worker_id, claim, started_at)
    SELECT 'running', id, 't', mod(id, 9), 1, pgqueue.now() FROM generate_series(%(first)s::bigint, %(last)s) AS id;
    DELETE FROM pgqueue.job_running
"""
"""Jobs that ran, and are gone."""


@pytest.fixture
def worker(dsn: str) -> Iterator[psycopg.Connection]:
    """A session with the settings of a worker's."""
    with closing(psycopg.connect(dsn)) as conn:
        yield conn


def run(eyes: Eyes, jobs: dict[int, int], worker_id: int = ME) -> None:
    """Let these jobs run, by their ids, each with its claim."""
    eyes.do(RUNNING, worker_id, list(jobs), list(jobs.values()))


def begin(conn: psycopg.Connection, pairs: Sequence[tuple[int, int]]) -> list[int] | None:
    """Complete jobs by these pairs of id and claim in a transaction that stays open; the ids, if not all were ended."""
    conn.execute(text("sessions_settings", "pgqueue").encode())
    [(ended, _)] = conn.execute(SQL.encode(), params(pairs), prepare=True).fetchall()
    return ended if ended is None else sorted(ended)


def params(pairs: Sequence[tuple[int, int]], notify: bool = True) -> dict[str, Any]:
    ids, claims = [id for id, _ in pairs], [claim for _, claim in pairs]
    return {"ids": ids, "claims": claims, "worker_id": ME, "version_tag": "v", "notify": notify}


def complete(conn: psycopg.Connection, *pairs: tuple[int, int]) -> list[int] | None:
    """Complete jobs by these pairs of id and claim: None if all were ended, else the ids of those that were, sorted."""
    ended = begin(conn, pairs)
    conn.commit()
    return ended


def completed(eyes: Eyes) -> list[int]:
    """The jobs in history; none of them runs."""
    both = "SELECT count(*) FROM pgqueue.job_running r JOIN pgqueue.job_done d ON d.id = r.id"
    assert eyes.one(both) == 0
    return [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_done WHERE state = 'completed' ORDER BY id")]


@pytest.mark.promise("F01")
def test_a_job_is_ended_by_its_own_claim_only(worker: psycopg.Connection, eyes: Eyes) -> None:
    """Each id and each claim is one that was asked for, but not as a pair."""
    run(eyes, {1: 5, 2: 6, 3: 5})
    assert complete(worker, (1, 6), (2, 5)) == []
    assert complete(worker, (1, 6), (2, 5), (3, 5)) == [3]
    assert complete(worker, (1, 5), (2, 6)) is None
    assert completed(eyes) == [1, 2, 3]


@pytest.mark.promise("F01")
def test_a_job_is_ended_by_its_own_worker_only(worker: psycopg.Connection, eyes: Eyes) -> None:
    run(eyes, {1: 5, 2: 5})
    run(eyes, {3: 5}, OTHER)
    assert complete(worker, (1, 5), (3, 5), (2, 5)) == [1, 2]
    assert eyes.all("SELECT id, worker_id FROM pgqueue.job_running") == [(3, OTHER)]
    assert completed(eyes) == [1, 2]


@pytest.mark.promise("F01")
def test_of_what_is_asked_in_part_the_part_is_answered(worker: psycopg.Connection, eyes: Eyes) -> None:
    run(eyes, {id: 5 for id in range(1, 101)})
    asked = [(id, 5 if id % 3 else 4) for id in range(1, 201)]
    ours = [id for id in range(1, 101) if id % 3]
    assert complete(worker, *asked) == ours
    assert completed(eyes) == ours
    assert eyes.one("SELECT count(*) FROM pgqueue.job_running") == 100 - len(ours)


@pytest.mark.promise("T01")
def test_a_job_that_is_named_twice_is_ended_once_and_answered_once(worker: psycopg.Connection, eyes: Eyes) -> None:
    run(eyes, {1: 5, 2: 6, 3: 7})
    assert complete(worker, (1, 5), (1, 5), (2, 4), (2, 6), (3, 7)) == [1, 2, 3]
    assert completed(eyes) == [1, 2, 3]


def test_nothing_to_do_is_all_done(worker: psycopg.Connection) -> None:
    """So a worker warms up."""
    assert complete(worker) is None


@pytest.mark.promise("F23")
@pytest.mark.parametrize("strength", ["UPDATE", "KEY SHARE"])
def test_a_row_that_another_session_has_locked_is_left_out_at_once(
    worker: psycopg.Connection, conn: psycopg.Connection, eyes: Eyes, strength: str
) -> None:
    run(eyes, {1: 5, 2: 5, 3: 5})
    conn.execute(f"SELECT FROM pgqueue.job WHERE id = 2 FOR {strength}".encode())
    worker.execute("SET statement_timeout = '10s'; SET lock_timeout = '1ms'")
    assert complete(worker, (1, 5), (2, 5), (3, 5)) == [1, 3]
    assert completed(eyes) == [1, 3]
    conn.rollback()
    assert complete(worker, (2, 5)) is None


@pytest.mark.promise("F01", "T01")
def test_two_that_end_the_same_jobs_at_once_end_each_once(
    worker: psycopg.Connection, conn: psycopg.Connection, eyes: Eyes
) -> None:
    """So it is after a connection broke, while its session in the server lives on."""
    run(eyes, {1: 5, 2: 5})
    assert begin(conn, [(2, 5)]) is None
    assert complete(worker, (2, 5), (1, 5)) == [1]
    conn.commit()
    assert complete(worker, (1, 5), (2, 5)) == []
    assert completed(eyes) == [1, 2]


@pytest.mark.promise("T01")
def test_what_ends_before_its_commit_has_ended_nothing(worker: psycopg.Connection, eyes: Eyes) -> None:
    run(eyes, {1: 5, 2: 5})
    assert begin(worker, [(1, 5), (2, 5)]) is None
    eyes.do("SELECT pg_terminate_backend(%s)", worker.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        worker.commit()
    assert completed(eyes) == []
    assert eyes.states() == {"running": 2}


@pytest.mark.parametrize("notify", [True, False])
def test_the_waiters_of_these_jobs_are_told_and_those_of_others_are_not(
    dsn: str, worker: psycopg.Connection, eyes: Eyes, notify: bool
) -> None:
    run(eyes, {1: 5, 2: 5, 3: 5, 4: 5})
    eyes.do("INSERT INTO pgqueue.job_waiter (job_id) VALUES (2), (4)")
    with psycopg.connect(dsn, autocommit=True) as waiting:
        for id in (1, 2, 3, 4):
            waiting.execute(f'LISTEN "pgqueue.:ended.{id}"'.encode())
        worker.execute(SQL.encode(), params([(1, 5), (2, 5), (3, 5)], notify))
        worker.commit()
        waiting.execute("NOTIFY last; LISTEN last; NOTIFY last")
        told = [note.channel for note in waiting.notifies(timeout=10, stop_after=2 if notify else 1)]
    assert told == (["pgqueue.:ended.2"] if notify else []) + ["last"]


@pytest.mark.promise("F07")
@pytest.mark.parametrize("planned", ["never analysed", "vacuumed while empty", "analysed under an old snapshot"])
def test_jobs_are_found_by_their_ids_among_the_dead_whatever_was_known_when_it_was_planned(
    dsn: str, worker: psycopg.Connection, eyes: Eyes, planned: str
) -> None:
    """The claims are compared through a hash, so a batch does not cost its square."""
    command, names = compiled(SQL)
    given = psycopg.ClientCursor(worker)

    def execute(pairs: Sequence[tuple[int, int]]) -> Any:
        values = [params(pairs)[name] for name in names]
        places = ", ".join(["%s"] * len(names))
        given.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE planned ({places})".encode(), values)
        [([found],)] = given.fetchall()
        return found["Plan"]

    if planned == "vacuumed while empty":
        eyes.do("VACUUM ANALYZE pgqueue.job_running")
    worker.execute(text("sessions_settings", "pgqueue").replace("true)", "false)").encode())
    worker.execute(b"PREPARE planned AS " + command)
    execute([])
    worker.commit()
    with psycopg.connect(dsn) as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        psycopg.ClientCursor(eyes.conn).execute(CHURN, {"first": 1, "last": 20_000})
        jobs = {id: id % 5 for id in range(1, 20_001, 40)}
        run(eyes, jobs)
        run(eyes, {id: 1 for id in range(20_001, 21_001)}, OTHER)
        if planned == "analysed under an old snapshot":
            eyes.do("ANALYZE pgqueue.job_running")
        read = nodes(execute(list(jobs.items())))
        worker.rollback()
    scanned = [node for node in read if node.get("Relation Name") == "job_running" and "Scan" in node["Node Type"]]
    assert sorted((node["Node Type"], node.get("Index Name")) for node in scanned) == [
        ("Index Scan", "job_running_id"),
        ("Tid Scan", None),
    ]
    [by_id] = [node for node in scanned if node["Node Type"] == "Index Scan"]
    assert "hashed" in by_id["Filter"], by_id
    assert by_id["Shared Hit Blocks"] + by_id["Shared Read Blocks"] < 6 * len(jobs)

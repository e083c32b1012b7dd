"""The two statements that end most jobs: by the fence of each, by ids whatever the plan, and stopped by no lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import monotonic
from typing import Any

import psycopg
import pytest
from statement_plans import nodes
from workers import Eyes, wait_until

from pgqueue.database.pipeline import compiled
from pgqueue.database.statements import text

ME, OTHER = 7, 8
PLAIN, UNLOCKED = "complete_plain", "complete_plain_unlocked"
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


class Plain:
    """One of the statements, on a session with the settings of a worker's."""

    def __init__(self, conn: psycopg.Connection, name: str, patience: str = "20ms") -> None:
        self.conn, self.name = conn, name
        self.sql = text(name, "pgqueue").replace("20ms", patience)

    def begin(self, *pairs: tuple[int, int], notify: bool = True) -> list[int] | None:
        """Complete jobs by these pairs of id and claim, in a transaction that stays open.

        Answers None if all were ended, else the ids of those that were, sorted.
        """
        self.conn.execute(text("sessions_settings", "pgqueue").encode())
        [(ended, *_)] = self.conn.execute(self.sql.encode(), params(pairs, notify), prepare=True).fetchall()
        return ended if ended is None else sorted(ended)

    def complete(self, *pairs: tuple[int, int]) -> list[int] | None:
        """The same, and commit."""
        ended = self.begin(*pairs)
        self.conn.commit()
        return ended


def params(pairs: Sequence[tuple[int, int]], notify: bool = True) -> dict[str, Any]:
    ids, claims = [id for id, _ in pairs], [claim for _, claim in pairs]
    return {"ids": ids, "claims": claims, "worker_id": ME, "version_tag": "v", "notify": notify}


@pytest.fixture
def worker(dsn: str) -> Iterator[psycopg.Connection]:
    with closing(psycopg.connect(dsn)) as conn:
        yield conn


@pytest.fixture(params=[PLAIN, UNLOCKED])
def plain(request: pytest.FixtureRequest, worker: psycopg.Connection) -> Plain:
    return Plain(worker, request.param)


def run(eyes: Eyes, jobs: dict[int, int], worker_id: int = ME) -> None:
    """Let these jobs run, by their ids, each with its claim."""
    eyes.do(RUNNING, worker_id, list(jobs), list(jobs.values()))


def completed(eyes: Eyes) -> list[int]:
    """The jobs in history; none of them runs."""
    both = "SELECT count(*) FROM pgqueue.job_running r JOIN pgqueue.job_done d ON d.id = r.id"
    assert eyes.one(both) == 0
    return [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_done WHERE state = 'completed' ORDER BY id")]


@pytest.mark.promise("F01")
def test_a_job_is_ended_by_its_own_claim_only(plain: Plain, eyes: Eyes) -> None:
    """Each id and each claim is one that was asked for, but not as a pair."""
    run(eyes, {1: 5, 2: 6, 3: 5})
    assert plain.complete((1, 6), (2, 5)) == []
    assert plain.complete((1, 6), (2, 5), (3, 5)) == [3]
    assert plain.complete((1, 5), (2, 6)) is None
    assert completed(eyes) == [1, 2, 3]


@pytest.mark.promise("F01")
def test_a_job_is_ended_by_its_own_worker_only(plain: Plain, eyes: Eyes) -> None:
    run(eyes, {1: 5, 2: 5})
    run(eyes, {3: 5}, OTHER)
    assert plain.complete((1, 5), (3, 5), (2, 5)) == [1, 2]
    assert eyes.all("SELECT id, worker_id FROM pgqueue.job_running") == [(3, OTHER)]
    assert completed(eyes) == [1, 2]


@pytest.mark.promise("F01")
def test_of_what_is_asked_in_part_the_part_is_answered(plain: Plain, eyes: Eyes) -> None:
    run(eyes, {id: 5 for id in range(1, 101)})
    asked = [(id, 5 if id % 3 else 4) for id in range(1, 201)]
    ours = [id for id in range(1, 101) if id % 3]
    assert plain.complete(*asked) == ours
    assert completed(eyes) == ours
    assert eyes.one("SELECT count(*) FROM pgqueue.job_running") == 100 - len(ours)


@pytest.mark.promise("T01")
def test_a_job_that_is_named_twice_is_ended_once_and_answered_once(plain: Plain, eyes: Eyes) -> None:
    run(eyes, {1: 5, 2: 6, 3: 7})
    assert plain.complete((1, 5), (1, 5), (2, 4), (2, 6), (3, 7)) == [1, 2, 3]
    assert completed(eyes) == [1, 2, 3]


def test_nothing_to_do_is_all_done(plain: Plain) -> None:
    """So a worker warms up."""
    assert plain.complete() is None


@pytest.mark.promise("F23")
@pytest.mark.parametrize("strength", ["UPDATE", "KEY SHARE"])
def test_a_row_that_another_session_has_locked_is_left_out_at_once(
    worker: psycopg.Connection, conn: psycopg.Connection, eyes: Eyes, strength: str
) -> None:
    run(eyes, {1: 5, 2: 5, 3: 5})
    conn.execute(f"SELECT FROM pgqueue.job WHERE id = 2 FOR {strength}".encode())
    plain = Plain(worker, PLAIN)
    worker.execute("SET SESSION statement_timeout = '10s'")
    assert plain.complete((1, 5), (2, 5), (3, 5)) == [1, 3]
    assert completed(eyes) == [1, 3]
    conn.rollback()
    assert plain.complete((2, 5)) is None


@pytest.mark.promise("F23")
@pytest.mark.parametrize("strength", ["UPDATE", "KEY SHARE"])
def test_unlocked_a_row_that_another_session_has_locked_fails_all_of_it_soon(
    worker: psycopg.Connection, conn: psycopg.Connection, eyes: Eyes, strength: str
) -> None:
    """Long before the 2 s that a worker waits for other locks."""
    run(eyes, {1: 5, 2: 5, 3: 5})
    conn.execute(f"SELECT FROM pgqueue.job WHERE id = 2 FOR {strength}".encode())
    plain = Plain(worker, UNLOCKED)
    began = monotonic()
    with pytest.raises(psycopg.errors.LockNotAvailable):
        plain.begin((1, 5), (2, 5), (3, 5))
    assert monotonic() - began < 1.5
    worker.rollback()
    assert eyes.states() == {"running": 3}
    assert Plain(worker, PLAIN).complete((1, 5), (2, 5), (3, 5)) == [1, 3]


def test_what_follows_in_the_transaction_is_as_patient_as_ever(worker: psycopg.Connection, eyes: Eyes) -> None:
    """The COMMIT, too: it waits for those that notify."""
    run(eyes, {1: 5})
    Plain(worker, UNLOCKED).begin((1, 5), (2, 5))
    assert worker.execute("SHOW lock_timeout").fetchall() == [("2s",)]
    worker.commit()
    assert worker.execute("SHOW lock_timeout").fetchall() == [("0",)]


@pytest.mark.promise("F01", "T01")
@pytest.mark.parametrize("name", [PLAIN, UNLOCKED])
def test_two_that_end_the_same_jobs_at_once_end_each_once(
    worker: psycopg.Connection, conn: psycopg.Connection, eyes: Eyes, name: str
) -> None:
    """So it is after a connection broke, while its session in the server lives on."""
    run(eyes, {1: 5, 2: 5})
    assert Plain(conn, name).begin((2, 5)) is None
    assert Plain(worker, PLAIN).complete((2, 5), (1, 5)) == [1]
    conn.commit()
    assert Plain(worker, name).complete((1, 5), (2, 5)) == []
    assert completed(eyes) == [1, 2]


@pytest.mark.promise("F01", "T01")
@pytest.mark.parametrize("committed", [True, False])
def test_unlocked_a_row_that_was_waited_for_is_ended_only_if_it_is_still_there(
    worker: psycopg.Connection, conn: psycopg.Connection, eyes: Eyes, committed: bool
) -> None:
    """With more patience than it has, so that the other session ends in the middle of the wait."""
    run(eyes, {1: 5, 2: 5, 3: 5})
    assert Plain(conn, PLAIN).begin((2, 5)) is None
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(Plain(worker, UNLOCKED, "60s").complete, (1, 5), (2, 5), (3, 5))
        wait_until(lambda: waits(eyes, worker))
        (conn.commit if committed else conn.rollback)()
        assert ends.result(30) == ([1, 3] if committed else None)
    assert completed(eyes) == [1, 2, 3]


def test_unlocked_it_gives_way_to_a_session_that_locks_the_same_rows_the_other_way_round(
    worker: psycopg.Connection, conn: psycopg.Connection, eyes: Eyes
) -> None:
    """Long before PostgreSQL looks for a deadlock, which might hit the other."""
    run(eyes, {1: 5, 2: 5})
    conn.execute("SELECT FROM pgqueue.job WHERE id = 2 FOR UPDATE")
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(Plain(worker, UNLOCKED, "500ms").complete, (1, 5), (2, 5))
        wait_until(lambda: waits(eyes, worker))
        conn.execute("SELECT FROM pgqueue.job WHERE id = 1 FOR UPDATE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            ends.result(30)
    assert eyes.states() == {"running": 2}


def waits(eyes: Eyes, conn: psycopg.Connection) -> bool:
    """Whether this session waits for a lock."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    return bool(eyes.one(asked, conn.info.backend_pid))


@pytest.mark.promise("T01")
def test_what_ends_before_its_commit_has_ended_nothing(plain: Plain, eyes: Eyes) -> None:
    run(eyes, {1: 5, 2: 5})
    assert plain.begin((1, 5), (2, 5)) is None
    eyes.do("SELECT pg_terminate_backend(%s)", plain.conn.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        plain.conn.commit()
    assert completed(eyes) == []
    assert eyes.states() == {"running": 2}


@pytest.mark.parametrize("notify", [True, False])
def test_the_waiters_of_these_jobs_are_told_and_those_of_others_are_not(
    dsn: str, plain: Plain, eyes: Eyes, notify: bool
) -> None:
    run(eyes, {1: 5, 2: 5, 3: 5, 4: 5})
    eyes.do("INSERT INTO pgqueue.job_waiter (job_id) VALUES (2), (4)")
    with psycopg.connect(dsn, autocommit=True) as waiting:
        for id in (1, 2, 3, 4):
            waiting.execute(f'LISTEN "pgqueue.:ended.{id}"'.encode())
        plain.begin((1, 5), (2, 5), (3, 5), notify=notify)
        plain.conn.commit()
        waiting.execute("NOTIFY last; LISTEN last; NOTIFY last")
        told = [note.channel for note in waiting.notifies(timeout=10, stop_after=2 if notify else 1)]
    assert told == (["pgqueue.:ended.2"] if notify else []) + ["last"]


@pytest.mark.promise("F07")
@pytest.mark.parametrize("planned", ["never analysed", "vacuumed while empty", "analysed under an old snapshot"])
def test_jobs_are_found_by_their_ids_among_the_dead_whatever_was_known_when_it_was_planned(
    dsn: str, plain: Plain, eyes: Eyes, planned: str
) -> None:
    """The claims are compared through a hash, so a batch does not cost its square."""
    command, names = compiled(plain.sql)
    given = psycopg.ClientCursor(plain.conn)

    def execute(pairs: Sequence[tuple[int, int]]) -> Any:
        values = [params(pairs)[name] for name in names]
        places = ", ".join(["%s"] * len(names))
        given.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE planned ({places})".encode(), values)
        [([found],)] = given.fetchall()
        return found["Plan"]

    if planned == "vacuumed while empty":
        eyes.do("VACUUM ANALYZE pgqueue.job_running")
    plain.conn.execute(text("sessions_settings", "pgqueue").replace("true)", "false)").encode())
    plain.conn.execute(b"PREPARE planned AS " + command)
    execute([])
    plain.conn.commit()
    with psycopg.connect(dsn) as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        psycopg.ClientCursor(eyes.conn).execute(CHURN, {"first": 1, "last": 20_000})
        jobs = {id: id % 5 for id in range(1, 20_001, 40)}
        run(eyes, jobs)
        run(eyes, {id: 1 for id in range(20_001, 21_001)}, OTHER)
        if planned == "analysed under an old snapshot":
            eyes.do("ANALYZE pgqueue.job_running")
        read = nodes(execute(list(jobs.items())))
        plain.conn.rollback()
    scanned = [node for node in read if node.get("Relation Name") == "job_running" and "Scan" in node["Node Type"]]
    others = [("Tid Scan", None)] if plain.name == PLAIN else []
    found = sorted((node["Node Type"], node.get("Index Name")) for node in scanned)
    assert found == [("Index Scan", "job_running_id"), *others]
    [by_id] = [node for node in scanned if node["Node Type"] == "Index Scan"]
    assert "hashed" in by_id["Filter"], by_id
    assert by_id["Shared Hit Blocks"] + by_id["Shared Read Blocks"] < 6 * len(jobs)

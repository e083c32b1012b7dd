"""The number of a database: where the ids of its jobs begin, and what keeps them there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import items, pgqueue
from servers import binaries
from workers import Eyes, until, wait_until, work

import pgqueue as library
from pgqueue import InvalidOption, task
from pgqueue.database import migrations
from pgqueue.errors import Error
from pgqueue.pytest_plugin import Databases

Conn = psycopg.Connection[Any]

BEGIN = 1 << 43
SEEN = "SELECT sequence FROM pgqueue.advance_sequences(true)"


@pytest.fixture
def other_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    with pgqueue_databases.copy() as made:
        yield made


def first_id(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        return library.enqueue(conn, "t").id


@pytest.mark.promise("F391")
def test_ids_of_databases_with_numbers_are_unlike_each_other(dsn: str, other_dsn: str, conn: Conn) -> None:
    assert first_id(other_dsn) == 1
    assert library.migrate(dsn, number=1023) == []
    job = library.enqueue(conn, "t")
    conn.commit()
    assert job.id == 1023 * BEGIN + 1 < 2**53
    assert json.loads(pgqueue("jobs", str(job.id), "--json", dsn=dsn).stdout)["items"][0]["id"] == job.id
    assert pgqueue("jobs", "1", dsn=dsn).returncode == 1
    assert conn.execute("SELECT nextval('pgqueue.flow_id_seq')").fetchone() == (1,)  # a node packs the id of its flow


@pytest.mark.promise("F391")
async def test_jobs_with_high_ids_run_with_keys_and_without(dsn: str, eyes: Eyes) -> None:
    @task(name="numbered.ends")
    async def ends() -> None: ...

    await library.amigrate(dsn, number=1023)
    with psycopg.connect(dsn) as conn:
        for _ in range(5):
            ends.enqueue(conn)
            ends.using(lock="k").enqueue(conn)
            ends.using(delay=0.01).enqueue(conn)
    async with work(dsn, ends):
        await until(eyes.done(15))
    assert eyes.one("SELECT min(id) FROM pgqueue.job") == 1023 * BEGIN + 1


@pytest.mark.promise("F392")
def test_a_number_is_never_below_what_was_given(dsn: str, conn: Conn) -> None:
    library.migrate(conn, number=5)
    assert library.enqueue(conn, "t").id == 5 * BEGIN + 1
    for number in (0, 4):
        with pytest.raises(InvalidOption, match=f"ids up to {5 * BEGIN + 1} were given.*lowest number that fits is 5"):
            library.migrate(conn, number=number)
    library.migrate(conn, number=5)  # nothing to do
    assert library.enqueue(conn, "t").id == 5 * BEGIN + 2
    conn.execute("INSERT INTO pgqueue.job (id, task) VALUES (%s, 'copied')", [7 * BEGIN + 9])
    with pytest.raises(InvalidOption, match=str(7 * BEGIN + 9)):
        library.migrate(conn, number=6)  # the sequence has not given it, and it is there
    library.migrate(conn, number=8)
    assert library.enqueue(conn, "t").id == 8 * BEGIN + 1


@pytest.mark.promise("F392")
def test_rows_that_were_copied_without_their_sequence_are_said_and_their_number_can_be_taken(
    conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive is to count from 1 without a word: the ids of another database, and those of this one from before."""
    library.migrate(conn)
    assert not caplog.records
    conn.execute("INSERT INTO pgqueue.job (id, task) VALUES (%s, 'copied')", [3 * BEGIN + 9])
    library.migrate(conn)
    [said] = caplog.messages
    assert "has number 0" in said and f"{3 * BEGIN + 9}, of number 3" in said and "migrate --number 3" in said
    library.migrate(conn, number=3)
    assert library.enqueue(conn, "t").id == 3 * BEGIN + 10
    conn.execute("INSERT INTO pgqueue.job (id, task) VALUES (%s, 'the last one')", [4 * BEGIN])
    caplog.clear()
    library.migrate(conn)
    assert not [each for each in caplog.messages if "of number" in each]  # 4 * BEGIN is the last id of number 3


@pytest.mark.promise("F392")
def test_what_an_open_transaction_was_given_is_waited_for(dsn: str, conn: Conn) -> None:
    library.enqueue(conn, "t")
    with pytest.raises(Error, match=r"number 3: no lock within 0.05 s.*holds .*job_id_seq"):
        library.migrate(dsn, number=3, lock_timeout=0.05)
    conn.commit()
    library.migrate(dsn, number=3, lock_timeout=0.05)
    assert first_id(dsn) == 3 * BEGIN + 1


@pytest.mark.promise("F392")
def test_what_is_given_while_the_number_waits_is_not_given_again(dsn: str, conn: Conn, eyes: Eyes) -> None:
    """Naive is to read the sequence, and then to take its lock: what was given in between comes twice."""
    conn.execute("SELECT setval('pgqueue.job_id_seq', %s)", [3 * BEGIN + 100])  # by hand, without the number
    conn.commit()
    first = library.enqueue(conn, "t").id
    with ThreadPoolExecutor(1) as pool:
        setting = pool.submit(library.migrate, dsn, number=3, lock_timeout=20.0)
        wait_until(lambda: eyes.one("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0)
        second = library.enqueue(conn, "t").id
        conn.commit()
        setting.result()
    assert (first, second, first_id(dsn)) == (3 * BEGIN + 101, 3 * BEGIN + 102, 3 * BEGIN + 103)


@pytest.mark.promise("F392")
@pytest.mark.parametrize("number", [-1, 1024, True, 1.5, "7"])
def test_what_is_no_number_is_refused(conn: Conn, number: Any) -> None:
    with pytest.raises(InvalidOption, match="from 0 to 1023"):
        library.migrate(conn, number=number)
    with pytest.raises(InvalidOption, match="outbox"):
        library.migrate(conn, number=1, line=migrations.OUTBOX)


@pytest.mark.promise("F393")
def test_a_restart_of_the_sequence_is_no_lag(conn: Conn) -> None:
    library.enqueue(conn, "t")
    conn.execute("ALTER SEQUENCE pgqueue.job_id_seq RESTART WITH 1000")
    assert conn.execute(SEEN).fetchall() == []
    assert library.enqueue(conn, "t").id == 1000
    conn.execute("ALTER SEQUENCE pgqueue.job_id_seq RESTART WITH 1000")  # gives 1000 again
    assert conn.execute(SEEN).fetchall() == [("pgqueue.job_id_seq",)]


@pytest.mark.promise("F393")
def test_the_number_stays_whatever_becomes_of_the_rows(conn: Conn) -> None:
    library.migrate(conn, number=2)
    assert conn.execute(SEEN).fetchall() == []
    conn.execute("TRUNCATE pgqueue.job RESTART IDENTITY")
    assert library.enqueue(conn, "t").id == 2 * BEGIN + 1
    conn.execute("INSERT INTO pgqueue.job (id, task) VALUES (%s, 'of another database')", [3 * BEGIN + 5])
    assert conn.execute(SEEN).fetchall() == []
    conn.execute("TRUNCATE pgqueue.job")  # no row says where this database's ids are
    conn.execute("SELECT setval('pgqueue.job_id_seq', 70)")  # as a dump of data without numbers does
    assert conn.execute(SEEN).fetchall() == [("pgqueue.job_id_seq",)]
    assert 2 * BEGIN < library.enqueue(conn, "t").id < 3 * BEGIN


@pytest.mark.promise("F393")
@pytest.mark.skipif(not (binaries() / "pg_dump").exists(), reason="this server comes without pg_dump")
def test_a_dump_keeps_the_number(dsn: str, empty_dsn: str, tmp_path: Path) -> None:
    library.migrate(dsn, number=9)
    script = str(tmp_path / "dump.sql")
    for arguments in (
        ["pg_dump", "-n", "pgqueue", "-f", script, "-d", dsn],
        ["psql", "-Xq1f", script, "-d", empty_dsn],
    ):
        subprocess.run([str(binaries() / arguments[0]), *arguments[1:]], check=True, capture_output=True)
    assert library.migrate(empty_dsn) == []
    assert first_id(empty_dsn) == 9 * BEGIN + 1


@pytest.mark.promise("F391")
def test_commands_set_and_show_the_number(dsn: str) -> None:
    done = pgqueue("migrate", "--number", "7", dsn=dsn)
    assert (done.returncode, "number 7" in done.stdout) == (0, True)
    assert items(pgqueue("migrate", "--check", "--json", dsn=dsn))[0]["number"] == 7
    assert items(pgqueue("status", "--json", dsn=dsn))[0]["number"] == 7
    assert "number 7" in pgqueue("status", dsn=dsn).stdout
    assert json.loads(pgqueue("doctor", "--json", dsn=dsn).stdout)["number"] == 7
    below = pgqueue("migrate", "--number", "6", dsn=dsn)
    assert (below.returncode, str(7 * BEGIN) in below.stderr) == (2, True)
    assert pgqueue("migrate", "--number", "1024", dsn=dsn).returncode == 2
    assert pgqueue("migrate", "--check", "--number", "7", dsn=dsn).returncode == 2

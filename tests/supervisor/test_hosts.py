"""Supervisors and workers on several hosts, and in containers that have one name and the same pids: orders reach whom
they are meant for, and nobody is taken for who was there before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import Worker, items, pgqueue, working
from hosts import container, host
from stopped import stopped
from supervised import TASKS, Supervised, deploy, gone, put, supervised
from workers import Eyes, wait_until

from pgqueue.admin.health import Health, health, up
from pgqueue.database.statements import text

# Orders --------------------------------------------------------------------------------------------------------------


def run_in(where: list[str], code: str) -> subprocess.CompletedProcess[str]:
    command = [*where, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)


@pytest.mark.second
@pytest.mark.promise("S03", "S04", "S06")
def test_an_order_from_another_container_needs_its_row_and_notify_only(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """From there nobody can even see it. It looks by itself every 50 s; what is heard earlier, NOTIFY said."""
    there = container("elsewhere")
    with supervised(tmp_path, dsn, processes=1, where=host("here", beat=50.0)) as one:
        assert run_in(there, "import socket; print(socket.gethostname())").stdout == "elsewhere\n"
        assert "ProcessLookupError" in run_in(there, f"import os; os.kill({one.pid}, 0)").stderr
        first = one.pids()
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.supervisor") == 1)
        done = pgqueue("restart", "--wait", dsn=dsn, where=there)
        assert done.returncode == 0, done.stderr
        assert f"(here:{one.pid}): done" in done.stdout
        wait_until(gone(first))
        assert len(one.pids()) == 1
        scaled = pgqueue("scale", "2", "--wait", "--json", dsn=dsn, where=there)
        assert (scaled.returncode, [each["problem"] for each in items(scaled)]) == (0, [None]), scaled.stderr
        assert len(one.pids()) == 2
        assert pgqueue("quiet", "--wait", dsn=dsn, where=there).returncode == 0
        assert one.pids() == set()
        assert one.counts("SIGHUP") == one.counts("SIGUSR1") == one.counts("SIGTTIN") == 0
        heard = (
            "SELECT kind, extract(epoch FROM seen_at - created_at)::float8 FROM pgqueue.supervisor_order ORDER BY id"
        )
        orders = eyes.all(heard)
    assert [kind for kind, _ in orders] == ["restart", "scale", "quiet"]
    assert max(seconds for _, seconds in orders) < 20, orders


@contextmanager
def two(tmp_path: Path, dsn: str) -> Iterator[tuple[Supervised, Supervised]]:
    """A supervisor with one process on the host alpha, and one on beta."""
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
    with (
        supervised(tmp_path / "alpha", dsn, processes=1, where=host("alpha")) as alpha,
        supervised(tmp_path / "beta", dsn, processes=1, where=host("beta")) as beta,
    ):
        yield alpha, beta


@pytest.mark.second
@pytest.mark.promise("S03", "S04", "S06")
def test_host_and_supervisor_say_who_is_told(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with two(tmp_path, dsn) as (alpha, beta):
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.supervisor") == 2)
        numbers = dict(eyes.all("SELECT host, id FROM pgqueue.supervisor"))
        old = alpha.pids(), beta.pids()

        def order(*arguments: str) -> list[str]:
            """Who said that it is done, in the order of their ids."""
            done = pgqueue(*arguments, "--wait", dsn=dsn)
            assert done.returncode == 0, done.stderr
            return [name for name in ("alpha", "beta") if f"({name}:" in done.stdout and "done" in done.stdout]

        assert order("scale", "2", "--host", "alpha") == ["alpha"]
        assert len(alpha.pids()) == 2 and beta.pids() == old[1]
        before = alpha.pids()
        assert order("quiet", "--supervisor", str(numbers["beta"])) == ["beta"]
        assert beta.pids() == set() and alpha.pids() == before
        assert order("restart", "--host", "beta") == ["beta"]
        assert len(beta.pids()) == 1 and alpha.pids() == before
        both = ["--host", "alpha", "--supervisor", str(numbers["alpha"])]
        assert order("restart", *both) == ["alpha"]
        wait_until(gone(before))
        assert len(alpha.pids()) == 2
        before = alpha.pids() | beta.pids()
        done = pgqueue("restart", "--host", "alpha", "--supervisor", str(numbers["beta"]), "--wait", dsn=dsn)
        assert done.returncode == 1 and "no supervisor fits" in done.stderr
        assert alpha.pids() | beta.pids() == before
        assert order("restart") == ["alpha", "beta"]
        wait_until(gone(before))
        told = (
            "SELECT s.host, o.kind FROM pgqueue.supervisor_order o JOIN pgqueue.supervisor s ON s.id = o.supervisor_id"
        )
        assert eyes.all(f"{told} ORDER BY o.id") == [
            ("alpha", "scale"),
            ("beta", "quiet"),
            ("beta", "restart"),
            ("alpha", "restart"),
            *sorted((name, "restart") for name in numbers),
        ]


# Who was there before ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["worker", "supervisor"])
def test_ids_are_drawn_and_cannot_be_given(table: str, eyes: Eyes) -> None:
    sql = "SELECT is_identity, identity_generation, identity_cycle FROM information_schema.columns "
    sql += "WHERE table_schema = 'pgqueue' AND table_name = %s AND column_name = 'id'"
    assert eyes.all(sql, table) == [("YES", "ALWAYS", "NO")]


ENTERED = """
CREATE TABLE public.entered (id bigint, pid integer);
CREATE FUNCTION public.enter() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO public.entered VALUES (NEW.id, NEW.pid); RETURN NULL; END $$;
CREATE TRIGGER entered AFTER INSERT ON pgqueue.worker FOR EACH ROW EXECUTE FUNCTION public.enter()
"""


@pytest.mark.second
def test_a_workers_id_is_never_used_again(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """Not after a restart, nor a crash, nor by who was taken for dead, nor when no row is left of any that ever was."""
    eyes.conn.execute(ENTERED.encode())
    with supervised(tmp_path, dsn, "--lease", "3s", processes=2) as one:
        one.restart(signal.SIGHUP)
        wait_until(lambda: len(one.pids()) == 2)
        killed = one.pids().pop()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: killed not in one.pids() and len(one.pids()) == 2)
        known = "SELECT max(id) FROM pgqueue.worker WHERE pid = %s AND dead_at IS NULL"
        wait_until(lambda: all(eyes.one(known, pid) for pid in one.pids()))  # the killed one has its row for a moment
        stalled = one.pids().pop()
        before = eyes.one(known, stalled)
        with stopped([stalled]):
            wait_until(lambda: eyes.one("SELECT dead_at FROM pgqueue.worker WHERE id = %s", before) is not None)
        again = wait_until(lambda: eyes.one(known, stalled))
        assert again != before
        one.signal(signal.SIGTERM)
        assert one.worker.ends() == 0
    eyes.do("UPDATE pgqueue.worker SET dead_at = pgqueue.now() - interval '2 hours'")
    eyes.conn.execute(text("pruner_workers", "pgqueue"), {"n": 99})
    assert eyes.all("SELECT id FROM pgqueue.worker") == []
    entered = [worker for (worker,) in eyes.all("SELECT id FROM entered")]
    assert len(entered) >= 2 + 2 + 1 + 1
    with supervised(tmp_path, dsn, processes=1):
        pass
    every = [worker for (worker,) in eyes.all("SELECT id FROM entered")]
    assert len(every) > len(entered) and len(set(every)) == len(every), every


PROBE = """
@pgqueue.task(name="probe")
def probe() -> object:
    import subprocess
    done = subprocess.run([sys.argv[0], "health", "--ready", "--json"], capture_output=True, text=True)
    return [done.returncode, json.loads(done.stdout)["items"][0]]
"""


def events(directory: Path, name: str) -> list[dict[str, Any]]:
    path = directory / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def boot(directory: Path, dsn: str, *options: str) -> AbstractContextManager[Worker]:
    """A container with the name that all have here; what is started is process 1, and the command in it process 2."""
    return working("shop", *options, dsn=dsn, cwd=directory, where=container("box"))


@pytest.mark.second
def test_a_worker_with_the_name_and_the_pid_of_another_is_somebody_else(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """The one before it is rescued, by one of two that have its name and its pid, and nobody else is."""
    deploy(tmp_path)
    [job] = put(eyes, "held", '{"name": "go"}')
    with boot(tmp_path, dsn, "--lease", "6s") as old:
        wait_until(lambda: events(tmp_path, "began"))
        [first] = eyes.all("SELECT id, host, pid FROM pgqueue.worker")
        old.close()
    assert first[1:] == ("box", 2)
    with boot(tmp_path, dsn, "--lease", "6s") as new, boot(tmp_path, dsn, "--lease", "6s") as beside:
        for worker in (new, beside):
            worker.says("ready")
        wait_until(lambda: len(events(tmp_path, "began")) == 2)
        assert events(tmp_path, "began")[1]["crashes"] == 1
        rows = eyes.all("SELECT host, pid, dead_at IS NULL, id > %s FROM pgqueue.worker ORDER BY id", first[0])
        assert rows == [("box", 2, False, False), ("box", 2, True, True), ("box", 2, True, True)]
        wait_until(lambda: "was given back" in new.output + beside.output)  # it is said when it is done
        said = new.output + beside.output
        assert said.count("was given back") == said.count(f"worker {first[0]} gave no sign of life: 1 of its jobs") == 1
        put(eyes, "quick", number=20)
        (tmp_path / "go").touch()
        wait_until(eyes.done(21))
        assert eyes.one("SELECT worker_id > %s FROM pgqueue.job_done WHERE id = %s", first[0], job)
        assert eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NULL") == 2


@pytest.mark.second
@pytest.mark.promise("S04")
def test_a_supervisor_with_the_name_and_the_pid_of_another_is_not_told_its_orders(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    deploy(tmp_path)
    with boot(tmp_path, dsn, "--processes", "1") as old:
        old.says("ready: ")
        [first] = wait_until(lambda: eyes.all("SELECT id, host, pid FROM pgqueue.supervisor"))
        old.close()
    assert first[1:] == ("box", 2)
    done = pgqueue("restart", "--supervisor", str(first[0]), dsn=dsn)
    assert done.returncode == 0 and "(box:2): ordered to restart" in done.stdout
    with boot(tmp_path, dsn, "--processes", "1") as new:
        new.says("ready: ")
        [second] = wait_until(lambda: eyes.all("SELECT id, host, pid FROM pgqueue.supervisor WHERE id > %s", first[0]))
        assert second[1:] == ("box", 2)
        assert pgqueue("scale", "2", "--supervisor", str(second[0]), "--wait", dsn=dsn).returncode == 0
        orders = "SELECT supervisor_id, kind, seen_at IS NULL FROM pgqueue.supervisor_order ORDER BY id"
        assert eyes.all(orders) == [(first[0], "restart", True), (second[0], "scale", False)]
        assert "rolling restart" not in new.output
        mine = "SELECT count(*) FROM pgqueue.worker WHERE supervisor_id = %s AND dead_at IS NULL"
        wait_until(lambda: eyes.one(mine, second[0]) == 2)


# Health --------------------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_what_a_container_did_before_it_was_started_anew_is_no_sign_of_its_life(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    deploy(tmp_path, TASKS + PROBE)
    answer = "SELECT result FROM pgqueue.job_done WHERE id = %s"
    well = [0, {"host": "box", "well": True, "ready": True, "read_only": False}]

    def probes() -> bool:
        """Whether a probe that runs in the container calls it well."""
        [job] = put(eyes, "probe")
        return bool(wait_until(lambda: eyes.one(answer, job)) == well)

    with boot(tmp_path, dsn, "--lease", "10m") as old:
        wait_until(probes)
        old.close()
    anew = pgqueue("health", "--ready", "--json", dsn=dsn, where=container("box"))
    assert (anew.returncode, items(anew)) == (1, [{"host": "box", "well": False, "ready": False, "read_only": False}])
    assert pgqueue("health", "--ready", "--host", "box", dsn=dsn).returncode == 0, "its lease is not over"
    with boot(tmp_path, dsn, "--lease", "10m"):
        wait_until(probes)


def test_only_signs_of_life_since_then_count(conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, beat_at) "
        "VALUES ('1 hour', 1, 1, 'one', 'v', '{}', pgqueue.now() - interval '10 minutes')"
    )
    conn.execute(
        "INSERT INTO pgqueue.supervisor (host, pid, size, state, beat_at) "
        "VALUES ('two', 1, 1, 'quiet', pgqueue.now() - interval '5 seconds')"
    )
    assert health(conn, "one") == health(conn, "one", since=660.0) == Health("one", True, True)
    assert health(conn, "one", since=599.0) == Health("one", False, False)
    assert health(conn, "two") == health(conn, "two", since=660.0) == Health("two", True, False)
    assert health(conn, "two", since=4.9) == Health("two", False, False)


def test_for_how_long_this_host_or_container_has_been_up() -> None:
    here = up()
    if here is None:
        pytest.skip("no /proc here, or it is hidden")
    assert here > 0
    code = "from pgqueue.admin.health import up; print(up())"
    assert 0 <= float(run_in(container("box"), code).stdout) < 60
    later = up()
    assert later is not None and later > here

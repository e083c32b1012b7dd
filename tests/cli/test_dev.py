"""`pgqueue dev`: one terminal for server, tables, worker and dashboard, and one Ctrl-C for all of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import psutil
import psycopg
import pytest
from commands import COMMAND, pgqueue
from servers import server_home
from workers import wait_until

TASKS = """
import pgqueue

@pgqueue.task(name="shop.write")
def write(where: str) -> None:
    with open(where, "w") as file:
        file.write("{text}")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def deploy(place: Path, text: str) -> None:
    """Write the application's module, whole at once."""
    (place / "new").write_text(TASKS.format(text=text))
    (place / "new").rename(place / "devshop.py")


@contextmanager
def dev(place: Path, *options: str, dsn: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running `pgqueue dev`; whatever it leaves is killed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PG"))}
    if dsn != "embedded:":
        environment["PGQUEUE_DSN"] = dsn
    with (place / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            [COMMAND, "dev", "devshop", *options], cwd=place, env=environment, stdout=log, stderr=log
        )
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: "ready: 1 worker process" in said(place) or process.poll() is not None)
        assert process.poll() is None, said(place)
        family = psutil.Process(process.pid).children(recursive=True)
        yield process
        process.wait(60)
        assert [each for each in family if each.is_running()] == []
    finally:
        for each in family:
            if each.is_running():
                each.kill()
        process.kill()
        process.wait()


def said(place: Path) -> str:
    return (place / "dev.log").read_text()


def run(place: Path, dsn: str) -> str:
    """Enqueue a job, and return what its handler has written."""
    written = place / "written"
    written.unlink(missing_ok=True)
    done = pgqueue("enqueue", "shop.write", f'{{"where": "{written}"}}', dsn=dsn, cwd=place)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: written.exists() and written.read_text() != "")
    return written.read_text()


@pytest.mark.second
@pytest.mark.promise("F286")
def test_the_first_job_runs_within_seconds_on_a_machine_without_a_server() -> None:
    """From nothing: a server, its tables, a worker. 15 s is what the issue of a first hour allows."""
    with server_home() as place:
        deploy(place, "first")
        began = monotonic()
        with dev(place, "--no-web", dsn="embedded:") as process:
            assert run(place, "embedded:") == "first"
            assert monotonic() - began < 15
            process.send_signal(signal.SIGINT)
        assert process.returncode == 0
        wait_until(
            lambda: (
                not any(str(place) in " ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
            )
        )


@pytest.mark.second
@pytest.mark.promise("F286")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_changed_file_is_run_the_dashboard_is_served_and_a_signal_ends_all(
    empty_dsn: str, tmp_path: Path, number: signal.Signals
) -> None:
    deploy(tmp_path, "one")
    address = f"127.0.0.1:{free_port()}"
    with dev(tmp_path, "--bind", address, dsn=empty_dsn) as process:
        assert run(tmp_path, empty_dsn) == "one"
        with urllib.request.urlopen(f"http://{address}/", timeout=30) as page:
            assert page.status == 200
        deploy(tmp_path, "two")
        wait_until(lambda: run(tmp_path, empty_dsn) == "two")
        process.send_signal(number)
    assert process.returncode == 0
    assert "Traceback" not in said(tmp_path) and "second signal" not in said(tmp_path)


@pytest.mark.promise("F286")
def test_if_a_process_ends_the_others_end_too(empty_dsn: str, tmp_path: Path) -> None:
    """The dashboard finds its port taken."""
    deploy(tmp_path, "one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environment = os.environ | {"PGQUEUE_DSN": empty_dsn}
        done = subprocess.run(
            [COMMAND, "dev", "devshop", "--bind", address],
            cwd=tmp_path,
            env=environment,
            check=False,
            timeout=60,
            capture_output=True,
            text=True,
        )
    assert done.returncode not in (0, 130) and address in done.stderr, done.stderr
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,), "the tables are there"


@pytest.mark.promise("F286")
@pytest.mark.parametrize(
    ("dsn", "more"),
    [
        ("postgresql://app@db.example/shop", {}),
        ("host=127.0.0.1,10.0.0.1 dbname=shop", {}),
        ("service=shop", {}),
        ("dbname=shop", {"PGHOST": "db.example"}),
    ],
)
def test_a_server_elsewhere_is_not_changed_unless_it_is_named(tmp_path: Path, dsn: str, more: dict[str, str]) -> None:
    """PGQUEUE_DSN may be that of production, left in a shell."""
    deploy(tmp_path, "one")
    done = pgqueue("dev", "devshop", dsn=dsn, cwd=tmp_path, **more)
    assert (done.returncode, "on another machine" in done.stderr, "db.example" in done.stderr) == (2, True, False)

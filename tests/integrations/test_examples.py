"""The applications of examples/: their own tests pass, and their servers and workers do what their pages say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pages
import pytest
from django_projects import database
from forks import COMMAND
from workers import Eyes, wait_until

EXAMPLES = pages.ROOT / "examples"
FASTAPI, DJANGO = EXAMPLES / "fastapi_shop", EXAMPLES / "django_shop"
ALEMBIC = str(Path(sys.executable).with_name("alembic"))


def environ(dsn: str) -> dict[str, str]:
    """The environment of an example on this database: what its README says, and nothing of ours."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "DJANGO_", "PYTEST_"))
    }
    entry = database(dsn)
    entry["HOST"] = entry.get("HOST") or entry["OPTIONS"].get("host", "")
    names = {f"DATABASE_{name}": entry.get(name, "") for name in ("NAME", "USER", "PASSWORD", "HOST", "PORT")}
    return kept | names | {"DATABASE_URL": f"postgresql+asyncpg://{pages.address(dsn)}", "PGQUEUE_TEST_DSN": dsn}


def run(home: Path, dsn: str, *command: str) -> str:
    """Run this command of an example to its end; what it printed."""
    done = subprocess.run(
        command, cwd=home, env=environ(dsn), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def serving(
    home: Path, dsn: str, log: Path, server: tuple[str, ...], worker: tuple[str, ...]
) -> Iterator[httpx.Client]:
    """A client of this application, which has a server and a worker in processes of their own until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ExitStack() as stack:
        out = stack.enter_context(log.open("wb"))
        for command in (tuple(part.replace("PORT", port) for part in server), worker):
            process = stack.enter_context(
                subprocess.Popen(command, cwd=home, env=environ(dsn), stdout=out, stderr=subprocess.STDOUT)
            )
            stack.callback(process.terminate)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30))

        def up() -> bool:
            try:
                return client.get("/jobs/1/", follow_redirects=True).status_code == 404
            except httpx.TransportError:
                return False

        wait_until(up)
        yield client


def completed(client: httpx.Client, job: str) -> object:
    """The result of this job, when it has one."""
    wait_until(lambda: client.get(job).json()["state"] == "completed")
    return client.get(job).json()["result"]


@pytest.mark.second
@pytest.mark.promise("F264")
def test_the_tests_of_the_shop_on_fastapi_pass(dsn: str) -> None:
    assert "4 passed" in run(FASTAPI, dsn, sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


@pytest.mark.second
@pytest.mark.promise("F264")
def test_the_shop_on_fastapi_does_what_its_page_says(empty_dsn: str, tmp_path: Path) -> None:
    run(FASTAPI, empty_dsn, ALEMBIC, "upgrade", "head")
    server = (sys.executable, "-m", "uvicorn", "shop.api:app", "--port", "PORT")
    worker = (COMMAND, "work", "shop.tasks")
    with serving(FASTAPI, empty_dsn, tmp_path / "log", server, worker) as client:
        answer = client.post("/purchases/tea")
        assert answer.status_code == 202
        assert completed(client, answer.headers["Location"]) == "charged tea"
    run(FASTAPI, empty_dsn, ALEMBIC, "downgrade", "base")
    with closing(Eyes(empty_dsn)) as eyes:
        assert eyes.one("SELECT count(*) FROM pg_namespace WHERE nspname = 'pgqueue'") == 0
        assert eyes.one("SELECT to_regclass('purchase')") is None


@pytest.mark.second
@pytest.mark.promise("F264")
def test_the_tests_of_the_shop_on_django_pass(dsn: str) -> None:
    said = run(DJANGO, dsn, sys.executable, "manage.py", "test")
    assert "Ran 6 tests" in said and "OK" in said


@pytest.mark.second
@pytest.mark.promise("F264")
def test_the_shop_on_django_does_what_its_page_says(empty_dsn: str, tmp_path: Path) -> None:
    run(DJANGO, empty_dsn, sys.executable, "manage.py", "migrate")
    run(DJANGO, empty_dsn, sys.executable, "manage.py", "makemigrations", "--check")
    manage = (sys.executable, "manage.py")
    server, worker = (*manage, "runserver", "--noreload", "PORT"), (*manage, "pgqueue", "work")
    with serving(DJANGO, empty_dsn, tmp_path / "log", server, worker) as client:
        answer = client.post("/orders/tea/")
        assert answer.status_code == 202
        assert completed(client, answer.headers["Location"]) == "a receipt for tea"
        gift = client.post("/orders/tea/gift/")
        assert gift.status_code == 202
        assert completed(client, gift.headers["Location"]) is None
    with closing(Eyes(empty_dsn)) as eyes:
        wait_until(lambda: eyes.one("SELECT bool_and(counted OR wrapped) FROM shop_order"))

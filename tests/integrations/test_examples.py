"""The applications of examples/: their own tests pass, and their servers and workers do what their pages say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pages
import pytest
from django_projects import database
from forks import COMMAND
from relays import app_dsn as app_dsn
from workers import Eyes, wait_until

EXAMPLES = pages.ROOT / "examples"
FASTAPI, DJANGO = EXAMPLES / "fastapi_shop", EXAMPLES / "django_shop"
FLASK, ASYNCIO, SERVICES = EXAMPLES / "flask_shop", EXAMPLES / "asyncio_worker", EXAMPLES / "two_services"
OWN_TESTS = {FASTAPI: 4, FLASK: 4, ASYNCIO: 3, SERVICES: 2}
ALEMBIC = str(Path(sys.executable).with_name("alembic"))


def environ(dsn: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an example on this database: what its README says, and nothing of ours."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "DJANGO_", "PYTEST_"))
    }
    entry = database(dsn)
    entry["HOST"] = entry.get("HOST") or entry["OPTIONS"].get("host", "")
    names = {f"DATABASE_{name}": entry.get(name, "") for name in ("NAME", "USER", "PASSWORD", "HOST", "PORT")}
    named = {"DATABASE_URL": f"postgresql+asyncpg://{pages.address(dsn)}", "PGQUEUE_TEST_DSN": dsn}
    return kept | names | named | dict(more or {})


def run(home: Path, dsn: str, *command: str, **more: str) -> str:
    """Run this command of an example to its end; what it printed."""
    env = environ(dsn, more)
    done = subprocess.run(
        command, cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def serving(
    home: Path, dsn: str, log: Path, server: tuple[str, ...], *workers: tuple[str, ...], **more: str
) -> Iterator[httpx.Client]:
    """A client of this application, which has a server and workers in processes of their own until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ExitStack() as stack:
        out = stack.enter_context(log.open("wb"))
        for command in (tuple(part.replace("PORT", port) for part in server), *workers):
            process = stack.enter_context(
                subprocess.Popen(command, cwd=home, env=environ(dsn, more), stdout=out, stderr=subprocess.STDOUT)
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
@pytest.mark.parametrize("home", OWN_TESTS, ids=lambda home: home.name)
def test_the_tests_of_an_example_pass(home: Path, dsn: str) -> None:
    said = run(home, dsn, sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    assert f"{OWN_TESTS[home]} passed" in said


def test_each_example_is_tried_here_and_named_in_the_index() -> None:
    there = {home for home in EXAMPLES.iterdir() if (home / "README.md").is_file()}
    assert there == {*OWN_TESTS, DJANGO}
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [home.name for home in there if f"[{home.name}]({home.name})" not in index] == []


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


@pytest.mark.second
@pytest.mark.promise("F367")
def test_the_shop_on_flask_does_what_its_page_says(dsn: str, tmp_path: Path) -> None:
    named = {"SHOP_DSN": dsn, "PGQUEUE_DSN": dsn}
    flask = (sys.executable, "-m", "flask", "--app", "shop.app")
    assert "the table is there" in run(FLASK, dsn, *flask, "tables", **named)
    server, worker = (*flask, "run", "--port", "PORT"), (COMMAND, "work", "shop.tasks")
    with serving(FLASK, dsn, tmp_path / "log", server, worker, **named) as client:
        answer = client.post("/orders/tea")
        assert answer.status_code == 202
        assert completed(client, answer.headers["Location"]) == "charged tea"
        assert client.post(f"/orders/{'x' * 40}").status_code == 422
    with closing(Eyes(dsn)) as eyes:
        assert eyes.all("SELECT item, charged FROM shop_order") == [("tea", True)]


@pytest.mark.second
@pytest.mark.promise("F464")
def test_the_shop_on_flask_closes_its_pool_at_the_end(dsn: str) -> None:
    """What is registered first is called last. Only on Python 3.13 the threads of an open pool hold the end up."""
    program = "import atexit; made = []; atexit.register(lambda: print(made[0].extensions['pool'].closed))"
    asked = f"{program}; from shop.app import create_app; made.append(create_app())"
    assert run(FLASK, dsn, sys.executable, "-c", asked, SHOP_DSN=dsn) == "True\n"


class Pages(BaseHTTPRequestHandler):
    """Pages for the checker: one is gone, the others are there."""

    def do_HEAD(self) -> None:
        self.send_response(404 if self.path == "/gone" else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written for a request."""


@pytest.mark.second
@pytest.mark.promise("F367")
def test_the_checker_on_asyncio_does_what_its_page_says(empty_dsn: str, tmp_path: Path) -> None:
    checker, named = (sys.executable, "-m", "checker"), {"PGQUEUE_DSN": empty_dsn}
    with ExitStack() as stack:
        site = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Pages))
        threading.Thread(target=site.serve_forever, daemon=True).start()
        stack.callback(site.shutdown)
        here = f"http://127.0.0.1:{site.server_port}"
        run(ASYNCIO, empty_dsn, *checker, "tables", **named)
        run(ASYNCIO, empty_dsn, *checker, "add", f"{here}/", f"{here}/gone", **named)
        log = stack.enter_context((tmp_path / "log").open("wb"))
        works = subprocess.Popen((*checker, "run"), cwd=ASYNCIO, env=environ(empty_dsn, named), stdout=log, stderr=log)
        stack.enter_context(works)
        stack.callback(works.kill)
        with closing(Eyes(empty_dsn)) as eyes:
            wait_until(lambda: eyes.one("SELECT count(status) FROM page") == 2)
        works.terminate()
        assert works.wait(60) == 0
        shown = run(ASYNCIO, empty_dsn, *checker, "show", **named)
    assert shown == f"200 {here}/\n404 {here}/gone\n"
    assert (tmp_path / "log").read_text().splitlines()[-1] == "the checker has ended"


@pytest.mark.second
@pytest.mark.promise("F367")
def test_the_two_services_do_what_their_page_says(app_dsn: str, dsn: str, tmp_path: Path) -> None:
    named = {"ORDERS_DSN": app_dsn, "MAILING_DSN": dsn}
    for service in ("orders", "mailing"):
        run(SERVICES, dsn, sys.executable, "-m", f"{service}.tables", **named)
    server = (sys.executable, "-m", "uvicorn", "orders.app:app", "--port", "PORT")
    relay = (COMMAND, "relay", "--from", app_dsn, "--to", dsn)
    worker = (COMMAND, "work", "mailing.tasks", "--dsn", dsn)
    with (
        serving(SERVICES, dsn, tmp_path / "log", server, relay, worker, **named) as client,
        closing(Eyes(dsn)) as eyes,
    ):
        order = client.post("/orders/tea").json()["order"]
        wait_until(lambda: eyes.one("SELECT count(*) FROM receipt") == 1)
        assert eyes.all("SELECT shop_order, text FROM receipt") == [(order, "thank you for tea")]
    with closing(Eyes(app_dsn)) as eyes:
        assert eyes.one("SELECT count(*) FROM pgqueue.outbox") == 0

"""A worker that is started while there is no primary waits for one; a wrong address is an error at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from commands import COMMAND, heard, pgqueue, working
from loop_thread import LoopThread, pump
from pgbouncers import free_port
from psycopg.conninfo import conninfo_to_dict
from relays import app_dsn as app_dsn
from servers import Server
from standby import pair
from workers import Eyes, wait_until

import pgqueue as library
from pgqueue.cli.database import between_primaries
from pgqueue.cli.worker_process import begin
from pgqueue.config import configure
from pgqueue.database import migrations

SHOP = "import pgqueue\n\n@pgqueue.task(name='shop.mail')\nasync def mail() -> None: ...\n"

pytestmark = pytest.mark.promise("F342")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.mark.parametrize("attributes", ["any", "read-write", "primary"])
def test_a_worker_waits_for_the_promotion_of_a_standby(attributes: str, own_server: Server, app: Path) -> None:
    assert own_server.cluster is not None
    with pair(own_server.cluster, synchronous=False) as both:
        migrations.migrate(both.dsn())
        both.caught_up()
        both.crash()
        with working("shop", dsn=both.dsn(attributes), cwd=app) as worker:
            worker.says("trying again until it is back" if attributes != "any" else "nothing is taken until")
            both.promote()
            worker.says("ready")
            worker.signal(signal.SIGTERM)
            assert worker.ends() == 0, worker.output


@pytest.mark.second
@pytest.mark.parametrize("side", ["queue", "application"])
def test_a_relay_waits_for_the_promotion_of_a_standby(
    side: str, own_server: Server, app_dsn: str, dsn: str, eyes: Eyes
) -> None:
    """The only address of this side is that of a standby."""
    assert own_server.cluster is not None
    with pair(own_server.cluster, synchronous=False) as both:
        of_queue = side == "queue"
        migrations.migrate(both.dsn(), line=migrations.QUEUE if of_queue else migrations.OUTBOX)
        source, target = (app_dsn, both.dsn("any")) if of_queue else (both.dsn("any"), dsn)
        with psycopg.connect(app_dsn if of_queue else both.dsn()) as conn:
            library.enqueue(library.Outbox(conn), "shop.mail")
        both.caught_up()
        both.crash()
        command = [COMMAND, "relay", "--from", source, "--to", target]
        with heard(partial(_started, command)) as relay:
            relay.says("the database is read only")
            both.promote()
            if of_queue:
                with psycopg.connect(both.dsn()) as conn:
                    wait_until(lambda: delivered(conn), 60)
            else:
                wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job") == 1, 60)
            relay.signal(signal.SIGTERM)
            assert relay.ends() == 0, relay.output


def _started(command: list[str], stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stderr=stderr, text=True)


def delivered(conn: psycopg.Connection[Any]) -> bool:
    """Whether the job is there now."""
    conn.rollback()
    return conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (1,)


class Proxy:
    """A port of loopback that closes each connection without a word, until it leads to the server."""

    def __init__(self, dsn: str) -> None:
        self._target = conninfo_to_dict(dsn)
        self.closed = threading.Semaphore(0)
        self.knows_server = threading.Event()
        self._loop = LoopThread()
        self.port = self._loop.listen(self._serve)

    def close(self) -> None:
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.knows_server.is_set():
            writer.close()
            self.closed.release()
            return
        theirs, ours = await self._loop.connect(self._target)
        self._loop.start(pump(reader, ours))
        self._loop.start(pump(theirs, writer))


@contextmanager
def proxy(dsn: str) -> Iterator[Proxy]:
    made = Proxy(dsn)
    try:
        yield made
    finally:
        made.close()


def test_a_worker_waits_behind_a_proxy_that_knows_no_server(own_server: Server, app: Path) -> None:
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    with proxy(dsn) as made:
        query = urlencode({"host": "127.0.0.1", "port": made.port, "sslmode": "disable", "gssencmode": "disable"})
        with working("shop", dsn=f"postgresql://postgres@/postgres?{query}", cwd=app) as worker:
            worker.says("trying again until it is back")
            for _ in range(4):
                assert made.closed.acquire(timeout=60)
            made.knows_server.set()
            worker.says("ready")
            worker.signal(signal.SIGTERM)
            assert worker.ends() == 0, worker.output


@pytest.mark.parametrize(
    ("dsn", "environ"),
    [
        ("dbname=shop host=127.0.0.1 port={port}", {}),
        ("dbname=shop host=/nowhere,127.0.0.1 port=,{port}", {}),
        ("dbname=shop host=db.invalid hostaddr=127.0.0.1 port={port}", {}),
        ("dbname=shop", {"PGHOST": "127.0.0.1", "PGPORT": "{port}"}),
        ("service=shop", {"PGSERVICEFILE": "{file}"}),
        ("dbname=shop", {"PGSERVICE": "shop", "PGSERVICEFILE": "{file}"}),
    ],
)
def test_a_proxy_is_found_wherever_libpq_finds_it(
    dsn: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: host and port are read from the DSN only."""
    with proxy("") as made:
        file = tmp_path / "services"
        file.write_text(f"[shop]\nhost=127.0.0.1\nport={made.port}\ndbname=shop\n")
        for name, value in environ.items():
            monkeypatch.setenv(name, value.format(port=made.port, file=file))
        configure(dsn=dsn.format(port=made.port))
        assert between_primaries()


async def test_a_database_that_goes_away_after_the_first_look_is_waited_for() -> None:
    """Naive: the worker ends with 3, for it found a database a moment before."""

    class Starts:
        worker_id, tries = 0, 0

        async def start(self) -> None:
            self.tries += 1
            if self.tries < 4:
                raise psycopg.OperationalError("refused")
            if self.tries == 5:
                self.worker_id = 7
                raise psycopg.OperationalError("after its row")

    worker: Any = Starts()
    await begin(worker)
    assert worker.tries == 4
    with pytest.raises(psycopg.OperationalError, match="after its row"):
        await begin(worker)


def test_a_wrong_address_is_an_error_at_once(app: Path) -> None:
    done = pgqueue("work", "shop", dsn=f"postgresql://postgres@127.0.0.1:{free_port()}/postgres", cwd=app)
    assert done.returncode == 3

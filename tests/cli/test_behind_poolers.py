"""A worker that is started behind a pooler whose server is away waits, as one between two primaries does."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest
from commands import working
from pgbouncers import PgBouncer, needs_pgbouncer
from servers import Server

from pgqueue.database import migrations

SHOP = "import pgqueue\n\n@pgqueue.task(name='shop.mail')\nasync def mail() -> None: ...\n"
RETRY = "server_login_retry = 1\n"


@needs_pgbouncer
@pytest.mark.second
@pytest.mark.promise("F342")
@pytest.mark.parametrize(
    ("more", "is_new"),
    [(f"{RETRY}query_wait_timeout = 1\n", False), (RETRY, True)],
    ids=["it has known its server", "it has never met its server"],
)
def test_a_worker_waits_behind_a_pooler_without_a_server(
    more: str, is_new: bool, own_server: Server, tmp_path: Path
) -> None:
    """Naive: the pooler answers, so the address leads to a server, and its refusal is exit code 3."""
    (tmp_path / "shop.py").write_text(SHOP)
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    with PgBouncer(dsn, 5, more=more) as bouncer:
        psycopg.connect(bouncer.dsn).close()
        if is_new:
            bouncer.stop()
        own_server.stop("immediate")
        if is_new:
            bouncer.start(is_alone=True)
        with working("shop", dsn=f"{bouncer.dsn} connect_timeout=2", cwd=tmp_path, PGQUEUE_PREPARE="off") as worker:
            worker.says("trying again until it is back")
            own_server.start()
            worker.says("ready")
            worker.signal(signal.SIGTERM)
            assert worker.ends() == 0, worker.output

"""What a handle says of a job on a real standby that lags, and what is told where nothing can be written."""

from __future__ import annotations

import psycopg
import pytest
from servers import Server
from standby import ask, frozen_second, pair

import pgqueue
from pgqueue.database import migrations
from pgqueue.steady_clock import monotonic

WAIT = "SELECT count(pg_wal_replay_pause())"


@pytest.mark.second
@pytest.mark.promise("F421")
def test_a_handle_asks_the_primary_of_two_and_else_reads_what_the_standby_has(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the standby stands first, has not heard of the job, and the handle says that it is not there."""
    assert own_server.cluster is not None
    with pair(own_server.cluster, synchronous=False) as both:
        hosts = ",".join(str(cluster.sockets) for cluster in (both.standby, both.primary))
        dsn = f"postgresql://postgres@/postgres?host={hosts}"
        migrations.migrate(both.primary.dsn())
        with psycopg.connect(both.primary.dsn()) as conn:
            old = pgqueue.enqueue(conn, "shop.mail")
        both.caught_up()
        ask(both.standby, WAIT)
        with psycopg.connect(both.primary.dsn()) as conn:
            new = pgqueue.enqueue(conn, "shop.mail")
            pgqueue.cancel(conn, old.id)
        monkeypatch.setenv("PGQUEUE_DSN", dsn)
        assert (old.state, new.state) == ("cancelled", "available")
        monkeypatch.setenv("PGQUEUE_DSN", both.standby.dsn())
        assert old.state == "available"  # as it was
        with pytest.raises(pgqueue.JobNotFound):
            _ = new.state
        with psycopg.connect(dsn) as conn:  # the application's connection: libpq takes the first host
            assert old.info(conn).state == "available"
            conn.rollback()
            for change in (lambda: pgqueue.enqueue(conn, "shop.mail"), lambda: pgqueue.cancel(conn, old.id)):
                with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="in a read-only transaction"):
                    change()
                conn.rollback()


@pytest.mark.promise("F421")
def test_a_handle_reads_the_standby_while_the_primary_is_frozen(dsn: str) -> None:
    """Naive: the state is waited for until the attempt to find the primary ends, after two minutes."""
    with psycopg.connect(dsn) as conn:
        job = pgqueue.enqueue(conn, "shop.mail")
    began = monotonic()
    with frozen_second(dsn) as address:
        pgqueue.configure(dsn=address)
        assert job.state == "available"
    assert monotonic() - began < 60  # the machine may be busy

"""A standby of an embedded server: a copy by pg_basebackup that streams from it, follows, and can take its place.

Used by system/test_standby.py. Both servers listen on sockets only, each in a directory of its own; both go with the
test.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from servers import SETTINGS, memory
from workers import wait_until

from pgqueue.database import embedded
from pgqueue.database.embedded import Cluster


def ask(cluster: Cluster, query: str, *params: object) -> Any:
    """The first value of the answer of that server."""
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        row = conn.execute(query.encode(), params).fetchone()
    return row and row[0]


class Pair:
    """A primary and its standby. `dsn` leads to whichever can be written."""

    def __init__(self, primary: Cluster, standby: Cluster) -> None:
        self.primary, self.standby = primary, standby

    def dsn(self, attributes: str = "read-write") -> str:
        """Both hosts: the client takes the one that is no standby; `any`: the first that answers."""
        hosts = ",".join(str(cluster.sockets) for cluster in (self.primary, self.standby))
        query = urlencode({"host": hosts, "target_session_attrs": attributes}, safe="/,")
        return f"postgresql://postgres@/postgres?{query}"

    def crash(self) -> None:
        """Kill the primary with all its processes, as if its machine had lost power."""
        postmaster = psutil.Process(self.primary.postmaster())
        postmaster.suspend()  # else a process that it starts meanwhile lives on, and may commit
        processes = [postmaster, *postmaster.children()]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(processes, 60)

    def caught_up(self) -> None:
        """Wait until the standby has seen all that the primary has committed by now."""
        catch_up(self.primary, self.standby)

    def cut(self) -> None:
        """Let the standby hear no more of the primary, which goes on."""
        alter(self.standby, "primary_conninfo", "")
        wait_until(lambda: ask(self.standby, "SELECT count(*) FROM pg_stat_wal_receiver") == 0)

    def promote(self) -> None:
        """Make the standby the primary; returns when it can be written."""
        self.standby.run("pg_ctl", "-D", str(self.standby.data), "-w", "-t", "60", "promote")


@contextmanager
def standby(primary: Cluster, **settings: str) -> Iterator[Cluster]:
    """A standby of a running server, streaming over a slot."""
    directory = Path(tempfile.mkdtemp(prefix="pgqueue-standby-", dir=memory()))
    if primary.account:
        os.chown(directory, *primary.account)
    (directory / embedded.MARK).touch()  # a directory of ours, for `embedded`
    try:
        primary.run(
            *("pg_basebackup", "-h", str(primary.sockets), "-U", "postgres", "-D", str(directory / "data")),
            *("--wal-method=stream", "--checkpoint=fast", "--no-sync", "--write-recovery-conf"),
            *("--create-slot", "--slot=standby"),
        )
        with embedded.start(directory, bin_path=primary.bin_path, settings=SETTINGS | settings, keep=False) as second:
            yield second.cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def pair(primary: Cluster, *, synchronous: bool) -> Iterator[Pair]:
    """The two, to fail over from one to the other; `synchronous`: a commit waits until the standby has it too."""
    with standby(primary) as second:
        if synchronous:
            alter(primary, "synchronous_standby_names", "*")
            wait_until(lambda: ask(primary, "SELECT sync_state FROM pg_stat_replication") == "sync")
        yield Pair(primary, second)
        if primary.postmaster() is None:
            primary.start()  # and stop in order: a killed server leaves its shared memory behind
            alter(primary, "synchronous_standby_names", "")


@contextmanager
def feedback(primary: Cluster, second: Cluster, database: str, *, hold: bool = True) -> Iterator[None]:
    """A long query on the standby, which tells the primary to keep what that may still want to see."""
    if not hold:
        yield
        return
    catch_up(primary, second)
    with psycopg.connect(second.dsn(database)) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT count(*) FROM pgqueue.job")
        wait_until(lambda: ask(primary, "SELECT xmin::text FROM pg_replication_slots"))
        yield
        held = ask(primary, "SELECT age(xmin) FROM pg_replication_slots")
        assert held > 20, f"the standby held back {held} transactions only"


def catch_up(primary: Cluster, second: Cluster) -> None:
    """Wait until `second` has replayed all that is written now."""
    written = ask(primary, "SELECT pg_current_wal_lsn()::text")
    wait_until(lambda: ask(second, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", written))


def alter(cluster: Cluster, name: str, value: str) -> None:
    """Change a setting of a running server."""
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        conn.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        conn.execute("SELECT pg_reload_conf()")


@contextmanager
def frozen_first(dsn: str, n: int = 1) -> Iterator[str]:
    """An address of several servers: the first `n` take connections and say nothing, the last is that of the DSN."""
    said = conninfo_to_dict(dsn)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        host, port = "127.0.0.1,", f"{frozen.getsockname()[1]},"
        yield make_conninfo(dsn, host=f"{host * n}{said['host']}", port=f"{port * n}{said.get('port', 5432)}")


@contextmanager
def frozen_second(dsn: str) -> Iterator[str]:
    """An address of two servers: the first only reads; the second takes connections and says nothing."""
    said = conninfo_to_dict(dsn)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        yield make_conninfo(
            dsn,
            host=f"{said['host']},127.0.0.1",
            port=f"{said.get('port', 5432)},{frozen.getsockname()[1]}",
            options="-c default_transaction_read_only=on",
        )

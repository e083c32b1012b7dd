"""A standby of an embedded server: a copy by pg_basebackup that streams from it, follows, and can take its place.

Used by test_standby.py. Both servers listen on sockets only, each in a directory of its own; both go with the test.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlencode

import psutil
import psycopg
from psycopg import sql
from servers import SETTINGS, memory
from workers import Eyes, wait_until

from pgqueue import embedded
from pgqueue.embedded import Cluster

SLOT = "standby"


class Pair:
    """A primary and its standby. `dsn` leads to whichever can be written."""

    def __init__(self, primary: Cluster, standby: Cluster) -> None:
        self.primary, self.standby = primary, standby
        self._crashed: list[psutil.Process] = []

    def dsn(self, database: str = "postgres") -> str:
        """Both hosts: the client takes the one that is no standby."""
        hosts = ",".join(str(cluster.sockets) for cluster in (self.primary, self.standby))
        query = urlencode({"host": hosts, "target_session_attrs": "read-write"}, safe="/,")
        return f"postgresql://postgres@/{quote(database, safe='')}?{query}"

    def crash(self) -> None:
        """Kill the primary with all its processes, as if its machine had lost power."""
        postmaster = psutil.Process(self.primary.postmaster())
        self._crashed = [postmaster, *postmaster.children()]
        for process in self._crashed:
            _kill(process)
        psutil.wait_procs(self._crashed, 10)

    def cut(self, database: str = "postgres") -> None:
        """Let the standby hear no more of the primary, which goes on."""
        with psycopg.connect(self.standby.dsn(database), autocommit=True) as conn:
            conn.execute("ALTER SYSTEM SET primary_conninfo = ''")
            conn.execute("SELECT pg_reload_conf()")
            eyes = Eyes(self.standby.dsn(database))
            wait_until(lambda: not eyes.all("SELECT FROM pg_stat_wal_receiver"))
            eyes.close()

    def promote(self) -> None:
        """Make the standby the primary; returns when it can be written."""
        self.standby.run("pg_ctl", "-D", str(self.standby.data), "-w", "-t", "60", "promote")

    def caught_up(self) -> None:
        """Wait until the standby has seen all that the primary has committed by now."""
        with psycopg.connect(self.primary.dsn(), autocommit=True) as conn:
            row = conn.execute("SELECT pg_current_wal_lsn()").fetchone()
        eyes = Eyes(self.standby.dsn())
        wait_until(lambda: eyes.one("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", row and row[0]))
        eyes.close()


@contextmanager
def standby(primary: Cluster, *, synchronous: bool = False, **settings: str) -> Iterator[Cluster]:
    """A standby of a running server, streaming over a slot; `synchronous`: its commits wait until it has them too."""
    directory = Path(tempfile.mkdtemp(prefix="pgqueue-standby-", dir=memory()))
    shutil.chown(directory, *primary.account) if primary.account else None
    (directory / "door.lock").touch()
    host = str(primary.sockets)
    primary.run(
        *("pg_basebackup", "-h", host, "-U", "postgres", "-D", str(directory / "data"), "-X", "stream", "-R"),
        *("-C", "-S", SLOT, "-c", "fast", "--no-sync"),
    )
    # What the primary asks of its standbys is copied with it, and this one has none: it would wait for ever.
    own = SETTINGS | {"synchronous_standby_names": "", **settings}
    with embedded.start(directory, bin_path=primary.bin_path, settings=own, keep=False) as running:
        if synchronous:
            _wait_for_standby(primary)
        yield running.cluster


@contextmanager
def pair(primary: Cluster, *, synchronous: bool) -> Iterator[Pair]:
    """The two, to fail over from one to the other."""
    with standby(primary, synchronous=synchronous) as second:
        yield Pair(primary, second)
        if primary.postmaster() is None:
            primary.start()  # and stop in order: a killed server leaves its shared memory behind


def _wait_for_standby(primary: Cluster) -> None:
    with psycopg.connect(primary.dsn(), autocommit=True) as conn:
        conn.execute(sql.SQL("ALTER SYSTEM SET synchronous_standby_names = '*'"))
        conn.execute("SELECT pg_reload_conf()")
    eyes = Eyes(primary.dsn())
    wait_until(lambda: eyes.one("SELECT sync_state FROM pg_stat_replication") == "sync")
    eyes.close()


def _kill(process: psutil.Process) -> None:
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return

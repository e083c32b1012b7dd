"""Patroni itself on loopback: three servers, etcd, and haproxy in front (Debian: patroni, etcd-server, haproxy).

Used by failover.py and system/test_failover.py. All lies in a temporary directory, and all processes go with the block.
They are ended by the ids that were noted when they were started, and with the children that these have then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import psycopg
import pytest
from pgbouncers import free_port
from servers import memory
from workers import wait_until

from pgqueue.database.embedded import server_account

BINARIES = next((path for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"))), None)
PROGRAMS = {name: shutil.which(name) or shutil.which(name, path="/usr/sbin") for name in ("patroni", "etcd", "haproxy")}
WHY = "Patroni is not installed: apt-get install patroni etcd-server haproxy postgresql"
there = BINARIES is not None and all(PROGRAMS.values())
needs_patroni = pytest.mark.skipif(not there, reason=WHY)

TTL = 20
"""Seconds until a leader that does not answer is replaced; Patroni allows no less."""
NOT_YET = {412, 503}
"""What Patroni answers while it knows no standby that is good enough, or a server is still starting."""
ACCESS = ("all", "replication")
SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "200", "max_wal_size": "1GB"}
HAPROXY = """\
defaults
    mode tcp
    retries 0
    timeout connect 2s
    timeout client 1h
    timeout server 1h
    timeout check 1s
listen primary
    bind 127.0.0.1:{port}
    option httpchk GET /primary
    default-server inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
"""


class Node:
    """One PostgreSQL server and the Patroni that keeps it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.port, self.api = free_port(), free_port()
        self.directory = directory / name
        self.process: subprocess.Popen[bytes] | None = None
        self.frozen: list[psutil.Process] = []

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres connect_timeout=2"

    def configuration(self, etcd: int, *, synchronous: bool) -> dict[str, Any]:
        at = f"127.0.0.1:{self.port}"
        settings = SETTINGS | {"unix_socket_directories": str(self.directory)}
        dcs = {
            **{"ttl": TTL, "loop_wait": 1, "retry_timeout": 3, "synchronous_mode": synchronous},
            "postgresql": {"use_pg_rewind": True, "parameters": {"wal_log_hints": "on"}},
        }
        return {
            **{"scope": "pgqueue", "name": self.name, "etcd3": {"host": f"127.0.0.1:{etcd}"}},
            "restapi": {"listen": f"127.0.0.1:{self.api}", "connect_address": f"127.0.0.1:{self.api}"},
            "bootstrap": {"dcs": dcs, "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}]},
            "postgresql": {
                **{"listen": at, "connect_address": at, "data_dir": str(self.directory / "data")},
                **{"bin_dir": str(BINARIES), "parameters": settings, "pgpass": str(self.directory / "pgpass")},
                "authentication": {
                    "superuser": {"username": "postgres", "password": "x"},
                    "replication": {"username": "replicator", "password": "x"},
                },
                "pg_hba": ["local all all trust", *(f"host {what} all 127.0.0.1/32 trust" for what in ACCESS)],
            },
        }

    def processes(self) -> list[psutil.Process]:
        """Patroni, its server, and all children of both."""
        found: list[psutil.Process] = []
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            server = psutil.Process(int((self.directory / "data" / "postmaster.pid").read_text().split()[0]))
            if any(str(self.directory) in each for each in server.cmdline()):
                found += [server, *server.children(recursive=True)]
        if self.process is not None and self.process.poll() is None:
            patroni = psutil.Process(self.process.pid)
            found += [patroni, *patroni.children(recursive=True)]
        return found

    def kill(self) -> None:
        """kill -9 of all its processes, as if its machine had lost power."""
        _signal(self.processes(), signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)

    def freeze(self) -> None:
        """Stop all its processes: connections stay, and nothing answers."""
        self.frozen = self.processes()
        _signal(self.frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        _signal(self.frozen, signal.SIGCONT)
        self.frozen = []


class Patroni:
    """The three nodes of a cluster, `synchronous` or not. `proxy` is the DSN through haproxy."""

    def __init__(self, *, synchronous: bool) -> None:
        assert there, WHY
        self._ends = ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="pgqueue-patroni-", dir=memory()))
        self._ends.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self._account = server_account()
        self.nodes = [Node(f"n{number}", self.directory) for number in (1, 2, 3)]
        self._etcd, self._proxy = free_port(), free_port()
        self._synchronous = synchronous

    def __enter__(self) -> Patroni:
        try:
            self._own(self.directory)
            peer = f"http://127.0.0.1:{free_port()}"
            client = f"http://127.0.0.1:{self._etcd}"
            self._ends.callback(_end, self._start("etcd", *_etcd(self.directory / "etcd", client, peer)))
            for node in self.nodes:
                self._ends.callback(node.kill)
                self._ends.callback(node.thaw)
                node.directory.mkdir()
                self._own(node.directory)
                self.begin(node)
                if node is self.nodes[0]:  # so that it is known which one makes the cluster
                    wait_until(lambda: self.leader() is not None, 60)
            lines = [f"    server {node.name} 127.0.0.1:{node.port} check port {node.api}" for node in self.nodes]
            file = self.directory / "haproxy.cfg"
            file.write_text(HAPROXY.format(port=self._proxy) + "\n".join(lines) + "\n")
            self._ends.callback(_end, self._start("haproxy", "-db", "-f", str(file)))
            wait_until(lambda: self.whole() and self._leads(), 90)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def proxy(self) -> str:
        return f"host=127.0.0.1 port={self._proxy} user=postgres dbname=postgres connect_timeout=2"

    def dsn(self, **more: str) -> str:
        """The three hosts, the first node's first."""
        hosts, ports = ",".join(["127.0.0.1"] * 3), ",".join(str(node.port) for node in self.nodes)
        options = {"host": hosts, "port": ports, "user": "postgres", "dbname": "postgres", "connect_timeout": "2"}
        return psycopg.conninfo.make_conninfo("", **(options | more))

    def begin(self, node: Node) -> None:
        """Start the Patroni of this node, which starts its server."""
        file = self.directory / f"{node.name}.yml"
        file.write_text(json.dumps(node.configuration(self._etcd, synchronous=self._synchronous)))
        node.process = self._start("patroni", str(file), log=node.name)

    def leader(self) -> Node | None:
        """The node whose server can be written; None between two."""
        for node in self.nodes:
            if not node.frozen and role(node) == "primary":
                return node
        return None

    def whole(self) -> bool:
        """Whether each node that is not frozen has a part, and a standby follows as it should."""
        leader = self.leader()
        if leader is None:
            return False
        synchronous = "sync" if self._synchronous else "async"
        with suppress(psycopg.OperationalError), psycopg.connect(leader.dsn, autocommit=True) as conn:
            states = [state for (state,) in conn.execute("SELECT sync_state FROM pg_stat_replication")]
            return synchronous in states and len(states) == len(self.nodes) - 1
        return False

    def _leads(self) -> bool:
        """Whether haproxy has found the primary."""
        with suppress(psycopg.OperationalError), psycopg.connect(self.proxy) as conn:
            return conn.execute("SELECT pg_is_in_recovery()").fetchone() == (False,)
        return False

    def switch_over(self) -> None:
        """A planned switchover; returns when Patroni says that it is done."""
        leader = self.leader()
        assert leader is not None
        self.ask(leader, "switchover", leader=leader.name)

    def restart(self, node: Node) -> None:
        """Restart the server of this node; returns when Patroni says that it is done."""
        self.ask(node, "restart")

    def ask(self, node: Node, command: str, **said: str) -> None:
        """Have the Patroni of this node do that, when it can."""
        wait_until(lambda: self._done(node, command, said))

    def _done(self, node: Node, command: str, said: dict[str, str]) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{node.api}/{command}", json.dumps(said).encode())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        except HTTPError as refused:
            if refused.code not in NOT_YET:
                raise
            return False
        return True

    def _start(self, name: str, *arguments: str, log: str | None = None) -> subprocess.Popen[bytes]:
        program = PROGRAMS[name]
        assert program is not None
        user, group = self._account or (None, None)
        command, where = [program, *arguments], self.directory
        with (self.directory / f"{log or name}.log").open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, cwd=where, user=user, group=group)

    def _own(self, path: Path) -> None:
        path.chmod(0o700)
        if self._account is not None:
            os.chown(path, *self._account)


def role(node: Node) -> str | None:
    """`primary` or `standby`; None if it does not answer."""
    with suppress(psycopg.OperationalError), psycopg.connect(node.dsn, autocommit=True) as conn:
        row = conn.execute("SELECT pg_is_in_recovery()").fetchone()
        return "standby" if row == (True,) else "primary"
    return None


def _etcd(directory: Path, client: str, peer: str) -> list[str]:
    return [
        *("--data-dir", str(directory), "--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
    ]


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(30)

"""One peer on a fresh database, with its processes; and the servers that the peers of a run share, one at a time.

A peer's database is made once in a run, by the peer's own `setup`. Each sample gets a copy of it.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import psycopg

from bench.peers.broker import Broker
from bench.peers.child import Child, Died, family_cpu
from bench.peers.install import Home
from bench.peers.peer import Peer
from bench.peers.rabbitmq import RabbitMQ
from bench.peers.redis import Redis
from bench.server import Lab

LOOK_SECONDS = 0.005
FILL_PART = 1_000
BROKERS: dict[str, Callable[[Path], Broker]] = {"redis": Redis, "rabbitmq": RabbitMQ}
"""By the word that peers.toml has for each."""


class Servers:
    """The PostgreSQL of the run, and each other server from the first peer on that needs it."""

    def __init__(self, lab: Lab, home: Home, folder: Path) -> None:
        self.lab = lab
        self.home = home
        self._folder = folder
        self._templates: set[str] = set()
        self._brokers: dict[str, Broker] = {}

    def close(self) -> None:
        with ExitStack() as stack:  # each of them, whatever another one says
            for broker in self._brokers.values():
                stack.callback(broker.close)

    def broker(self, server: str) -> Broker:
        """Started when it is first asked for."""
        if server not in self._brokers:
            self._brokers[server] = BROKERS[server](self._folder / server)
        return self._brokers[server]

    @contextmanager
    def stage(self, peer: Peer, *, history: bool = False) -> Iterator[Stage]:
        """The peer on a fresh database, or on an empty broker. Its processes end with it."""
        self.home.require(peer)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder)))
            if peer.server in BROKERS:
                dsn, broker = "", self.broker(peer.server)
                broker.empty()
            else:
                dsn, broker = stack.enter_context(self.lab.database(self._template(peer, folder))), None
            stage = Stage(self, peer, dsn, broker, folder, history=history)
            stack.callback(stage.close)
            if broker is not None:
                stage.start("setup").wait()
            yield stage

    def _template(self, peer: Peer, folder: Path) -> str:
        name = "peer_" + peer.name.replace("-", "_").replace(" ", "_")
        if name not in self._templates:
            with closing(Stage(self, peer, self.lab.make_template(name), None, folder, history=False)) as stage:
                stage.start("setup").wait()
            self._templates.add(name)
        return name


class Stage:
    """One peer, ready to be measured."""

    def __init__(
        self, servers: Servers, peer: Peer, dsn: str, broker: Broker | None, folder: Path, *, history: bool
    ) -> None:
        self.peer = peer
        self.lab = servers.lab
        self.dsn = dsn
        self._broker = broker
        self._home = servers.home
        self._folder = folder
        self._environment = {
            **servers.home.environment(peer),
            "BENCH_DSN": dsn,
            "BENCH_BROKER": broker.url if broker is not None else "",
            "BENCH_SETTINGS": json.dumps(peer.settings),
            "BENCH_HISTORY": "1" if history else "0",
            "BENCH_FOLDER": str(folder),
        }
        self._children: list[Child] = []
        self.workers: list[Child] = []
        self._worked: dict[str, Any] = {}
        """How the workers were started last."""

    def close(self) -> None:
        for child in self._children:
            child.end()

    def start(self, role: str, **variables: str) -> Child:
        """A process of this peer."""
        log = self._folder / f"{role}-{len(self._children)}.log"
        environment = {**self._environment, **variables}
        child = Child(self._home.command(self.peer, role), environment, log, folder=self._folder)
        self._children.append(child)
        return child

    def client(self) -> Child:
        """A process of the application's side that is ready."""
        client = self.start("client")
        client.hear()
        return client

    def work(
        self, processes: int = 1, *, starts: bool = False, seconds: float | None = None, twenty: bool = False
    ) -> None:
        """Start so many worker processes; with `starts` they write down when each job began. `seconds`: how long a job
        of an application takes there, in place of a millisecond. `twenty`: each runs 20 jobs at once, if it can."""
        self._worked = {"starts": starts, "seconds": seconds, "twenty": twenty}
        told = {"BENCH_STARTS": "1" if starts else "0"} | ({} if seconds is None else {"BENCH_WORK": str(seconds)})
        if twenty:
            told["BENCH_SETTINGS"] = json.dumps({**self.peer.settings, **self.peer.twenty})
        for _ in range(processes):
            self.workers.append(self.start("worker", BENCH_WORKER=str(len(self._children)), **told))

    def kill_work(self) -> None:
        """End the workers by SIGKILL; what they have counted stays."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()

    def revive(self) -> int:
        """Start a worker for each that has ended, as whatever supervises it would; how many."""
        ended = [worker for worker in self.workers if worker.ended()]
        for worker in ended:
            self.workers.remove(worker)
        self.work(len(ended), **self._worked)
        return len(ended)

    def stop_work(self) -> int:
        """End the workers, and forget what they have counted; how much that was."""
        for worker in self.workers:
            worker.end()
        self.workers.clear()
        ran = self.ran().total()
        for file in self._folder.glob("count-*"):
            file.unlink()
        return ran

    def fill(self, task: str, jobs: int) -> None:
        """Enqueue so many, from a process that ends then, and let PostgreSQL know how large its tables are."""
        client = self.client()
        client.ask(do="many", task=task, n=jobs)
        self._filled(client)

    def fill_within(self, seconds: float, task: str, jobs: int) -> int:
        """The same, a part at a time and at least one, until there are so many or the time is over; how many."""
        client = self.client()
        until, filled = monotonic() + seconds, 0
        while filled < jobs and (filled == 0 or monotonic() < until):
            part = min(FILL_PART, jobs - filled)
            client.ask(do="many", task=task, n=part, first=filled)
            filled += part
        self._filled(client)
        return filled

    def _filled(self, client: Child) -> None:
        client.end()
        if self.dsn:
            with self._connect() as conn:
                conn.execute("ANALYZE")

    def ran(self) -> Counter[str]:
        """How many jobs each worker process has begun."""
        found: Counter[str] = Counter()
        for file in self._folder.glob("count-*"):
            if len(content := file.read_bytes()) == 8:  # just made, and still empty, else
                found[file.name.split("-")[1]] += struct.unpack("<q", content)[0]
        return +found

    def starts(self) -> list[tuple[int, float]]:
        """The number of each job that has one, and when it began, by the machine's monotonic clock."""
        lines = [line for file in self._folder.glob("starts-*") for line in file.read_text().splitlines(keepends=True)]
        pairs = [line.split() for line in lines if line.endswith("\n")]
        return [(int(number), float(began)) for number, began in pairs]

    def wait_for(self, jobs: int, patience: float) -> float:
        """Wait until so many jobs were begun; when it was."""
        return self._wait(lambda ran: ran.total() >= jobs, f"of {jobs}", patience)

    def wait_for_each(self, workers: int, jobs: int, patience: float) -> float:
        """Wait until so many worker processes have begun a job each, or all the jobs were begun; when it was."""
        return self._wait(lambda ran: len(ran) >= workers or ran.total() >= jobs, f"of {jobs}", patience)

    def _wait(self, is_so: Callable[[Counter[str]], bool], of: str, patience: float) -> float:
        last, deadline = -1, monotonic() + patience
        while True:
            found = self.ran()
            at, total = monotonic(), found.total()
            if is_so(found):
                return at
            if total > last:
                last, deadline = total, at + patience
            if at > deadline:
                raise Died(f"{total} {of} jobs were begun, and no more within {patience:g} s{self._words()}")
            for worker in self.workers:
                worker.check()
            sleep(LOOK_SECONDS)

    def wait_until_done(self, patience: float) -> float:
        """Wait until the peer itself knows every job as done; when it was."""
        deadline = monotonic() + patience
        while self.unfinished():
            if monotonic() > deadline:
                raise Died(f"not every job was known as done within {patience:g} s{self._words()}")
            sleep(LOOK_SECONDS)
        return monotonic()

    def unfinished(self) -> bool:
        """Whether a job is left that is not done, in the peer's own tables, keys or queues."""
        asked = self.peer.unfinished
        if isinstance(asked, list):
            assert self._broker is not None
            return sum(self._broker.numbers(asked)) > 0
        with self._connect() as conn:
            row = conn.execute(asked.encode()).fetchone()
            return bool(row and row[0])

    def _connect(self) -> psycopg.Connection[Any]:
        """A session of the bench. It is not logged where those of the peer are: see statements.py."""
        return psycopg.connect(self.dsn, autocommit=True, options="-c log_statement=none")

    def server_cpu(self) -> float:
        """CPU seconds of the server so far."""
        return self.lab.cpu() if self._broker is None else family_cpu(psutil.Process(self._broker.pid))

    def worker_cpu(self) -> float:
        """CPU seconds of the workers so far."""
        return sum(worker.cpu() for worker in self.workers)

    def counters(self) -> dict[str, float]:
        """What has grown so far: CPU of both sides, and the WAL of PostgreSQL."""
        found: dict[str, float] = {"server_cpu": self.server_cpu(), "worker_cpu": self.worker_cpu()}
        if self.dsn:
            found["wal"] = self.lab.wal()
        return found

    def transactions(self) -> float:
        """How many transactions PostgreSQL has ended so far. A session tells it within a second, or when it ends."""
        return self.lab.transactions(self.dsn) if self.dsn else 0

    def _words(self) -> str:
        """The last lines of each worker."""
        logs = [file.read_text(errors="replace").strip()[-400:] for file in self._folder.glob("worker-*.log")]
        return "".join(f"\n    {log}" for log in logs if log)

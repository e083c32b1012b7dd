"""`pgqueue work` for several databases: one process, a worker for each."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from time import time
from typing import Any, ClassVar

import psycopg
import pytest
from commands import Worker, pgqueue, working
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from servers import Server
from stopped import server_pids, stopped
from workers import Eyes, wait_until

import pgqueue as library
from pgqueue import InvalidOption
from pgqueue.cli import many_workers
from pgqueue.client import tasks
from pgqueue.config import config
from pgqueue.database.identity import DatabaseIdentity
from pgqueue.database.sessions import Silent
from pgqueue.databases import Database, current, named
from pgqueue.pytest_plugin import Databases
from pgqueue.worker.settings import BATCH_MOST, SHARED_BATCH_MOST

SHOP = """
import asyncio, logging, pathlib, threading
import pgqueue

def noted():
    with pgqueue.connect() as conn:
        conn.execute("INSERT INTO noted SELECT current_database()")

@pgqueue.task(name="of_thread")
def of_thread() -> None:
    logging.getLogger("shop").info("in the thread")
    noted()

@pgqueue.task(name="of_loop")
async def of_loop() -> None:
    await asyncio.to_thread(noted)

@pgqueue.task(name="inner")
def inner() -> str:
    with pgqueue.connect() as conn:
        return conn.execute("SELECT current_database()").fetchone()[0]

@pgqueue.task(name="asks_in_thread")
def asks_in_thread() -> list[str]:
    with pgqueue.connect() as conn:
        handle = inner.enqueue(conn)
    result = handle.result(timeout=60)
    with pgqueue.connect() as conn:
        return [result, handle.info(conn).state]

@pgqueue.task(name="asks_on_loop")
async def asks_on_loop() -> list[str]:
    async with await pgqueue.aconnect() as conn:
        handle = await inner.aenqueue(conn)
    result = await handle.aresult(timeout=60)
    async with await pgqueue.aconnect() as conn:
        return [result, (await handle.ainfo(conn)).state]

@pgqueue.task(name="threads")
async def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]

@pgqueue.task(name="until")
async def until(path: str) -> None:
    pathlib.Path(f"{path}.begun").touch()
    while not pathlib.Path(path).exists():
        await asyncio.sleep(0.01)
"""


TICKS = """
import pgqueue

@pgqueue.task(name="each", schedule=pgqueue.Every(1))
async def each() -> None: ...

@pgqueue.task(name="in_b", schedule=pgqueue.Every(1), schedule_in="b")
async def in_b() -> None: ...

@pgqueue.task(name="nowhere", schedule=pgqueue.Every(1), schedule_in="nowhere")
async def nowhere() -> None: ...
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.fixture
def other_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """A second database, which has the number 1."""
    with pgqueue_databases.copy() as made:
        library.migrate(made, number=1)
        yield made


@pytest.fixture
def other_eyes(other_dsn: str) -> Iterator[Eyes]:
    looking = Eyes(other_dsn)
    yield looking
    looking.close()


def both(dsn: str, other_dsn: str) -> list[str]:
    return ["--database", f"a={dsn}", "--database", f"b={other_dsn}"]


def enqueue(dsn: str, *tasks: str, **args: Any) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [library.enqueue(conn, task, **args).id for task in tasks]


def ready(worker: Worker, *names: str) -> None:
    for name in names:
        worker.says(f" {name} worker ")


# What is named -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F395")
@pytest.mark.parametrize("text", ["", "a", "=postgresql:///x", "a=", "a= ", "A=postgresql:///x", "a b=postgresql:///x"])
def test_what_names_no_database_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="NAME=DSN"):
        named([text])


@pytest.mark.promise("F395")
def test_wrong_uses_are_named_without_a_password(dsn: str, other_dsn: str, app: Path) -> None:
    secret = "postgresql://u:hidden@localhost/x"
    for arguments, said in (
        (["--database", f"a={dsn}", "--database", f"a={other_dsn}"], "'a' is named twice"),
        (["--database", secret], "NAME=DSN"),
        (["--dsn", dsn, "--database", f"b={secret}"], "exclude each other"),
        ([*both(dsn, other_dsn), "--processes", "2"], "one process"),
        ([*both(dsn, other_dsn), "--listen-dsn", secret], "off"),
        ([*both(dsn, dsn)], "databases 'a' and 'b' are one database"),
        (["--only", "a"], "--only is for several databases"),
        ([*both(dsn, other_dsn), "--only", "c"], "there are: a, b"),
    ):
        done = pgqueue("work", "shop", *arguments, cwd=app)
        assert (done.returncode, said in done.stderr, "hidden" in done.stderr) == (2, True, False), done.stderr


@pytest.mark.promise("F395")
def test_two_databases_with_one_number_do_not_start(dsn: str, app: Path, pgqueue_databases: Databases) -> None:
    with pgqueue_databases.copy() as twin:
        done = pgqueue("work", "shop", cwd=app, PGQUEUE_DATABASES=f"a={dsn}\n b={twin}")
    assert done.returncode == 2
    assert "databases 'a' and 'b' have one number, 0" in done.stderr and "--number" in done.stderr


@pytest.mark.promise("F499")
def test_workers_that_share_a_loop_do_less_in_one_step() -> None:
    own = many_workers.Own(Database("a", "postgresql:///a"), lambda: library.Worker(tasks=[]))
    assert own.worker.settings.batch_most == SHARED_BATCH_MOST < BATCH_MOST
    assert library.Worker(dsn="postgresql:///a", tasks=[]).settings.batch_most == BATCH_MOST


@pytest.mark.promise("F396")
def test_the_configured_database_is_that_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", "postgresql:///one")
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", "postgresql:///listen")
    token = current.set(Database("a", "postgres:///a"))
    try:
        assert (config().dsn, config().listen_dsn) == ("postgresql:///a", "postgresql:///a")
        assert config(dsn="postgresql:///said").dsn == "postgresql:///said"
        assert config(listen_dsn="off").listen_dsn is None
    finally:
        current.reset(token)
    assert config().dsn == "postgresql:///one"


@pytest.mark.promise("F401")
def test_a_schedule_names_a_database_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "registry", {})

    @library.task(name="in_b", schedule=library.Every(60), schedule_in="b")
    def in_b() -> None: ...

    assert tasks.scheduled([in_b]).keys() == {"in_b"}  # where databases have no names
    for name, declares in (("b", {"in_b"}), ("a", set())):
        token = current.set(Database(name, "postgresql:///x"))
        assert tasks.scheduled([in_b]).keys() == declares
        current.reset(token)
    with pytest.raises(InvalidOption, match="there is no schedule"):
        library.task(name="never", schedule_in="b")(in_b.fn)
    with pytest.raises(InvalidOption, match="no name of a database"):
        library.task(name="wrong", schedule=library.Every(60), schedule_in="B b")(in_b.fn)


# Work ----------------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F396")
def test_a_handle_in_a_handler_means_the_jobs_own_database(
    dsn: str, other_dsn: str, eyes: Eyes, other_eyes: Eyes, app: Path
) -> None:
    with working("shop", *both(dsn, other_dsn), dsn=None, cwd=app) as worker:
        ready(worker, "a", "b")
        for address, looking in ((dsn, eyes), (other_dsn, other_eyes)):
            ids = enqueue(address, "asks_in_thread", "asks_on_loop")
            wait_until(looking.done(4))
            results = looking.all("SELECT result FROM pgqueue.job WHERE id = ANY (%s)", ids)
            assert results == [([conninfo_to_dict(address)["dbname"], "completed"],)] * 2


@pytest.mark.second
@pytest.mark.promise("F394")
@pytest.mark.promise("F396")
def test_each_database_has_a_worker_and_handlers_know_theirs(
    dsn: str, other_dsn: str, eyes: Eyes, other_eyes: Eyes, app: Path
) -> None:
    sides = {"a": (dsn, eyes), "b": (other_dsn, other_eyes)}
    for _, looking in sides.values():
        looking.do("CREATE TABLE noted (name text)")
    with working("shop", "--metrics", "127.0.0.1:0", *both(dsn, other_dsn), dsn=None, cwd=app) as worker:
        ready(worker, *sides)
        for address, looking in sides.values():
            enqueue(address, "of_thread", "of_loop")
            wait_until(looking.done(2))
        for name, (address, looking) in sides.items():
            assert looking.one("SELECT array_agg(DISTINCT name) FROM noted") == [conninfo_to_dict(address)["dbname"]]
            assert looking.one("SELECT count(*) FROM noted") == 2
            assert f" {name} worker " in worker.says(f" shop[{worker.process.pid} {name} worker")
        port = worker.says("metrics are at").rpartition("/metrics")[0].rpartition(":")[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            found = [
                sample for each in text_string_to_metric_families(answer.read().decode()) for sample in each.samples
            ]
        counted = {
            tuple(sorted(each.labels.items())): each.value for each in found if each.name == "pgqueue_jobs_total"
        }
        assert counted == {
            (("database", name), ("outcome", "completed"), ("queue", "default"), ("task", task)): 1.0
            for name in sides
            for task in ("of_thread", "of_loop")
        }
        alive = {each.labels["database"]: each.value for each in found if each.name == "pgqueue_workers_alive"}
        assert alive == {"a": 1.0, "b": 1.0}
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    for looking in (eyes, other_eyes):
        assert looking.one("SELECT count(*) FROM pgqueue.worker") == 0


@pytest.mark.second
@pytest.mark.promise("F394")
def test_a_worker_that_idles_has_two_threads(dsn: str, other_dsn: str, app: Path, other_eyes: Eyes) -> None:
    with working("shop", *both(dsn, other_dsn), dsn=None, cwd=app) as worker:
        ready(worker, "a", "b")
        enqueue(other_dsn, "threads")
        wait_until(other_eyes.done(1))
        names: Sequence[str] = json.loads(other_eyes.one("SELECT result::text FROM pgqueue.job"))
    of_all = {"pgqueue-end", "pgqueue-alarms", "pgqueue-watchdog"}
    own = [name for name in names if name.startswith("pgqueue-") and name not in of_all]
    assert 2 <= len(own) <= 2 * 2, own
    assert len(names) <= 2 * 2 + len(of_all) + 6, names  # the main thread, and what the loop has for all


@pytest.mark.second
@pytest.mark.promise("F401")
def test_a_schedule_ticks_in_each_database_or_in_the_one_it_names(
    dsn: str, other_dsn: str, eyes: Eyes, other_eyes: Eyes, tmp_path: Path
) -> None:
    (tmp_path / "ticks.py").write_text(TICKS)
    ended = "SELECT coalesce(array_agg(DISTINCT task::text ORDER BY task::text), '{}') FROM pgqueue.job_done"
    with working("ticks", *both(dsn, other_dsn), dsn=None, cwd=tmp_path) as worker:
        worker.says("schedule_in='nowhere' names none of the databases here (a, b)")
        wait_until(lambda: eyes.one(ended) == ["each"] and other_eyes.one(ended) == ["each", "in_b"])
    for looking, names in ((eyes, ["each"]), (other_eyes, ["each", "in_b"])):
        assert looking.one("SELECT array_agg(name::text ORDER BY name) FROM pgqueue.schedule") == names


@pytest.mark.second
@pytest.mark.promise("F397")
def test_one_that_is_away_at_the_start_keeps_no_other_and_begins_when_it_is_back(
    dsn: str, eyes: Eyes, app: Path, own_server: Server
) -> None:
    away = own_server.dsn("postgres")
    library.migrate(away, number=1)
    enqueue(away, "threads")
    own_server.stop()
    with working("shop", "--log-format", "json", *both(dsn, away), dsn=None, cwd=app) as worker:
        worker.says('"database": "a", "worker"')
        assert '"database": "b"' in worker.says("the database is lost")
        enqueue(dsn, "threads")
        wait_until(eyes.done(1))
        own_server.start()
        looking = Eyes(away)
        wait_until(looking.done(1))
        late = looking.one(
            "SELECT extract(epoch FROM min(started_at) - pg_postmaster_start_time())::float8 FROM pgqueue.job"
        )
        looking.close()
        print(f"first job {late:.1f} s after the start of its server")
        assert late < 10.0  # a try each second, a worker that registers; the machine may be busy
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0


@pytest.mark.second
@pytest.mark.promise("F397")
def test_one_that_fails_for_good_is_named_and_the_exit_code_says_it(
    dsn: str, eyes: Eyes, empty_dsn: str, app: Path
) -> None:
    with working("shop", *both(dsn, empty_dsn), dsn=None, cwd=app) as worker:
        ready(worker, "a")
        assert " b]" in worker.says("run `pgqueue migrate`")
        enqueue(dsn, "threads")
        wait_until(eyes.done(1))
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 4


@pytest.mark.second
@pytest.mark.promise("F398")
def test_one_stop_for_all_gives_back_what_still_runs_in_each(
    dsn: str, other_dsn: str, eyes: Eyes, other_eyes: Eyes, app: Path
) -> None:
    begun = [app / "a.begun", app / "b.begun"]
    with working("shop", "--grace", "0s", *both(dsn, other_dsn), dsn=None, cwd=app) as worker:
        ready(worker, "a", "b")
        enqueue(dsn, "until", path=str(app / "a"))
        enqueue(other_dsn, "until", path=str(app / "b"))
        wait_until(lambda: all(file.exists() for file in begun))
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 5
    for looking in (eyes, other_eyes):
        assert looking.one("SELECT ARRAY[state, attempt::text] FROM pgqueue.job") == ["available", "0"]
        assert looking.one("SELECT count(*) FROM pgqueue.worker") == 0


@pytest.mark.second
@pytest.mark.promise("F398")
def test_quiet_lets_all_finish_and_ends_the_process(dsn: str, other_dsn: str, eyes: Eyes, app: Path) -> None:
    with working("shop", *both(dsn, other_dsn), dsn=None, cwd=app) as worker:
        ready(worker, "a", "b")
        enqueue(dsn, "until", path=str(app / "a"))
        wait_until((app / "a.begun").exists)
        worker.signal(signal.SIGUSR1)
        (app / "a").touch()
        assert worker.ends() == 0
    assert eyes.one("SELECT state FROM pgqueue.job") == "completed"


HOLDS = """
import pathlib, time
import pgqueue

@pgqueue.task(name="holds")
def holds(path: str) -> None:
    pathlib.Path(f"{path}.begun").touch()
    with pathlib.Path(path).open("a") as beats:
        while True:
            try:
                while True:
                    print(time.time(), file=beats, flush=True)
                    time.sleep(0.02)
            except BaseException:
                pass

@pgqueue.task(name="naps")
def naps(seconds: float) -> None:
    time.sleep(seconds)
"""


@pytest.fixture
def holding(tmp_path: Path) -> Path:
    (tmp_path / "holding.py").write_text(HOLDS)
    return tmp_path


@pytest.mark.second
@pytest.mark.promise("F403")
def test_no_job_runs_on_here_while_another_database_is_slow(
    dsn: str, other_dsn: str, eyes: Eyes, other_eyes: Eyes, holding: Path
) -> None:
    with working("holding", "--grace", "0s", *both(dsn, other_dsn), dsn=None, cwd=holding) as worker:
        ready(worker, "a", "b")
        for name, address in (("a", dsn), ("b", other_dsn)):
            enqueue(address, "holds", path=str(holding / name))
        wait_until(lambda: all((holding / f"{name}.begun").exists() for name in "ab"))
        with psycopg.connect(other_dsn) as locking:
            locking.execute("LOCK TABLE pgqueue.worker IN ACCESS EXCLUSIVE MODE")
            worker.signal(signal.SIGTERM)
            wait_until(lambda: eyes.one("SELECT state FROM pgqueue.job") == "available")
            given_back = time()
            assert worker.ends() == 5
            assert other_eyes.one("SELECT state FROM pgqueue.job") == "running"
        last = float((holding / "a").read_text().splitlines()[-1])
        assert last - given_back < 1.0  # a quarter of a second, and what a busy machine adds
        worker.says("could not sign off in b")


@pytest.mark.second
@pytest.mark.promise("F403")
def test_a_database_that_is_frozen_keeps_no_last_message_of_another(
    dsn: str, eyes: Eyes, holding: Path, own_server: Server
) -> None:
    frozen = own_server.dsn("postgres")
    library.migrate(frozen, number=1)
    with working("holding", "--grace", "1s", *both(dsn, frozen), dsn=None, cwd=holding) as worker:
        ready(worker, "a", "b")
        enqueue(dsn, "holds", path=str(holding / "a"))
        enqueue(frozen, "naps", seconds=1)
        wait_until((holding / "a.begun").exists)
        with psycopg.connect(frozen) as conn:
            wait_until(lambda: conn.execute("SELECT state FROM pgqueue.job").fetchone() == ("running",))
        assert own_server.cluster is not None
        with stopped(server_pids(own_server.cluster)):
            worker.signal(signal.SIGTERM)
            begun = time()
            assert worker.ends() == 5
            assert time() - begun < 15.0  # else it is ended at 20.5
            assert eyes.one("SELECT ARRAY[state, attempt::text] FROM pgqueue.job") == ["available", "0"]


@pytest.mark.second
@pytest.mark.promise("F405")
def test_a_failure_during_the_grace_is_the_exit_code(dsn: str, other_dsn: str, other_eyes: Eyes, app: Path) -> None:
    with working("shop", *both(dsn, other_dsn), dsn=None, cwd=app) as worker:
        ready(worker, "a", "b")
        enqueue(other_dsn, "until", path=str(app / "b"))
        wait_until((app / "b.begun").exists)
        worker.signal(signal.SIGTERM)
        worker.says("no more jobs are taken")
        other_eyes.do("ALTER SCHEMA pgqueue RENAME TO gone")  # to drop it may meet a deadlock
        (app / "b").touch()
        assert worker.ends() == 4
        assert " b worker " in worker.says("run `pgqueue migrate`")


# With workers that do as they are told -------------------------------------------------------------------------------


class Told:
    """A worker without a database. `run` ends with `failure`; `hangs`: the lifespan does not end."""

    worker_id, worn_out = 1, False
    seen: ClassVar[list[int | None]] = []
    """What the watchdog has seen while it left."""

    def __init__(self, failure: Exception | None = None, *, hangs: bool = False, noted: bool = False) -> None:
        self.failure, self.hangs, self.noted = failure, hangs, noted
        self.stopping, self.stopped = asyncio.Event(), asyncio.Event()
        self.state = self

    def share_loop(self) -> None: ...

    async def start(self) -> None: ...

    async def run(self) -> None:
        if self.failure is not None:
            raise self.failure
        await self.stopped.wait()

    async def stop(self, _: float) -> int:
        self.stopping.set()
        if self.noted:
            self.seen[:] = [completing() for completing in watched.values()]
        if self.hangs:
            await asyncio.Event().wait()
        return 0

    async def stop_process(self, _: float) -> None:
        self.stopped.set()

    def quiet(self) -> None: ...

    def completing(self) -> int:
        return 7  # as of a completer that has outcomes, and was cancelled


class Signalled:
    """The signals of a process that gets none but those of the test."""

    name, grace = "", None

    def __init__(self, *_: object) -> None:
        self.received = asyncio.Event()


class Watching:
    """A watchdog that only notes which workers it looks at."""

    def __init__(self, completing: Callable[[], int | None], _: float) -> None:
        assert completing() is None  # it belongs to no worker

    def start(self) -> None:
        started.append(self)

    def watch(self, name: str, completing: Callable[[], int | None]) -> None:
        assert started == [self]
        watched[name] = completing
        if len(watched) == 2:
            all_watched.set()

    def forget(self, name: str) -> None:
        del watched[name]


started: list[Watching] = []
all_watched = asyncio.Event()
watched: dict[str, Callable[[], int | None]] = {}
looked: list[str] = []
Lives = Callable[..., many_workers._Life]


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Lives:
    """Makes the life of a process with these workers. A look at their databases answers, or raises `away`."""
    started.clear()
    watched.clear()
    all_watched.clear()
    looked.clear()
    monkeypatch.setattr(many_workers, "Signals", Signalled)
    monkeypatch.setattr(many_workers, "Watchdog", Watching)
    monkeypatch.setattr(many_workers, "AGAIN_SECONDS", 0.01)

    def made(*workers: Told, away: str | None = None) -> many_workers._Life:
        def look(own: many_workers.Own) -> many_workers.Looked:
            looked.append(own.database.name)
            if away is not None:
                raise psycopg.OperationalError(away)
            number = int(own.database.name)
            facts = dict.fromkeys(("database", "postgresql", "schema", "schema_version", "concurrency", "connections"))
            return many_workers.Looked(
                DatabaseIdentity(1, number, number), facts | {"unknown_queues": [], "queues": [], "tasks": []}
            )

        monkeypatch.setattr(many_workers.Own, "_look", look)
        owns = [own(str(number), "postgresql:///x", told) for number, told in enumerate(workers)]
        return many_workers._Life(owns, 0.0, 600.0, "asyncio")

    return made


def own(name: str, dsn: str, told: Told) -> many_workers.Own:
    made: Any = many_workers.Own
    one: many_workers.Own = made(Database(name, dsn), lambda: told)
    return one


def soon(main: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(asyncio.wait_for(main, 20))


@pytest.mark.promise("F404")
def test_the_watchdog_leaves_a_worker_that_has_stopped_alone(life: Lives) -> None:
    async def main() -> int:
        return await life(Told(RuntimeError("broken"), noted=True))._run()

    assert soon(main()) == 1
    assert Told.seen == [None]  # while it left
    assert not watched


@pytest.mark.promise("F404")
def test_one_watchdog_looks_at_all_workers(life: Lives) -> None:
    async def main() -> None:
        ours = life(Told(), Told())
        running = asyncio.ensure_future(ours._run())
        await all_watched.wait()
        assert {name: completing() for name, completing in watched.items()} == {
            "completer of 0": 7,
            "completer of 1": 7,
        }
        ours._signals.received.set()
        await running

    asyncio.run(asyncio.wait_for(main(), 20))
    assert len(started) == 1


@pytest.mark.promise("F404")
@pytest.mark.parametrize("bound", ["LEAVE_SECONDS", "LEAVING_SECONDS"])
def test_a_lifespan_that_hangs_at_its_end_does_not_keep_the_process(
    life: Lives, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """It hangs until all the others have ended, or until a signal."""
    monkeypatch.setattr(many_workers, bound, 0.05)

    async def main() -> int:
        hangs = Told(RuntimeError("broken"), hangs=True)
        ours = life(hangs) if bound == "LEAVE_SECONDS" else life(hangs, Told())
        running = asyncio.ensure_future(ours._run())
        if bound == "LEAVING_SECONDS":
            await hangs.stopping.wait()
            ours._signals.received.set()
        return await running

    assert soon(main()) == 1


@pytest.mark.promise("F407")
def test_a_signal_before_the_first_look_has_ended_is_kept(life: Lives) -> None:
    async def main() -> int:
        ours = life(Told(), away="connection refused")
        ours._quiet()
        return await ours._run()

    assert soon(main()) == 0


@pytest.mark.promise("F406")
def test_what_a_server_refuses_for_good_ends_its_worker(life: Lives, dsn: str) -> None:
    async def main(said: str, *, tries: int | None = None) -> int:
        ours = life(Told(), away=said)
        running = asyncio.ensure_future(ours._run())
        while tries is not None and len(looked) < tries:  # noqa: ASYNC110 (threads add to it)
            await asyncio.sleep(0.01)
        if tries is not None:
            ours._quiet()
        return await running

    for wrong in ({"user": "nobody"}, {"dbname": "none"}):
        with pytest.raises(psycopg.OperationalError) as caught:
            psycopg.connect(make_conninfo(dsn, **wrong))
        assert soon(main(str(caught.value))) == 3
    assert soon(main('FATAL:  password authentication failed for user "x"')) == 3
    assert soon(main("FATAL:  sorry, too many clients already", tries=9)) == 0


@pytest.mark.promise("F406")
def test_a_first_look_that_hangs_is_broken_off(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_workers, "ASK_SECONDS", 0.2)

    async def main() -> int:
        one = own("a", dsn, Told())
        with psycopg.connect(dsn) as locking:
            locking.execute("LOCK TABLE pgqueue.migration IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(Silent):
                await one.look()
        return 0

    soon(main())

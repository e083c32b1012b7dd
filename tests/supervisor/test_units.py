"""The units of deploy/, run by a real systemd.

Each is taken as it stands. Only its paths are those of the test. Left out is what a user's systemd cannot do: to be
another user, and to hide directories in which our own Python may lie.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

import psycopg
import pytest
from commands import pgqueue as command
from pgbouncers import free_port
from relays import app_dsn
from service_managers import ServiceManager, service_manager
from supervised import gone
from workers import Eyes, wait_until

import pgqueue

__all__ = ["app_dsn"]

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAM = str(Path(sys.executable).with_name("pgqueue"))
NOT_OURS = re.compile(r"^(User|PrivateTmp|ProtectHome)=.*\n", re.MULTILINE)
TASKS = """
import pgqueue

@pgqueue.task(name="quick")
async def quick() -> int:
    return 1
"""


@pytest.fixture
def systemctl() -> Iterator[ServiceManager]:
    with service_manager() as made:
        yield made


def install(systemctl: ServiceManager, name: str, directory: Path, environ: dict[str, str], **others: str) -> None:
    """Install this unit of deploy/ for a shop in this directory, with these lines in its file of the environment."""
    (directory / "shop").mkdir()
    (directory / "shop" / "tasks.py").write_text(TASKS)
    (directory / "env").write_text("".join(f'{key}="{value}"\n' for key, value in environ.items()))
    text = NOT_OURS.sub("", (DEPLOY / name).read_text())
    paths = {"/srv/shop/.venv/bin/pgqueue": PROGRAM, "/srv/shop\n": f"{directory}\n", **others}
    for old, new in paths.items():
        assert old in text, f"{name} does not name {old}"
        text = text.replace(old, new.replace("%", "%%"))
    text = re.sub("(?<=EnvironmentFile=).*", str(directory / "env"), text)
    (systemctl.units / name).write_text(text)
    systemctl("daemon-reload")


@pytest.mark.promise("S21")
def test_the_unit_of_the_workers_is_what_the_command_prints() -> None:
    text = (DEPLOY / "pgqueue-work.service").read_text()
    [words] = re.findall(r"^ExecStart=/srv/shop/.venv/bin/pgqueue work (.*)$", text, re.MULTILINE)
    done = command("systemd", *words.split(), "--user", "shop", "--directory", "/srv/shop")
    assert done.returncode == 0, done.stderr
    head, unit = text.split("[Unit]")
    assert f"[Unit]{unit}".replace("/srv/shop/.venv/bin/pgqueue", PROGRAM) == done.stdout
    assert all(line.startswith("#") for line in head.splitlines())


@pytest.mark.promise("S21")
@pytest.mark.parametrize(
    "words",
    [
        ("--user", ""),
        ("--user", "shop\nExecStartPre=/bin/sh"),
        ("--user", "two words"),
        ("--directory", "/srv\nExecStartPre=/bin/sh"),
        ("--environment-file", "/etc/x\nExecStartPre=/bin/sh"),
        ("--version-tag", "1\nExecStartPre=/bin/sh"),
    ],
)
def test_no_word_becomes_a_line_of_the_unit(words: tuple[str, str]) -> None:
    """An empty name would be no line at all: the workers would run as root."""
    done = command("systemd", "shop.tasks", *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout


@pytest.mark.promise("S21")
def test_a_specifier_of_systemd_is_none_in_a_path() -> None:
    done = command("systemd", "shop.tasks", "--directory", "/srv/%i", "--environment-file", "/etc/%H")
    assert "\nWorkingDirectory=/srv/%%i\n" in done.stdout and "\nEnvironmentFile=/etc/%%H\n" in done.stdout


@pytest.mark.second
@pytest.mark.promise("S21")
def test_systemd_starts_reloads_replaces_and_stops_the_workers(
    systemctl: ServiceManager, tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    name = "pgqueue-work.service"
    install(systemctl, name, tmp_path, {"PGQUEUE_DSN": dsn})

    def works() -> set[int]:
        return {child.pid for child in systemctl.main(name).children()}

    systemctl("start", name)  # answers when all processes work
    assert systemctl.shows(name, "ActiveState") == "active"
    assert systemctl.shows(name, "StatusText") == "supervisor [4 of 4 active]"
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue(conn, "quick")
    wait_until(eyes.done(1))

    first, supervisor = works(), systemctl.main(name)
    assert len(first) == 4
    systemctl("reload", name)
    wait_until(gone(first))
    assert len(works()) == 4 and systemctl.main(name) == supervisor and systemctl.shows(name, "NRestarts") == "0"

    old = works()
    supervisor.kill()
    wait_until(lambda: systemctl.shows(name, "NRestarts") == "1" and systemctl.shows(name, "ActiveState") == "active")
    assert systemctl.main(name) != supervisor and not old & works()

    last = works()
    systemctl("stop", name)  # answers when it has ended
    assert systemctl.shows(name, "Result") == "success" and gone(last)()


@pytest.mark.second
@pytest.mark.promise("S21")
def test_systemd_runs_a_relay(systemctl: ServiceManager, tmp_path: Path, app_dsn: str, dsn: str, eyes: Eyes) -> None:
    name = "pgqueue-relay.service"
    install(systemctl, name, tmp_path, {"PGQUEUE_DSN": dsn}, **{"postgresql://shop@localhost/shop": f'"{app_dsn}"'})
    systemctl("start", name)
    with psycopg.connect(app_dsn) as app:
        pgqueue.enqueue(pgqueue.Outbox(app), "quick")
    wait_until(lambda: eyes.all("SELECT task FROM pgqueue.job") == [("quick",)])
    systemctl.main(name).kill()
    wait_until(lambda: systemctl.shows(name, "NRestarts") == "1")
    with psycopg.connect(app_dsn) as app:
        pgqueue.enqueue(pgqueue.Outbox(app), "quick")
    wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job") == 2)
    systemctl("stop", name)
    assert systemctl.shows(name, "Result") == "success"


@pytest.mark.second
@pytest.mark.promise("S21")
def test_systemd_runs_the_dashboard(systemctl: ServiceManager, tmp_path: Path, dsn: str) -> None:
    name, address = "pgqueue-web.service", f"127.0.0.1:{free_port()}"
    secrets = {"PGQUEUE_WEB_READER": "r" * 30, "PGQUEUE_WEB_OPERATOR": "o" * 30}
    install(systemctl, name, tmp_path, {"PGQUEUE_DSN": dsn, **secrets}, **{"127.0.0.1:8300": address})
    systemctl("start", name)

    def page() -> str:
        with suppress(URLError), urllib.request.urlopen(f"http://{address}/", timeout=10) as answer:
            return str(answer.read().decode())
        return ""

    assert "pgqueue" in wait_until(page)
    assert systemctl.shows(name, "NRestarts") == "0"
    systemctl("stop", name)
    assert systemctl.shows(name, "Result") == "success" and page() == ""

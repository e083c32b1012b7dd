"""The project's pages (README, docs/) as tests read them: headings, links, and code blocks with how to run them.

A `python` block whose first line is `# name.py` is a file; any other is a script. In a `console` block the lines that
begin with `$` are commands, the others what they print, with `…` for whatever stands there. A `sql` block is run on the
page's database. A block that cannot run here says why in a comment, which the reader does not see:

    <!-- not run: it needs a second server -->
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any
from urllib.parse import quote, urlencode

import forks
import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgqueue.database import embedded

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "SECURITY")), *sorted((ROOT / "docs").rglob("*.md"))]
RUN = {"python", "console", "sql"}
ADDRESS = "app@localhost/shop"  # the database of every example; here the test's own
PATIENCE = 120.0

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>.+) -->\n$")
_SHOWN = re.compile(r"^\*Not run here\b", re.MULTILINE)
_RUN_BY = re.compile(r"<!-- run by (?P<who>\S+) -->\n$")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[[^\]]+\]\(([^)\s]+)\)")
_FILE = re.compile(r"# (\w+\.py)\n")
_SHELL = re.compile(r"[|<>&;$`~]")
"""What a command has that only a shell understands."""

SETTINGS = """
from urllib.parse import parse_qs, unquote, urlsplit
url = urlsplit("postgresql://{address}")
query = {{name: values[0] for name, values in parse_qs(url.query).items()}}
DATABASES = {{"default": {{
    "ENGINE": "django.db.backends.postgresql", "NAME": unquote(url.path[1:]), "USER": unquote(url.username or ""),
    "PASSWORD": unquote(url.password or ""), "HOST": query.get("host", ""), "PORT": query.get("port", ""),
}}}}
"""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `excuse` says why it is not run, `elsewhere` who runs it instead."""

    page: Path
    line: int
    section: str
    language: str
    text: str
    excuse: str | None
    elsewhere: str | None

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    """The page's path in the project: pages in different folders have the same file name."""
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Block]:
    """The page's blocks in order; fails for an excuse that the reader sees: it is a matter of the tests."""
    text = page.read_text(encoding="utf-8")
    assert not _SHOWN.search(text), f"{name(page)}: why a block is not run stands in its comment only"
    found = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        headings = [heading[0] for heading in re.findall(r"^(## .+)$|^(# .+)$", before, re.MULTILINE)]
        excuse, elsewhere = _NOT_RUN.search(before), _RUN_BY.search(before)
        assert excuse or not before.endswith("-->\n") or elsewhere, (
            f"{name(page)}: a comment that is never read: {before[-90:]}"
        )
        found.append(
            Block(
                page,
                before.count("\n") + 1,
                headings[-1] if headings else "",
                fence[1],
                fence[2],
                excuse and excuse["why"],
                elsewhere and elsewhere["who"],
            )
        )
    return found


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings."""
    return set(map(anchor, _HEADING.findall(prose(page))))


def links(page: Path) -> Iterator[str]:
    yield from _LINK.findall(prose(page))


def linked_images(page: Path) -> set[Path]:
    """The pictures of the project that the page shows."""
    return {(page.parent / link).resolve() for link in _IMAGE.findall(prose(page)) if "://" not in link}


def address(dsn: str) -> str:
    """What follows `postgresql://` in the URL of this database, readable for every driver."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    user, password = quote(parts.pop("user", "")), parts.pop("password", None)
    database = quote(parts.pop("dbname", ""))
    return f"{user}{'' if password is None else ':' + quote(password, safe='')}@/{database}?{urlencode(parts)}"


class Reader:
    """Does what a page says, in a directory and a database of its own; each section starts with the usual settings."""

    def __init__(self, home: Path, dsn: str) -> None:
        self._home = home
        self._dsn = dsn
        self._address = address(dsn)
        self._section: str | None = None
        self._environment: dict[str, str] = {}
        (home / "settings_of_the_page.py").write_text(SETTINGS.format(address=self._address), encoding="utf-8")

    def follow(self, block: Block) -> None:
        """Run one block; AssertionError if it does not do what the page says."""
        if block.section != self._section:
            self._section, self._environment = block.section, self._usual()
        text = block.text.replace(ADDRESS, self._address)
        match block.language:
            case "sql":
                with psycopg.connect(self._dsn, autocommit=True) as conn:
                    conn.execute(text.encode())
            case "python" if file := _FILE.match(text):
                (self._home / file[1]).write_text(text, encoding="utf-8")
            case "python":
                self._run([sys.executable, "-c", text], str(block))
            case "console":
                for command, expected in _commands(text):
                    self._command(command, expected, str(block))

    def _usual(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "DJANGO_"))}
        return kept | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self._home),
            "PGQUEUE_DSN": f"postgresql://{self._address}",
            "DJANGO_SETTINGS_MODULE": "settings_of_the_page",
        }

    def _command(self, command: str, expected: list[str], where: str) -> None:
        words = shlex.split(command, comments=True)
        if words[0] == "export":
            self._environment |= dict(word.split("=", 1) for word in words[1:])
            return
        if words[:2] == ["pgqueue", "work"]:
            output = self._work(command)
        elif words[0] == "pgqueue" and not _SHELL.search(command):
            output = self._pgqueue(words[1:], where)
        else:
            output = self._run(["bash", "-c", command], where)
        if expected:
            assert _pattern(expected).fullmatch(output), f"{where}: {command}\nprinted:\n{output}\nnot:\n{expected}"

    def _pgqueue(self, arguments: list[str], where: str) -> str:
        """A command that needs no shell, and is forked: most of the time of its process goes into imports."""
        kept = {name: value for name, value in self._environment.items() if name != "PYTHONPATH"}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with forks.start(forks.COMMAND, *arguments, cwd=self._home, env=kept, text=True, **streams) as process:
            try:
                output, _ = process.communicate(timeout=PATIENCE)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, f"{where}: {arguments}\nended with {process.returncode}:\n{output}"
        return str(output)

    def _run(self, command: list[str], where: str) -> str:
        done = subprocess.run(
            command,
            cwd=self._home,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{where}: {command[-1]}\nended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def _work(self, command: str) -> str:
        """Run a worker until no job is waiting or running, then stop it as an operator would."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self._home,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            done = self._worked_off(process)
            process.terminate()
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.communicate()
        assert done, f"{command}: jobs are left, or it ended\n{output}"
        assert process.returncode == 0, output
        return output

    def _worked_off(self, process: subprocess.Popen[str]) -> bool:
        dsn = self._environment["PGQUEUE_DSN"]
        deadline, pause = monotonic() + PATIENCE, Event()
        with ExitStack() as stack:
            if dsn == "embedded:":
                dsn = stack.enter_context(embedded.start(self._home / ".pgqueue")).dsn
            conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
            while process.poll() is None and monotonic() < deadline:
                at_work = conn.execute("SELECT count(*) FROM pgqueue.worker").fetchone()
                left = conn.execute(
                    "SELECT count(*) FROM pgqueue.job WHERE state IN ('available', 'blocked', 'running')"
                ).fetchone()
                if at_work != (0,) and left == (0,):
                    return True
                pause.wait(0.05)
        return False


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines it prints."""
    for piece in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *printed = piece.rstrip("\n").split("\n")
        while command.endswith("\\"):
            command = f"{command[:-1]}{printed.pop(0)}"
        yield command, printed


def _pattern(expected: list[str]) -> re.Pattern[str]:
    """A line that is only `…` stands for any lines, a `…` in a line for anything in it."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "…" else rf"{'.*'.join(map(re.escape, line.split('…')))}\s*\n"
        for line in expected
    ]
    return re.compile("".join(lines))

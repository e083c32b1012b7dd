"""`python -m bench peers` and `python -m bench report`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic, strftime
from typing import Any

import click
import psutil
import psycopg

from bench.peers import peer, quotes, record, report
from bench.peers.child import Died
from bench.peers.install import ROOT, Home, NotInstalled, default_home
from bench.peers.peer import Peer
from bench.peers.record import Record
from bench.peers.scenarios import SCENARIOS, Scenario, applies
from bench.peers.size import Size
from bench.peers.stage import Servers
from bench.server import Lab

QUICK = 0.01
FAILURES = (Died, NotInstalled, OSError, subprocess.SubprocessError, psycopg.Error, RuntimeError, KeyError, ValueError)
"""What a peer that does not work leads to, its own tables included."""


@click.command("peers")
@click.option("--install", is_flag=True, help="Put the peers into the folder first.")
@click.option("--only", default="", metavar="NAMES", help="These peers, with commas between; pgqueue always runs.")
@click.option("--scenarios", default="", metavar="NAMES", help="These scenarios, with commas between.")
@click.option("--rounds", default=3, show_default=True, help="Samples of each peer in each scenario.")
@click.option(
    "--full",
    is_flag=True,
    help="Also what takes long: a deep backlog, a snapshot of ten minutes, three rounds of each crash.",
)
@click.option("--quick", is_flag=True, help="Tiny and once: shows that each peer runs, not how fast anything is.")
@click.option("--resume", is_flag=True, help="Go on with the run that the file holds.")
@click.option("--list", "listed", is_flag=True, help="Say which peers and scenarios there are, and do nothing.")
@click.option("--home", type=click.Path(file_okay=False, path_type=Path), help="The folder of the peers.")
@click.option("--table", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=peer.TABLE, hidden=True)
@click.option("--pg", type=click.Choice(["16", "18"]), default="18", show_default=True, help="PostgreSQL's version.")
@click.option("--directory", type=click.Path(file_okay=False, path_type=Path), help="On which disk the data lies.")
@click.option("--json", "to", type=click.Path(dir_okay=False, path_type=Path), help="The record; else in the folder.")
def peers(
    install: bool,
    only: str,
    scenarios: str,
    rounds: int,
    full: bool,
    quick: bool,
    resume: bool,
    listed: bool,
    home: Path | None,
    table: Path,
    pg: str,
    directory: Path | None,
    to: Path | None,
) -> None:
    """Measure pgqueue beside other job queues, each from its own package, in turn on one PostgreSQL."""
    known = peer.read(table)
    try:
        contenders = peer.chosen(known.peers, _names(only))
        wanted = _scenarios(_names(scenarios), full=full)
    except KeyError as error:
        raise click.UsageError(error.args[0]) from None
    if listed:
        return click.echo(_list(contenders))
    place = Home(home or default_home(), known)
    to = to or place.folder / report.RECORD
    missing = _install(place, contenders) if install else {}
    lab = Lab(int(pg), directory)
    try:
        about = lab.about() | _machine() | {"rounds": 1 if quick else rounds, "quick": quick, "full": full}
        found = _begin(to, about, resume=resume)
        with tempfile.TemporaryDirectory(prefix="pgqueue-peers-") as folder:
            servers = Servers(lab, place, Path(folder))
            try:
                _introduce(found, contenders, place, missing)
                _measure(found, servers, contenders, wanted, to)
            finally:
                servers.close()
    finally:
        lab.close()
    click.echo(report.markdown(found))
    click.echo(f"record: {to}", err=True)
    return None


@click.command("report")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="The folder to write the report to.")
@click.option("--write", is_flag=True, help="Put it into bench/results, and its figures into the pages.")
def write_report(file: Path | None, to: Path | None, write: bool) -> None:
    """Write a record of `python -m bench peers` as Markdown with a chart of each scenario, and a copy of it.

    `--write` without a file fills the pages from bench/results as it stands.
    """
    if not write and (file is None or to is None):
        raise click.UsageError("name a record and --to a folder, or say --write")
    if file is not None:
        found = record.read(file)
        if write and (found.about.get("quick") or not found.about.get("full")):
            raise click.UsageError(f"{file} is of no full run: the pages quote one of --full, without --quick")
        for folder in [*([to] if to else []), *([quotes.RESULTS] if write else [])]:
            for path in report.write(found, folder):
                click.echo(path)
    if write:
        for path in quotes.write():
            click.echo(path)


def _measure(found: Record, servers: Servers, contenders: list[Peer], wanted: list[Scenario], to: Path) -> None:
    """Take every sample that the record does not have; write it down after each."""
    todo = [step for step in _steps(found.about, contenders, wanted) if not _is_there(found, *step)]
    begun = monotonic()
    for number, (scenario, this, turn) in enumerate(todo):
        sample = _sample(servers, scenario, this, found)
        found.add(scenario.name, this.name, turn, sample)
        found.write(to)
        left = (monotonic() - begun) / (number + 1) * (len(todo) - number - 1)
        words = sample.get("error") or "  ".join(f"{key} {value:,.4g}" for key, value in sample.items())
        place = f"[{number + 1}/{len(todo)}, {left / 60:.0f} min left]"
        click.echo(f"{place} {scenario.name} round {turn} {this.name}: {words}", err=True)


def _steps(
    about: Mapping[str, Any], contenders: list[Peer], wanted: list[Scenario]
) -> Iterator[tuple[Scenario, Peer, int]]:
    """Scenario by scenario, the peers in turn, their order turned round each time."""
    for scenario in wanted:
        rounds = 1 if scenario.once and not about["full"] else about["rounds"]
        for turn in range(1, rounds + 1):
            for this in contenders if turn % 2 else contenders[::-1]:
                if applies(scenario, this):
                    yield scenario, this, turn


def _is_there(found: Record, scenario: Scenario, this: Peer, turn: int) -> bool:
    return found.has(scenario.name, this.name, turn) or found.peers[this.name]["reason"] is not None


def _sample(servers: Servers, scenario: Scenario, this: Peer, found: Record) -> record.Sample:
    """One sample, or why there is none: a peer that fails never ends the run."""
    size = Size(QUICK if found.about["quick"] else 1.0, found.medians(this.name), found.about["full"])
    try:
        with servers.stage(this, history=scenario.history) as stage:
            return dict(scenario.take(stage, size))
    except FAILURES as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _install(place: Home, contenders: list[Peer]) -> dict[str, str]:
    """Put each peer there; why those are missing that could not be."""
    missing = {}
    for this in contenders:
        try:
            place.install(this, lambda text: click.echo(f"install {text}", err=True))
        except NotInstalled as error:
            missing[this.name] = str(error)
            click.echo(f"install {this.name}: {error}", err=True)
    return missing


def _introduce(found: Record, contenders: list[Peer], place: Home, missing: dict[str, str]) -> None:
    """Write down each peer of the run: its versions, its settings, or why it cannot run."""
    for this in contenders:
        reason, versions = missing.get(this.name), {}
        try:
            if reason is None:
                place.require(this)
                versions = place.versions(this)
        except NotInstalled as error:
            reason = str(error)
        known = {key: value for key, value in asdict(this).items() if key not in ("name", "adapter", "unfinished")}
        found.peers[this.name] = {**known, "packages": list(this.packages), "versions": versions, "reason": reason}
        if reason is not None:
            click.echo(f"{this.name} is not run: {reason}", err=True)


def _begin(to: Path, about: dict[str, object], *, resume: bool) -> Record:
    """An empty record, or the one to go on with, if it was made with the same versions and sizes."""
    if not resume or not to.exists():
        return Record(about=about)
    found = record.read(to)
    for key in ("server", "settings", "python", "pgqueue", "commit", "machine", "rounds", "quick", "full"):
        if found.about.get(key) != about[key]:
            raise click.UsageError(
                f"{to} was made with {key} {found.about.get(key)!r}, and it is {about[key]!r} now: begin a new run"
            )
    return found


def _scenarios(names: list[str], *, full: bool) -> list[Scenario]:
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise KeyError(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if names:
        return [scenario for scenario in SCENARIOS.values() if scenario.name in names]
    return [scenario for scenario in SCENARIOS.values() if full or not scenario.full_only]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _list(contenders: list[Peer]) -> str:
    lines = [f"{this.name:<16} {' '.join(this.packages)}  {this.reason or ''}".rstrip() for this in contenders]
    return "\n".join([*lines, "", *(f"{scenario.name:<16} {scenario.title}" for scenario in SCENARIOS.values())])


def _machine() -> dict[str, object]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "begun": strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "commit": commit.stdout.strip() or "?",
        "cpu": _cpu_model(),
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # no Linux
        return "?"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")

"""`python -m bench peers` and `python -m bench report`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import monotonic, strftime

import click
import psutil
import psycopg

from bench.peers import peer, plan, quotes, record, report
from bench.peers.child import Died, ending_at_sigterm, limited
from bench.peers.install import ROOT, Home, NotInstalled, default_home
from bench.peers.paths import bare
from bench.peers.peer import OURS, Peer
from bench.peers.plan import Step
from bench.peers.record import LEFT_OUT, PIECES, Record
from bench.peers.scenarios import SCENARIOS, Scenario
from bench.peers.size import Size
from bench.peers.stage import Servers
from bench.server import Lab
from pgqueue import errors

QUICK = 0.01
MINUTES = 60.0
TOOK = "took_s"
"""In every sample: how long it took, with all that is around it."""
FAILURES = (
    *(Died, NotInstalled, OSError, subprocess.SubprocessError, psycopg.Error, psutil.Error, errors.Error),
    *(RuntimeError, LookupError, ArithmeticError, ValueError),
)
"""What a peer that does not work leads to: its own tables, and a figure of nothing, included."""


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
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.1),
    help="How long this call may take: smaller samples, then fewer. In a run that goes on its sizes stay.  "
    "[default: 60; no end with --full or --quick]",
)
@click.option("--resume", is_flag=True, help="Go on with the run that the file holds.")
@click.option("--retry", is_flag=True, help="With --resume: take samples that failed once more.")
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
    minutes: float | None,
    resume: bool,
    retry: bool,
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
    rounds = 1 if quick else rounds
    minutes = minutes or (None if quick or full else MINUTES)
    steps = plan.steps(contenders, wanted, rounds=rounds, full=full, named=bool(_names(scenarios)))
    begun = monotonic()
    with ending_at_sigterm(), closing(Lab(int(pg), directory)) as lab:
        about = lab.about() | _machine() | {"rounds": rounds, "quick": quick, "full": full}
        about["scale"] = QUICK if quick else plan.scale_for(steps, minutes, full=full) if minutes else 1.0
        found = _begin(to, about, resume=resume, retry=retry)
        with tempfile.TemporaryDirectory(prefix="pgqueue-peers-") as folder:
            servers = Servers(lab, place, Path(folder))
            try:
                _introduce(found, contenders, place, missing)
                _measure(found, servers, steps, to, begun=begun, minutes=minutes)
            finally:
                servers.close()
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
        if write and (lacks := quotes.lacking(found)):
            raise click.UsageError(f"{file} is of no whole run, which alone the pages quote: it lacks {lacks}")
        for folder in [*([to] if to else []), *([quotes.RESULTS] if write else [])]:
            for path in report.write(found, folder):
                click.echo(path)
    if write:
        for path in quotes.write():
            click.echo(path)


def _measure(
    found: Record, servers: Servers, steps: list[Step], to: Path, *, begun: float, minutes: float | None = None
) -> None:
    """Take every sample that the record does not have, until the minutes are over; write it down after each."""
    scale, full = found.about["scale"], found.about["full"]
    todo = _todo(found, steps)
    planned, pace, started = plan.seconds(todo, scale, full=full), 1.0, monotonic()
    of = f" of {minutes:g}" if minutes else ""
    click.echo(f"{len(todo)} samples, likely {planned / 60:.0f}{of} min, sizes x {scale:g}", err=True)
    for number, step in enumerate(todo):
        left = plan.seconds(todo[number:], scale, full=full)
        ours = [later for later in todo[number + 1 :] if _round_of(later) == _round_of(step) and _is_ours(later)]
        need = plan.seconds([step, *ours], scale, full=full)
        if minutes and monotonic() + pace * need > begun + 60 * minutes:
            # What was taken of this round in this piece is of no use without pgqueue's sample.
            for last in (
                ours if any(_is_new(found, other) for other in steps if _round_of(other) == _round_of(step)) else ()
            ):
                click.echo(f"{last.words}: {_take(found, servers, last, steps, to)}", err=True)
            break
        words = _take(found, servers, step, steps, to)
        left -= step.seconds(scale, full=full)
        pace = (monotonic() - started) / (planned - left)
        budget = f", time for {max(0.0, minutes - (monotonic() - begun) / 60):.0f}" if minutes else ""
        place = f"[{number + 1}/{len(todo)}, {pace * left / 60:.0f} min left{budget}]"
        click.echo(f"{place} {step.scenario.name} round {step.turn} {step.peer.name}: {words}", err=True)
    for text in _rounds_done(found, steps):
        click.echo(text, err=True)
    if absent := found.about.get(LEFT_OUT):
        click.echo(f"the minutes are over, and {len(absent)} samples are left: --resume goes on with them", err=True)


def _take(found: Record, servers: Servers, step: Step, steps: list[Step], to: Path) -> str:
    """Take this sample and write it down; what it is, in words."""
    sample = _sample(servers, step, found)
    found.add(step.scenario.name, step.peer.name, step.turn, sample)
    _note_left(found, steps)
    found.write(to)
    return str(sample.get("error") or "  ".join(f"{key} {value:,.4g}" for key, value in sample.items()))


def _todo(found: Record, steps: list[Step]) -> list[Step]:
    """What is lacking; before the peers of a round also pgqueue, where its sample is of another piece."""
    lacking = [step for step in steps if not _is_there(found, step)]
    beside = {_round_of(step) for step in lacking if _is_ours(step)}
    todo = []
    for step in lacking:
        if _round_of(step) not in beside:
            beside.add(_round_of(step))
            ours = [other for other in steps if _round_of(other) == _round_of(step) and _is_ours(other)]
            todo += [other for other in ours if not _is_new(found, other)]
        todo.append(step)
    return todo


def _rounds_done(found: Record, steps: list[Step]) -> list[str]:
    """A line for each round: how many of its samples there are."""
    turns = sorted({step.turn for step in steps})
    return [
        f"round {turn}: {sum(_is_there(found, step) for step in each)} of {len(each)} samples"
        for turn in turns
        if (each := [step for step in steps if step.turn == turn])
    ]


def _round_of(step: Step) -> tuple[str, int]:
    return step.scenario.name, step.turn


def _is_ours(step: Step) -> bool:
    return step.peer.name == OURS


def _is_new(found: Record, step: Step) -> bool:
    return found.is_new(step.scenario.name, step.peer.name, step.turn)


def _note_left(found: Record, steps: list[Step]) -> None:
    """Write into the record which samples of its plans it does not have yet."""
    here = [[step.scenario.name, step.peer.name, step.turn] for step in steps if not _is_there(found, step)]
    before = [left for left in found.about.get(LEFT_OUT, []) if left not in here and not found.has(*left)]
    found.about[LEFT_OUT] = [*here, *before]


def _is_there(found: Record, step: Step) -> bool:
    """Whether nothing is to be taken here: there is a sample beside one of pgqueue, or the peer cannot run."""
    name = step.peer.name
    return found.is_beside(step.scenario.name, name, step.turn, OURS) or found.peers[name]["reason"] is not None


def _sample(servers: Servers, step: Step, found: Record) -> record.Sample:
    """One sample, or why there is none: a peer that fails or hangs never ends the run."""
    scale, full = found.about["scale"], found.about["full"]
    size = Size(scale, found.medians(step.peer.name), full)
    begun = monotonic()
    try:
        with (
            servers.stage(step.peer, history=step.scenario.history) as stage,
            limited(step.limit(scale, full=full)),
        ):
            sample: record.Sample = dict(step.scenario.take(stage, size))
    except FAILURES as error:
        sample = {"error": f"{type(error).__name__}: {error}"}
    return {**sample, TOOK: round(monotonic() - begun, 1)}


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


def _begin(to: Path, about: dict[str, object], *, resume: bool, retry: bool = False) -> Record:
    """An empty record, or the one to go on with, if it was made with the same versions. Its sizes stay as they are."""
    piece = {key: about.get(key) for key in ("begun", "load", "command")}
    if not resume or not to.exists():
        return Record(about={**about, PIECES: [piece]})
    found = record.read(to)
    for key in ("server", "settings", "python", "pgqueue", "commit", "machine", "rounds", "quick", "full"):
        if found.about.get(key) != bare(about[key]):
            raise click.UsageError(
                f"{to} was made with {key} {found.about.get(key)!r}, and it is {about[key]!r} now: begin a new run"
            )
    if retry:
        found.forget_errors()
    found.begin_piece(piece)
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

"""`python -m bench`: starts the server, runs scenarios, prints the table, writes the JSON.

`python -m bench peers` and `python -m bench report` are commands of their own: see peers/.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import click
import psutil

from bench import (
    claims,
    databases,
    drain,
    enqueueing,
    eyes,
    flat,
    flows,
    growth,
    history,
    idle,
    latency,
    limits,
    load,
    locks,
    rates,
    reading,
    relaying,
    restarting,
    ticks,
    web,
    writing,
)
from bench.figures import Figure, document, figures_of, table
from bench.holders import HOLDERS
from bench.peers.command import peers, write_report
from bench.run import QUICK, Run
from bench.server import Lab

Scenario = Callable[[Run], list[Figure]]
SCENARIOS: dict[str, Scenario] = {
    "drain-uvloop": drain.drain_uvloop,
    "drain-asyncio": drain.drain_asyncio,
    "drain-two": drain.drain_two,
    "drain-sync": drain.drain_sync,
    "transactional": writing.transactional,
    "batches": writing.batches,
    "enqueue-one": enqueueing.enqueue_one,
    "enqueue-many": enqueueing.enqueue_many,
    "enqueue-unique": enqueueing.enqueue_unique,
    "latency": latency.latency,
    "held": flat.held,
    "deep": flat.deep,
    "idle": idle.idle,
    "fleet": idle.fleet,
    "shapes": flat.shapes,
    "flows": flows.flows,
    "claims": claims.batched_claim,
    "history": history.history,
    "growth": growth.growth,
    "databases": databases.databases,
    "databases-apart": databases.apart,
    "reading": reading.reading,
    "eyes": eyes.eyes,
    "web": web.web,
    "held-load": load.held_load,
    "beside-pgbench": load.beside_pgbench,
    "restart": restarting.restart,
    "locks-distinct": locks.distinct,
    "locks-hundred": locks.hundred,
    "locks-behind": locks.behind,
    "locks-deep": locks.deep,
    "locks-held": locks.held,
    "limits-held": limits.held,
    "rates": rates.rates,
    "rates-held": rates.held,
    "relay": relaying.relay,
    "relay-held": relaying.held,
    "ticks-at-once": ticks.at_once,
    "ticks-spread": ticks.spread,
}

SAME = (
    *("server", "settings", "python", "psycopg", "uvloop", "pgqueue", "code", "machine"),
    *("rounds", "scale", "holder", "held seconds", "jobs"),
)
"""What a file must have been made with, to be gone on with. Naive: the version, which stays while code changes."""
SECONDS = {
    "drain-uvloop": 7,
    "drain-asyncio": 7,
    "drain-two": 8,
    "drain-sync": 12,
    "transactional": 29,
    "batches": 22,
    "enqueue-one": 17,
    "enqueue-many": 17,
    "enqueue-unique": 14,
    "latency": 26,
    "held": 38,
    "deep": 31,
    "idle": 48,
    "fleet": 39,
    "shapes": 80,
    "flows": 28,
    "claims": 41,
    "history": 34,
    "growth": 21,
    "databases": 45,
    "databases-apart": 60,
    "reading": 87,
    "eyes": 29,
    "web": 71,
    "held-load": 55,
    "beside-pgbench": 35,
    "restart": 148,
    "locks-distinct": 47,
    "locks-hundred": 79,
    "locks-behind": 77,
    "locks-deep": 47,
    "locks-held": 47,
    "limits-held": 59,
    "rates": 15,
    "rates-held": 19,
    "relay": 18,
    "relay-held": 48,
    "ticks-at-once": 99,
    "ticks-spread": 91,
}
"""What each took at a scale of 0.02 with one round, on a busy machine (load 2 to 17): only their shares are used."""


@click.command()
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO]...")
@click.option("--list", "listed", is_flag=True, help="Say what there is, and measure nothing.")
@click.option("--quick", is_flag=True, help="Tiny and once: shows that the harness works, not how fast anything is.")
@click.option("--rounds", default=5, show_default=True, help="Samples of each side.")
@click.option("--scale", default=1.0, show_default=True, help="Share of the full number of jobs, and of the seconds.")
@click.option("--held-seconds", default=60.0, show_default=True, help="How long held-load and locks-held hold theirs.")
@click.option(
    "--holder",
    type=click.Choice(list(HOLDERS)),
    default="snapshot",
    show_default=True,
    help="Who holds the horizon in held, held-load, limits-held and rates-held.",
)
@click.option("--jobs", type=click.IntRange(100), help="How many jobs wait in web, and have ended. [1000000]")
@click.option("--pg", type=click.Choice(["16", "18"]), default="18", show_default=True, help="PostgreSQL's version.")
@click.option("--directory", type=click.Path(file_okay=False, path_type=Path), help="On which disk the data lies.")
@click.option(
    "--json", "to", type=click.Path(dir_okay=False, path_type=Path), help="Write everything there, after each scenario."
)
@click.option("--resume", is_flag=True, help="With --json: leave out the scenarios that the file has.")
def main(
    scenarios: tuple[str, ...],
    listed: bool,
    quick: bool,
    rounds: int,
    scale: float,
    held_seconds: float,
    holder: str,
    jobs: int | None,
    pg: str,
    directory: Path | None,
    to: Path | None,
    resume: bool,
) -> None:
    """Measure pgqueue beside hand-written SQL. Exit code 1 if a goal was missed (never with --quick)."""
    if listed:
        return click.echo(_list())
    if unknown := [name for name in scenarios if name not in SCENARIOS]:
        raise click.UsageError(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if quick:
        rounds, scale = 1, QUICK
    if resume and to is None:
        raise click.UsageError("--resume goes on with a file: name it with --json")
    lab = Lab(int(pg), directory)
    try:
        about = lab.about() | {"rounds": rounds, "scale": scale, "holder": holder, "held seconds": held_seconds}
        about |= {"minutes": {}, "jobs": jobs}
        figures = _begun(about, to) if resume and to is not None and to.exists() else []
        click.echo(_text(about) + "\n")
        run = Run(lab, rounds, scale, held_seconds, holder, jobs)
        figures = _measure(run, scenarios or tuple(SCENARIOS), about, figures, to)
    finally:
        lab.close()
    click.echo(table(figures))
    click.echo(f"\nload average after: {about.get('load after', about['load'])}")
    if not quick and any(figure.verdict == "FAIL" for figure in figures):
        sys.exit(1)


def _measure(
    run: Run, names: Sequence[str], about: dict[str, Any], figures: list[Figure], to: Path | None
) -> list[Figure]:
    """These figures, and those of the scenarios that they are not of; all are written down after each."""
    todo = [name for name in names if name not in about["minutes"]]
    began = monotonic()
    for number, name in enumerate(todo):
        click.echo(f"[{number + 1}/{len(todo)}{_left(todo, number, began)}] {name}: {_doc(name)}", err=True)
        started = monotonic()
        figures = figures + SCENARIOS[name](run)
        about["minutes"][name] = round((monotonic() - started) / 60, 2)
        about["load after"] = [round(one, 2) for one in psutil.getloadavg()]
        if to is not None:
            draft = to.with_suffix(".part")
            draft.write_text(json.dumps(document(about, figures), indent=1), encoding="utf-8")
            draft.replace(to)
    return figures


def _left(todo: list[str], number: int, began: float) -> str:
    """The minutes that the others are likely to take, by those that are over; nothing before the first has ended."""
    over = sum(SECONDS[name] for name in todo[:number])
    if not over:
        return ""
    rest = sum(SECONDS[name] for name in todo[number:])
    return f", {(monotonic() - began) / over * rest / 60:.0f} min left"


def _begun(about: dict[str, Any], to: Path) -> list[Figure]:
    """The figures of that file, if they were measured in the same way; `about` gets what it says of them."""
    found = json.loads(to.read_text(encoding="utf-8"))
    for key in SAME:
        if found["about"].get(key) != about[key]:
            raise click.UsageError(
                f"{to} was made with {key} {found['about'].get(key)!r}, and it is {about[key]!r} now: begin a new file"
            )
    about["minutes"] = found["about"]["minutes"]
    return figures_of(found)


def _doc(name: str) -> str:
    return _first_line(SCENARIOS[name])


def _list() -> str:
    return "\n".join(f"{name:<16}{_first_line(scenario)}" for name, scenario in SCENARIOS.items())


def _first_line(scenario: Scenario) -> str:
    return (scenario.__doc__ or "").partition("\n")[0]


def _text(about: dict[str, Any]) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in about["settings"].items())
    said = ("server", "settings", "minutes")  # of the minutes there are none yet
    rest = "\n".join(f"{name:<9} {value}" for name, value in about.items() if name not in said and value is not None)
    return f"{about['server']}\n{settings}\n{rest}"


COMMANDS = {"peers": peers, "report": write_report}
"""What there is beside the scenarios: each has options of its own."""


def run(arguments: list[str]) -> None:
    """A command by its name, else scenarios. SIGTERM ends it as Ctrl-C does: no server and no worker is left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is None:
        main(arguments, prog_name="python -m bench")
    else:
        command(arguments[1:], prog_name=f"python -m bench {arguments[0]}")


if __name__ == "__main__":
    run(sys.argv[1:])

"""`python -m bench`: starts the server, runs scenarios, prints the table, writes the JSON.

`python -m bench peers` and `python -m bench report` are commands of their own: see peers/.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
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
from bench.figures import Figure, document, table
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
@click.option("--json", "to", type=click.Path(dir_okay=False, path_type=Path), help="Write everything there.")
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
) -> None:
    """Measure pgqueue beside hand-written SQL. Exit code 1 if a goal was missed (never with --quick)."""
    if listed:
        return click.echo(_list())
    if unknown := [name for name in scenarios if name not in SCENARIOS]:
        raise click.UsageError(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if quick:
        rounds, scale = 1, QUICK
    lab = Lab(int(pg), directory)
    try:
        about = lab.about() | {"rounds": rounds, "scale": scale, "holder": holder}
        click.echo(_text(about) + "\n")
        figures = _measure(Run(lab, rounds, scale, held_seconds, holder, jobs), scenarios or tuple(SCENARIOS))
        about["load after"] = [round(one, 2) for one in psutil.getloadavg()]
    finally:
        lab.close()
    click.echo(table(figures))
    click.echo(f"\nload average after: {about['load after']}")
    if to is not None:
        to.write_text(json.dumps(document(about, figures), indent=1), encoding="utf-8")
    if not quick and any(figure.verdict == "FAIL" for figure in figures):
        sys.exit(1)


def _measure(run: Run, names: tuple[str, ...]) -> list[Figure]:
    figures = []
    for name in names:
        click.echo(f"{name}: {_first_line(SCENARIOS[name])}", err=True)
        figures += SCENARIOS[name](run)
    return figures


def _list() -> str:
    return "\n".join(f"{name:<16}{_first_line(scenario)}" for name, scenario in SCENARIOS.items())


def _first_line(scenario: Scenario) -> str:
    return (scenario.__doc__ or "").partition("\n")[0]


def _text(about: dict[str, Any]) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in about["settings"].items())
    rest = "\n".join(f"{name:<9} {value}" for name, value in about.items() if name not in ("server", "settings"))
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

"""The comparison with other job queues runs, goes on after an interruption, and says why a peer has no figure."""

from __future__ import annotations

import os
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from peer_records import about, plain_about
from peer_tables import OURS

from bench.peers import command, peer, plan, record
from bench.peers.child import Child, Died, ending_at_sigterm, limited
from bench.peers.command import peers
from bench.peers.drain import WITH_START
from bench.peers.record import PIECES, Record
from bench.peers.scenarios import SCENARIOS
from bench.peers.size import Size

ADAPTERS = Path(command.__file__).parent / "adapters"


OTHERS = """
[peers.broken]
title = "Broken"
language = "python"
adapter = "there_is_no_such_adapter"
done = "never"
history = "none"
durability = "none"

[peers.misread]
title = "Misread"
language = "python"
adapter = "pgqueue_tasks"
settings = { concurrency = 10, bulk = 1000 }
done = "in a table that there is not"
unfinished = "SELECT EXISTS (SELECT FROM there_is_no_such_table)"
history = "none"
durability = "none"

[peers.absent]
title = "Absent"
language = "python"
adapter = "there_is_no_such_adapter"
reason = "it needs a machine that there is not"
done = "never"
history = "none"
durability = "none"
"""
BROKEN = OURS + OTHERS


@pytest.mark.second
@pytest.mark.promise("F260")
def test_a_peer_that_fails_is_listed_and_the_others_are_measured(tmp_path: Path) -> None:
    table, to = tmp_path / "table.toml", tmp_path / "peers.json"
    table.write_text(BROKEN, encoding="utf-8")
    options = ["--quick", "--table", str(table), "--home", str(tmp_path / "home"), "--json", str(to)]

    first = CliRunner().invoke(peers, [*options, "--scenarios", "drain-1"])

    assert first.exit_code == 0, first.output
    found = record.read(to)
    drained = found.samples["drain-1"]["pgqueue"]["1"]
    assert drained.keys() - {WITH_START, command.TOOK} == {
        "jobs_s",
        "server_us",
        "worker_us",
        "wal_bytes",
        "transactions",
        "statements",
    }, drained
    assert drained["jobs_s"] > 0 and drained["wal_bytes"] > 0 and drained["statements"] > 0
    assert "ModuleNotFoundError" in (found.error("drain-1", "broken") or ""), "the end of what it wrote is its reason"
    assert "UndefinedTable" in (found.error("drain-1", "misread") or ""), "its tables are not as the table here says"
    assert "absent" not in found.samples["drain-1"]
    assert found.peers["pgqueue"]["versions"]["python"]
    assert "Absent: it needs a machine that there is not" in first.output


@pytest.mark.promise("F239")
def test_a_sample_that_hangs_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    """The handlers of signals are as before."""
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Died, match="given up"), limited(0.05):
        threading.Event().wait(60)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert issubclass(Died, command.FAILURES)


@pytest.mark.promise("F239")
def test_a_peer_that_hangs_is_given_up_and_the_next_one_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging:
        """Servers that make a stage of each peer; that of graphile-worker never answers."""

        @contextmanager
        def stage(self, this: peer.Peer, *, history: bool) -> Iterator[peer.Peer]:
            yield this

    def take(stage: Any, size: Size) -> dict[str, float]:
        if stage.name == "graphile-worker":
            threading.Event().wait(60)
        return {"jobs_s": 1.0}

    monkeypatch.setattr(plan, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(plan, "LIMIT_FACTOR", 0.0)
    known = peer.chosen(peer.read().peers, ["graphile-worker", "rq"])
    steps = plan.steps(known, [replace(SCENARIOS["one"], take=take)], rounds=1, full=False)
    found = Record(plain_about(), {this.name: about(this.name) for this in known})
    servers: Any = Hanging()

    command._measure(found, servers, steps, tmp_path / "peers.json", begun=0.0)

    assert "given up" in (found.error("one", "graphile-worker") or "")
    assert found.median("one", "pgqueue", "jobs_s") == found.median("one", "rq", "jobs_s") == 1.0


@pytest.mark.promise("F239")
def test_a_stop_ends_what_the_run_has_started(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(3600)"], {}, tmp_path / "log", folder=tmp_path)
    with pytest.raises(SystemExit) as stopped, ending_at_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        finally:
            child.end()
    assert stopped.value.code == 143 and child.ended()


@pytest.mark.promise("F260")
def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "peers.json"
    taken: list[tuple[str, str]] = []

    def sample(servers: object, step: plan.Step, found: Record) -> record.Sample:
        if len(taken) == 3:
            raise KeyboardInterrupt
        taken.append((step.scenario.name, step.peer.name))
        return {"jobs_s": 1.0}

    monkeypatch.setattr(command, "_sample", sample)
    contenders = peer.chosen(peer.read().peers, ["graphile-worker"])
    steps = plan.steps(contenders, [SCENARIOS["one"], SCENARIOS["bulk"]], rounds=1, full=False)
    found = Record(plain_about(), {name: about(name) for name in ("pgqueue", "graphile-worker")})
    servers: Any = None
    with pytest.raises(KeyboardInterrupt):
        command._measure(found, servers, steps, to, begun=0.0)

    taken.clear()
    command._measure(record.read(to), servers, steps, to, begun=0.0)

    assert taken == [("bulk", "graphile-worker")]
    assert all(len(record.read(to).samples[scenario]) == 2 for scenario in ("one", "bulk"))


def test_every_peer_is_pinned_and_has_an_adapter() -> None:
    table = peer.read()
    assert next(iter(table.peers)) == peer.OURS
    for this in table.peers.values():
        if this.reason is not None:
            continue
        suffix = {"python": ".py", "node": ".mjs", "ruby": ".rb"}[this.language]
        assert (ADAPTERS / f"{this.adapter}{suffix}").is_file(), this.name
        assert this.unfinished and this.done and this.history and this.durability, this.name
        pin = {"python": "==", "node": "@", "ruby": "="}[this.language]
        assert all(pin in package[1:] for package in this.packages), this.name
        assert this.packages or this.name == peer.OURS
    assert all("==" in package for package in table.node)


def test_what_is_set_for_twenty_jobs_at_once_is_read_by_the_adapter() -> None:
    for this in peer.read().peers.values():
        text = "".join(file.read_text(encoding="utf-8") for file in ADAPTERS.glob(f"{this.adapter}.*"))
        assert [name for name in this.twenty if name not in text] == [], this.name


def test_a_field_that_there_is_not_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text(BROKEN + 'verzion = "1"\n', encoding="utf-8")
    with pytest.raises(TypeError, match="verzion"):
        peer.read(table)


@pytest.mark.parametrize(("option", "word"), [("--only", "graphile-worker"), ("--scenarios", "drain-1")])
def test_an_unknown_name_is_a_usage_error_that_names_those_there_are(option: str, word: str) -> None:
    done = CliRunner().invoke(peers, [option, "drian"])
    assert done.exit_code == 2
    assert "drian" in done.output and word in done.output


def test_pgqueue_runs_beside_whatever_is_named() -> None:
    known = peer.read().peers
    assert [this.name for this in peer.chosen(known, ["graphile-worker"])] == ["pgqueue", "graphile-worker"]
    assert len(peer.chosen(known, [])) == len(known)


def test_a_run_is_not_gone_on_with_when_it_was_made_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    about: dict[str, object] = {
        "server": "PostgreSQL 18",
        "settings": {},
        "python": "3",
        "pgqueue": "1",
        "commit": "a",
        "machine": "m",
    }
    about |= {"rounds": 3, "quick": False, "full": False}
    Record(about=about).write(file)
    gone_on = command._begin(file, about, resume=True).about
    assert {key: gone_on[key] for key in about} == about and len(gone_on[PIECES]) == 1
    assert command._begin(file, {**about, "commit": "b"}, resume=False).samples == {}
    with pytest.raises(Exception, match="begin a new run"):
        command._begin(file, {**about, "commit": "b"}, resume=True)


def test_the_table_has_no_address_and_no_path_of_a_machine() -> None:
    text = peer.TABLE.read_text(encoding="utf-8")
    assert tomllib.loads(text)
    assert "://" not in text and "/home" not in text and "/root" not in text

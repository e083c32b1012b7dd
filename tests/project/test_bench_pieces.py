"""A comparison that is taken in pieces is the whole plan in the end, and compares nothing across two pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench.peers import command, peer, plan, quotes, record, report
from bench.peers.paths import bare
from bench.peers.record import PIECES, Record
from bench.peers.scenarios import SCENARIOS

SERVERS: Any = None
SECONDS = 2.6
"""What a sample takes here, about."""
PEERS = ("pgqueue", "graphile-worker", "rq")
ABOUT: dict[str, Any] = {
    **{key: "as it was" for key in ("server", "settings", "python", "pgqueue", "commit", "machine")},
    **{"rounds": 2, "quick": False, "full": False, "scale": 0.3, "load": [0.1]},
}


def contenders() -> dict[str, dict[str, Any]]:
    fields: dict[str, Any] = {
        "language": "python",
        "server": "postgresql",
        "settings": {},
        "reason": None,
        "versions": {},
    }
    texts = {name: "-" for name in ("done", "history", "durability", "more", "less")}
    return {name: {"title": name, **fields, **texts} for name in PEERS}


def planned() -> list[plan.Step]:
    chosen = peer.chosen(peer.read().peers, PEERS)
    return plan.steps(chosen, [SCENARIOS["one"], SCENARIOS["bulk"]], rounds=2, full=False)


@pytest.fixture
def piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Take a piece, where a sample takes as long as is planned. What was taken, in order."""
    to, begun = tmp_path / "peers.json", count(1)

    def take(*, minutes: float | None = None, killed_after: int | None = None) -> list[str]:
        clock = [0.0]
        taken: list[str] = []
        number = next(begun)

        def sample(servers: object, step: plan.Step, found: Record) -> record.Sample:
            if len(taken) == killed_after:
                raise KeyboardInterrupt
            clock[0] += step.seconds(0.3, full=False)
            taken.append(f"{step.scenario.name} {step.turn} {step.peer.name}")
            # The machine is ten times slower in each piece than in the one before.
            return {"jobs_s": (200.0 if step.peer.name == "pgqueue" else 100.0) / 10**number}

        monkeypatch.setattr(command, "_sample", sample)
        monkeypatch.setattr(command, "monotonic", lambda: clock[0])
        found = command._begin(to, {**ABOUT, "begun": f"day {number}", "command": "bench"}, resume=True)
        found.peers = contenders()
        with suppress(KeyboardInterrupt):
            command._measure(found, SERVERS, planned(), to, begun=0.0, minutes=minutes)
        return taken

    return take


@pytest.mark.promise("F440")
def test_pieces_add_up_to_the_whole_plan(piece: Callable[..., list[str]], tmp_path: Path) -> None:
    pieces = [piece(minutes=0.25) for _ in range(3)] + [piece(killed_after=2), piece(), piece()]
    assert pieces[-1] == [], "nothing is left"
    found = record.read(tmp_path / "peers.json")
    for step in planned():
        name, scenario = step.peer.name, step.scenario.name
        assert found.is_beside(scenario, name, step.turn, "pgqueue"), step.words
    kept = [sample for peers in found.samples.values() for rounds in peers.values() for sample in rounds.values()]
    assert len(kept) == sum(map(len, pieces)) > len(planned()), "no sample is thrown away"


@pytest.mark.promise("F440")
def test_a_ratio_is_never_between_two_pieces(piece: Callable[..., list[str]], tmp_path: Path) -> None:
    """Each piece is ten times slower than the one before: a ratio across two would be 20 or 0.2."""
    assert piece(killed_after=4) == ["one 1 pgqueue", "one 1 graphile-worker", "one 1 rq", "bulk 1 pgqueue"]
    after = piece(killed_after=3)
    assert after == ["bulk 1 pgqueue", "bulk 1 graphile-worker", "bulk 1 rq"], "pgqueue once more beside them"
    assert piece(killed_after=1) == ["one 2 graphile-worker"], "in the second round pgqueue is the last"
    assert piece()[:2] == ["one 2 graphile-worker", "one 2 pgqueue"], "that sample had nothing beside it"
    found = record.read(tmp_path / "peers.json")
    for scenario in ("one", "bulk"):
        for other in PEERS[1:]:
            assert found.ratio(scenario, "jobs_s", "pgqueue", other) == pytest.approx(2.0), (scenario, other)
        assert found.rounds(scenario, "rq", "jobs_s") == 2
    assert set(found.samples["bulk"]["pgqueue"]) == {"1", "1.2", "2.4"}


@pytest.mark.promise("F440")
@pytest.mark.parametrize("samples", [2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
def test_a_piece_that_ends_by_its_minutes_leaves_no_round_without_pgqueue(
    piece: Callable[..., list[str]], tmp_path: Path, samples: float
) -> None:
    taken = ["something"]
    for _ in range(20):
        if not (taken := piece(minutes=samples * SECONDS / 60)):
            break
        found = record.read(tmp_path / "peers.json")
        for key in taken:
            scenario, turn, name = key.split()
            assert found.is_beside(scenario, name, int(turn), "pgqueue"), f"{key} of {taken}"
    assert taken == []


@pytest.mark.promise("F440")
def test_a_report_of_pieces_says_so(piece: Callable[..., list[str]], tmp_path: Path) -> None:
    piece(killed_after=4)
    file = tmp_path / "peers.json"
    assert "pieces" not in report.effort(record.read(file))
    piece(killed_after=0)
    piece()
    found = record.read(file)
    assert [each["begun"] for each in found.about[PIECES]] == ["day 1", "day 3"], "a piece without a sample is none"
    assert "2 pieces, begun day 1, day 3. A ratio is of samples of one piece." in report.effort(found)
    assert "of 3 rounds" not in report.markdown(found), "pgqueue has three samples of two rounds"


@pytest.mark.promise("F441")
def test_a_record_has_no_path_of_the_machine_that_measured(tmp_path: Path) -> None:
    file, home = tmp_path / "run.json", Path.home()
    told = f"python -m bench peers --json {tmp_path}/run.json --home={home}/.cache/peers --directory /mnt/disk/"
    found = Record({"command": told, PIECES: [{"command": told}]}, {"rq": {"reason": f"it is not in {home}/a/b"}})
    error = f'Died: ended\n  File "{tmp_path}/lib/python3.11/site-packages/rq/worker.py", line 7'
    found.add("one", "rq", 1, {"error": error})
    found.write(file)
    text = file.read_text(encoding="utf-8")
    assert str(tmp_path) not in text and str(home) + "/" not in text and "/mnt" not in text
    read = record.read(file)
    assert read.about["command"] == "python -m bench peers --json …/run.json --home=…/peers --directory …/disk"
    assert read.peers["rq"]["reason"] == "it is not in …/b"
    assert read.samples["one"]["rq"]["1"]["error"] == 'Died: ended\n  File "…/worker.py", line 7'


@pytest.mark.parametrize(
    "text",
    [
        "python -m bench peers --minutes 17 --json peers.json",
        "jobs/s and transactions/s, 1/2",
        "redis://127.0.0.1:6379/0/1",
        "PostgreSQL 18.4 on x86_64-pc-linux-gnu, 64-bit",
        "bench/peers/peers.toml",
        "6.4.1+dfsg-1",
    ],
)
def test_what_is_no_path_stays(text: str) -> None:
    assert bare(text) == text


def test_the_last_whole_run_has_no_path() -> None:
    found = quotes.last()
    text = json.dumps([found.about, found.peers, found.samples]) if found is not None else ""
    assert not any(place in text for place in ("/home/", "/root/", "/tmp/"))

"""Every sample of a run, written to one JSON file as soon as it is taken, so that an interrupted run can go on.

{"about": {settings, hardware, …}, "peers": {NAME: {versions, settings, …}},
 "samples": {SCENARIO: {PEER: {ROUND: {MEASURE: number} or {"error": text}}}}}

A run may be taken in pieces, at different times. Each call that takes samples is a piece.

1. The key of a sample has its round and its piece: `2` is of round 2 and the first piece, `2.3` of round 2 and piece 3.
2. A ratio is taken only between samples of one key. The machine may be another one in the next piece, or busy.
3. So a sample of a peer counts as taken only if pgqueue has one with the same key. Else it is taken once more.
4. A sample of another piece has another key, so none is thrown away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.paths import bare

Sample = dict[str, Any]
LEFT_OUT = "left_out"
"""In `about`: scenario, peer and round of each sample for which there was no time."""
PIECES = "pieces"
"""In `about`: when each piece was begun, beside which load, by which command."""


@dataclass(slots=True)
class Record:
    """What a run has found out so far."""

    about: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, dict[str, dict[str, Sample]]] = field(default_factory=dict)

    @property
    def piece(self) -> int:
        """The number of the piece that is taken now."""
        return max(1, len(self.about.get(PIECES, [])))

    def begin_piece(self, about: Mapping[str, Any]) -> None:
        """From now on samples are of another piece."""
        pieces = self.about.setdefault(PIECES, [])
        if self.samples and not pieces:  # a record from before there were pieces
            pieces.append({"begun": self.about.get("begun")})
        pieces.append(dict(about))

    def add(self, scenario: str, peer: str, number: int, sample: Mapping[str, Any]) -> None:
        """Keep the sample of this round and of the piece that is taken now."""
        self.samples.setdefault(scenario, {}).setdefault(peer, {})[self._key(number)] = dict(sample)

    def is_new(self, scenario: str, peer: str, number: int) -> bool:
        """Whether the piece that is taken now has a sample of this round."""
        return self._key(number) in self.samples.get(scenario, {}).get(peer, {})

    def is_beside(self, scenario: str, peer: str, number: int, ours: str) -> bool:
        """Whether there is a sample of this round, and one of `ours` with the same key."""
        found = self.samples.get(scenario, {})
        return any(key in found.get(ours, {}) for key in found.get(peer, {}) if _round(key) == number)

    def rounds(self, scenario: str, peer: str, measure: str) -> int:
        """How many rounds have this measure, in whichever piece."""
        return len({_round(key) for key in self.values(scenario, peer, measure)})

    def _key(self, number: int) -> str:
        return str(number) if self.piece == 1 else f"{number}.{self.piece}"

    def forget_errors(self) -> None:
        """Drop every sample that failed, so that it is taken once more."""
        for peers in self.samples.values():
            for rounds in peers.values():
                for number in [number for number, sample in rounds.items() if "error" in sample]:
                    del rounds[number]

    def has(self, scenario: str, peer: str, number: int) -> bool:
        return any(_round(key) == number for key in self.samples.get(scenario, {}).get(peer, {}))

    def values(self, scenario: str, peer: str, measure: str) -> dict[str, float]:
        """What this measure was, by the key of each sample that has it."""
        rounds = self.samples.get(scenario, {}).get(peer, {})
        return {number: sample[measure] for number, sample in rounds.items() if measure in sample}

    def median(self, scenario: str, peer: str, measure: str) -> float | None:
        """The median of all rounds; None without any."""
        values = self.values(scenario, peer, measure).values()
        return median(values) if values else None

    def ratio(self, scenario: str, measure: str, ours: str, other: str) -> float | None:
        """The median of the ratios of samples with one key, ours to the other's; None where no key has both."""
        mine, theirs = self.values(scenario, ours, measure), self.values(scenario, other, measure)
        ratios = [value / theirs[number] for number, value in mine.items() if theirs.get(number)]
        return median(ratios) if ratios else None

    def ranked(self, scenario: str, measure: str, *, less_is_better: bool) -> dict[str, float]:
        """The medians of all peers that have one, the best first."""
        found = {name: self.median(scenario, name, measure) for name in self.samples.get(scenario, {})}
        known = {name: value for name, value in found.items() if value is not None}
        return dict(sorted(known.items(), key=lambda pair: pair[1], reverse=not less_is_better))

    def title(self, peer: str) -> str:
        """The name of this peer as a reader knows it."""
        return str(self.peers.get(peer, {}).get("title", peer))

    def error(self, scenario: str, peer: str) -> str | None:
        """Why this peer has no figure here: the first error of its rounds, or why it cannot run at all."""
        reason: str | None = self.peers.get(peer, {}).get("reason")
        if reason:
            return reason
        rounds = self.samples.get(scenario, {}).get(peer, {}).values()
        return next((str(sample["error"]) for sample in rounds if "error" in sample), None)

    def medians(self, peer: str) -> dict[str, float]:
        """The medians of this peer by `scenario.measure`."""
        found: dict[str, float] = {}
        for scenario, peers in self.samples.items():
            for measure in {key for sample in peers.get(peer, {}).values() for key in sample} - {"error"}:
                if (value := self.median(scenario, peer, measure)) is not None:
                    found[f"{scenario}.{measure}"] = value
        return found

    def write(self, path: Path) -> None:
        """Write all of it, without paths of this machine; a reader sees the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        document = {"about": self.about, "peers": self.peers, "samples": self.samples}
        draft.write_text(json.dumps(bare(document), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)


def _round(key: str) -> int:
    return int(key.partition(".")[0])


def read(path: Path) -> Record:
    """The record of that file."""
    return Record(**json.loads(path.read_text(encoding="utf-8")))

"""A peer: another job queue, as peers.toml describes it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("peers.toml")
OURS = "pgqueue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is installed, how it runs, and what its figures mean. peers.toml says what each field is."""

    name: str
    title: str
    language: str
    adapter: str = ""
    server: str = "postgresql"
    python: str = "3.11"
    packages: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    twenty: dict[str, Any] = field(default_factory=dict)
    size: int = 1_000
    done: str
    unfinished: str | list[str] = ""
    history: str
    durability: str
    more: str = "-"
    less: str = "-"
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """All peers in their order, and the packages that bring node."""

    peers: dict[str, Peer]
    node: tuple[str, ...]


def read(path: Path = TABLE) -> Table:
    """The table of that file; TypeError where a peer has a field that there is not."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    peers = {
        name: Peer(name=name, **{**fields, "packages": tuple(fields.get("packages", ()))})
        for name, fields in found["peers"].items()
    }
    return Table(peers, tuple(found.get("node", ())))


def chosen(peers: dict[str, Peer], names: Iterable[str]) -> list[Peer]:
    """These peers in the order of the table, and pgqueue; all, if none is named. KeyError names unknown ones."""
    wanted = set(names)
    if unknown := sorted(wanted - peers.keys()):
        raise KeyError(f"no peer {', '.join(unknown)}; there are {', '.join(peers)}")
    return [peer for name, peer in peers.items() if not wanted or name in wanted | {OURS}]

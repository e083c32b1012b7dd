"""What a record of a comparison says of a peer and of its run, made up."""

from __future__ import annotations

from typing import Any


def about(name: str, **more: Any) -> dict[str, Any]:
    fields = {"title": name.title(), "language": "node", "server": "postgresql", "settings": {"a": 1}, "reason": None}
    texts = {name: "text | with a bar" for name in ("done", "history", "durability", "more", "less")}
    return {**fields, **texts, "versions": {name: "1.2"}, **more}


def plain_about(rounds: int = 1) -> dict[str, Any]:
    return {"rounds": rounds, "quick": False, "full": False, "scale": 1.0}

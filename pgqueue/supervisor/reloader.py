"""For development: notices when a source file has changed (`--reload`). It looks at the files once a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

LOOK_SECONDS = 1.0
PASSED_OVER = {"__pycache__", "node_modules", "site-packages"}


def sources(directory: Path) -> dict[str, int]:
    """Every Python file below, with the time of its last change. Hidden and installed files are left out."""
    return dict(_changed_at(directory))


async def watch(directory: Path, changed: Callable[[str], object]) -> None:
    """Look until cancelled. If a look finds changes, call `changed` with the name of one changed file."""
    before = await asyncio.to_thread(sources, directory)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = await asyncio.to_thread(sources, directory)
        if different := sorted(now.items() ^ before.items()):
            changed(different[0][0].removeprefix(f"{directory}{os.sep}"))
        before = now


def _changed_at(directory: Path) -> Iterator[tuple[str, int]]:
    for place, directories, files in os.walk(directory):
        directories[:] = [
            name
            for name in directories
            if not name.startswith(".") and name not in PASSED_OVER and not Path(place, name, "pyvenv.cfg").exists()
        ]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(place, name)
                try:
                    yield path, os.stat(path).st_mtime_ns
                except OSError:
                    continue

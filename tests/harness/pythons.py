"""Other versions of Python on this machine: on the path, or pyenv's, whose shims may lead nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def python(version: str) -> str | None:
    """A Python of this version, such as `3.13`: this one, or another that can make environments."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    homes = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(homes.glob(f"{version}.*/bin/python")))]
    works = (each for each in found if each and _is(each, version))
    return next(works, None)


def _is(program: str, version: str) -> bool:
    script = "import sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
    done = subprocess.run([program, "-c", script], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == version

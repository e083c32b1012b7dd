"""The distribution's name, which differs from the import name.

Used by code that asks for our version or names an extra. It is a constant; a test compares it with pyproject.toml.
Looking it up would read every installed distribution, and would not find an editable install.
"""

from __future__ import annotations

NAME = "pgqueue-jobs"


def install(extra: str) -> str:
    """The command that installs this extra."""
    return f"pip install '{NAME}[{extra}]' (from a checkout '.[{extra}]')"

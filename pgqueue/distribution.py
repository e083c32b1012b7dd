"""What pgqueue is called where it is installed: the distribution's name, which is not the import name.

Used by code that asks for our version or names an extra. A constant, held to pyproject.toml by a test: to look it up,
every distribution there is would be read (90 ms for 60 of them), and one installed as editable would not be found.
"""

from __future__ import annotations

NAME = "pgqueue-jobs"


def install(extra: str) -> str:
    """The command that installs one of our extras."""
    return f"pip install '{NAME}[{extra}]' (from a checkout '.[{extra}]')"

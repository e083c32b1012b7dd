"""The tasks that are declared here, by name: filled by `tasks`, and asked where a task is known by its name only."""

from __future__ import annotations

from typing import Any

declared_tasks: dict[str, Any] = {}
"""Every declared task under its name and under each alias. A module of its own: `tasks` imports what asks here."""

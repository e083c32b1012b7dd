"""Django's framework of tasks: `django.tasks` of Django 6, or the backport `django_tasks` if the project has that.

They have the same names in the same places, but for few. These are what the backend needs of them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.apps import apps

_PACKAGE = "django_tasks" if apps.is_installed("django_tasks") or not find_spec("django.tasks") else "django.tasks"
_json = import_module("django_tasks.utils" if _PACKAGE == "django_tasks" else "django.utils.json")

framework: Any = import_module(_PACKAGE)
base: Any = import_module(f"{_PACKAGE}.base")
backend: Any = import_module(f"{_PACKAGE}.backends.base")
exceptions: Any = import_module(f"{_PACKAGE}.exceptions")
signals: Any = import_module(f"{_PACKAGE}.signals")
normalize_json: Any = _json.normalize_json
"""A value as JSON has it; TypeError if it has no such form."""

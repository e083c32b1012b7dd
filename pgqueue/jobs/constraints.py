"""Constraints in annotations, as msgspec knows them: those of annotated_types and pydantic become `msgspec.Meta`.

Used by `stand_ins` when a task is declared. What cannot be obeyed is refused: a constraint that is ignored would look
as if it held. Never imports the libraries: their objects are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_LIMITS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")
_NO_CONSTRAINTS = frozenset(
    (
        "title",
        "description",
        "examples",
        "json_schema_extra",
        "deprecated",
        "repr",
        "strict",
        "allow_inf_nan",
        "annotation",
    )
)
_NO_CONSTRAINT_CLASSES = frozenset(("DocInfo", "Unit", "Strict", "WithJsonSchema", "Examples"))


def constraints(said: Iterable[Any]) -> list[msgspec.Meta]:
    """The constraints of annotated_types and pydantic in the metadata of Annotated, as msgspec knows them.

    Raises TypeError for one that msgspec cannot obey. Metadata of other libraries says nothing about values.
    """
    found: list[msgspec.Meta] = []
    for each in said:
        given = getattr(each, "_attributes_set", None)  # pydantic's Field(…), and what other libraries derive from it
        if isinstance(given, dict):
            _check_field(given)
            found += constraints(each.metadata)
            continue
        library = type(each).__module__.partition(".")[0]
        ours = library in ("annotated_types", "pydantic") or hasattr(each, "__get_pydantic_core_schema__")
        if ours and (limits := _limits(each)):
            found.append(msgspec.Meta(**limits))
    return found


def _check_field(given: Mapping[str, Any]) -> None:
    if unknown := given.keys() - _NO_CONSTRAINTS - set(_LIMITS):
        raise TypeError(f"Field({', '.join(sorted(unknown))}) says nothing here; use a default, or a pydantic model")


def _limits(said: Any) -> dict[str, Any]:
    limits = {name: value for name in _LIMITS if (value := getattr(said, name, None)) is not None}
    more = [name for name, value in getattr(said, "__dict__", {}).items() if value is not None and value is not False]
    known = any(hasattr(said, name) for name in _LIMITS) or type(said).__name__ in _NO_CONSTRAINT_CLASSES
    if not known or set(more) - _NO_CONSTRAINTS - set(_LIMITS):
        raise TypeError(f"there is no check for {said!r:.80}; use msgspec.Meta, or a pydantic model")
    if "pattern" in limits:
        limits["pattern"] = getattr(limits["pattern"], "pattern", limits["pattern"])  # it may be compiled
    return limits

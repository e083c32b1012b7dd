"""The form of a task: a field for each parameter, made of the function's signature; and its fields as JSON values.

Called by the page that enqueues by hand. A form says what a value looks like, and judges nothing: whether the values
fit is said by the task, as for every enqueue. An empty field is an argument that is not given.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin
from uuid import UUID

import msgspec

from pgqueue.client.tasks import Task
from pgqueue.web.redaction import HIDDEN, Redaction

FIRST = "arg."
"""How the names of fields begin that are arguments."""
MORE = "more"
"""The field for the keywords that `**keywords` takes."""

HINTS: Mapping[type, str] = {
    datetime: "2026-12-24T18:00:00+01:00",
    date: "2026-12-24",
    time: "18:00:00",
    timedelta: "PT1H30M",
    UUID: "a UUID",
    Decimal: "9.90",
    bytes: "base64",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `kind`: text, number, choice or json. `label` is what a person reads beside it."""

    name: str
    label: str
    kind: str
    needs: str
    required: bool = False
    default: str | None = None
    step: str = "any"
    hint: str = ""
    choices: Sequence[tuple[str, str]] = ()
    nullable: bool = False
    secret: bool = False
    """Its values are redacted, so they are not shown again."""


class Unreadable(Exception):
    """What was typed into fields is no JSON. By the labels of the fields."""

    def __init__(self, said: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{label}: {why}" for label, why in said.items()))


def fields_of(task: Task[..., Any], redaction: Redaction) -> list[Field]:
    """The fields of this task, in the order of its parameters."""
    fields = [_field(each, redaction) for each in task.codec.parameters]
    if task.codec.is_open:
        fields.append(Field(MORE, "More arguments", "json", "a JSON object", hint='{"name": "value"}'))
    return fields


def values_of(fields: Sequence[Field], form: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The arguments that were typed, as JSON values. Raises Unreadable."""
    found: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for field in fields:
        try:
            if field.name == MORE:
                found = _more(typed(field, form)) | found
            elif text := typed(field, form):
                found[field.label] = _value(field, text)
            elif field.nullable and field.required:
                found[field.label] = None
        except ValueError as error:
            wrong[field.label] = f"is not JSON: {error}"
    if wrong:
        raise Unreadable(wrong)
    return found


def typed(field: Field, form: Mapping[str, Sequence[str]]) -> str:
    """What was typed into this field. Browsers send the lines of a text with CR LF."""
    text = ([*form.get(field.name, ()), ""])[0].replace("\r\n", "\n")
    return text if field.kind == "text" else text.strip()


def read_json(text: str) -> Any:
    """The JSON value. Raises ValueError, also for what only Python takes for JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _more(text: str) -> dict[str, Any]:
    value = read_json(text) if text else {}
    if not isinstance(value, dict):
        raise ValueError("write an object of the arguments by name")
    return value


def _value(field: Field, text: str) -> Any:
    """A number that is none stays a text: the task says then what it needs."""
    if field.kind == "text":
        return text
    if field.kind != "number":
        return read_json(text)
    try:
        return read_json(text)
    except ValueError:
        return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _field(parameter: inspect.Parameter, redaction: Redaction) -> Field:
    annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
    many = parameter.kind is parameter.VAR_POSITIONAL
    inner, nullable = _inner(annotation)
    kind, more = ("json", {"hint": "[1, 2]"}) if many else _kind(inner)
    default = None if parameter.default is parameter.empty else _written(parameter.default)
    secret = redaction.hides(("args", parameter.name), "a value")
    return Field(
        FIRST + parameter.name,
        parameter.name,
        kind,
        f"a list of {_named(annotation)}" if many else _named(annotation),
        required=parameter.default is parameter.empty and not many,
        default=HIDDEN if default is not None and redaction.hides(("args", parameter.name), default) else default,
        nullable=nullable,
        secret=secret,
        **more,
    )


def _inner(annotation: Any) -> tuple[Any, bool]:
    """The annotation without what says nothing of a field, and whether None fits, too."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        else:
            break
    if get_origin(annotation) in (Union, UnionType):
        others = [each for each in get_args(annotation) if each is not NoneType]
        nullable = len(others) < len(get_args(annotation))
        return (_inner(others[0])[0] if len(others) == 1 else Any), nullable
    return annotation, False


def _kind(inner: Any) -> tuple[str, dict[str, Any]]:
    if get_origin(inner) is Literal:
        return "choice", {"choices": [(json.dumps(each), str(each)) for each in get_args(inner)]}
    if not isinstance(inner, type):
        return "json", {}
    if issubclass(inner, Enum):
        return "choice", {"choices": [(_json(each), each.name) for each in inner]}
    if inner is bool:
        return "choice", {"choices": [("true", "true"), ("false", "false")]}
    if inner in (int, float):
        return "number", {"step": "1" if inner is int else "any"}
    if inner is str or inner in HINTS or issubclass(inner, PurePath):
        return "text", {"hint": HINTS.get(inner, "")}
    return "json", {}


def _named(annotation: Any) -> str:
    return "any JSON value" if annotation is Any else inspect.formatannotation(annotation).replace("typing.", "")


def _written(default: Any) -> str:
    """A default as a person would type it, if it can be typed."""
    return default if isinstance(default, str) and default else _json(default)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)

"""What of a result would not be in its JSON: a part that its class leaves out, hides or changes is found and named.

Used by `codec` when a handler has returned, for values that have a class in them. The rules are those of arguments, but
a result is read as plain JSON. So its parts need not come back as equal: a tuple may be a list there, a time a text.

A model's own serializer writes the model. A part of it is kept if reading the JSON makes the same part of it
(`round_trip`), or if the JSON has the part in the form of all other results.
"""

from __future__ import annotations

import reprlib
import typing
from collections.abc import Callable, Iterable
from decimal import Decimal
from types import NoneType
from typing import Any, cast

import msgspec

from pgqueue.jobs.annotations import unfit
from pgqueue.jobs.round_trip import CHANGED, difference
from pgqueue.jobs.stand_ins import field_names, is_model, read_model, unwritten

LEFT_OUT = ": would not be in the JSON; its class leaves it out there"
_PLAIN = frozenset((str, int, bool, NoneType, float))

Form = Callable[[Any], Any]
"""Makes plain values of any value, in the form of results."""


def never_written(annotation: Any) -> str:
    """What no value of this annotation would have in its JSON: the path to a field of a class in it, and the complaint.
    "" if the annotation shows nothing."""
    return _never_written(annotation, set())


def _never_written(annotation: Any, seen: set[type]) -> str:
    if why := next(filter(None, (_never_written(each, seen) for each in typing.get_args(annotation))), ""):
        return why
    cls = typing.get_origin(annotation) or annotation
    if not isinstance(cls, type) or cls in seen:
        return ""
    seen.add(cls)
    fields: dict[str, Any]
    if is_model(cls):
        own: dict[str, Any] = {} if _has_own_form(cls) else cast("Any", cls).model_fields
        fields = {name: each.annotation for name, each in own.items()}
        for name, each in own.items():
            if each.exclude and each.is_required():
                return f"{cls.__qualname__}.{name}{LEFT_OUT}"
            if _is_secret(each.annotation) and not _has_serializer(cls, name, each):
                return f"{cls.__qualname__}.{name}: is hidden in the JSON, as it is a secret"
    else:
        if (private := unwritten(cls)) is not None:
            return f"{cls.__qualname__}.{private}{LEFT_OUT}"
        fields = _hints(cls) if field_names(cls) is not None else {}
    return next(filter(None, (_never_written(each, seen) for each in fields.values())), "")


def _hints(cls: type) -> dict[str, Any]:
    """The annotations of its fields; none if one of them cannot be resolved: then nothing is shown."""
    try:
        return typing.get_type_hints(cls)
    except Exception:  # a text may raise anything
        return {}


def _has_own_form(cls: Any) -> bool:
    """Whether a model writes itself as its author says."""
    return bool(cls.__pydantic_decorators__.model_serializers or cls.model_config.get("json_encoders"))


def _has_serializer(cls: Any, name: str, field: Any) -> bool:
    """Whether a field of a model is written as its author says."""
    declared = cls.__pydantic_decorators__.field_serializers.values()
    named = any(name in each.info.fields or "*" in each.info.fields for each in declared)
    return named or any("Serializer" in type(each).__name__ for each in field.metadata)


def _is_secret(annotation: Any) -> bool:
    """Whether the text of the values has nothing of them, as pydantic's SecretStr."""
    inner = typing.get_args(annotation)
    if inner:
        return any(map(_is_secret, inner))
    return isinstance(annotation, type) and hasattr(annotation, "get_secret_value")


def is_plain(value: object) -> bool:
    """Whether there is no class in it, so that JSON has all of it."""
    cls = type(value)
    if cls in _PLAIN:
        return True
    if cls is dict:
        parts: Iterable[object] = value.values()  # type: ignore[attr-defined]
        # Of keys, only a Decimal may be none: it is not finite.
        return _PLAIN.issuperset(map(type, value)) and (  # type: ignore[call-overload]
            _PLAIN.issuperset(map(type, parts)) or all(map(is_plain, parts))
        )
    if cls in (list, tuple):
        parts = value  # type: ignore[assignment]
        return _PLAIN.issuperset(map(type, parts)) or all(map(is_plain, parts))
    return False


def loss(value: Any, plain: Any, form: Form, in_model: bool = False) -> str:
    """The first part of `value` that `plain`, its plain values, does not have: its path and the complaint, or "".

    `in_model`: a model has made the plain values, and not `form`.
    """
    if isinstance(value, Decimal):
        if not value.is_finite():
            return unfit(value, "a finite Decimal")
    elif is_model(type(value)):
        return _in_model(value, plain, form, in_model)
    elif isinstance(value, dict):
        return _in_dict(value, plain, form, in_model)
    elif isinstance(value, list | tuple | set | frozenset):
        return _in_items(value, plain, form, in_model)
    elif (names := field_names(type(value))) is not None:
        return _in_fields(value, names, plain, form, in_model)
    return CHANGED if in_model and not _holds(plain, value, form) else ""


def _holds(plain: Any, value: Any, form: Form) -> bool:
    """Whether these plain values are what `form` makes of the value. A value without a form is not held."""
    try:
        return bool(form(value) == plain)
    except (TypeError, ValueError):
        return False


def _in_dict(value: dict[Any, Any], plain: Any, form: Form, in_model: bool) -> str:
    if not isinstance(plain, dict) or len(plain) != len(value):
        return CHANGED
    for (name, each), written in zip(value.items(), plain.values(), strict=True):
        if isinstance(name, Decimal) and not name.is_finite():
            return f", key{unfit(name, 'a finite Decimal')}"
        if (in_model or type(each) not in _PLAIN) and (why := loss(each, written, form, in_model)):
            return f"[{reprlib.repr(name)}]{why}"
    return ""


def _in_items(value: Any, plain: Any, form: Form, in_model: bool) -> str:
    if not isinstance(plain, list | tuple | set | frozenset) or len(plain) != len(value):
        return CHANGED
    for i, (each, written) in enumerate(zip(value, plain, strict=True)):
        if (in_model or type(each) not in _PLAIN) and (why := loss(each, written, form, in_model)):
            return f"[{i}]{why}"
    return ""


def _in_fields(value: Any, names: list[str], plain: Any, form: Form, in_model: bool) -> str:
    """A dataclass, a Struct or an object of attrs, which leaves out the fields whose names begin with an underscore."""
    keys = getattr(value, "__struct_encode_fields__", names)
    if isinstance(plain, list | tuple):  # a Struct that is array_like; a tag is the first of its items
        plain = dict(zip(keys, plain[len(plain) - len(names) :], strict=False))
    if not isinstance(plain, dict):
        return CHANGED
    for name, key in zip(names, keys, strict=True):
        part = getattr(value, name, msgspec.UNSET)
        if key not in plain:
            if not _may_be_left_out(value, name, part):
                return f".{name}{LEFT_OUT}"
        elif (in_model or type(part) not in _PLAIN) and (why := loss(part, plain[key], form, in_model)):
            return f".{name}{why}"
    return ""


def _may_be_left_out(value: Any, name: str, part: Any) -> bool:
    """Whether nothing is lost with a field that is not written: it has no value, or its class makes the same again."""
    if part is msgspec.UNSET or hasattr(value, "__struct_fields__"):  # a Struct leaves out its defaults, if it says so
        return True
    made: Any = next((each.default for each in getattr(value, "__attrs_attrs__", ()) if each.name == name), ...)
    if hasattr(made, "factory") and hasattr(made, "takes_self"):
        made = made.factory(value) if made.takes_self else made.factory()
    return not difference(part, made, in_model=True)


def _in_model(value: Any, plain: Any, form: Form, in_model: bool) -> str:
    cls = type(value)
    if in_model and isinstance(plain, dict):  # a subclass in a field of its base is written as that base
        fields = cls.model_fields.items()
        keys = _keys(value)
        if lost := next((name for name, each in fields if not each.exclude and keys[name] not in plain), None):
            return f".{lost}{LEFT_OUT}"
    try:
        back = read_model(cls, plain)
    except Exception:  # a model may be for writing only: then the JSON must have each part in our own form
        back = None
    if back is not None and not difference(value, back, in_model=True):
        return ""
    if getattr(cls, "__pydantic_root_model__", False):
        return loss(value.root, plain, form, in_model=True)
    if not isinstance(plain, dict):
        return CHANGED
    for name, key in _keys(value).items():
        part = getattr(value, name)
        if back is not None and not difference(part, getattr(back, name, ...), in_model=True):
            continue
        if why := loss(part, plain[key], form, in_model=True) if key in plain else LEFT_OUT:
            return f".{name}{why}"
    theirs = getattr(back, "__pydantic_private__", None) or {}
    for name, part in (value.__pydantic_private__ or {}).items():
        if difference(part, theirs.get(name, ...), in_model=True):
            return f".{name}{LEFT_OUT}"
    return ""


def _keys(model: Any) -> dict[str, str]:
    """The names of a model's parts, and how they are called in its JSON."""
    fields = type(model).model_fields.items()
    return {name: each.serialization_alias or each.alias or name for name, each in fields} | {
        name: name for name in model.__pydantic_extra__ or ()
    }

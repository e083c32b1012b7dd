"""Annotations that msgspec cannot read, or would read without their constraints, replaced by ones that it can.

Used by `codec` and `annotations`, when a task is declared. `readable` walks an annotation. What msgspec reads as it is
stays the same object, so that plain tasks pay nothing. The rest becomes one of these:

- `Sequence`, `Iterable`, `Collection`, `collections.abc.Set`: a list or a set, with a note of what else is taken. As
  fields of a class they are that list or set, as msgspec reads them: else every class with such a field would need a
  stand-in, and no union could have it.
- Constraints of annotated_types and pydantic: the same constraints as `msgspec.Meta`. One that cannot be obeyed is a
  TypeError.
- The classes that freezegun puts in the place of datetime and date, while a test declares a task: Python's own.
- Unions of several types that are texts in JSON (`str | UUID`), enums of texts and numbers, pydantic's dataclasses, and
  classes with a field of any such kind: a **stand-in**, a class of ours with a `Form` that reads the value.

There is one JSON form for each type: the one that msgspec writes, and for paths and IP addresses their text. Never
imports pydantic, attrs or annotated_types: their objects are recognised by their attributes.
"""

from __future__ import annotations

import abc
import collections.abc
import dataclasses
import inspect
import ipaddress
import pathlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, EnumMeta
from math import isfinite
from types import NoneType
from typing import Any, Literal, cast
from uuid import UUID

import msgspec

from pgqueue.jobs.constraints import constraints

Reader = Callable[[Any], Any]
"""Makes a value from what JSON has for it. Raises ValueError or TypeError if that cannot be."""

TEXTS: frozenset[type] = frozenset(
    (
        pathlib.PurePath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.Path,
        type(pathlib.Path()),
        ipaddress.IPv4Address,
        ipaddress.IPv6Address,
        ipaddress.IPv4Network,
        ipaddress.IPv6Network,
        ipaddress.IPv4Interface,
        ipaddress.IPv6Interface,
    )
)
"""Types that msgspec does not know and whose JSON form is their text."""

ACCEPTS = "pgqueue:accepts"
"""The note beside a list or set that stands for an abstract type: the types of values that are taken."""

_SCALARS = (bool, int, float, None, NoneType)
_MSGSPEC_TEXTS = (str, datetime, date, time, timedelta, UUID, Decimal, bytes, bytearray)
_KNOWN_LISTS = (collections.abc.Sequence, collections.abc.Collection)
_LISTS = (*_KNOWN_LISTS, collections.abc.Iterable, collections.abc.Reversible)
_ABSTRACT: Mapping[Any, tuple[type, tuple[type, ...]]] = {
    **dict.fromkeys(_LISTS, (list, (list, tuple))),
    collections.abc.Set: (set, (set, frozenset)),
}
_KNOWN = (*_KNOWN_LISTS, collections.abc.Set)
"""Abstract types that msgspec reads as a list or set."""
_WRAPPERS = (typing.Required, typing.NotRequired, typing.Final)


@dataclass(frozen=True, slots=True)
class Form:
    """What a stand-in stands for, how its values are checked, and how they are read.

    `parts` are readable annotations: the members of a union by their numbers, the fields of a class by their names.
    """

    kind: Literal["union", "enum", "class", "dict"]
    cls: Any
    parts: Mapping[Any, Any]
    required: frozenset[str]
    read: Reader


_FORMS: dict[type, Form] = {}
_stand_ins: set[type] = set()
"""Also those without a form yet, because the fields of their classes are being visited."""


def form_of(cls: type) -> Form | None:
    """The form of a stand-in; None for any other class."""
    return _FORMS.get(cls)


def is_model(cls: Any) -> bool:
    """True for a pydantic model, recognised by its methods: pydantic itself is never imported here."""
    return hasattr(cls, "__pydantic_validator__") and hasattr(cls, "model_validate_json")


def readable(annotation: Any) -> Any:
    """Return an annotation that msgspec reads as this one is meant; the same one if msgspec reads it so.

    Raises TypeError if it has a constraint that cannot be obeyed, or no JSON form.
    """
    return _readable(annotation, {})


def from_json(cls: Any, value: Any) -> Any:
    """Read a value of a class that msgspec does not know. Raises ValueError or TypeError if it does not fit."""
    if (form := _FORMS.get(cls)) is not None:
        try:
            return form.read(value)
        except msgspec.ValidationError as error:  # msgspec adds the path to here to any other error
            what, _, path = str(error).partition(" - at `$")
            raise ValueError(f"{what} at {path.strip('.`')}" if path else what) from error
    if cls in TEXTS:
        if type(value) is not str:
            raise ValueError(f"given {value!r:.80}, needs the text of a {cls.__name__}")
        return cls(value)
    return read_model(cls, value)


def read_model(cls: Any, value: Any) -> Any:
    """Read a pydantic model or dataclass. As JSON: a strict model accepts a text for a date only there."""
    read = cls.model_validate_json if is_model(cls) else cls.__pydantic_validator__.validate_json
    try:
        return read(msgspec.json.encode(value))
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        first = cast("Any", error).errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or cls.__qualname__}: {first['msg']}") from error


# -- Walking an annotation ---------------------------------------------------------------------------------------------


def _readable(annotation: Any, made: dict[Any, type], in_class: bool = False) -> Any:
    """`made` has the stand-ins of classes whose fields are being visited: a class may contain itself."""
    if not _foreign(annotation, set(), in_class):
        return annotation
    bare, said = _bare(annotation)
    found = _replaced(bare, made, in_class)
    kept = [each for each in said if isinstance(each, msgspec.Meta)] + constraints(said)
    return typing.Annotated[(found, *kept)] if kept else found


def _foreign(annotation: Any, seen: set[Any], in_class: bool) -> bool:
    """Whether there is anything in it, at any depth, that msgspec does not read as it is meant."""
    bare, said = _bare(annotation)
    if constraints(said) or _is_odd(bare, in_class):
        return True
    within = in_class or _is_record(typing.get_origin(bare) or bare)
    return any(_foreign(part, seen, within) for part in _parts(bare, seen))


def _bare(annotation: Any) -> tuple[Any, list[Any]]:
    """The annotation without Annotated, NewType, aliases; and what Annotated said."""
    said: list[Any] = []
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            said = [*annotation.__metadata__, *said]
            annotation = annotation.__origin__
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # `type Name = …`, from Python 3.12
            annotation = annotation.__value__
        elif type(origin).__name__ == "TypeAliasType":
            annotation = cast("Any", origin).__value__[typing.get_args(annotation)]
        elif origin in _WRAPPERS:
            (annotation,) = typing.get_args(annotation)
        else:
            return annotation, said


def _is_odd(bare: Any, in_class: bool) -> bool:
    if _abstract(bare) is not None:
        return not in_class or (typing.get_origin(bare) or bare) not in _KNOWN
    return _is_odd_enum(bare) or _is_odd_union(bare) or _is_pydantic_dataclass(bare) or _is_frozen(bare)


def _parts(bare: Any, seen: set[Any]) -> Iterator[Any]:
    """The annotations within this one. A class that was seen has none: its other parts are looked at already."""
    origin = typing.get_origin(bare)
    if origin is not None and origin is not Literal:
        yield from (each for each in typing.get_args(bare) if each is not Ellipsis)
    if _is_record(origin or bare) and (origin or bare) not in seen:
        seen.add(origin or bare)
        yield from _hints(bare).values()


def _replaced(bare: Any, made: dict[Any, type], in_class: bool) -> Any:
    origin, args = typing.get_origin(bare), typing.get_args(bare)
    if (abstract := _abstract(bare)) is not None:
        base, accepted = abstract
        item = _readable(args[0], made, in_class) if args else Any
        if in_class:
            return base.__class_getitem__(item)  # type: ignore[attr-defined]
        return typing.Annotated[(base.__class_getitem__(item), msgspec.Meta(extra={ACCEPTS: accepted}))]  # type: ignore[attr-defined]
    if _is_frozen(bare):
        return bare.__mro__[1]
    if _is_odd_enum(bare):
        return _enum(bare)
    if _is_pydantic_dataclass(bare):
        return _pydantic_dataclass(bare)
    if _is_union(bare):
        members = tuple(_readable(each, made, in_class) for each in args)
        odd = _is_odd_union(bare) or (any(map(_is_stand_in, members)) and len([*filter(_is_some, members)]) > 1)
        return _union(members) if odd else typing.Union[members]  # noqa: UP007  # made at run time
    if _is_record(origin or bare):
        return made.get(bare) or _record(bare, made)
    if origin is None:
        return bare
    return origin[tuple(each if each is Ellipsis else _readable(each, made, in_class) for each in args)]


def _is_frozen(bare: Any) -> bool:
    return isinstance(bare, type) and bare.__module__ == "freezegun.api"


def _abstract(bare: Any) -> tuple[type, tuple[type, ...]] | None:
    try:
        return _ABSTRACT.get(typing.get_origin(bare) or bare)
    except TypeError:  # it cannot be hashed, so it is none of them
        return None


# -- Unions and enums --------------------------------------------------------------------------------------------------


def _is_union(bare: Any) -> bool:
    return typing.get_origin(bare) in (typing.Union, types.UnionType)


def _is_odd_union(bare: Any) -> bool:
    """Whether msgspec refuses this union because of its texts: it tells members apart by their JSON types."""
    if not _is_union(bare):
        return False
    members = [_bare(each)[0] for each in typing.get_args(bare)]
    texts = [each for each in members if _may_be_text(each)]
    others = [each for each in members if not _may_be_text(each) and each not in (None, NoneType)]
    return len(texts) > 1 or (bool(texts and others) and any(_is_unknown(each) for each in members))


def _may_be_text(bare: Any) -> bool:
    if typing.get_origin(bare) is Literal:
        return any(isinstance(each, str) for each in typing.get_args(bare))
    if not isinstance(bare, type):
        return False
    if issubclass(bare, Enum):
        return any(isinstance(each.value, str) for each in bare)
    return bare in _MSGSPEC_TEXTS or bare in TEXTS or _is_frozen(bare)


def _is_unknown(bare: Any) -> bool:
    """Whether msgspec leaves values of this type to us."""
    return is_model(bare) or (isinstance(bare, type) and bare in TEXTS) or _is_odd_enum(bare)


def _union(members: tuple[Any, ...]) -> type:
    """A union of which several members are texts in JSON. A text is read as the first that takes it, as `str` last.

    A value that would be read as another member is found when it is enqueued, and refused.
    """
    others = tuple(each for each in members if not _may_be_text(_bare(each)[0]) and not _is_stand_in(each))
    if others:  # msgspec says whether it can tell them apart
        msgspec.json.Decoder(typing.Union[others], dec_hook=from_json)  # noqa: UP007
    enums = [each for each in members if _is_stand_in(each) and each in _FORMS and _FORMS[each].kind == "enum"]
    objects = [each for each in members if _is_stand_in(each) and each not in enums]
    if len(objects) > 1 or (objects and any(_bare(each)[0] not in _SCALARS for each in others)):
        raise TypeError("its members cannot be told apart in JSON")
    ordered = sorted(members, key=_how_late)

    def read(value: Any) -> Any:
        for each in ordered:
            try:
                return msgspec.convert(value, each, str_keys=True, dec_hook=from_json)
            except (msgspec.ValidationError, ValueError, TypeError):  # it is for another member, or for none
                continue
        raise ValueError(f"given {value!r:.80}, which no member of the union takes")

    return _stand_in(Form("union", typing.Union[members], dict(enumerate(members)), frozenset(), read))  # noqa: UP007


def _is_stand_in(annotation: Any) -> bool:
    return isinstance(annotation, type) and annotation in _stand_ins


def _is_some(annotation: Any) -> bool:
    return annotation not in (None, NoneType)


def _how_late(member: Any) -> int:
    """An int is no float if there is an int; any text is a `str`."""
    bare = _bare(member)[0]
    return 2 if bare is str else 1 if bare is float else 0


def _is_odd_enum(bare: Any) -> bool:
    """Whether msgspec does not read this enum: its values are neither all texts nor all ints, or it has a metaclass."""
    if not isinstance(bare, type) or not issubclass(bare, Enum):
        return False
    if type(bare) is not EnumMeta:
        return True
    values = [each.value for each in bare]
    return not all(type(each) is int for each in values) and not all(isinstance(each, str) for each in values)


def _enum(cls: Any) -> type:
    """An enum with texts and numbers as values: in JSON it is its value."""
    for each in cls:
        plain = each.value is None or isinstance(each.value, bool | int | str)
        if not plain and not (isinstance(each.value, float) and isfinite(each.value)):
            raise TypeError(f"the value of {each!r} is no plain JSON value (str, int, float, bool, None)")
    return _stand_in(Form("enum", cls, {}, frozenset(), cls))


# -- Classes with fields -----------------------------------------------------------------------------------------------


def _is_record(cls: Any) -> bool:
    """Whether it is a class whose fields msgspec reads by their annotations."""
    return isinstance(cls, type) and not is_model(cls) and field_names(cls) is not None


def field_names(cls: Any) -> list[str] | None:
    """The names of the fields of a dataclass, Struct, attrs class, NamedTuple or TypedDict."""
    if hasattr(cls, "__struct_fields__"):
        return list(cls.__struct_fields__)
    if dataclasses.is_dataclass(cls):
        return [each.name for each in dataclasses.fields(cls)]
    if hasattr(cls, "__attrs_attrs__"):
        return [each.name for each in cls.__attrs_attrs__]
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return list(cast("Any", cls)._fields)
    if issubclass(cls, dict) and hasattr(cls, "__total__"):
        return list(cls.__annotations__)
    return None


def _hints(bare: Any) -> dict[str, Any]:
    """The annotations of the fields of a class, with the arguments of a generic one put in.

    Empty if they cannot be resolved: then msgspec says so itself.
    """
    origin = typing.get_origin(bare) or bare
    try:
        found = typing.get_type_hints(origin, include_extras=True)
    except Exception:  # whatever it is, msgspec meets it too and reports it
        return {}
    given = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(bare), strict=False))
    names = list(found) if issubclass(origin, dict) else field_names(origin) or []
    return {name: _with_arguments(found.get(name, Any), given) for name in names}


def _with_arguments(hint: Any, given: Mapping[Any, Any]) -> Any:
    if isinstance(hint, typing.TypeVar):
        return given.get(hint, hint)
    free = getattr(hint, "__parameters__", ())
    return hint[tuple(given.get(each, each) for each in free)] if free and typing.get_origin(hint) else hint


def _record(bare: Any, made: dict[Any, type]) -> type:
    """A class with a field that msgspec does not read: its fields are read by a Struct, and given to the class."""
    cls = typing.get_origin(bare) or bare
    stand_in = _new_class()
    made[bare] = stand_in
    hints = _hints(bare)
    if hints.keys() != set(field_names(cls) or hints):
        raise TypeError(f"the annotations of {cls.__qualname__} cannot be resolved when the program runs")
    fields = {name: _readable(hint, made, in_class=True) for name, hint in hints.items()}
    keys = dict(
        zip(getattr(cls, "__struct_fields__", fields), getattr(cls, "__struct_encode_fields__", fields), strict=True)
    )
    config = getattr(cls, "__struct_config__", None)
    if config is not None and config.array_like:
        raise TypeError(f"{cls.__qualname__} is array_like, and has fields that msgspec does not read")
    struct = msgspec.defstruct(
        cls.__name__,
        [
            (f"f{i}", fields[name], msgspec.field(name=keys[name], default=msgspec.UNSET))
            for i, name in enumerate(fields)
        ],
        forbid_unknown_fields=bool(config and config.forbid_unknown_fields and config.tag is None),
    )
    names, arguments, is_row = list(fields), _arguments(cls), issubclass(cls, tuple)

    def read(value: Any) -> Any:
        if is_row:
            if not isinstance(value, list) or len(value) > len(names):
                raise ValueError(f"given {value!r:.80}, needs a list of {len(names)} for {cls.__name__}")
            value = dict(zip(names, value, strict=False))
        found = msgspec.convert(value, struct, str_keys=True, dec_hook=from_json)
        given = zip(names, msgspec.structs.astuple(found), strict=True)
        return cls(**{arguments[name]: each for name, each in given if each is not msgspec.UNSET and name in arguments})

    is_dict = issubclass(cls, dict)
    required = frozenset(name for name in names if is_dict and _is_required(cls, name))
    _FORMS[stand_in] = Form("dict" if is_dict else "class", cls, fields, required, _complete(read, required))
    return stand_in


def _complete(read: Reader, required: frozenset[str]) -> Reader:
    """A reader of a TypedDict, which does not look itself whether all is there."""
    if not required:
        return read

    def complete(value: Any) -> Any:
        found = read(value)
        if missing := sorted(required - found.keys()):
            raise ValueError(f"missing {', '.join(map(repr, missing))}")
        return found

    return complete


def _arguments(cls: Any) -> dict[str, str]:
    """How the fields of this class are called where it is made; without those that it makes itself."""
    if dataclasses.is_dataclass(cls):
        return {each.name: each.name for each in dataclasses.fields(cls) if each.init}
    if hasattr(cls, "__attrs_attrs__"):
        return {each.name: getattr(each, "alias", each.name.lstrip("_")) for each in cls.__attrs_attrs__ if each.init}
    return {name: name for name in (list(_hints(cls)) if issubclass(cls, dict) else field_names(cls) or [])}


def unwritten(cls: Any) -> str | None:
    """The field of an attrs class without which it cannot be made, and that is not in its JSON; None if there is none.

    Msgspec leaves out the fields of attrs whose names begin with an underscore."""
    hidden = [each for each in getattr(cls, "__attrs_attrs__", ()) if each.init and each.name.startswith("_")]
    given = inspect.signature(cls).parameters if hidden else {}
    called = _arguments(cls)
    needed = (each.name for each in hidden if given[called[each.name]].default is inspect.Parameter.empty)
    return next(needed, None)


def _is_required(cls: Any, name: str) -> bool:
    """Whether a TypedDict needs this key. Its own list is wrong where annotations are texts."""
    origin = typing.get_origin(typing.get_type_hints(cls, include_extras=True)[name])
    return origin is not typing.NotRequired and (origin is typing.Required or name in cls.__required_keys__)


def _is_pydantic_dataclass(bare: Any) -> bool:
    return dataclasses.is_dataclass(bare) and hasattr(bare, "__pydantic_validator__")


def _pydantic_dataclass(cls: Any) -> type:
    """A dataclass of pydantic: written field by field like any dataclass, and read by its own validator."""
    for name, each in getattr(cls, "__pydantic_fields__", {}).items():
        if each.alias is not None or each.validation_alias is not None:
            raise TypeError(
                f"field {name} of {cls.__qualname__} has an alias; give it its own name, or use a BaseModel"
            )

    def read(value: Any) -> Any:
        return read_model(cls, value)

    return _stand_in(Form("class", cls, {}, frozenset(), read))


def _new_class() -> type:
    """A class of which every value is said to be an object: msgspec asks that of what a reader has returned."""
    made = abc.ABCMeta("StandIn", (), {"__subclasshook__": classmethod(lambda cls, other: True)})
    _stand_ins.add(made)
    return made


def _stand_in(form: Form) -> type:
    made = _new_class()
    _FORMS[made] = form
    return made

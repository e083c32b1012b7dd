"""Kinds: whether a value fits its annotation, strictly, at any depth.

Used by `codec` only. A kind is made from an annotation when a task is declared, and checks values when a job is
enqueued. Kinds are stricter than msgspec, which would take a list for a tuple, or a text for a date. A value that
passes comes back from JSON equal and with the type of its annotation. Kinds also refuse what JSON or PostgreSQL cannot
keep: NaN and infinities, naive datetimes, keys that are no text. A value of a plain type costs one look into a set of
types. What classes do with their fields no kind can know: such values are compared with what comes back (`round_trip`).

Never changes a value, never does I/O, never imports pydantic (its models are recognised by their methods).
"""

from __future__ import annotations

import inspect
import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import PurePath
from types import NoneType, SimpleNamespace
from typing import Any, cast
from uuid import UUID

import msgspec
from msgspec import inspect as nodes

from pgqueue.errors import InvalidOption
from pgqueue.jobs.stand_ins import ACCEPTS, TEXTS, Form, form_of, is_model, unwritten

Check = Callable[[Any], str]
"""Returns "" for a value that fits, else the complaint, which begins with the path to the unfit part."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an annotation asks of a value. A value whose type is in `exact` needs no further check."""

    needs: str
    check: Check
    exact: frozenset[type] = frozenset()


@dataclass(slots=True)
class _Survey:
    """What one annotation contains: its classes (a class may contain itself), whether there is a datetime, and whether
    values must be compared with what comes back."""

    classes: dict[int, Kind] = field(default_factory=dict)  # by the id of its node: a generic class may come twice
    nodes: list[object] = field(default_factory=list)  # kept, because another node could get the id of one that is gone
    datetimes: bool = False
    compared: bool = False


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The kind of a (readable) annotation, whether its values may hold a datetime, and whether they are compared."""

    stored: Any
    kind: Kind
    datetimes: bool
    compared: bool


def surveyed(annotation: Any) -> Surveyed:
    """Survey an annotation that msgspec can read.

    Raises TypeError, ValueError, NameError or AttributeError if the annotation has no JSON form.
    """
    survey = _Survey()
    kind = _of(annotation, survey)
    return Surveyed(annotation, kind, survey.datetimes, survey.compared)


def _of(annotation: Any, survey: _Survey) -> Kind:
    node = nodes.type_info(annotation)
    survey.nodes.append(node)
    return _kind(node, survey)


def _kind(node: nodes.Type, survey: _Survey) -> Kind:
    match node:
        case nodes.AnyType():
            return _PLAIN
        case nodes.Metadata(type=inner, extra=extra):
            accepted = (extra or {}).get(ACCEPTS)
            return (
                _kind(inner, survey)
                if accepted is None
                else _items(accepted, _kind(cast("Any", inner).item_type, survey))
            )
        case nodes.StrType() | nodes.IntType() | nodes.BoolType() | nodes.NoneType():
            base = _BASES[type(node)]
            return Kind(base[0], partial(_check_base, *base), frozenset((base[1],) if node == type(node)() else ()))
        case nodes.UnionType(types=types):
            return _union([_kind(each, survey) for each in types])
        case nodes.ListType(item_type=item) | nodes.SetType(item_type=item) | nodes.FrozenSetType(item_type=item):
            return _items(_CONTAINERS[type(node)], _kind(item, survey))
        case nodes.VarTupleType(item_type=item):
            return _items(tuple, _kind(item, survey))
        case nodes.TupleType(item_types=items):
            return _row("a tuple", tuple, [_kind(item, survey) for item in items])
        case nodes.DictType(key_type=key, value_type=value):
            return _mapping(_key(key, survey), _kind(value, survey))
        case nodes.EnumType(cls=cls):
            return Kind(cls.__qualname__, partial(_check_instance, cls.__qualname__, cls))
        case nodes.LiteralType(values=values):
            return _literal(values)
        case nodes.CustomType(cls=cls) if is_model(cls):
            survey.compared = True
            return Kind(cls.__qualname__, partial(_check_class, cls))
        case nodes.CustomType(cls=cls) if cls in _TIMES:  # msgspec does not know them while a test has frozen the clock
            return _kind(_TIMES[cls], survey)
        case nodes.CustomType(cls=cls) if cls in TEXTS:
            return Kind(cls.__qualname__, partial(_check_text, cls, type(cls()) if issubclass(cls, PurePath) else cls))
        case nodes.CustomType(cls=cls) if (form := form_of(cls)) is not None:
            survey.compared = True
            return survey.classes.get(id(cls)) or _formed(cls, form, survey)
        case nodes.StructType() | nodes.DataclassType() | nodes.TypedDictType() | nodes.NamedTupleType():
            return survey.classes.get(id(node)) or _record(node, survey)
        case _ if type(node) in _SCALARS:
            survey.datetimes |= isinstance(node, nodes.DateTimeType)
            needs, check = _SCALARS[type(node)]
            return Kind(needs, check)
    raise TypeError(f"there is no JSON form for {getattr(node, 'cls', type(node).__name__.removesuffix('Type'))}")


def _key(node: nodes.Type, survey: _Survey) -> Kind:
    if isinstance(node, nodes.AnyType):
        return _TEXT
    if type(node) in _KEYS:
        return _kind(node, survey)
    shown = getattr(node, "cls", type(node)).__name__.removesuffix("Type").replace("StandIn", "mixed")
    raise TypeError(f"a JSON object cannot have {shown} keys")


def _record(node: Any, survey: _Survey) -> Kind:
    """A class with named fields. It is noted before its fields are visited, because it may contain itself."""
    fields: dict[str, Kind] = {}
    cls = typing.get_origin(node.cls) or node.cls  # a generic class has arguments, its objects do not
    name = cls.__qualname__
    _check_written(cls)
    if isinstance(node, nodes.TypedDictType):
        kind = Kind(name, partial(_check_typed_dict, name, fields, {f.name for f in node.fields if f.required}))
    else:
        survey.compared |= not isinstance(node, nodes.NamedTupleType)
        kind = Kind(name, partial(_check_fields, cls, fields))
    survey.classes[id(node)] = kind
    fields.update((each.name, _kind(each.type, survey)) for each in node.fields)
    return kind


def _formed(cls: type, form: Form, survey: _Survey) -> Kind:
    """The kind of a stand-in. That of a class is noted before its fields are visited, as in `_record`."""
    if form.kind == "union":
        kind = _union([_of(each, survey) for each in form.parts.values()])
        return replace(kind, exact=frozenset())  # a text may be read as another member
    if form.kind == "enum":
        return Kind(form.cls.__qualname__, partial(_check_instance, form.cls.__qualname__, form.cls))
    fields: dict[str, Kind] = {}
    name = form.cls.__qualname__
    _check_written(form.cls)
    if form.kind == "dict":
        kind = Kind(name, partial(_check_typed_dict, name, fields, set(form.required)))
    else:
        kind = Kind(name, partial(_check_fields, form.cls, fields))
    survey.classes[id(cls)] = kind
    fields.update((part, _of(each, survey)) for part, each in form.parts.items())
    return kind


def _check_written(cls: type) -> None:
    if (field := unwritten(cls)) is not None:
        raise TypeError(
            f"{cls.__qualname__}.{field} is not written, as its name begins with an underscore, and without it no "
            f"{cls.__qualname__} is made. Give it a default, or another name"
        )


def _union(kinds: list[Kind]) -> Kind:
    needs = " or ".join(kind.needs for kind in kinds)
    members = [kind for kind in kinds if kind.needs != "None"]
    return Kind(needs, partial(_check_union, needs, kinds, members), frozenset().union(*(kind.exact for kind in kinds)))


def _items(base: type | tuple[type, ...], item: Kind) -> Kind:
    needs = f"a {' or '.join(each.__name__ for each in (base if isinstance(base, tuple) else (base,)))}"
    return Kind(needs, partial(_check_items, needs, base, item))


def _row(needs: str, base: type, kinds: list[Kind]) -> Kind:
    return Kind(needs, partial(_check_row, f"{needs} of {len(kinds)}", base, kinds))


def _mapping(key: Kind, value: Kind) -> Kind:
    return Kind("a dict", partial(_check_mapping, key, value))


def _literal(values: tuple[Any, ...]) -> Kind:
    needs = f"one of {', '.join(map(repr, values))}"
    allowed = {(type(value), value) for value in values}
    return Kind(needs, lambda value: "" if (type(value), value) in allowed else unfit(value, needs))


def check_plain(value: Any) -> str:
    """The check of a value without annotation: it must come back from JSON as it was."""
    if type(value) in (str, int, bool, NoneType):
        return ""
    if type(value) is float:
        return _check_float(value)
    if isinstance(value, dict):
        return _PLAIN_DICT.check(value)
    if type(value) is list:
        return _PLAIN_LIST.check(value)
    return unfit(value, "a plain JSON value (str, int, float, bool, None, list, dict with str keys)")


def _check_base(needs: str, base: type, value: Any) -> str:
    # In Python a bool is an int, in JSON it is not.
    fits = isinstance(value, base) and (type(value) is not bool or base is bool)
    return "" if fits else unfit(value, needs)


def _check_instance(needs: str, cls: type, value: Any) -> str:
    return "" if isinstance(value, cls) else unfit(value, needs)


def _check_class(cls: type, value: Any) -> str:
    """Not isinstance: an instance of a subclass would come back as its parent."""
    return "" if type(value) is cls else unfit(value, cls.__qualname__)


def _check_text(cls: type, concrete: type, value: Any) -> str:
    """Paths are made of a class for the machine's own kind: any other one would come back as that."""
    return "" if type(value) is concrete else unfit(value, cls.__qualname__)


def _check_float(value: Any) -> str:
    if type(value) is bool or not isinstance(value, float | int):
        return unfit(value, "float")
    try:
        if isinstance(value, int):
            return "" if float(value) == value else unfit(value, "an int that a float holds exactly")
        return "" if math.isfinite(value) else unfit(value, "a finite float")
    except OverflowError:  # an int may be larger than any float
        return unfit(value, "an int that fits a float")


def _check_date(value: Any) -> str:
    """By value, as all times: freezegun's and pendulum's classes come back as Python's own."""
    return "" if isinstance(value, date) and not isinstance(value, datetime) else unfit(value, "date")


def _check_datetime(value: Any) -> str:
    if not isinstance(value, datetime):
        return unfit(value, "datetime")
    offset = value.utcoffset()
    if offset is None:
        return unfit(value, "a datetime with a time zone, such as datetime.now(timezone.utc)")
    return _check_offset(value, offset)


def _check_time(value: Any) -> str:
    if not isinstance(value, time):
        return unfit(value, "time")
    offset = value.utcoffset()
    if offset is None and value.tzinfo is not None:
        return unfit(value, "a time without a time zone, or with a fixed offset")
    return _check_offset(value, offset or timedelta())


def _check_offset(value: Any, offset: timedelta) -> str:
    """The offset must have no seconds, as local times before about 1900 have: ISO text would lose them."""
    whole = offset % timedelta(minutes=1) == timedelta()
    return "" if whole else unfit(value, "an offset of whole minutes; use .astimezone(timezone.utc)")


def _check_decimal(value: Any) -> str:
    return "" if type(value) is Decimal and value.is_finite() else unfit(value, "a finite Decimal")


def _check_union(needs: str, kinds: list[Kind], members: list[Kind], value: Any) -> str:
    if any(not kind.check(value) for kind in kinds):
        return ""
    # For "list or None" the complaint about the list's third item says more than "needs a list or None".
    return members[0].check(value) if len(members) == 1 and value is not None else unfit(value, needs)


def _check_items(needs: str, base: type | tuple[type, ...], item: Kind, value: Any) -> str:
    if not isinstance(value, base):
        return unfit(value, needs)
    items = cast("Iterable[Any]", value)
    if item.exact and item.exact.issuperset(map(type, items)):
        return ""
    return next((f"[{index}]{why}" for index, each in enumerate(items) if (why := item.check(each))), "")


def _check_row(needs: str, base: type, kinds: list[Kind], value: Any) -> str:
    if not isinstance(value, base) or len(cast("tuple[Any, ...]", value)) != len(kinds):
        return unfit(value, needs)
    pairs = enumerate(zip(kinds, cast("tuple[Any, ...]", value), strict=True))
    return next((f"[{index}]{why}" for index, (kind, each) in pairs if (why := kind.check(each))), "")


def _check_mapping(key: Kind, value_kind: Kind, value: Any) -> str:
    if not isinstance(value, dict):
        return unfit(value, "a dict")
    for name, each in value.items():
        if type(name) not in key.exact and (why := key.check(name)):
            return f", key{why}"
        if type(each) not in value_kind.exact and (why := value_kind.check(each)):
            return f"[{reprlib.repr(name)}]{why}"
    return ""


def _check_typed_dict(needs: str, fields: Mapping[str, Kind], required: set[str], value: Any) -> str:
    if not isinstance(value, dict):
        return unfit(value, f"a dict ({needs})")
    if missing := sorted(required - value.keys()):
        return f": missing {listed(missing)} of {needs}"
    if unknown := [name for name in value if name not in fields]:
        return f": {needs} has no {listed(unknown)}"
    return next((f"[{name!r}]{why}" for name, each in value.items() if (why := fields[name].check(each))), "")


def _check_fields(cls: type, fields: Mapping[str, Kind], value: Any) -> str:
    if why := _check_class(cls, value):
        return why
    for name, kind in fields.items():
        each = getattr(value, name, msgspec.UNSET)  # an unset field of a Struct is not stored, and is read as unset
        if each is not msgspec.UNSET and (why := kind.check(each)):
            return f".{name}{why}"
    return ""


_PLAIN = Kind("a plain JSON value", check_plain, frozenset((str, int, bool, NoneType)))
_PLAIN_LIST = _items(list, _PLAIN)
_TEXT = Kind("str", partial(_check_base, "str", str), frozenset((str,)))
_PLAIN_DICT = _mapping(_TEXT, _PLAIN)

_BASES: Mapping[type, tuple[str, type]] = {
    nodes.StrType: ("str", str),
    nodes.IntType: ("int", int),
    nodes.BoolType: ("bool", bool),
    nodes.NoneType: ("None", NoneType),
}
_CONTAINERS: Mapping[type, type] = {nodes.ListType: list, nodes.SetType: set, nodes.FrozenSetType: frozenset}
_SCALARS: Mapping[type, tuple[str, Check]] = {
    nodes.FloatType: ("float", _check_float),
    nodes.DateTimeType: ("datetime", _check_datetime),
    nodes.TimeType: ("time", _check_time),
    nodes.DateType: ("date", _check_date),
    nodes.TimeDeltaType: ("timedelta", partial(_check_instance, "timedelta", timedelta)),
    nodes.UUIDType: ("UUID", partial(_check_instance, "UUID", UUID)),
    nodes.DecimalType: ("Decimal", _check_decimal),
    nodes.BytesType: ("bytes", partial(_check_class, bytes)),
    nodes.ByteArrayType: ("bytearray", partial(_check_class, bytearray)),
}
_TIMES: Mapping[type, nodes.Type] = {datetime: nodes.DateTimeType(), date: nodes.DateType()}
_KEYS = frozenset(
    (nodes.StrType, nodes.IntType, nodes.FloatType, nodes.EnumType, nodes.LiteralType, nodes.UUIDType, nodes.DateType)
) | {nodes.DateTimeType, nodes.TimeType, nodes.TimeDeltaType, nodes.DecimalType}


def unfit(value: Any, needs: str) -> str:
    """The complaint about one value: what was given (shortened) and what is needed."""
    return f": given {reprlib.repr(value)} ({type(value).__qualname__}), needs {needs}"


def listed(names: Iterable[object]) -> str:
    """Names for a message, quoted."""
    return ", ".join(map(repr, names))


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(task: str, fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError, NameError) as error:  # a NameError: annotations are evaluated here from Python 3.14
        raise InvalidOption(f"task {task!r}: its signature cannot be read ({error})") from error


def wants_job(fn: Callable[..., Any], parameters: list[inspect.Parameter]) -> bool:
    """True if the first parameter is annotated with pgqueue's Job.

    If the annotation cannot be resolved but reads `Job`, that counts: `Job` may be imported for type checkers only.
    """
    if not parameters or parameters[0].kind not in POSITIONAL:
        return False
    annotation = parameters[0].annotation
    try:
        found = _evaluated(fn, annotation)
    except Exception:  # a text may raise anything; if it is not `Job`, `resolved` meets the error again and reports it
        return str(annotation).rpartition(".")[2] == "Job"
    return _is_job(found)


def _is_job(found: object) -> bool:
    return isinstance(found, type) and f"{found.__module__}.{found.__qualname__}" == "pgqueue.jobs.job.Job"


def is_list_of_jobs(parameter: inspect.Parameter) -> bool:
    """Whether this parameter, its annotation resolved, is a list of pgqueue's Job; a bare `jobs` counts."""
    if parameter.annotation is parameter.empty:
        return parameter.name == "jobs"
    item = next(iter(typing.get_args(parameter.annotation)), None)
    return typing.get_origin(parameter.annotation) is list and _is_job(item)


def element(parameter: inspect.Parameter) -> inspect.Parameter | None:
    """The parameter of one element of this list, its annotation resolved; None if it is no list, or has a default."""
    listed = typing.get_origin(parameter.annotation) or parameter.annotation
    if listed is not list or parameter.default is not parameter.empty or parameter.kind not in POSITIONAL:
        return None
    item = next(iter(typing.get_args(parameter.annotation)), parameter.empty)
    return None if _is_job(item) else parameter.replace(annotation=item, kind=parameter.POSITIONAL_OR_KEYWORD)


def resolved(task: str, fn: Callable[..., Any], parameters: list[inspect.Parameter]) -> Iterable[inspect.Parameter]:
    for parameter in parameters:
        try:
            yield parameter.replace(annotation=_evaluated(fn, parameter.annotation))
        except Exception as error:
            raise InvalidOption(
                f"task {task!r}, parameter {parameter.name}: the annotation {parameter.annotation!r} cannot be "
                f"resolved when the program runs ({error}). Define or import it at the top of the module, "
                "not in a function or under TYPE_CHECKING"
            ) from error


def returned(fn: Callable[..., Any]) -> Any:
    """The annotation of what it returns, resolved; raises whatever that raises."""
    return _evaluated(fn, inspect.signature(fn).return_annotation)


def _evaluated(fn: Callable[..., Any], annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    scope = getattr(inspect.unwrap(fn), "__globals__", {})
    holder = SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, globalns=scope, include_extras=True)["it"]

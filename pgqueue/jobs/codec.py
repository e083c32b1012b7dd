"""Typed arguments <-> the JSON object kept in the row.

Called twice in a job's life: `encode` when it is enqueued, `decode` when the executor runs it. One `Codec` per task is
built at declaration. A wrong annotation is reported at import. A wrong value is reported at enqueue, before anything
reached the database. The JSON is written and read by msgspec; `annotations` decides whether the values fit.

The object's keys are the parameters' names. `*args` is a list under its own name. The keywords that `**kwargs` takes
are keys of the object itself, as in a job written in SQL. Defaults are not stored: they belong to the code. In jsonb
there is one kind of number: without annotation a float of 1e16 and more comes back as an int.

Never does I/O, never imports anything by a name found in data.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, cast

import msgspec

from pgqueue.errors import InvalidArguments, InvalidOption, PayloadTooLarge
from pgqueue.jobs import annotations as signatures
from pgqueue.jobs.annotations import Kind, check_plain, is_model, kind_of, listed, unfit
from pgqueue.jobs.sizes import JSON_MOST, TEXT_MOST, text_too_large

_EMPTY = frozenset(("{}", b"{}"))
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # an escape, not a backslash that is followed by these letters
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TOO_DEEP = ": nested too deeply, or contains itself"
_LATE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """How the arguments of one task become JSON text and come back.

    >>> from decimal import Decimal
    >>> def charge(customer: int, amount: Decimal, note: str = "") -> None: ...
    >>> codec = Codec.of(charge)
    >>> text = codec.encode((7,), {"amount": Decimal("9.90")})
    >>> text
    '{"customer":7,"amount":"9.90"}'
    >>> codec.decode(text)
    ((7, Decimal('9.90'), ''), {})
    """

    task: str
    wants_job: bool
    _parameters: tuple[inspect.Parameter, ...] = field(repr=False)
    _positional: tuple[str, ...] = field(repr=False)
    _keywords: frozenset[str] = field(repr=False)
    _required: frozenset[str] = field(repr=False)
    _list: str | None = field(repr=False)  # the name of *args
    _rest: Any = field(repr=False)  # dict[str, T] for **kwargs: T
    _kinds: Mapping[str, Kind] = field(repr=False)
    _exact: Mapping[str, frozenset[type]] = field(repr=False)
    _exact_rest: frozenset[type] = field(repr=False)
    _timed: tuple[tuple[int, str], ...] = field(repr=False)  # parameters that may hold a datetime: index and name
    _read: Callable[[str | bytes], Any] = field(repr=False)

    @classmethod
    def of(cls, fn: Callable[..., Any], task: str | None = None) -> Codec:
        """Build the codec of this function, once, at its declaration; `task` is the name used in messages.

        A first parameter annotated `pgqueue.Job` is no argument. Raises InvalidOption if an annotation cannot be
        resolved at run time or has no JSON form.
        """
        name = task or str(getattr(fn, "__qualname__", fn))
        parameters = signatures.parameters(name, fn)
        wants_job = signatures.wants_job(fn, parameters)
        return _build(name, wants_job, tuple(signatures.resolved(name, fn, parameters[wants_job:])))

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the JSON object for a call with these arguments.

        Raises InvalidArguments if a name is wrong or missing, or a value does not fit its annotation. NaN, NUL and lone
        surrogates are refused at any depth. Raises PayloadTooLarge above 1 MiB.
        """
        given = self._bind(args, kwargs)
        if not given:
            return "{}"
        exact, others = self._exact, self._exact_rest
        plain = True
        for name, value in given.items():
            if type(value) not in exact.get(name, others):
                plain = False
                self._check(name, value)
        raw = _dump(given, f"task {self.task!r}", "parameter")
        if not plain:  # constraints and validators are unknown to the kinds: the decoder itself checks them
            self._reread(raw)
        return raw.decode()

    def decode(self, text: str | bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the call, typed as annotated, with defaults filled in.

        Raises InvalidArguments if the text does not fit the function as it is now. If several names or values are
        wrong, the first is named.
        """
        if not self._parameters and text in _EMPTY:
            return (), {}
        try:
            read = self._read(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._unreadable(error) from error
        values, rest = (read, {}) if self._rest is None else read
        values = msgspec.structs.astuple(values)
        for index, name in self._timed:
            if values[index] is not self._parameters[index].default:
                self._check(name, values[index])
        if len(values) == len(self._positional):
            return values, rest
        return self._spread(values, rest)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults filled in. Raises InvalidArguments if they do not bind."""
        given = self._bind(args, kwargs)
        defaults = {p.name: p.default for p in self._parameters if p.default is not p.empty}
        return defaults | given

    def knows(self, name: str) -> bool:
        """Whether a call may have an argument of this name."""
        return self._rest is not None or name in self._order()

    def takes(self) -> str:
        """The signature in words, for messages."""
        return self._takes()

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(zip(self._positional, args, strict=False))
        if len(args) > len(self._positional):
            self._bind_list(given, args)
        if kwargs:
            if not self._keywords.issuperset(kwargs) or not given.keys().isdisjoint(kwargs):
                self._check_names(given, kwargs)
            given.update(kwargs)
        if not given.keys() >= self._required:
            missing = [name for name in self._order() if name in self._required and name not in given]
            raise self._refused(f"missing {listed(missing)}; {self._takes()}")
        return given

    def _bind_list(self, given: dict[str, Any], args: tuple[Any, ...]) -> None:
        if self._list is None:
            raise self._refused(f"given {len(args)} positional arguments; {self._takes()}")
        given[self._list] = list(args[len(self._positional) :])

    def _check_names(self, given: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        """The slow half of binding: if a keyword is wrong, name it."""
        names = {parameter.name for parameter in self._parameters}
        for name in kwargs:
            if name in given:
                raise self._refused(f"parameter {name!r} is given twice")
            if name not in self._keywords and (self._rest is None or name in names):
                raise self._refused(f"no keyword parameter {name!r}; {self._takes()}")

    def _check(self, name: str, value: Any) -> None:
        try:
            why = (self._kinds.get(name) or self._kinds["**"]).check(value)
        except RecursionError:
            why = _TOO_DEEP
        if why:
            raise self._refused(f"parameter {_shown(name)}{why}")

    def _reread(self, raw: bytes) -> None:
        try:
            self.decode(raw)
        except InvalidArguments as error:
            raise InvalidArguments(str(error).replace("the stored arguments", "the arguments", 1)) from error

    def _spread(self, values: tuple[Any, ...], rest: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count = len(self._positional)
        args, others = values[:count], dict(zip(self._order()[count:], values[count:], strict=True))
        more = others.pop(self._list) if self._list else ()
        return (*args, *more), others | rest

    def _order(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self._parameters)

    def _takes(self) -> str:
        shown = [str(parameter.replace(annotation=parameter.empty)) for parameter in self._parameters]
        return f"it takes ({', '.join(shown + ['**keywords'] * (self._rest is not None))})"

    def _refused(self, why: str) -> InvalidArguments:
        return InvalidArguments(f"task {self.task!r}: {why}")

    def _unreadable(self, error: Exception) -> InvalidArguments:
        match = _WHERE.match(str(error))
        what, path = (match["what"], match["path"]) if match else (str(error), None)
        where = f", parameter {path}" if path else ""
        hint = f"; {self._takes()}" if "field `" in what else ""
        return self._refused(f"the stored arguments do not fit{where}: {what}{hint}")


def keywords_only(task: str) -> Codec:
    """Return the codec of a task whose function is not known here: any keywords, with plain JSON values.

    >>> keywords_only("billing.charge").encode((), {"customer": 7})
    '{"customer":7}'
    """

    def unknown(**arguments: Any) -> None: ...

    return Codec.of(unknown, task)


def json_object(values: Mapping[str, Any], what: str) -> str:
    """Return `values`, plain JSON values, as the text of a JSON object; `what` names it in the InvalidArguments raised.

    >>> json_object({"trace": "00-4b"}, "headers")
    '{"trace":"00-4b"}'
    """
    if not isinstance(values, Mapping):
        raise InvalidArguments(f"{what}{unfit(values, 'a mapping')}")
    try:
        why = check_plain(dict(values))
    except RecursionError:
        why = _TOO_DEEP
    if why:
        raise InvalidArguments(f"{what}{why}")
    return _dump(dict(values), what, "key").decode()


# -- Declaration: a signature becomes kinds and a decoder ------------------------------------------------------------


def _build(task: str, wants_job: bool, parameters: tuple[inspect.Parameter, ...]) -> Codec:
    rest = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
    named = tuple(p for p in parameters if p is not rest)
    surveys = {("**" if p is rest else p.name): _survey(task, p) for p in parameters}
    kinds = {name: kind for name, (kind, _) in surveys.items()}
    struct = _struct(task, named)
    keywords = None if rest is None else dict.__class_getitem__((str, _stored(rest)))
    return Codec(
        task=task,
        wants_job=wants_job,
        _parameters=named,
        _positional=tuple(p.name for p in named if p.kind in signatures.POSITIONAL),
        _keywords=frozenset(p.name for p in named if p.kind in _NAMED),
        _required=frozenset(p.name for p in named if p.default is p.empty and p.kind is not p.VAR_POSITIONAL),
        _list=next((p.name for p in named if p.kind is p.VAR_POSITIONAL), None),
        _rest=keywords,
        _kinds=kinds,
        _exact={name: kind.exact for name, kind in kinds.items()},
        _exact_rest=kinds["**"].exact if rest else frozenset(),
        _timed=tuple((i, p.name) for i, p in enumerate(named) if surveys[p.name][1]),
        _read=_reader(struct) if keywords is None else partial(_read_open, struct, keywords),
    )


def _survey(task: str, parameter: inspect.Parameter) -> tuple[Kind, bool]:
    """Return the kind of this parameter and whether it may hold a datetime."""
    try:
        stored = _stored(parameter)
        msgspec.json.Decoder(stored, dec_hook=_from_json)
        return kind_of(stored)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        shown = inspect.formatannotation(parameter.annotation)
        raise InvalidOption(f"task {task!r}, parameter {parameter.name}: {shown} cannot be stored: {error}") from error


def _struct(task: str, parameters: Iterable[inspect.Parameter]) -> Any:
    """The class msgspec decodes into: one field per parameter. Unknown names are refused."""
    fields = [(p.name, _stored(p), _default(p)) if _optional(p) else (p.name, _stored(p)) for p in parameters]
    try:
        return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    except TypeError as error:
        raise InvalidOption(f"task {task!r}: {error}") from error


def _reader(struct: Any) -> Callable[[str | bytes], Any]:
    return msgspec.json.Decoder(struct, dec_hook=_from_json).decode


def _read_open(struct: Any, keywords: Any, text: str | bytes) -> tuple[Any, dict[str, Any]]:
    """Decode for a function with **kwargs: every name that is no parameter is a keyword."""
    found = msgspec.json.decode(text, type=dict[str, Any])
    named = {name: found.pop(name) for name in struct.__struct_fields__ if name in found}
    convert = partial(msgspec.convert, str_keys=True, dec_hook=_from_json)
    return convert(named, struct), convert(found, keywords)


def _optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL


def _stored(parameter: inspect.Parameter) -> Any:
    """The type of the value stored under the parameter's name (for **kwargs: under each name)."""
    annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
    return list.__class_getitem__(annotation) if parameter.kind is parameter.VAR_POSITIONAL else annotation


def _default(parameter: inspect.Parameter) -> Any:
    """The function's own default, the same object. If the row has no value, the code of today decides."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return msgspec.field(default_factory=list)
    value = parameter.default
    return value if type(value) in (str, int, float, bool, NoneType) else msgspec.field(default_factory=lambda: value)


# -- JSON text -------------------------------------------------------------------------------------------------------


def _dump(values: dict[str, Any], what: str, item: str) -> bytes:
    """Encode an object whose values fit. Refuse what PostgreSQL's jsonb would refuse."""
    try:
        raw = _encode(values)
    except _LATE_ERRORS as error:
        raise InvalidArguments(f"{what}{_culprit(values, item, _fails)}: cannot be JSON: {error}") from error
    if len(raw) > JSON_MOST:
        raise PayloadTooLarge(
            f"{what}: {len(raw):,} bytes of JSON, the limit is {JSON_MOST:,}; store the data and pass its key"
        )
    if (size := text_too_large(raw)) is not None:
        raise PayloadTooLarge(
            f"{what}: {size:,} bytes with all the digits of its numbers, as PostgreSQL keeps them; the limit is "
            f"{TEXT_MOST:,}. Store the data and pass its key"
        )
    if b"\\u0000" in raw and _NUL.search(raw):
        raise InvalidArguments(
            f"{what}{_culprit(values, item, _has_nul)}: has a NUL (\\u0000), which jsonb cannot store"
        )
    return raw


def _culprit(values: Mapping[str, Any], item: str, is_bad: Callable[[Any], bool]) -> str:
    """Name the item that is to blame, for the message."""
    bad = (name for name, value in values.items() if is_bad(name) or is_bad(value))
    return next((f", {item} {_shown(name)}" for name in bad), "")


def _shown(name: str) -> str:
    return name if name.isidentifier() else ascii(name)


def _fails(value: Any) -> bool:
    try:
        _encode(value)
    except _LATE_ERRORS:
        return True
    return False


def _has_nul(value: Any) -> bool:
    return _NUL.search(_encode(value)) is not None


def _to_json(value: Any) -> Any:
    """Encode what msgspec does not know: pydantic models, and subclasses of plain types, which come back plain."""
    if is_model(type(value)):
        dumped = value.model_dump(mode="json", by_alias=True, round_trip=True)
        if why := check_plain(dumped):
            raise ValueError(f"{type(value).__qualname__}{why}")
        return dumped
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


def _from_json(cls: type, value: Any) -> Any:
    # As JSON: a strict model accepts a text for a date only there.
    return cast("Any", cls).model_validate_json(msgspec.json.encode(value))


_encode = msgspec.json.Encoder(enc_hook=_to_json).encode

"""Typed arguments <-> the JSON object kept in the row.

Called twice in a job's life: `encode` when it is enqueued, `decode` when the executor runs it. One `Codec` per task is
built at declaration. A wrong annotation is reported at import. A wrong value is reported at enqueue, before anything
reached the database. The JSON is written and read by msgspec; `annotations` decides whether the values fit, `stand_ins`
reads what msgspec cannot. `round_trip` compares what classes with fields make of their values. A handler's result
becomes JSON here, too (`result_json`), in the same form.

The object's keys are the parameters' names. `*args` is a list under its own name. The keywords that `**kwargs` takes
are keys of the object itself, as in a job written in SQL. Defaults are not stored: they belong to the code. In jsonb
there is one kind of number: without annotation a float of 1e16 and more comes back as an int.

Never does I/O, never imports anything by a name found in data.
"""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import lru_cache, partial
from math import isfinite
from types import NoneType
from typing import Any
from uuid import UUID

import msgspec

from pgqueue.errors import InvalidArguments, InvalidOption, PayloadTooLarge
from pgqueue.jobs import annotations as signatures
from pgqueue.jobs.annotations import Kind, Surveyed, check_plain, listed, surveyed, unfit
from pgqueue.jobs.fields import OF_USING
from pgqueue.jobs.losses import is_plain, loss, never_written
from pgqueue.jobs.nodes import NodeResult
from pgqueue.jobs.round_trip import difference
from pgqueue.jobs.sizes import JSON_MOST, TEXT_MOST, text_too_large
from pgqueue.jobs.stand_ins import TEXTS, from_json, is_model, readable
from pgqueue.options import OPTION_WORDS
from pgqueue.plain_text import plural

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # an escape, not a backslash that is followed by these letters
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_SAID = (
    (re.compile(r"^Object missing required field `(.*)`$"), r"missing '\1'"),
    (re.compile(r"^Object contains unknown field `(.*)`$"), r"there is no '\1'"),
    (re.compile(r"^Expected (.*), got (.*)$", re.DOTALL), r"needs \1, found \2"),
    (re.compile(r"^Expected (.*)$", re.DOTALL), r"needs \1"),
)
"""What msgspec says of JSON that does not fit, and what we say."""
_NO = re.compile(r"there is no '(.*)'")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
INJECTED = (
    ". If a decorator around the function gives this argument, it is no argument of the job: let the wrapper have a "
    "`__signature__` without it"
)
_TOO_DEEP = ": nested too deeply, or contains itself"
_LATE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
_TIMES = (datetime, date, time)  # in a tuple: what freezes the clock in tests replaces the names, not what is here


def _option(name: str) -> str:
    """What to write instead, if this keyword, an argument, is meant as an option of `using`."""
    option = OPTION_WORDS.get(name, name)
    said = f". For the option write task.using({option}=…).enqueue(conn, …), also of a task = pgqueue.remote(name)"
    return said if option in OF_USING else ""


class UnfitArguments(InvalidArguments):
    """The arguments of a stored job do not fit the function as it is here. Another version of it may take them."""


class AwaitsResults(Exception):
    """Arguments of a call stand for results of nodes: `awaiting` encodes the others. Never leaves `task.new`."""


class UnfitResult(ValueError):
    """A result that cannot be stored. The message begins with the path to the part, and says what is wrong with it."""


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
    _compared: frozenset[str] = field(repr=False)  # parameters whose values are compared with what comes back
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
        injected = INJECTED if hasattr(fn, "__wrapped__") else ""
        return _build(name, wants_job, tuple(signatures.resolved(name, fn, parameters[wants_job:])), injected)

    @classmethod
    def of_batch(cls, fn: Callable[..., Any], task: str) -> Codec:
        """Build the codec of a function that takes many jobs: one job has one element of its list as its argument.

        A first parameter that is a list of `pgqueue.Job` is no argument. Raises InvalidOption unless the other one is a
        list, without a default.

        >>> def index(documents: list[str]) -> None: ...
        >>> Codec.of_batch(index, "index").encode(("first",), {})
        '{"documents":"first"}'
        """
        parameters = list(signatures.resolved(task, fn, signatures.parameters(task, fn)))
        wants_jobs = len(parameters) > 1 and signatures.is_list_of_jobs(parameters[0])
        elements = [signatures.element(parameter) for parameter in parameters[wants_jobs:]]
        if len(elements) != 1 or elements[0] is None:
            raise InvalidOption(
                f"task {task!r}: the handler of a batch has one parameter, a list of the jobs' arguments, such as "
                "documents: list[str]; before it may stand jobs: list[pgqueue.Job]"
            )
        return _build(task, wants_jobs, (elements[0],), "")

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the JSON object for a call with these arguments.

        Raises InvalidArguments if a name is wrong or missing, or a value does not fit its annotation. NaN, NUL and lone
        surrogates are refused at any depth. Raises PayloadTooLarge above 1 MiB, AwaitsResults if an argument is the
        result of a node.
        """
        return self._encoded(self._bind(args, kwargs))

    def awaiting(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, dict[str, NodeResult]]:
        """Return the JSON object of the arguments that are there, and which parameters get the result of a node.

        Raises as `encode`. What a result is, only the run of the job checks.
        """
        given = self._bind(args, kwargs)
        results = {name: value for name, value in given.items() if type(value) is NodeResult}
        rest = {name: value for name, value in given.items() if name not in results}
        return _without(self, frozenset(results))._encoded(rest), results

    def _encoded(self, given: dict[str, Any]) -> str:
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
            self._reread(raw, given)
        return raw.decode()

    def decode(self, text: str | bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the call, typed as annotated, with defaults filled in.

        Raises UnfitArguments if the text does not fit the function as it is now. If several names or values are wrong,
        the first is named. Other errors of the application's own classes pass through: they are of their code.
        """
        if not self._parameters and text == ("{}" if isinstance(text, str) else b"{}"):
            return (), {}
        try:
            read = self._read(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._unreadable(error) from error
        values, rest = (read, {}) if self._rest is None else read
        values = msgspec.structs.astuple(values)
        for index, name in self._timed:
            if values[index] is not self._parameters[index].default and (why := self._complaint(name, values[index])):
                raise UnfitArguments(f"task {self.task!r}: {why}")
        if len(values) == len(self._positional):
            return values, rest
        return self._spread(values, rest)

    def call_of(self, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call that this JSON object writes, typed as annotated: for arguments that a person has typed in.

        As `decode`, but defaults are left out, so that a job made of this call does not keep them. Only a default that
        stands before a positional argument is filled in. Raises InvalidArguments; other errors pass through.

        >>> def charge(customer: int, cents: int = 100, *notes: str) -> None: ...
        >>> Codec.of(charge).call_of('{"customer": 7}'), Codec.of(charge).call_of('{"customer": 7, "notes": ["a"]}')
        (((), {'customer': 7}), ((7, 100, 'a'), {}))
        """
        try:
            args, kwargs = self.decode(text)
        except InvalidArguments as error:
            raise InvalidArguments(str(error).replace("the stored arguments", "the arguments", 1)) from error
        written = msgspec.json.decode(text).keys()
        count = len(self._positional)
        if len(args) == count:
            only = (place for place, name in enumerate(self._positional, 1) if name not in self._keywords)
            count = max((place for place in only if self._positional[place - 1] in written), default=0)
        named = dict(zip(self._positional[count:], args[count:], strict=False)) | kwargs
        by_name = {name: value for name, value in named.items() if name in written}
        return (args[:count] if len(args) == len(self._positional) else args), by_name

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults filled in. Raises InvalidArguments if they do not bind."""
        given = self._bind(args, kwargs)
        defaults = {p.name: p.default for p in self._parameters if p.default is not p.empty}
        return defaults | given

    @property
    def parameters(self) -> tuple[inspect.Parameter, ...]:
        """The parameters that are arguments, with their annotations resolved; without `**keywords`."""
        return self._parameters

    @property
    def is_open(self) -> bool:
        """Whether a call may have keywords of any name."""
        return self._rest is not None

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
            raise self._refused(f"missing {listed(missing)}; {self._takes()}{self._job_hint()}")
        return given

    def _job_hint(self) -> str:
        first = self._parameters[0]
        if self.wants_job or first.name != "job" or first.annotation is not inspect.Parameter.empty:
            return ""
        return ". If `job` is to be the running job, annotate it: job: pgqueue.Job"

    def _bind_list(self, given: dict[str, Any], args: tuple[Any, ...]) -> None:
        if self._list is None:
            raise self._refused(
                f"given {plural(len(args), 'positional argument', 'positional arguments')}; {self._takes()}"
            )
        given[self._list] = list(args[len(self._positional) :])

    def _check_names(self, given: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        """The slow half of binding: if a keyword is wrong, name it."""
        names = {parameter.name for parameter in self._parameters}
        for name in kwargs:
            if name in given:
                raise self._refused(f"parameter {name!r} is given twice")
            if name not in self._keywords and (self._rest is None or name in names):
                raise self._refused(f"no keyword parameter {name!r}; {self._takes()}{_option(name)}")

    def _check(self, name: str, value: Any) -> None:
        if type(value) is NodeResult:
            raise AwaitsResults
        if why := self._complaint(name, value):
            # Where any name is an argument, so is that of an option, until its value can be no argument.
            raise self._refused(why + (_option(name) if name not in self._kinds else ""))

    def _complaint(self, name: str, value: Any) -> str:
        try:
            why = (self._kinds.get(name) or self._kinds["**"]).check(value)
        except RecursionError:
            why = _TOO_DEEP
        return why and f"parameter {_shown(name)}{why}"

    def _reread(self, raw: bytes, given: Mapping[str, Any]) -> None:
        """Read what was written, and compare: it must come back as it was given."""
        try:
            args, kwargs = self.decode(raw)
        except InvalidArguments as error:
            raise InvalidArguments(str(error).replace("the stored arguments", "the arguments", 1)) from error
        except Exception as error:  # of a class of the application's, whose objects are made here
            why = f"making an object of them raised {type(error).__qualname__}: {error}"
            raise self._refused(f"the arguments cannot be read back: {why}") from error
        if self._compared:
            self._compare(given, self._bind(args, kwargs))

    def _compare(self, given: Mapping[str, Any], back: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if (name if name in self._kinds else "**") in self._compared:
                try:
                    why = difference(value, back[name])
                except RecursionError:
                    why = _TOO_DEEP
                if why:
                    raise self._refused(f"parameter {_shown(name)}{why}")

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

    def _unreadable(self, error: Exception) -> UnfitArguments:
        match = _WHERE.match(str(error))
        what, path = (match["what"], match["path"]) if match else (str(error), None)
        where = f", parameter {path}" if path else ""
        for theirs, ours in _SAID:
            what = theirs.sub(ours, what)
        hint = f"; {self._takes()}" if not path and what.startswith(("missing", "there is no")) else ""
        if hint and (unknown := _NO.match(what)):  # by its name alone a task was given an option as an argument
            hint += _option(unknown[1])
        return UnfitArguments(f"task {self.task!r}: the stored arguments do not fit{where}: {what}{hint}")


def check_result(task: str, fn: Callable[..., Any]) -> None:
    """Raise InvalidOption if the annotation of what the function returns shows that a part of it cannot be stored.

    An annotation that cannot be resolved shows nothing: the value is looked at when the handler has returned it.
    """
    try:
        annotation = signatures.returned(fn)
    except Exception:  # a text may raise anything
        return
    if why := never_written(annotation):
        raise InvalidOption(
            f"task {task!r}, what it returns: {why}. Return a value without it, or declare store_result=False"
        )


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


@lru_cache(maxsize=256)
def _without(codec: Codec, names: frozenset[str]) -> Codec:
    """The codec of the same task without the parameters of these names."""
    others = tuple(parameter for parameter in codec.parameters if parameter.name not in names)
    rest = inspect.Parameter
    if codec.is_open:
        others += (rest("keywords", rest.VAR_KEYWORD, annotation=codec._rest.__args__[1]),)
    return _build(codec.task, codec.wants_job, others, "")


# -- Declaration: a signature becomes kinds and a decoder ------------------------------------------------------------


def _build(task: str, wants_job: bool, parameters: tuple[inspect.Parameter, ...], injected: str) -> Codec:
    rest = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
    named = tuple(p for p in parameters if p is not rest)
    surveys = {("**" if p is rest else p.name): _survey(task, p, injected) for p in parameters}
    kinds = {name: survey.kind for name, survey in surveys.items()}
    struct = _struct(task, named, surveys)
    keywords = None if rest is None else dict.__class_getitem__((str, surveys["**"].stored))
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
        _timed=tuple((i, p.name) for i, p in enumerate(named) if surveys[p.name].datetimes),
        _compared=frozenset(name for name, survey in surveys.items() if survey.compared),
        _read=_reader(struct) if keywords is None else partial(_read_open, struct, keywords),
    )


def _survey(task: str, parameter: inspect.Parameter, injected: str) -> Surveyed:
    try:
        stored = readable(_stored(parameter))
        msgspec.json.Decoder(stored, dec_hook=from_json)
        return surveyed(stored)
    except (TypeError, ValueError, NameError, AttributeError, NotImplementedError) as error:
        shown = inspect.formatannotation(parameter.annotation)
        raise InvalidOption(
            f"task {task!r}, parameter {parameter.name}: {shown} cannot be stored: {error}{injected}"
        ) from error


def _struct(task: str, parameters: Iterable[inspect.Parameter], surveys: Mapping[str, Surveyed]) -> Any:
    """The class msgspec decodes into: one field per parameter. Unknown names are refused."""
    stored = [(p, surveys[p.name].stored) for p in parameters]
    fields = [(p.name, each, _default(p)) if _optional(p) else (p.name, each) for p, each in stored]
    try:
        return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    except (TypeError, ValueError, RuntimeError) as error:
        names = ", ".join(repr(p.name) for p, _ in stored if p.name.startswith("_")) or "its parameters"
        raise InvalidOption(f"task {task!r}: {names} cannot be names of arguments: begin them with a letter") from error


def _reader(struct: Any) -> Callable[[str | bytes], Any]:
    return msgspec.json.Decoder(struct, dec_hook=from_json).decode


def _read_open(struct: Any, keywords: Any, text: str | bytes) -> tuple[Any, dict[str, Any]]:
    """Decode for a function with **kwargs: every name that is no parameter is a keyword."""
    found = msgspec.json.decode(text, type=dict[str, Any])
    named = {name: found.pop(name) for name in struct.__struct_fields__ if name in found}
    convert = partial(msgspec.convert, str_keys=True, dec_hook=from_json)
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
        bad = next((each for each in values.items() if any(map(_fails, each))), None)
        why = _TOO_DEEP if bad is None else f", {item} {_shown(bad[0])}{next(filter(None, map(_formless, bad)))}"
        raise InvalidArguments(f"{what}{why}") from error
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
        name = next(name for name, value in values.items() if _has_nul(name) or _has_nul(value))
        raise InvalidArguments(f"{what}, {item} {_shown(name)}: has a NUL (\\u0000), which jsonb cannot store")
    return raw


def _shown(name: str) -> str:
    return name if name.isidentifier() else ascii(name)


def _fails(value: Any) -> bool:
    try:
        _encode(value)
    except _LATE_ERRORS:
        return True
    return False


def _formless(value: Any) -> str:
    """The path to the part of a value that has no JSON form, and the complaint; "" if it can be encoded."""
    try:
        _encode(value)
    except RecursionError:
        return _TOO_DEEP
    except _LATE_ERRORS as error:
        own = error
    else:
        return ""
    if isinstance(value, dict) and (bad := [key for key in value if _fails({key: None})]):
        return f", key{unfit(bad[0], 'a text or a number')}"
    for path, part in _inside(value):
        if _fails(part):
            return path + _formless(part)
    if isinstance(value, str):
        return f": {value!a:.80} has a lone surrogate, which is no text"
    # A ValueError is of a class of the application's, or of a model: it says what is wrong.
    return f": {own}" if isinstance(own, ValueError) else unfit(value, "a value with a JSON form")


def _inside(value: Any) -> list[tuple[str, Any]]:
    """The parts of a container with their paths."""
    if isinstance(value, dict):
        return [(f"[{reprlib.repr(key)}]", each) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", each) for i, each in enumerate(value)]
    return []


def _has_nul(value: Any) -> bool:
    return _NUL.search(_encode(value)) is not None


def to_json(value: Any) -> Any:
    """Encode what msgspec does not know: pydantic models, and subclasses of plain types, which come back plain."""
    if is_model(type(value)):
        dumped = value.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
        if why := check_plain(dumped):
            raise ValueError(f"{type(value).__qualname__}{why}")
        return dumped
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, datetime | date | time):
        return _plain_time(value)
    if isinstance(value, timedelta):
        return timedelta.__add__(value, timedelta())  # the sum of a subclass is none
    if type(value) in TEXTS or isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


def _plain_time(value: Any) -> Any:
    """The same datetime, date or time as an object of Python's own class."""
    moment, day, clock = _TIMES
    if isinstance(value, moment):
        parts = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
        return moment(*parts, value.tzinfo, fold=value.fold)
    if isinstance(value, day):
        return day(value.year, value.month, value.day)
    return clock(value.hour, value.minute, value.second, value.microsecond, value.tzinfo, fold=value.fold)


_encode = msgspec.json.Encoder(enc_hook=to_json).encode


# -- Results ---------------------------------------------------------------------------------------------------------

_TEXT_ONLY = frozenset((str,))
_plain = partial(msgspec.to_builtins, enc_hook=to_json)
_encode_plain = msgspec.json.Encoder(order="deterministic").encode  # knows no classes of ours, nor keys but texts


def result_json(value: object) -> str:
    """Return a handler's result as JSON text, in the form that arguments have.

    What JSON or jsonb cannot keep is refused at any depth: NaN and infinities, NUL, two keys of one text. So is what a
    class would leave out, hide or change there. Raises UnfitResult.

    >>> result_json({1: "a", "at": datetime(2026, 3, 1)})
    '{"1":"a","at":"2026-03-01T00:00:00"}'
    """
    try:
        raw: bytes | None = _encode_plain(value)
    except Exception:  # it needs a closer look, which says what is wrong
        raw = None
    if raw is None:
        raw = _result(value)
    else:
        why = _misfit(msgspec.to_builtins(value)) if b"null" in raw else ""  # NaN is written as null
        if why := why or ("" if is_plain(value) else loss(value, _plain(value), _plain)):
            raise UnfitResult(why)
    if len(raw) > JSON_MOST:
        raise UnfitResult(f": {len(raw):,} bytes of JSON, the limit is {JSON_MOST:,}")
    if (size := text_too_large(raw)) is not None:
        raise UnfitResult(f": {size:,} bytes with all the digits of its numbers, the limit is {TEXT_MOST:,}")
    if b"\\u0000" in raw and _NUL.search(raw):
        raise UnfitResult(": has a NUL (\\u0000), which jsonb cannot store")
    return raw.decode()


def _result(value: object) -> bytes:
    try:
        plain = _plain(value)
        why = _misfit(plain) or loss(value, plain, _plain)
        raw = b"" if why else _encode_plain(msgspec.to_builtins(plain, str_keys=True))
    except _LATE_ERRORS as error:
        raise UnfitResult(_formless(value)) from error
    if why:
        raise UnfitResult(why)
    return raw


def _keys(plain: dict[Any, Any]) -> set[str]:
    return {text for key in plain for text in msgspec.to_builtins({key: None}, str_keys=True)}


def _misfit(plain: object) -> str:
    """The first part of plain values that JSON would not keep: its path and the complaint."""
    if isinstance(plain, float):
        return "" if isfinite(plain) else unfit(plain, "a finite float")
    if isinstance(plain, list | tuple | set | frozenset):
        return next((f"[{i}]{why}" for i, each in enumerate(plain) if (why := _misfit(each))), "")
    if isinstance(plain, dict):
        if not _TEXT_ONLY.issuperset(map(type, plain)) and len(_keys(plain)) < len(plain):
            return ": two of its keys are one text in JSON"
        return next((f"[{reprlib.repr(key)}]{why}" for key, each in plain.items() if (why := _misfit(each))), "")
    return ""

"""Whether a value comes back from JSON as it was given: what its class leaves out, hides or changes is found and named.

Used by `codec` when a job is enqueued, for values whose classes decide themselves what of them becomes JSON: pydantic
models, dataclasses, Structs, unions of texts. The value is compared with what the stored text is read as. What a kind
takes on purpose counts as equal: a subclass of a plain type (it comes back as that type), a tuple for a `Sequence`.

A class with fields is not asked whether two of its objects are equal: it may say what it likes, or nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from types import NoneType
from typing import Any

import msgspec

from pgqueue.jobs.stand_ins import field_names, is_model

CHANGED = ": would not come back from JSON as it was given; its class leaves it out there, hides it or changes it"
_PLAIN = frozenset((str, int, bool, NoneType, bytes))


def difference(value: Any, back: Any, in_model: bool = False) -> str:
    """The first part of `value` that is not in `back` as it was given: its path and the complaint; "" if there is none.

    `in_model`: no kind has looked at the types, so a list is no tuple.

    >>> difference({"a": [1, 2]}, {"a": [1, 3]}).partition(":")[0]
    "['a'][1]"
    """
    cls = type(back)
    if cls in _PLAIN:
        return _differs(value, back, isinstance(value, cls) and value == back)
    names = list(cls.model_fields) if is_model(cls) else field_names(cls)
    if names is not None:
        return _in_fields(value, back, names, in_model)
    match back:
        case list() | tuple():
            taken = type(back) if in_model else (list, tuple)
            if not isinstance(value, taken) or len(value) != len(back):
                return CHANGED
            if _PLAIN.issuperset(map(type, back)) and list(value) == list(
                back
            ):  # long lists of numbers, at the speed of C
                return ""
            for i, each in enumerate(value):  # loops and no generators: each call counts where values are nested deeply
                if why := difference(each, back[i], in_model):
                    return f"[{i}]{why}"
            return ""
        case dict():
            if not isinstance(value, dict) or value.keys() != back.keys():
                return CHANGED
            if _PLAIN.issuperset(map(type, back.values())) and value == back:
                return ""
            for name, each in value.items():
                if why := difference(each, back[name], in_model):
                    return f"[{name!r}]{why}"
            return ""
        case set() | frozenset():
            return "" if isinstance(value, set | frozenset) and value == back else CHANGED
        case datetime():  # across zones `==` says no in the hour in which a clock is set back
            same = isinstance(value, datetime) and value.utcoffset() == back.utcoffset()
            return _differs(
                value, back, same and value.replace(tzinfo=None, fold=0) == back.replace(tzinfo=None, fold=0)
            )
        case Decimal():  # with its zeros
            return "" if isinstance(value, Decimal) and value.as_tuple() == back.as_tuple() else CHANGED
        case float() if type(value) is int:  # also a default of a model, such as `price: float = 0`
            return "" if value == back else CHANGED
    return _differs(value, back, isinstance(value, cls) and _equal(value, back))


def _differs(value: Any, back: Any, same: bool) -> str:
    """The complaint if they are not the same. The values are not shown: one of them may be a secret."""
    if same:
        return ""
    if isinstance(value, type(back)):
        return CHANGED
    return f": given a {type(value).__qualname__}, which would come back as a {type(back).__qualname__}"


def _in_fields(value: Any, back: Any, names: Iterable[str], in_model: bool) -> str:
    cls = type(back)
    if type(value) is not cls:
        return _differs(value, back, same=False)
    model = is_model(cls)
    parts = [(f".{name}", getattr(value, name, msgspec.UNSET), getattr(back, name, msgspec.UNSET)) for name in names]
    if model:
        for kept in ("__pydantic_extra__", "__pydantic_private__"):
            ours, theirs = getattr(value, kept, None) or {}, getattr(back, kept, None) or {}
            parts += [(f".{name}", ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    for path, part, part_back in parts:
        if why := difference(part, part_back, in_model or model):
            return path + why
    return ""


def _equal(value: Any, back: Any) -> bool:
    """Equality as the class defines it; by attributes if it defines none."""
    cls: Any = type(value)
    if cls.__eq__ is object.__eq__ and hasattr(value, "__dict__") and cls is type(back):
        return not difference(vars(value), vars(back), in_model=True)
    try:
        same = value == back
        return bool(same.all() if hasattr(same, "all") else same)  # arrays compare each of their items
    except Exception:  # of a class of the application's: if the two cannot be compared, they are not known to be equal
        return False

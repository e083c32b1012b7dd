"""The answers of durable steps: JSON as results are, read back as the step's function says that it answers.

The first attempt gets what later ones get: the answer as it is read back. So a type that JSON does not keep is seen at
once, not at the second attempt. No I/O.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from pgqueue.errors import Error, InvalidOption
from pgqueue.jobs import annotations as signatures
from pgqueue.jobs.codec import UnfitResult, result_json
from pgqueue.jobs.stand_ins import from_json, readable
from pgqueue.plain_text import kind_of

_readers: WeakKeyDictionary[Callable[..., Any], msgspec.json.Decoder[Any]] = WeakKeyDictionary()
"""How the answer of each function is read."""
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def check_step(task: str, name: str, fn: object, answer: object) -> None:
    """Raise InvalidOption if a plain handler has called an async function: nothing would run it."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise InvalidOption(f"task {task!r}, step {name!r}: {fn!r:.80} is async: use `await job.astep(…)`")


def written_answer(task: str, name: str, answer: object) -> str | None:
    """The answer as JSON text, None for None. Raises Error if it cannot be stored, as a result could not."""
    if answer is None:
        return None
    try:
        return result_json(answer)
    except UnfitResult as unfit:
        raise Error(f"task {task!r}, step {name!r}: its answer cannot be stored{unfit}") from unfit


def read_answer(task: str, name: str, fn: Callable[..., Any], text: str | None) -> Any:
    """The answer of this JSON text, as `fn` says what it returns. Raises Error if it does not fit that."""
    if text is None:
        return None
    try:
        return _reader(task, name, fn).decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Error(
            f"task {task!r}, step {name!r}: its answer is not what the function says it returns: {error}"
        ) from error


def _reader(task: str, name: str, fn: Callable[..., Any]) -> msgspec.json.Decoder[Any]:
    try:
        known = _readers.get(fn)
    except TypeError:  # a callable object that cannot be a key
        return _made(task, name, fn)
    if known is None:
        known = _made(task, name, fn)
        try:
            _readers[fn] = known
        except TypeError:
            return known
    return known


def _made(task: str, name: str, fn: Callable[..., Any]) -> msgspec.json.Decoder[Any]:
    try:
        annotation = signatures.returned(fn)
    except (TypeError, ValueError):  # it has no signature, as some built-in functions
        return _ANY
    except Exception as error:
        said = f"what {fn!r:.80} returns cannot be resolved: {kind_of(error)}: {error}"
        raise InvalidOption(f"task {task!r}, step {name!r}: {said}") from error
    if annotation in (inspect.Signature.empty, None, type(None), Any):
        return _ANY
    try:
        return msgspec.json.Decoder(readable(annotation), dec_hook=from_json)
    except (TypeError, ValueError, NameError, AttributeError, NotImplementedError) as error:
        said = f"what {fn!r:.80} returns cannot be read back: {error}"
        raise InvalidOption(f"task {task!r}, step {name!r}: {said}") from error

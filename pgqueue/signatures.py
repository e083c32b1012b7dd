"""What a function says of its parameters: their annotations, evaluated, and whether the first one is the Job.

Asked by the codec, once per task, at its declaration. Raises InvalidOption for what cannot be read.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from pgqueue.errors import InvalidOption

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(task: str, fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError, NameError) as error:  # a NameError: annotations are evaluated here from Python 3.14
        raise InvalidOption(f"task {task!r}: its signature cannot be read ({error})") from error


def wants_job(fn: Callable[..., Any], parameters: list[inspect.Parameter]) -> bool:
    """True if the first parameter is annotated with pgqueue's Job.

    A name that cannot be looked up is taken for it when it reads `Job`: it may be imported for type checkers only.
    """
    if not parameters or parameters[0].kind not in POSITIONAL:
        return False
    annotation = parameters[0].annotation
    try:
        found = _evaluated(fn, annotation)
    except Exception:  # anything may happen in a text; unless it reads Job, _resolve meets it again and reports it
        return str(annotation).rpartition(".")[2] == "Job"
    return isinstance(found, type) and f"{found.__module__}.{found.__qualname__}" == "pgqueue.job.Job"


def resolved(task: str, fn: Callable[..., Any], parameters: list[inspect.Parameter]) -> Iterable[inspect.Parameter]:
    for parameter in parameters:
        try:
            yield parameter.replace(annotation=_evaluated(fn, parameter.annotation))
        except Exception as error:
            raise InvalidOption(
                f"task {task!r}, parameter {parameter.name}: the annotation {parameter.annotation!r} cannot be "
                f"resolved when the program runs ({error}); define or import it at the top of the module, "
                "not in a function or under TYPE_CHECKING"
            ) from error


def _evaluated(fn: Callable[..., Any], annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    scope = getattr(inspect.unwrap(fn), "__globals__", {})
    holder = SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, globalns=scope, include_extras=True)["it"]

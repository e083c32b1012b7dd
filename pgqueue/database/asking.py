"""A question or a change, written once: `asks` makes the function for sync connections, `twin` the one for async ones.

    @asks
    def lag(conn: object) -> Statement[Lag]:
        return named("lag_outbox", lambda rows: Lag(*rows[0]))

    alag = twin(lag)

What is decorated takes the connection first and sends nothing: it returns a statement or steps. Callers see its answer
as the result, and its name, docstring and parameters as they are written. A keyword that it does not have is answered
by `no_option`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.steps import NOTES, Steps, adrive, drive
from pgqueue.options import checks_options

P = ParamSpec("P")
T = TypeVar("T")
Asked = Statement[T] | Steps[T]
"""What is to be sent: a statement, or steps."""

_ANSWER = re.compile(r"(?:Asked|Statement|Steps)\[(.+)\]", re.DOTALL)


def asks(make: Callable[P, Asked[T]]) -> Callable[P, T]:
    """The function that asks this on a sync connection."""
    return _asking(make, {})


def changes_jobs(make: Callable[P, Asked[T]]) -> Callable[P, T]:
    """The same for steps that change jobs: if the server refuses them, its error has a note that says what it means."""
    return _asking(make, NOTES)


def twin(on: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The function that asks the same on an async connection. Its name is that of the sync one, behind an `a`."""
    make, notes = vars(on)["made_of"]
    name = on.__name__

    @wraps(on)
    async def on_async(*args: Any, **options: Any) -> Any:
        asked = make(*args, **options)
        conn = args[0] if args else options["conn"]
        return await (drivers.arun(conn, asked) if isinstance(asked, Statement) else adrive(conn, asked, notes))

    on_async.__name__ = on_async.__qualname__ = f"a{name}"
    on_async.__doc__ = f"`{name}` for async connections.\n\n    {on.__doc__}"
    return checks_options(on_async)


@overload
def named(name: str, /, **params: object) -> Statement[list[Row]]: ...
@overload
def named(name: str, read: Callable[[list[Row]], T], /, **params: object) -> Statement[T]: ...
def named(name: str, read: Callable[[list[Row]], Any] = list, /, **params: object) -> Statement[Any]:
    """The named statement in the configured schema, with its parameters, and how its rows are read."""
    return Statement(text(name, client()[0]), params, read)


def said(name: str, kind: type[T], /, **params: object) -> Statement[T]:
    """The named statement whose answer is one value: the JSON of this kind. A time may be in seconds since 1970."""
    import msgspec  # imported here: a probe needs none of it

    return named(name, lambda rows: msgspec.json.decode(rows[0][0], type=kind, strict=False), **params)


def _asking(make: Callable[..., Any], notes: Mapping[str, str]) -> Callable[..., Any]:
    signature = inspect.signature(make)
    answer = _ANSWER.fullmatch(signature.return_annotation)
    assert answer is not None, f"{make.__qualname__} says no answer: {signature.return_annotation}"

    @wraps(make)
    def on(*args: Any, **options: Any) -> Any:
        asked = make(*args, **options)
        conn = args[0] if args else options["conn"]
        return drivers.run(conn, asked) if isinstance(asked, Statement) else drive(conn, asked, notes)

    on.__annotations__ = make.__annotations__ | {"return": answer[1]}
    vars(on)["__signature__"] = signature.replace(return_annotation=answer[1])
    vars(on)["made_of"] = make, notes
    return checks_options(on)

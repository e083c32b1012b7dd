"""The place of a failure is the application's, and finding it raises nothing, whatever the exception is."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest

from pgqueue.jobs import fingerprint as module
from pgqueue.jobs.fingerprint import fingerprint, place_of

Raises = Callable[[], object]


def code(source: str, path: str, name: str) -> dict[str, Any]:
    """The names of a module with this source, as if it lay at this path."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, path, "exec"), names)
    return names


def caught(raises: Raises) -> BaseException:
    """What it raises, with the traceback from there on."""
    try:
        raises()
    except BaseException as error:
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)  # without this function's own frame
    raise AssertionError("it raised nothing")


INSTALLED = f"{module.STANDARD}site-packages/stripe/api.py"
LIBRARY = code("def call(f):\n    return f()\ndef fails():\n    raise OSError('down')", INSTALLED, "stripe.api")


def handler(body: Raises) -> Raises:
    """A handler of an application at a path of its own, which calls this."""
    source = "class Cards:\n    def charge(self):\n        return body()\ndef send():\n    return Cards().charge()"
    names = code(source, "/srv/shop/tasks.py", "shop.tasks")
    names["body"] = body
    found: Raises = names["send"]
    return found


@pytest.mark.promise("F93")
@pytest.mark.parametrize(
    ("raises", "place"),
    [
        (handler(lambda: 1 / 0), None),
        (handler(LIBRARY["fails"]), "shop.tasks.Cards.charge"),
        (handler(lambda: json.loads("{")), None),
        (handler(lambda: LIBRARY["call"](LIBRARY["fails"])), None),
        (LIBRARY["fails"], "stripe.api.fails"),
        (lambda: json.loads("{"), None),
    ],
    ids=["its own", "a library's", "the standard library's", "through a callback", "installed application", "a lambda"],
)
def test_the_place_is_the_applications_innermost_function(raises: Raises, place: str | None) -> None:
    """Where no place is named here, it is the lambda of this file."""
    found = place_of(caught(raises))
    assert found == (place or f"{__name__}.<lambda>")


@pytest.mark.promise("F93")
def test_a_line_or_a_message_makes_no_other_group_and_a_task_does() -> None:
    places = {place_of(caught(handler(LIBRARY["fails"]))) for _ in range(2)}
    moved = code("\n\n\nclass Cards:\n    def charge(self):\n        raise OSError", "/srv/2/tasks.py", "shop.tasks")
    places.add(place_of(caught(moved["Cards"]().charge)))
    assert len(places) == 1
    [place] = places
    groups = {fingerprint(task, kind, place) for task in ("a", "b") for kind in ("OSError", "ValueError")}
    assert len(groups) == 4
    assert fingerprint("a", "b", None) == fingerprint("a", "b", "")


@pytest.mark.promise("F93")
def test_what_has_no_traceback_has_no_place() -> None:
    assert place_of(ValueError()) is None


@pytest.mark.promise("F93")
def test_no_exception_makes_it_raise() -> None:
    class Liar(Exception):
        @property
        def __traceback__(self) -> types.TracebackType | None:  # type: ignore[override]
            raise RuntimeError("not mine")

    assert place_of(Liar()) is None
    nameless = code("def fails():\n    raise OSError", "/srv/shop/nameless.py", "x")
    nameless["__name__"] = 7
    assert place_of(caught(nameless["fails"])) == "?.fails"

    def deep(n: int) -> None:
        deep(n + 1)

    place = place_of(caught(lambda: deep(0)))
    assert place is not None and place.endswith("deep")
    long = code(f"def {'f' * 500}():\n    raise OSError", "/srv/shop/long.py", "shop.long")
    assert len(place_of(caught(long["f" * 500])) or "") == module.PLACE_MOST

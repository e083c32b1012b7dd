"""What is written of an error: the traceback as Python prints it, however often it comes."""

from __future__ import annotations

from collections.abc import Callable
from traceback import format_exception

import pytest

from pgqueue.jobs import outcomes
from pgqueue.jobs.outcomes import _lines


def plain(number: int) -> None:
    raise OSError(f"the other side is down: {number}")


def elsewhere(number: int) -> None:
    if number % 2:
        raise OSError("odd")
    raise OSError("even")


def because(number: int) -> None:
    try:
        plain(number)
    except OSError as error:
        raise ValueError(f"no answer {number}") from error


def meanwhile(number: int) -> None:
    try:
        plain(number)
    except OSError:
        elsewhere(number)


def hidden(number: int) -> None:
    try:
        plain(number)
    except OSError:
        raise ValueError(f"no answer {number}") from None


def noted(number: int) -> None:
    error = KeyError("x")
    error.add_note(f"the {number}th")
    raise error


def grouped(number: int) -> None:
    raise ExceptionGroup(f"all {number}", [OSError("one"), ValueError("other")])


def deep(number: int, left: int = 300) -> None:
    if not left:
        plain(number)
    deep(number, left - 1)


def unreadable(number: int) -> None:
    compile(f"x = = {number}", "made", "exec")


FAILURES = [plain, elsewhere, because, meanwhile, hidden, noted, grouped, deep, unreadable]


@pytest.mark.promise("F255")
@pytest.mark.parametrize(
    "fails",
    [plain, elsewhere, because, meanwhile, hidden, noted, grouped, deep, unreadable],
    ids=lambda fails: fails.__name__,
)
def test_the_lines_of_an_error_are_those_of_python_however_often_it_comes(fails: Callable[[int], None]) -> None:
    for number in range(5):
        with pytest.raises(Exception) as caught:
            fails(number)
        assert "".join(_lines(caught.value)) == "".join(format_exception(caught.value))


def test_no_more_than_some_stacks_are_kept() -> None:
    for number in range(2 * outcomes.STACKS_MOST):
        made: dict[str, Callable[[], None]] = {}
        exec(compile(f"def made():\n    raise OSError({number})", f"made {number}", "exec"), made)
        with pytest.raises(OSError, match=str(number)) as caught:
            made["made"]()
        assert f'"made {number}"' in "".join(_lines(caught.value))
    assert len(outcomes._stacks) <= outcomes.STACKS_MOST

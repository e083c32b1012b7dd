"""Which combinations of parameters run every day."""

from __future__ import annotations

from itertools import product

import pytest
from cases import every_day


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 3), (2, 2, 2), (4, 2, 3), (31, 4, 3)], ids=str)
def test_each_value_is_in_a_case_of_every_day_and_no_case_is_superfluous(sizes: tuple[int, ...]) -> None:
    cases = [frozenset(zip("abc", case, strict=False)) for case in product(*map(range, sizes))]
    daily = [cases[place] for place in every_day(cases)]
    assert len(daily) == max(sizes)
    assert frozenset().union(*daily) == frozenset().union(*cases)


def test_parameters_that_go_together_are_tried_together() -> None:
    cases = [frozenset({("kind", kind), ("committed", kind % 2)}) for kind in range(5)]
    assert every_day(cases) == {*range(5)}


@pytest.mark.each_value
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_case_that_does_not_run_every_day_is_of_the_second_stage(
    request: pytest.FixtureRequest, first: int, last: int
) -> None:
    if len([item for item in request.session.items if "each_value" in item.keywords]) > 1:  # not asked for by its name
        assert (request.node.get_closest_marker("second") is None) == ((first, last) in {(1, 1), (2, 2), (1, 3)})

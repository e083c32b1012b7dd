"""When a worker polls, and what its polls show, without a database; with one it is in test_pace.py."""

from __future__ import annotations

import pytest

from pgqueue.worker.fetch.poll import LATE_SECONDS, SLOW_MOST, Polls, spaced

PACE = 5.0


@pytest.mark.promise("F09")
def test_an_idle_worker_looks_twice_before_a_fetch_in_five_seconds_and_never_more_than_two_polls_apart() -> None:
    for _ in range(200):
        left, pauses = 5.0, list[float]()
        while left > 0:
            pauses.append(spaced(left, 1.0))
            left -= pauses[-1]
        assert left == 0.0  # the last comes when the fetch is wanted, not before it
        assert len(pauses) == 3
        assert all(1.0 <= pause <= 2.0 for pause in pauses)


@pytest.mark.promise("F252")
def test_an_answer_puts_off_the_slow_poll_from_its_question_on_and_an_older_one_brings_it_no_nearer() -> None:
    """At the latest so far that an ordinary poll after it, up to two polls later, is within two slow ones."""
    for _ in range(200):
        polls = Polls()
        assert polls.slow_at == 0.0
        polls.proved(100.0, PACE)
        put_off = polls.slow_at
        assert 100.0 + PACE <= put_off <= 100.0 + SLOW_MOST * PACE <= 100.0 + 2 * PACE - 2 * PACE / 5
        polls.proved(90.0, PACE)
        assert polls.slow_at == put_off


def found(*, alone: bool = True, any: bool = True) -> Polls:
    """A poll has led to a fetch that was sent at 100."""
    polls = Polls()
    polls.leads(alone=alone)
    polls.fetched(100.0, any=any)
    return polls


@pytest.mark.promise("F252")
def test_rows_of_a_poll_were_not_told_once_no_notification_has_come_for_a_while() -> None:
    polls = found()
    assert not polls.ended(100.0 + LATE_SECONDS)
    assert polls.ended(100.1 + LATE_SECONDS)
    assert not polls.ended(200.0)  # it is said once


@pytest.mark.promise("F252")
def test_the_first_fetch_of_a_poll_counts_and_its_notification_may_come_after_it() -> None:
    polls = found()
    polls.fetched(105.0, any=True)
    assert polls.ended(101.0)
    polls = found()
    polls.told()
    assert not polls.ended(200.0)


@pytest.mark.promise("F252")
def test_nothing_else_shows_that_rows_were_not_told() -> None:
    """A fetch for another reason as well, one that took nothing, and one that comes when those of the poll are over."""
    assert not found(alone=False).ended(200.0)
    assert not found(any=False).ended(200.0)
    polls = found(any=False)
    polls.ended(101.0)
    polls.fetched(102.0, any=True)
    assert not polls.ended(200.0)
    polls.leads(alone=True)
    polls.told()
    polls.fetched(202.0, any=True)
    assert not polls.ended(300.0)

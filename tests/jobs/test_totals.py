"""Numbers that only grow: added up in any order, sent in short lines, and bounded however many tasks there are."""

from __future__ import annotations

import json

import pytest

from pgqueue.jobs.totals import OTHERS, TASKS_MOST, Counts, Numbers, Times, Totals


def counts(completed: int, failed: int = 0, ran: float = 0.5) -> Counts:
    made = Counts()
    made.add(completed, ran, 2 * ran)
    made.happened["failed"] = failed
    made.run[3] = made.wait[7] = completed
    return made


def totals(**completed: int) -> Totals:
    made = Totals(fenced=1, rescued=2, swept_nodes=4, lost_slots=3)
    made.tasks = {("mail", task): counts(n) for task, n in completed.items()}
    made.claims.add(0.002)
    return made


@pytest.mark.promise("F164")
def test_a_sum_of_reports_is_the_last_report_however_many_came_before() -> None:
    sums = Totals()
    first, second = totals(a=1), totals(a=5, b=7)
    second.claims.add(3.0)
    second.fenced = 4
    sums.include(first)
    sums.include(second, first)
    sums.include(second, second)
    [a, b] = [sums.tasks["mail", task].as_json("mail", task) for task in "ab"]
    assert (a["completed"], a["run"], b["completed"], a["run_seconds"]) == (5, [0, 0, 0, 5], 7, 0.5)
    assert (sums.fenced, sums.rescued, sums.swept_nodes, sums.lost_slots) == (4, 2, 4, 3)
    assert sum(sums.claims.counts) == 2


@pytest.mark.promise("F164")
def test_beyond_200_tasks_the_rest_is_one_and_stays_where_it_was_counted() -> None:
    sums = Totals()
    sums.include(totals(**{f"t{n}": 1 for n in range(TASKS_MOST + 50)}))
    assert (len(sums.tasks), sums.tasks["mail", OTHERS].happened["completed"]) == (TASKS_MOST + 1, 50)
    sums.include(totals(t249=3, t0=3))
    assert sums.tasks["mail", OTHERS].happened["completed"] == 53
    assert sums.tasks["mail", "t0"].happened["completed"] == 4


@pytest.mark.promise("F166")
def test_numbers_come_back_from_their_lines_and_each_line_is_short() -> None:
    names = {f"{n}" + "\U0001f980" * 190: n for n in range(TASKS_MOST)}  # a character is 12 bytes as JSON
    sent = Numbers(totals(**names), {"busy": 1, "free": 2, "lost": 0}, True)
    sent.gauges = [("pgqueue_depth", {"queue": f"q{n}", "state": "running"}, n) for n in range(1_000)]
    lines = [json.dumps(line) for line in sent.lines(16_384)]
    assert len(lines) > 3 and max(map(len, lines)) < 65_536
    got = Numbers.of_lines([json.loads(line) for line in lines])
    assert (got.slots, got.leads, list(got.gauges)) == (sent.slots, True, sent.gauges)
    assert got.totals.claims == sent.totals.claims and (got.totals.rescued, got.totals.swept_nodes) == (2, 4)
    made = [{names: each.as_json(*names) for names, each in one.totals.tasks.items()} for one in (got, sent)]
    assert made[0] == made[1]
    assert Numbers.of_lines([json.loads(json.dumps(line)) for line in Numbers().lines(100)]) == Numbers()


def test_a_time_is_counted_in_its_bucket() -> None:
    times = Times()
    for seconds in (0.001, 0.0011, 1e9):
        times.add(seconds)
    assert (times.counts[0], times.counts[1], times.counts[-1], sum(times.counts)) == (1, 1, 1, 3)

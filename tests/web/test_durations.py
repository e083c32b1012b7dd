"""How long the runs of a task took, before and since the newest version."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from dashboards import reading

from pgqueue.jobs.histogram import BOUNDS
from pgqueue.web.durations import durations

Conn = psycopg.Connection[Any]
ALL = len(BOUNDS) + 1


@pytest.mark.promise("F315")
def test_bars_are_shares_of_their_own_part_beside_each_other() -> None:
    """Naive is the number of attempts: a version of minutes is invisible beside one of days."""
    made = durations({"before": [0, 0, 900, 100], "since": [0, 0, 0, 3, 1]})
    assert made is not None
    assert made.bounds == BOUNDS[1:5] and list(made.ticks) == [100, 50, 0]
    assert [(part.name, part.total, part.shares) for part in made.parts] == [
        ("before", 1000, (0, 90, 10, 0)),
        ("since", 4, (0, 0, 75, 25)),
    ]
    assert [part.path.count("M") for part in made.parts] == [2, 2]
    assert made.parts[0].path.startswith("M10.8 100V10.0h4.2") and made.parts[1].path.startswith("M25.0 100V25.0h4.2")


@pytest.mark.promise("F315")
def test_the_shortest_and_the_longest_runs_are_drawn() -> None:
    made = durations({"whole": [1] + [0] * (ALL - 2) + [1]})
    assert made is not None and len(made.bounds) == ALL and made.bounds[-1] is None
    assert made.labelled.count(True) <= 6 and made.labelled[0]
    assert durations({"before": [], "since": [0] * ALL}) is None
    only = durations({"before": [], "since": [2]})
    assert only is not None and [part.name for part in only.parts] == ["since"] and only.bounds == BOUNDS[:1]


RAN = (
    "INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, wait, run) SELECT "
    "date_trunc('minute', now() - make_interval(mins => %s)), bin, 'q', 't', %s, %s, '{}', "
    "array_fill(0, ARRAY[%s]) || %s::bigint FROM pgqueue.ring WHERE kind = 'minute'"
)


@pytest.mark.promise("F315")
async def test_the_page_of_a_task_has_the_run_times_of_both_versions(dsn: str, conn: Conn) -> None:
    fast, slow = BOUNDS.index(0.1), BOUNDS.index(2.0)
    # The second one is of the minute of the deploy: it is in neither part.
    for minutes, number, place in ((30, 200, fast), (12, 1000, slow), (6, 75, slow), (5, 25, fast)):
        conn.execute(RAN, [minutes, number, number, place, number])
    conn.execute("INSERT INTO pgqueue.version_start VALUES ('v1', now() - interval '90 minutes')")
    conn.commit()
    async with reading(dsn) as browser:

        async def parts() -> list[tuple[str, int]]:
            answer = await browser.get("/task?name=t", headers={"accept": "application/json"})
            return [(part["name"], part["total"]) for part in answer.json()["durations"]["parts"]]

        assert await parts() == [("whole", 1300)]
        conn.execute(
            "INSERT INTO pgqueue.version_start VALUES ('v2<b>', date_trunc('minute', now()) - interval '11.5 minutes')"
        )
        conn.commit()
        assert await parts() == [("before", 200), ("since", 100)]
        page = (await browser.get("/task?name=t")).text
        assert "since v2&lt;b&gt; 75.0 % (75)" in page and 'class="bar-before"' in page and "<b>up to 2 s</b>" in page
        assert "v2<b>" not in page

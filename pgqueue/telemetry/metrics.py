"""Every metric that is exported: its name, its kind, its labels, and what it says. And how numbers become families.

Nothing else is exported, and `docs/metrics.md`, the board and the alert rules of `deploy/` name nothing else. Labels
are bounded: 200 tasks of a process, 200 queues of the database. The rest is one line, under a name that nothing else
has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from pgqueue.jobs.histogram import BOUNDS
from pgqueue.jobs.totals import Numbers, Sample

BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds in seconds. Each is one of `BOUNDS`, so no time is counted in a wrong one."""
PLACES = tuple(BOUNDS.index(bound) for bound in BUCKETS)
COUNTER, HISTOGRAM, GAUGE = "counter", "histogram", "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, by the name under which Prometheus has it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


OF_PROCESSES = (
    Metric("pgqueue_jobs_total", COUNTER, ("queue", "task", "outcome"), "Attempts of jobs that have ended here."),
    Metric(
        "pgqueue_job_wait_seconds",
        HISTOGRAM,
        ("queue", "task"),
        "From when a job could run until it began; intended delay is left out, time blocked counts.",
    ),
    Metric("pgqueue_job_run_seconds", HISTOGRAM, ("queue", "task"), "How long the handlers of jobs ran."),
    Metric("pgqueue_slots", GAUGE, ("state",), "Slots of these processes that are busy, free, or lost."),
    Metric("pgqueue_claim_seconds", HISTOGRAM, (), "How long it took to claim jobs, a round trip to the database."),
    Metric("pgqueue_flush_seconds", HISTOGRAM, (), "How long it took to write outcomes, a round trip to the database."),
    Metric(
        "pgqueue_fenced_total",
        COUNTER,
        (),
        "Outcomes that were dropped because the job had been given to another worker.",
    ),
    Metric("pgqueue_rescued_total", COUNTER, (), "Jobs of dead workers that were given back here."),
    Metric(
        "pgqueue_swept_nodes_total",
        COUNTER,
        (),
        "Nodes of flows that had ended and that jobs waited for when the sweep looked here.",
    ),
    Metric("pgqueue_lost_slots_total", COUNTER, (), "Slots that were lost to handlers that do not stop."),
)
OF_DATABASE = (
    Metric("pgqueue_workers_alive", GAUGE, (), "Live workers that take jobs or are about to."),
    Metric("pgqueue_depth", GAUGE, ("queue", "state"), "Jobs that wait or run; above 10,000 an estimate."),
    Metric(
        "pgqueue_oldest_eligible_seconds",
        GAUGE,
        ("queue",),
        "For how long the first job that could run, and is not paused, has waited; 0 if there is none.",
    ),
    Metric(
        "pgqueue_longest_blocked_seconds",
        GAUGE,
        ("queue",),
        "For how long a job has been blocked although its key has room; 0 if there is none.",
    ),
    Metric("pgqueue_blocked", GAUGE, ("reason",), "Blocked jobs, by what they wait for."),
    Metric("pgqueue_unknown_tasks", GAUGE, (), "Tasks that have waiting jobs and that no live worker knows."),
    Metric("pgqueue_depth_age_seconds", GAUGE, (), "How long ago the jobs were counted."),
    Metric("pgqueue_dead_rows", GAUGE, ("table",), "Dead rows of our tables that were not vacuumed yet."),
    Metric(
        "pgqueue_oldest_snapshot_seconds", GAUGE, (), "Age of the oldest transaction that keeps dead rows from vacuum."
    ),
    Metric("pgqueue_notify_queue_ratio", GAUGE, (), "Share of the server's NOTIFY queue in use, 0 to 1."),
    Metric("pgqueue_duty_age_seconds", GAUGE, ("duty",), "How long ago a duty of the leader last ran."),
    Metric("pgqueue_duty_seconds", GAUGE, ("duty",), "How long that run took."),
    Metric(
        "pgqueue_duty_failing_seconds", GAUGE, ("duty",), "For how long a duty has failed each time; 0 if it does not."
    ),
    Metric("pgqueue_outbox_waiting", GAUGE, ("outbox",), "Staged jobs that wait for a relay, as it reported last."),
    Metric(
        "pgqueue_outbox_lag_seconds",
        GAUGE,
        ("outbox",),
        "For how long the first staged job has waited, as the relay reported last, and how long ago that was.",
    ),
    Metric(
        "pgqueue_outbox_report_age_seconds", GAUGE, ("outbox",), "How long ago the relay of the outbox has reported."
    ),
)
METRICS = (*OF_PROCESSES, *OF_DATABASE)
_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_KINDS: dict[str, type[_Family]] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}
_BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Part:
    """What is exported of one database: the numbers of its processes, if there are any, and the gauges.

    `database`: its name, if there are several; it becomes a label.
    """

    numbers: Numbers | None
    gauges: Iterable[Sample]
    database: str | None = None


def families(parts: Sequence[Part]) -> Iterator[Family]:
    """What is exported of these databases and their processes."""
    made: dict[str, _Family] = {}
    for part in parts:
        names, labels = ([], []) if part.database is None else (["database"], [part.database])
        for metric in OF_PROCESSES if part.numbers is not None and not made else ():
            made[metric.name] = _family(metric.name, names)
        for name, values, value in _series(part):
            family = made.get(name)
            if family is None:
                family = made[name] = _family(name, names)
            if isinstance(family, HistogramMetricFamily):
                counts, seconds = value
                family.add_metric([*labels, *values], _buckets(counts), seconds)
            else:
                family.add_metric([*labels, *values], value)
    yield from made.values()


def _series(part: Part) -> Iterator[tuple[str, Sequence[str], Any]]:
    """Each series of it: its metric, the values of its labels, and its value. Of a histogram that is how often each
    time was counted, and the sum of the times."""
    if part.numbers is not None:
        yield from _of_processes(part.numbers)
    for name, labels, value in part.gauges:
        yield name, [labels[label] for label in _BY_NAME[name].labels], value


def _of_processes(numbers: Numbers) -> Iterator[tuple[str, Sequence[str], Any]]:
    totals = numbers.totals
    for (queue, task), counts in totals.tasks.items():
        for outcome, n in counts.happened.items():
            yield "pgqueue_jobs_total", [queue, task, outcome], n
        yield "pgqueue_job_wait_seconds", [queue, task], (counts.wait, counts.wait_seconds)
        yield "pgqueue_job_run_seconds", [queue, task], (counts.run, counts.run_seconds)
    for state, n in numbers.slots.items():
        yield "pgqueue_slots", [state], n
    for name, times in (("pgqueue_claim_seconds", totals.claims), ("pgqueue_flush_seconds", totals.flushes)):
        yield name, [], (times.counts, times.seconds)
    yield "pgqueue_fenced_total", [], totals.fenced
    yield "pgqueue_rescued_total", [], totals.rescued
    yield "pgqueue_swept_nodes_total", [], totals.swept_nodes
    yield "pgqueue_lost_slots_total", [], totals.lost_slots


def _family(name: str, more: Sequence[str]) -> _Family:
    metric = _BY_NAME[name]
    return _KINDS[metric.kind](name, metric.help, labels=[*more, *metric.labels])


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """How many times are at most as long as each bound, as text and number."""
    below = list(accumulate(counts))
    return [*((str(bound), below[place]) for bound, place in zip(BUCKETS, PLACES, strict=True)), ("+Inf", below[-1])]

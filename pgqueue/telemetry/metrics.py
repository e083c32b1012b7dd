"""Every metric that is exported: its name, its kind, its labels, and what it says. And how numbers become families.

Nothing else is exported, and `docs/metrics.md`, the board and the alert rules of `deploy/` name nothing else. Labels
are bounded: 200 tasks of a process, 200 queues of the database. The rest is one line, under a name that nothing else
has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
_BY_NAME = {metric.name: metric for metric in METRICS}


def families(numbers: Numbers | None, gauges: Iterable[Sample]) -> Iterator[Family]:
    """What is exported of these processes, if any, and of the database."""
    if numbers is not None:
        yield from _of_processes(numbers)
    made: dict[str, GaugeMetricFamily] = {}
    for name, labels, value in gauges:
        family = made.setdefault(name, _gauge(name))
        family.add_metric([labels[label] for label in _BY_NAME[name].labels], value)
    yield from made.values()


def _of_processes(numbers: Numbers) -> Iterator[Family]:
    totals = numbers.totals
    jobs, slots = _counter("pgqueue_jobs_total"), _gauge("pgqueue_slots")
    wait, run = _histogram("pgqueue_job_wait_seconds"), _histogram("pgqueue_job_run_seconds")
    for (queue, task), counts in totals.tasks.items():
        for outcome, n in counts.happened.items():
            jobs.add_metric([queue, task, outcome], n)
        wait.add_metric([queue, task], _buckets(counts.wait), counts.wait_seconds)
        run.add_metric([queue, task], _buckets(counts.run), counts.run_seconds)
    for state, n in numbers.slots.items():
        slots.add_metric([state], n)
    yield from (jobs, wait, run, slots)
    for name, times in (("pgqueue_claim_seconds", totals.claims), ("pgqueue_flush_seconds", totals.flushes)):
        spread = _histogram(name)
        spread.add_metric([], _buckets(times.counts), times.seconds)
        yield spread
    for name, n in (
        ("pgqueue_fenced_total", totals.fenced),
        ("pgqueue_rescued_total", totals.rescued),
        ("pgqueue_swept_nodes_total", totals.swept_nodes),
        ("pgqueue_lost_slots_total", totals.lost_slots),
    ):
        count = _counter(name)
        count.add_metric([], n)
        yield count


def _counter(name: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, _BY_NAME[name].help, labels=_BY_NAME[name].labels)


def _gauge(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, _BY_NAME[name].help, labels=_BY_NAME[name].labels)


def _histogram(name: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, _BY_NAME[name].help, labels=_BY_NAME[name].labels)


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """How many times are at most as long as each bound, as text and number."""
    below = list(accumulate(counts))
    return [*((str(bound), below[place]) for bound, place in zip(BUCKETS, PLACES, strict=True)), ("+Inf", below[-1])]

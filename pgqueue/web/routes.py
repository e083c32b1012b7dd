"""Every address of the dashboard, what it needs, and which function answers it. `dashboard.py` serves nothing else."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from pgqueue.web.access import NOTHING, READ
from pgqueue.web.pages import (
    bulks,
    changes,
    enqueue,
    flows,
    history,
    job,
    jobs,
    limits,
    lists,
    outbox,
    overview,
    queue,
    record,
    tasks,
    workers,
)
from pgqueue.web.pages.page import Asked, Page

PageFunction = Callable[[Asked], Awaitable[Page]]


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path. `needs` is `read`, an action of access.py, or nothing. `page` is None for what
    `dashboard.py` does itself: sign in, sign out, files, metrics, events."""

    name: str
    method: str
    path: str
    needs: str = READ
    page: PageFunction | None = None


ROUTES = (
    Route("static", "GET", "/static/{file}", NOTHING),
    Route("login", "GET", "/login", NOTHING),
    Route("sign_in", "POST", "/login", NOTHING),
    Route("sign_out", "POST", "/logout", NOTHING),
    Route("metrics", "GET", "/metrics"),
    Route("events", "GET", "/events", READ),
    Route("overview", "GET", "/", READ, overview.overview),
    Route("jobs", "GET", "/jobs", READ, jobs.jobs),
    Route("job", "GET", "/jobs/{id}", READ, job.job),
    Route("queues", "GET", "/queues", READ, lists.queues),
    Route("queue", "GET", "/queue", READ, queue.queue),
    Route("tasks", "GET", "/tasks", READ, tasks.tasks),
    Route("task", "GET", "/task", READ, tasks.task),
    Route("limits", "GET", "/limits", READ, limits.limits),
    Route("limit_jobs", "GET", "/limits/jobs", READ, limits.jobs),
    Route("schedules", "GET", "/schedules", READ, lists.schedules),
    Route("flows", "GET", "/flows", READ, flows.flows),
    Route("flow", "GET", "/flows/{id}", READ, flows.flow),
    Route("workers", "GET", "/workers", READ, workers.workers),
    Route("errors", "GET", "/errors", READ, lists.errors),
    Route("history", "GET", "/history", READ, history.history),
    Route("outbox", "GET", "/outbox", READ, outbox.outbox),
    Route("changes", "GET", "/changes", READ, record.changes),
    Route("cancel_job", "POST", "/jobs/{id}/cancel", "cancel", changes.cancel),
    Route("retry_job", "POST", "/jobs/{id}/retry", "retry", changes.retry),
    Route("discard_job", "POST", "/jobs/{id}/discard", "discard", changes.discard),
    Route("run_job_now", "POST", "/jobs/{id}/run-now", "run_now", changes.run_now),
    Route("reschedule_job", "POST", "/jobs/{id}/reschedule", "reschedule", changes.reschedule),
    Route("run_schedule", "POST", "/schedules/run", "schedules", changes.run_schedule),
    Route("pause_schedule", "POST", "/schedules/pause", "schedules", changes.pause_schedule),
    Route("resume_schedule", "POST", "/schedules/resume", "schedules", changes.resume_schedule),
    Route("bulks", "GET", "/bulk", READ, bulks.bulks),
    Route("preview", "GET", "/bulk/new", "bulk", bulks.preview),
    Route("bulk", "GET", "/bulk/{id}", READ, bulks.bulk),
    Route("begin_bulk", "POST", "/bulk", "bulk", bulks.begin),
    Route("stop_bulk", "POST", "/bulk/{id}/stop", "bulk", bulks.stop),
    Route("preview_flow", "GET", "/flows/{id}/change", "bulk", flows.preview),
    Route("change_flow", "POST", "/flows/{id}/change", "bulk", flows.change),
    Route("pause", "POST", "/pause", "pause", changes.pause),
    Route("resume", "POST", "/resume", "resume", changes.resume),
    Route("enqueue", "GET", "/enqueue", "enqueue", enqueue.form),
    Route("make_job", "POST", "/enqueue", "enqueue", enqueue.enqueue),
    Route("set_limit", "POST", "/limits/set", "limits", limits.set_limit),
    Route("reset_limit", "POST", "/limits/reset", "limits", limits.reset_limit),
    Route("set_rate", "POST", "/rates/set", "rates", limits.set_rate),
    Route("reset_rate", "POST", "/rates/reset", "rates", limits.reset_rate),
    Route("release_lock", "POST", "/locks/release", "locks", limits.release),
    Route("restart_workers", "POST", "/workers/restart", "workers", workers.restart),
    Route("quiet_workers", "POST", "/workers/quiet", "workers", workers.quiet),
    Route("scale_workers", "POST", "/workers/scale", "workers", workers.scale),
)

OF_ALL = (
    *(route for route in ROUTES if route.name in ("static", "login", "sign_in", "sign_out", "metrics")),
    Route("databases", "GET", "/", READ),
)
"""The routes beside those of each database, if there are several. `dashboard.py` makes the page, of all sources."""
SHARED = frozenset({"static", "login", "sign_in", "sign_out"})
"""These are the same below the path of each database, whether there is such a database or not."""

_DATABASE = re.compile(r"/db/([a-z0-9][a-z0-9_-]{0,39})(/.*)?", re.DOTALL)
_PARTS = {"id": r"(?P<id>[1-9][0-9]{0,17})", "file": r"(?P<file>[a-z][a-z0-9_.-]{0,60})"}


@dataclass(frozen=True, slots=True)
class Found:
    """What a path names: the database, the route and the parts. `known`: the path exists, maybe for another method."""

    database: str | None
    route: Route | None
    parts: Mapping[str, str]
    known: bool


def find(method: str, path: str, *, several: bool) -> Found:
    """What the path of a request names; `several`: whether each database has its own below `/db/NAME`."""
    if not several:
        return Found(None, *match(method, path))
    said = _DATABASE.fullmatch(path)
    if said is None:
        return Found(None, *match(method, path, _OF_ALL))
    route, parts, known = match(method, said[2] or "/")
    return Found(None if route is not None and route.name in SHARED else said[1], route, parts, known)


def match(
    method: str, path: str, routes: Sequence[tuple[Route, re.Pattern[str]]] | None = None
) -> tuple[Route | None, Mapping[str, str], bool]:
    """The route of a request, the parts of its path, and whether the path exists under another method. HEAD is GET."""
    wanted, known = "GET" if method == "HEAD" else method, False
    for route, pattern in _PATTERNS if routes is None else routes:
        if found := pattern.fullmatch(path):
            if route.method == wanted:
                return route, found.groupdict(), True
            known = True
    return None, {}, known


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", lambda part: _PARTS[part[1]], path))


_PATTERNS = tuple((route, _pattern(route.path)) for route in ROUTES)
_OF_ALL = tuple((route, _pattern(route.path)) for route in OF_ALL)

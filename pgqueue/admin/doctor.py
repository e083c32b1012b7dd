"""`doctor`: why jobs wait, and the health of what the queue stands on.

Called by applications and by the CLI. Every statement only reads, in the connection's own transaction. No statement
counts live what the leading worker has measured (see `depth`), so the answer takes the same time beside any backlog.

A finding is what an operator should act on. What a healthy queue shows is none: not an idle one, nor one that is busy
and whose jobs wait for a slot or for a key that others hold. A burst that drains is no finding either: only a queue
that has grown for half an hour, by the history.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqueue.admin import depth, lag, limits
from pgqueue.admin.depth import Group, Measured
from pgqueue.config import config
from pgqueue.database import migrations, shown, steps
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Statement, in_schema
from pgqueue.database.steps import Steps
from pgqueue.manual import Symptom, at_night, page
from pgqueue.plain_text import plural

OLD_SECONDS = 300.0
"""A transaction that is open for longer holds back the vacuum noticeably; so does an unused slot."""
VACUUM_SECONDS = 600.0
ROLLOUT_SECONDS = 900.0
"""So long a deploy may take: until then workers of two versions are no finding."""
LATE_SECONDS = 300.0
"""A worker lives for so long before a measurement, or a leader, is missed."""
DUTY_SECONDS = 60.0
"""So long a duty may fail: a lock, or a failover, is over by then."""
STUCK_SECONDS = 30.0
STUCK_KEYS_MOST = 1_000
OVERDUE_SECONDS = 60.0
"""So late a due job may be made available: many may become due at once."""
UNSERVED_SECONDS = 30.0
"""So long a job may wait in a queue without a worker: the worker may just be starting."""
UNSERVED_MOST = 1_000
RELAY_SECONDS, ABANDONED_SECONDS = 3_600.0, 7 * 86_400.0
"""A relay is missed from then on: `relay --once` may run now and then. And until then: its application may be gone."""
NOTIFY_SHARE, CONNECTIONS_SHARE = 0.25, 0.9
EXPLAINED = frozenset({"paused", "task_paused", "unserved", "unknown"})
"""Jobs that wait for one of these are no sign of too few slots: the pause, or another finding, says why they wait."""
HERE, MIGRATE = page("operations", "what-pgqueue-doctor-finds"), page("operations", "pgqueue-migrate")
DISK = at_night(Symptom.DISK)

NODES_MOST, RELEASE_SECONDS = 1_000, 60.0
"""So many nodes of flows are looked at; their jobs are released at once, or by the next sweep."""
INDEXES = (
    "job_available_id", "job_available_keyed", "job_available_limit_holds", "job_available_lock_holds",
    "job_available_node", "job_available_plain", "job_blocked_id", "job_blocked_limit_holds",
    "job_blocked_limit_line", "job_blocked_line", "job_blocked_lock_holds", "job_blocked_node",
    "job_blocked_queue_holds", "job_blocked_rate_line", "job_blocked_rate_suspects", "job_running_id",
    "job_running_limit", "job_running_lock", "job_running_node", "job_running_worker", "job_scheduled_due",
    "job_scheduled_id", "job_scheduled_limit_holds", "job_scheduled_lock_holds", "job_scheduled_node",
)  # fmt: skip
"""The indexes of jobs that wait or run. Without one of them claims read whole tables."""

KIND_MOST = 20
"""So many findings of a kind are listed."""
MOST_JOBS_FIRST = frozenset({"unknown"})
"""Of these kinds the worst finding is that of most jobs, and they come in this order. Of others it is the oldest."""

CRITICAL, WARNING, NOTICE = "critical", "warning", "notice"
SEVERITIES = (CRITICAL, WARNING, NOTICE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What an operator should act on.

    - `name`: what kind of finding this is, such as `snapshot`.
    - `severity`: `critical` (jobs do not run, or soon will not), `warning`, or `notice`.
    - `what`, `todo`: for people.
    - `seconds`: since when, as a number of seconds; None if that is unknown.
    - `page`: where to read more.
    - `queue`: if it is about the jobs of one.
    """

    name: str
    severity: str
    what: str
    todo: str
    page: str
    seconds: float | None = None
    queue: str | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many jobs of all queues are in this state for the same reason; see `depth.Group` for the reasons."""

    state: str
    reason: str
    jobs: depth.Count


@dataclass(frozen=True, slots=True)
class DutyInfo:
    """What has become of a duty of the leading worker, as its last heartbeat told. Times are in seconds.

    - `ran`: how long ago the last run ended; None: it has only failed. `took`: how long that run took.
    - `error`: the last error of the worker's life; `failed`: how long ago that was.
    - `failing`: for how long each run has failed, in any worker; None: the last one did not.
    """

    name: str
    ran: float | None
    took: float
    error: str | None = None
    failed: float | None = None
    failing: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why jobs wait, and what should be done; the most severe findings first. And how the leader's duties go.

    `counted_at` is when the jobs were counted: at the time `at`, or up to 120 seconds before. None: no job was counted.
    `number`: the jobs' ids of this database begin at `number << 43`; None if the schema does not fit.
    """

    reasons: tuple[Waiting, ...]
    findings: tuple[Finding, ...]
    at: datetime | None = None
    counted_at: datetime | None = None
    duties: tuple[DutyInfo, ...] = ()
    number: int | None = None


@asks
def doctor(conn: object) -> Steps[Diagnosis]:
    """Return why jobs wait, and what is wrong with what the queue stands on. A healthy queue has no finding.

    What this connection's role may not see is not looked at: other roles' sessions need pg_read_all_stats.

        for finding in pgqueue.doctor(conn).findings:
            print(finding.severity, finding.what, finding.todo)
    """
    return diagnosis()


adoctor = twin(doctor)
"""`doctor` for async connections."""


async def adiagnosis(conn: object, found: Measured) -> Diagnosis:
    """`adoctor` with numbers that were read before."""
    return await steps.adrive(conn, diagnosis(found), {})


def diagnosis(found: Measured | None = None) -> Steps[Diagnosis]:
    """The statements that look, and what they mean. They ask for the numbers, too, if these were not read before."""
    schema = config().schema
    rows = yield Statement(in_schema(migrations.QUEUE.read, schema), {}, list)
    applied = [migrations.Applied(*row) for row in rows]
    version, known = max((row.version for row in applied), default=0), len(migrations.files())
    if (how := migrations.foreign(applied)) is not None:
        return Diagnosis((), (_foreign(how),))
    if version < known:
        return Diagnosis((), (_behind(version, known),))
    if found is None:
        found = yield from depth.measured(schema)
    sessions = yield _facts("doctor_sessions", seconds=OLD_SECONDS)
    server = yield _facts("doctor_server")
    tables = yield _facts("doctor_tables", seconds=VACUUM_SECONDS, indexes=list(INDEXES))
    workers = yield _facts("doctor_workers")
    flows = yield _facts("doctor_flows", after="", n=NODES_MOST, seconds=RELEASE_SECONDS)
    [[undeclared, _]] = yield named("limits_undeclared", after=limits.FIRST_RATE, n=limits.KEYS_MOST)
    growth = yield _facts("doctor_growth")
    [[may]] = yield named("lag_relays_visible")
    relays = [lag.RelayLag(*row) for row in (yield named("lag_relays"))] if may else []
    held = [lag.HeldFence(*row) for row in (yield named("lag_held", seconds=lag.HELD_SECONDS))] if may else []
    duties = tuple(DutyInfo(**each) for each in (yield _facts("doctor_duties")))
    left = yield from _left(found)
    free = yield from _with_free_slot(found)
    findings = [
        *_newer(version, known),
        *_of_server(server),
        *_of_sessions(sessions),
        *_of_tables(tables),
        *_of_workers(workers, led=server["led"]),
        *_of_duties(duties),
        *_of_flows(flows),
        *_of_unserved(found, left),
        *_of_queues(found, free),
        *_of_growth(found, growth),
        *_of_relays(relays),
        *map(_held, held),
        *map(_undeclared, limits.unknown(undeclared)),
    ]
    findings = sorted(_worst(findings), key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(
        _reasons(found), tuple(findings), shown.at(found.now), shown.at(found.counted_at), duties, server["number"]
    )


def _facts(name: str, **params: object) -> Statement[Any]:
    return named(name, lambda rows: json.loads(rows[0][0]), **params)


def _reasons(found: Measured) -> tuple[Waiting, ...]:
    of_reason: dict[tuple[str, str], list[Group]] = {}
    for group in found.groups:
        of_reason.setdefault((group.state, group.reason), []).append(group)
    return tuple(Waiting(state, reason, depth.total(groups)) for (state, reason), groups in sorted(of_reason.items()))


def _worst(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The worst `KIND_MOST` of each kind, and how many more there are: 10,000 names of tasks have one cause."""
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        kinds.setdefault((each.name, each.severity), []).append(each)
    for (name, severity), found in kinds.items():
        if name not in MOST_JOBS_FIRST:
            found.sort(key=lambda each: -(each.seconds or 0.0))
        yield from found[:KIND_MOST]
        if more := found[KIND_MOST:]:
            what = plural(
                len(more), "more finding of this kind is not listed", "more findings of this kind are not listed"
            )
            todo = "look into the first ones: often all have one cause"
            seconds = max((each.seconds for each in more if each.seconds is not None), default=None)
            yield Finding(name, severity, what, todo, more[0].page, seconds)


# Findings ------------------------------------------------------------------------------------------------------------


def _foreign(how: str) -> Finding:
    todo = "take another schema or database for this pgqueue: `pgqueue migrate --schema NAME`"
    return Finding("schema", CRITICAL, f"the tables are not of this pgqueue: {how}", todo, MIGRATE)


def _behind(version: int, known: int) -> Finding:
    what = f"the schema is at version {version}, and this pgqueue needs {known}"
    return Finding("schema", CRITICAL, what, "run `pgqueue migrate`", MIGRATE)


def _newer(version: int, known: int) -> Iterator[Finding]:
    if version > known:
        what = f"the schema is at version {version}, and this pgqueue knows {known}"
        yield Finding("schema", NOTICE, what, "install the newer pgqueue here, too", MIGRATE)


def _of_sessions(found: Mapping[str, Any]) -> Iterator[Finding]:
    for each in found["snapshots"]:
        said = f": {each['query']}" if each["query"] else ""
        what = (
            f"session {each['pid']} ({each['application'] or 'no name'}, {each['role'] or 'unknown role'}, "
            f"{each['state'] or 'state unknown'}) holds a transaction open, so no dead row can be removed{said}"
        )
        todo = f"end it: SELECT pg_terminate_backend({each['pid']})"
        yield Finding("snapshot", WARNING, what, todo, DISK, each["age"])
    for each in found["prepared"]:
        what = f"prepared transaction {each['gid']!r} of {each['role']} was neither committed nor rolled back"
        yield Finding("prepared", WARNING, what, "COMMIT PREPARED it, or ROLLBACK PREPARED", DISK, each["age"])
    for each in found["slots"]:
        held = "dead rows and WAL" if each["holds"] else "WAL"
        what = f"{each['kind']} replication slot {each['name']} is not in use and keeps {held}"
        todo = "connect its client again, or drop it: SELECT pg_drop_replication_slot(…)"
        yield Finding("slot", WARNING, what, todo, DISK, each["age"])


def _of_server(found: Mapping[str, Any]) -> Iterator[Finding]:
    if found["read_only"]:
        what = "the database is read only (default_transaction_read_only is on): workers and relays take nothing"
        todo = "if that is no fence: ALTER DATABASE … RESET default_transaction_read_only; they go on by themselves"
        yield Finding("read_only", CRITICAL, what, todo, page("operations", "a-database-that-is-read-only"))
    if found["notify"] >= NOTIFY_SHARE:
        what = f"the server's NOTIFY queue is {100 * found['notify']:.0f} % full"
        todo = "end the session that listens and stays in a transaction; the log of a worker names it"
        yield Finding("notify", WARNING, what, todo, page("operations", "a-full-notify-queue"))
    if found["clients"] >= CONNECTIONS_SHARE * found["most"]:
        what = f"{found['clients']} of {found['most']} connections of the server are in use"
        todo = "raise max_connections, use fewer processes, or put a pooler before the application"
        yield Finding("connections", WARNING, what, todo, page("operations", "how-many-connections"))
    for each in found["behind"]:
        what = f"sequence {each['sequence']} goes on from {each['given']}, and there is {each['highest']} in the tables"
        todo = "run `pgqueue migrate`, or start a worker: each advances the sequences"
        yield Finding("sequences", CRITICAL, what, todo, at_night(Symptom.FAILED_OVER))


def _of_tables(found: Mapping[str, Any]) -> Iterator[Finding]:
    for each in found["dead"]:
        what = f"table {each['name']} has {each['dead']:,} dead rows beside {each['live']:,}, and was not vacuumed"
        todo = "let autovacuum run on it (is it on, are its workers busy?), or run VACUUM"
        yield Finding("vacuum", WARNING, what, todo, DISK, each["age"])
    if found["invalid"]:
        names = ", ".join(found["invalid"])
        yield Finding(
            "index",
            WARNING,
            f"invalid indexes: {names}",
            "REINDEX INDEX each of them",
            HERE,
        )
    if found["missing"]:
        names = ", ".join(found["missing"])
        todo = "make them again, as sql/migrations does"
        yield Finding("index", CRITICAL, f"missing indexes: {names}", todo, HERE)


def _of_workers(found: Mapping[str, Any], *, led: bool) -> Iterator[Finding]:
    versions = found["versions"]
    if len(versions) > 1 and min(each["youngest"] for each in versions) > ROLLOUT_SECONDS:
        listed = ", ".join(f"{each['workers']} of {each['version']}" for each in versions)
        todo = "restart those that a deploy has left out"
        what = f"workers of several versions: {listed}"
        # From the first worker of the second version on there were several.
        since = sorted(each["oldest"] for each in versions)[-2]
        yield Finding("versions", NOTICE, what, todo, at_night(Symptom.DEPLOY), since)
    lived = found["oldest"] or 0.0
    if (found["listener"] or 0.0) > LATE_SECONDS and not led:
        what = "no worker holds the leader's lock, although LISTEN is on: it goes through a pooler in transaction mode"
        todo = "give workers a direct connection for LISTEN: --listen-dsn"
        yield Finding("listen", NOTICE, what, todo, page("operations", "behind-a-pooler"))
    if lived > LATE_SECONDS and not 0 <= (found["measured"] or LATE_SECONDS) < LATE_SECONDS:
        what = "no worker has measured how many jobs there are"
        todo = "look into the logs of the workers; after a migration a role may lack rights: `pgqueue grants`"
        yield Finding("leader", WARNING, what, todo, HERE, found["measured"])
    for each in found["orphans"]:
        what = f"no live worker declares schedule {each['name']} any more"
        todo = "deploy its code, or remove it: `pgqueue schedules remove`"
        yield Finding("schedule", WARNING, what, todo, page("schedules"), each["age"])


def _of_flows(found: Mapping[str, Any]) -> Iterator[Finding]:
    if found["nodes"]:
        nodes = plural(found["nodes"], "node", "nodes")
        what = f"all jobs of {nodes} have ended, and jobs that wait for them are not released"
        todo = "look into the logs of the workers: a trigger or a value of a row may refuse a job; `pgqueue why ID`"
        yield Finding("unreleased", WARNING, what, todo, HERE, found["age"])


def _of_duties(duties: Iterable[DutyInfo]) -> Iterator[Finding]:
    for each in duties:
        if each.failing is not None and each.failing >= DUTY_SECONDS:
            what = f"the workers' duty {each.name} fails each time: {each.error}"
            yield Finding("duty", WARNING, what, _remedy(each.error or ""), HERE, each.failing)


def _remedy(error: str) -> str:
    """What to do about the error of a duty."""
    if "foreign key constraint" in error:
        return "drop this foreign key, or make it ON DELETE CASCADE or SET NULL: pgqueue deletes its old rows"
    if "in a trigger, has raised" in error:
        return (
            "drop this trigger, or let it spare pgqueue's tables: pgqueue deletes its old rows, and empties old leaves"
        )
    return "mend what the error names: the duty is tried again by itself; the logs of the workers say more"


@dataclass(frozen=True, slots=True)
class Left:
    """What is left in a queue without a worker. Times are in seconds.

    - `blocked`: for how long the first blocked job has waited; None if it is not among the oldest that were read.
    - `held`: how many jobs workers have that give no sign of life; `silent`: for how long the first of these is silent.
    """

    blocked: float | None = None
    held: int = 0
    silent: float | None = None


def _left(found: Measured) -> Steps[dict[str, Left]]:
    """Ask for what the measurement does not say of queues without a worker, if there are any with such jobs."""
    unserved = {queue.name for queue in _without_worker(found)}
    asked = {each.queue for each in found.groups if each.queue in unserved and each.state in ("blocked", "running")}
    if not asked:
        return {}
    told = yield _facts("doctor_unserved", queues=sorted(asked), most=UNSERVED_MOST)
    return {queue: Left(*values) for queue, *values in told}


def _without_worker(found: Measured) -> list[depth.QueueInfo]:
    """The queues that no live worker serves, but for those that are paused."""
    return [queue for queue in depth.queue_list(found, None) if queue.unserved and queue.paused_at is None]


def _of_unserved(found: Measured, left: Mapping[str, Left]) -> Iterator[Finding]:
    """Queues without a worker in which a job has waited for a while.

    1. Of available and blocked jobs all are counted. No worker moves a job whose time has come, if none lives at all:
       then it is still scheduled. No worker rescues the jobs of a dead one, if none lives at all: they still run.
    2. The measurement may be older than the death of the last worker. So what it says of slots does not count here.
    """
    of_queue: dict[str, list[Group]] = {}
    for group in found.groups:
        of_queue.setdefault(group.queue, []).append(group)
    for queue in _without_worker(found):
        groups = [each for each in of_queue.get(queue.name, ()) if each.reason != "task_paused"]
        rest = left.get(queue.name, Left())
        blocked = any(each.state == "blocked" for each in groups)
        waited = [found.now - each.since for each in groups if each.since is not None]
        waited += [each for each in (rest.blocked if blocked else None, rest.silent) if each is not None]
        seconds = max(waited, default=None)
        if seconds < UNSERVED_SECONDS if seconds is not None else not blocked:
            continue
        what = f"{_told(groups, rest)} in queue {queue.name}, which no live worker serves"
        todo = f"start a worker with -q {queue.name}"
        if not found.served:
            todo += "; no worker lives at all: if one should, its log says why it has ended"
        yield Finding("unserved", CRITICAL, what, todo, at_night(Symptom.STANDS_STILL), seconds, queue.name)


def _told(groups: Sequence[Group], rest: Left) -> str:
    """What waits in a queue without a worker."""
    waiting, said = depth.total(each for each in groups if each.state in ("available", "blocked")), []
    if waiting.n:
        said.append(plural(waiting.n, "job waits", "jobs wait", str(waiting)))
    if any(each.state == "scheduled" and each.since is not None for each in groups):
        said.append("scheduled jobs are overdue")
    if rest.held:
        said.append(plural(rest.held, "job is left by a dead worker", "jobs are left by dead workers"))
    return " and ".join(said)


def _with_free_slot(found: Measured) -> Steps[frozenset[str]]:
    """Ask which of the queues with a job that is stuck have a worker with a free slot for that job.

    The measurement does not say which job it is, so keys with room are looked for once more.
    """
    stuck = [queue.name for queue in depth.queue_list(found, None) if _is_stuck(queue)]
    if not stuck:
        return frozenset()
    roomy = yield _facts("depth_blocked", after="", n=STUCK_KEYS_MOST, again=[])
    return frozenset((yield _facts("doctor_free", queues=stuck, jobs=[job for _, job, _ in roomy])))


def _is_stuck(queue: depth.QueueInfo) -> bool:
    return queue.longest_blocked is not None and queue.longest_blocked > STUCK_SECONDS


def _of_queues(found: Measured, free: Container[str]) -> Iterator[Finding]:
    where = at_night(Symptom.STANDS_STILL)
    for queue in depth.queue_list(found, None):
        if _is_stuck(queue) and queue.name in free:
            what = f"a job of queue {queue.name} is blocked although its key has room, and a worker has a free slot"
            todo = "look into the logs of the workers of this queue; restart them if they say nothing"
            yield Finding("stuck", WARNING, what, todo, where, queue.longest_blocked, queue.name)
    yield from _of_overdue(found)
    unknown = depth.unknown_list(each for each in found.groups if found.served.get(each.queue))
    first = _first_unknown(found.groups)
    for task in sorted(unknown, key=lambda task: -task.jobs.n):
        since = first.get((task.queue, task.task))
        seconds = None if since is None else max(0.0, found.now - since)
        jobs = plural(task.jobs.n, "job waits", "jobs wait", str(task.jobs))
        what = f"{jobs} in queue {task.queue} for task {task.task}, which no live worker there knows"
        todo = "deploy its code, give the renamed task an alias, or cancel the jobs"
        yield Finding("unknown", WARNING, what, todo, where, seconds, task.queue)


def _first_unknown(groups: Iterable[Group]) -> dict[tuple[str, str], float]:
    """By queue and task: since when the first job waits whose task no worker knows. Of blocked jobs that is not
    counted."""
    first: dict[tuple[str, str], float] = {}
    for each in groups:
        if each.reason == depth.UNKNOWN and each.since is not None:
            name = each.queue, each.task
            first[name] = min(each.since, first.get(name, each.since))
    return first


def _of_overdue(found: Measured) -> Iterator[Finding]:
    """Jobs that were due when they were counted, and not available, although a worker serves their queue."""
    due: dict[str, float] = {}
    for group in found.groups:
        if group.state == "scheduled" and group.since is not None and found.served.get(group.queue):
            due[group.queue] = min(group.since, due.get(group.queue, group.since))
    for queue, since in sorted(due.items()):
        if found.counted_at - since >= OVERDUE_SECONDS:
            what = f"scheduled jobs of queue {queue} are overdue: workers live, and none makes them available"
            todo = "look into the logs of all workers: one says so if a trigger or a row refuses it; restart the leader"
            yield Finding("overdue", WARNING, what, todo, at_night(Symptom.STANDS_STILL), found.now - since, queue)


def _of_growth(found: Measured, growth: Iterable[tuple[str, list[tuple[int, int, int]]]]) -> Iterator[Finding]:
    """Queues that have grown for half an hour. Silent if half of their jobs wait for what another finding names."""
    for queue, spans in growth:
        if not found.served.get(queue):
            continue
        waiting = [each for each in found.groups if each.queue == queue and each.state in ("available", "blocked")]
        now = depth.total(waiting)
        if 2 * sum(each.n for each in waiting if each.reason in EXPLAINED) >= now.n:
            continue
        ago, before = since(spans)
        what = f"queue {queue} grows: {now} jobs wait, {before:,} did {10 * ago} minutes ago; more come than are done"
        todo = f"give it more slots, or see what enqueues so much: `pgqueue history -q {queue} --by task`"
        yield Finding("growth", WARNING, what, todo, at_night(Symptom.STARTS_LATE), 600.0 * ago, queue)


def _of_relays(relays: Iterable[lag.RelayLag]) -> Iterator[Finding]:
    for each in relays:
        if each.stopped is not None and each.reported < ABANDONED_SECONDS:
            most = "more than 10,000" if each.waiting > lag.COUNTED_MOST else None
            jobs = plural(each.waiting, "staged job waits", "staged jobs wait", most)
            what = f"the relay of outbox {each.name} delivers nothing, and {jobs}"
            yield Finding("relay", WARNING, what, each.stopped, page("relay", "copies"), each.reported)
        elif RELAY_SECONDS < each.reported < ABANDONED_SECONDS:
            what = f"the relay of outbox {each.name} reports no more: what is staged there becomes no job"
            todo = "start it: `pgqueue relay --from …`; if it runs, its log says what it waits for, as missing tables"
            yield Finding("relay", WARNING, what, todo, page("relay", "operations"), each.reported)


def _held(each: lag.HeldFence) -> Finding:
    what = f"{each.said}: what is staged there waits until it ends"
    todo = (
        f"end it: SELECT pg_terminate_backend({each.pid}). A relay does so, if both have the same role, or its "
        "role is in pg_signal_backend"
    )
    return Finding("fence", CRITICAL, what, todo, page("relay", "operations"), each.seconds)


def since(spans: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Since how many times ten minutes a queue grows, and how many jobs waited at most before that.

    `spans` are (which ten minutes ago, least, most), the last ten minutes first. It grows as long as the least of ten
    minutes is more than the most of the ten before.

    >>> since([(0, 900, 950), (1, 500, 800), (2, 100, 400), (3, 300, 350)])
    (2, 400)
    """
    last = spans[0]
    for each in spans[1:]:
        if each[0] != last[0] + 1 or each[2] >= last[1]:
            break
        last = each
    return last[0], last[2]


def _undeclared(each: limits.Undeclared) -> Finding:
    jobs = plural(each.waiting, "job waits", "jobs wait")
    what = f"{jobs} for {each.kind} {each.name}, which no worker has declared"
    todo = "deploy the code that declares it, or correct its name"
    return Finding("undeclared", WARNING, what, todo, at_night(Symptom.STANDS_STILL), each.waited)

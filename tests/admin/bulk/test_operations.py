"""Operations by filter: each job that fits is dealt with once, in steps, by one process after the other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any

import psycopg
import pytest
from clocks import step_clock
from driver_kinds import ASYNC, KINDS, drive
from roles import Role, refused, role
from workers import Eyes

import pgqueue
from pgqueue.admin.bulk import operations, runner, steps
from pgqueue.admin.bulk.operations import pace_of
from pgqueue.database import drivers, statements

__all__ = ["role"]

Conn = psycopg.Connection[Any]
LATER = datetime.now(UTC) + timedelta(days=2)


@pytest.fixture
def app(dsn: str) -> Iterator[Conn]:
    """A connection in autocommit mode."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that were locked are tried again at once."""
    monkeypatch.setattr(steps, "LATER_SECONDS", 0.0)


def put(app: Conn, n: int, state: str = "failed", task: str = "bulk.task", more: str = "") -> list[int]:
    """Jobs in a state; `more` are columns with their values."""
    columns = {
        "failed": {"finished_at": "now()", "reason": "'error'", "bin": "0"},
        "cancelled": {"finished_at": "now()", "reason": "'by hand'", "bin": "0"},
        "completed": {"finished_at": "now()", "bin": "0"},
        "running": {"worker_id": "1", "claim": "1", "started_at": "now()"},
        "scheduled": {"run_at": "now() + interval '1 hour'"},
        "blocked": {"lock_key": "'k'", "key": "'lock:k'"},
    }.get(state, {}) | dict(each.split(" = ", 1) for each in more.split("; ") if each)
    names, values = ", ".join(["state", "task", *columns]), ", ".join(["%s", "%s", *columns.values()])
    insert = f"INSERT INTO pgqueue.job ({names}) SELECT {values} FROM generate_series(1, %s) AS g RETURNING id"  # noqa: S608
    return [id for (id,) in app.execute(insert.encode(), [state, task, n]).fetchall()]


def finish(app: Conn, id: int, holder: str = "test") -> pgqueue.Bulk:
    """Work on an operation until it is over."""
    for _ in range(1_000):
        made = runner.take(app, holder, id)
        if made is None:
            break
        while made.open and not made.pause:
            runner.step(app, made)
    done = pgqueue.get_bulk(app, id)
    assert done.state == "done"
    return done


def states(app: Conn) -> dict[str, int]:
    rows = app.execute("SELECT state, count(*) FROM pgqueue.job GROUP BY state").fetchall()
    return {state: n for state, n in rows}


@pytest.mark.promise("F163")
@pytest.mark.parametrize("action", ["cancel", "retry", "discard", "reschedule"])
def test_the_record_of_a_job_has_the_operations_that_changed_it(app: Conn, action: str) -> None:
    """Each of the first 1,000; not those that were left out, nor the jobs of other operations, nor the later ones."""
    state = "scheduled" if action in ("cancel", "reschedule") else "failed"
    [*jobs, last], others = put(app, 1_001, state), put(app, 2, state, task="other")
    more: dict[str, Any] = {"at": LATER} if action == "reschedule" else {}
    by_hand = [] if action == "discard" else pgqueue.cancel(app, others[0], actor="bob")
    begun = pgqueue.bulk(app, action, state=state, task="bulk.task", actor="ann", **more)
    finish(app, begun.id)
    other = pgqueue.bulk(app, action, state=state, task="other", actor="eve", **more)
    finish(app, other.id)
    for job in (jobs[0], jobs[-1]):
        [entry] = pgqueue.audit(app, job=job)
        assert (entry.actor, entry.action, entry.count) == ("ann", f"bulk {action}", 1_001)
        assert entry.details["bulk"] == begun.id
    assert pgqueue.audit(app, job=last) == [], "of the job behind the first 1,000 it is not known"
    assert [each.actor for each in pgqueue.audit(app, job=others[1])] == ["eve"]
    if by_hand and action != "retry":  # it had ended, or was left out by the filter
        assert [each.actor for each in pgqueue.audit(app, job=others[0])] == ["bob"]
    assert len(pgqueue.audit(app, job=jobs[0], limit=1)) == 1


@pytest.mark.promise("F163")
def test_jobs_that_an_operation_has_left_out_were_not_changed_by_it(app: Conn) -> None:
    [job] = put(app, 1, "completed", more="unique_key = 'u'")
    begun = pgqueue.bulk(app, "retry", state="failed", actor="ann")
    app.execute("INSERT INTO pgqueue.bulk_job (bulk_id, reason, job_id) VALUES (%s, 'held', %s)", [begun.id, job])
    assert pgqueue.audit(app, job=job) == []


def fail(app: Conn, ids: list[int], error_type: str) -> None:
    """An attempt of each of these jobs that has failed with this class of errors."""
    app.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type) SELECT id, enqueued_at, 1, 1, 1, now(), now(), "
        "(SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'), 'error', %s FROM pgqueue.job WHERE id = ANY (%s)",
        [error_type, ids],
    )


@pytest.mark.promise("F300")
@pytest.mark.parametrize("most", [1, 1000])
@pytest.mark.parametrize("action", ["cancel", "retry", "discard", "reschedule"])
def test_the_chosen_jobs_are_changed_and_no_other(
    app: Conn, action: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them does not fit by its state, one is not there. The steps look at no other job."""
    monkeypatch.setattr(steps, "STEP_MOST", most)
    monkeypatch.setattr(steps, "WALK_MOST", 5)
    state, wrong = ("scheduled", "failed") if action in ("cancel", "reschedule") else ("failed", "scheduled")
    first, *_, second, _ = put(app, 9, state)
    [elsewhere] = put(app, 1, wrong)
    chosen = [second, first, elsewhere, second + 1_000]
    found = pgqueue.preview_bulk(app, action, ids=chosen)
    assert (found.count.n, found.count.exact, found.ids) == (2, True, (first, second))
    more: dict[str, Any] = {"at": LATER} if action == "reschedule" else {}
    begun = pgqueue.bulk(app, action, ids=chosen, note="by hand", **more)
    done = finish(app, begun.id)
    assert (done.changed, done.left_out, done.note) == (2, 0, "by hand")
    assert [ids for ids in done.ids.values()] == [(first, second)]
    assert states(app).get(state, 0) == (9 if action == "reschedule" else 7) and states(app)[wrong] == 1
    [entry] = pgqueue.audit(app)
    assert entry.target["ids"] == sorted(chosen) and entry.details["note"] == "by hand"


@pytest.mark.promise("F301")
@pytest.mark.parametrize("most", [1, 1000])
def test_an_operation_takes_the_jobs_of_a_cause_that_a_list_has(
    app: Conn, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STEP_MOST", most)
    monkeypatch.setattr(steps, "WALK_MOST", 2)
    for task in ("bulk.task", "bulk.other"):
        for error_type in ("KeyError", "ValueError"):
            fail(app, put(app, 3, task=task), error_type)
    put(app, 2)
    asked: dict[str, Any] = {"state": "failed", "task": "bulk.task", "error_type": "KeyError"}
    listed = sorted(job.id for job in pgqueue.find(app, **asked))
    found = pgqueue.preview_bulk(app, "retry", **asked)
    assert (found.count.n, found.ids) == (3, tuple(listed)) and len(listed) == 3
    done = finish(app, pgqueue.bulk(app, "retry", **asked).id)
    assert done.ids == {"retried": tuple(listed)} and done.target["error_type"] == "KeyError"
    assert states(app) == {"available": 3, "failed": 11}


@pytest.mark.promise("F301")
def test_the_number_of_jobs_of_a_cause_beside_many_others_is_an_estimate(
    app: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "LOOKED_MOST", 80)
    fail(app, put(app, 400)[::2], "KeyError")
    found = pgqueue.preview_bulk(app, "retry", error_type="KeyError")
    assert not found.count.exact and 180 <= found.count.n <= 220


@pytest.mark.promise("F300")
@pytest.mark.parametrize("ids", [[], [0], ["7"], list(range(1, 1_002))], ids=lambda ids: f"{len(ids)}")
def test_what_is_no_choice_of_jobs_is_refused(app: Conn, ids: list[Any]) -> None:
    put(app, 1)
    for call in (pgqueue.preview_bulk, pgqueue.bulk):
        with pytest.raises(pgqueue.InvalidOption, match="ids"):
            call(app, "retry", ids=ids)
    with pytest.raises(pgqueue.InvalidOption, match="500 characters"):
        pgqueue.bulk(app, "retry", task="bulk.task", note="x" * 501)
    assert pgqueue.bulks(app) == []


ACTIONS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, int]]] = {
    "cancel": ({}, {"cancelled": 9, "requested": 3}, {"cancelled": 9 + 3, "running": 3, "failed": 3, "completed": 3}),
    "retry": ({}, {"retried": 6}, {"available": 3 + 6, "scheduled": 3, "blocked": 3, "running": 3, "completed": 3}),
    "discard": ({}, {"discarded": 9}, {"available": 3, "scheduled": 3, "blocked": 3, "running": 3}),
    "reschedule": (
        {"at": LATER},
        {"rescheduled": 9},
        {"scheduled": 9, "running": 3, "failed": 3, "cancelled": 3, "completed": 3},
    ),
}


@pytest.mark.promise("F85")
@pytest.mark.each_value
@pytest.mark.parametrize("most", [1, 2, 1000])
@pytest.mark.parametrize("walk", [2, 10_000])
@pytest.mark.parametrize("action", ACTIONS)
def test_all_that_fit_are_changed_and_nothing_else(
    action: str, walk: int, most: int, app: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of whatever size."""
    monkeypatch.setattr(steps, "STEP_MOST", most)
    monkeypatch.setattr(steps, "WALK_MOST", walk)
    options, counts, left = ACTIONS[action]
    for _ in range(3):
        for state in ("available", "scheduled", "blocked", "running", "failed", "cancelled", "completed"):
            put(app, 1, state)
            put(app, 1, state, "another")
    begun = pgqueue.bulk(app, action, task="bulk.task", **options)
    assert (begun.state, begun.counts, begun.changed) == ("running", {}, 0)
    done = finish(app, begun.id)
    assert done.counts == counts and done.changed == sum(counts.values()) and done.left_out == 0
    assert {reason: len(ids) for reason, ids in done.ids.items()} == counts
    app.execute("DELETE FROM pgqueue.job WHERE task = 'another'")
    assert states(app) == left
    signals = app.execute("SELECT count(*) FROM pgqueue.job_signal").fetchone()
    assert signals == (3 if action == "cancel" else 0,)


@pytest.mark.promise("F85")
def test_states_queues_and_ages_choose(app: Conn) -> None:
    old = put(app, 2, more="finished_at = now() - interval '3 hours'")
    put(app, 2)
    mine = put(app, 1, more="queue = 'mail'; finished_at = now() - interval '3 hours'")
    put(app, 2, "cancelled", more="finished_at = now() - interval '3 hours'")
    done = finish(app, pgqueue.bulk(app, "retry", state="failed", older_than="2h", queue="mail").id)
    assert done.ids == {"retried": tuple(mine)}
    done = finish(app, pgqueue.bulk(app, "retry", state="failed", older_than=timedelta(hours=2)).id)
    assert done.ids == {"retried": tuple(old)}
    with pytest.raises(pgqueue.InvalidOption, match="use one of failed, cancelled"):
        pgqueue.bulk(app, "retry", state="completed")
    [again] = put(app, 1, "completed", "again.task")
    done = finish(app, pgqueue.bulk(app, "retry", state=["completed"], task="again.task", again=True).id)
    assert done.ids == {"again": (again,)}


@pytest.mark.promise("F85")
@pytest.mark.parametrize("action", ACTIONS)
def test_an_empty_filter_is_refused(action: str, app: Conn) -> None:
    options = ACTIONS[action][0]
    for call in (pgqueue.bulk, pgqueue.preview_bulk):
        given = options if call is pgqueue.bulk else {}
        with pytest.raises(pgqueue.InvalidOption, match="would choose all jobs"):
            call(app, action, **given)
        with pytest.raises(pgqueue.InvalidOption, match="would choose all jobs"):
            call(app, action, queue=None, **given)
    assert pgqueue.bulks(app) == [] and pgqueue.audit(app) == []


@pytest.mark.promise("F85")
def test_what_an_action_does_not_have_is_refused(app: Conn) -> None:
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ("delete", {"queue": "q"}),
        (["cancel"], {"queue": "q"}),
        (None, {"queue": "q"}),
        ("cancel", {"state": 7}),
        ("retry", {"queue": "q", "reason": "x"}),
        ("retry", {"queue": "q", "pace": "fast"}),
        ("retry", {"queue": "q", "pace": 0}),
        ("retry", {"queue": "q", "pace": True}),
        ("retry", {"queue": "q", "up_to": "7"}),
        ("cancel", {"queue": "q", "older_than": 60}),
        ("cancel", {"queue": "q", "again": True}),
        ("cancel", {"queue": "q", "reason": "two\nlines"}),
        ("cancel", {"state": "failed"}),
        ("cancel", {"queue": "q", "at": LATER}),
        ("reschedule", {"queue": "q"}),
        ("reschedule", {"queue": "q", "at": datetime(2026, 1, 1)}),
        ("reschedule", {"state": "running", "at": LATER}),
    ]
    for action, options in wrong:
        with pytest.raises(pgqueue.InvalidOption):
            pgqueue.bulk(app, action, **options)
    for bad in (0, True, "7", 1_001):
        with pytest.raises(pgqueue.InvalidOption):
            pgqueue.bulks(app, limit=bad)  # type: ignore[arg-type]
    assert pgqueue.stop_bulk(app, 7) is None
    with pytest.raises(pgqueue.BulkNotFound):
        pgqueue.get_bulk(app, 7)


@pytest.mark.promise("F85")
def test_jobs_that_fail_again_meanwhile_are_not_visited_again(app: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those enqueued after the preview, however long the operation takes."""
    monkeypatch.setattr(steps, "STEP_MOST", 10)
    ids = put(app, 50)
    seen = pgqueue.preview_bulk(app, "retry", task="bulk.task")
    assert (seen.count.n, seen.count.exact, seen.ids) == (50, True, tuple(ids[:10])) and seen.up_to == max(ids)
    put(app, 5)
    begun = pgqueue.bulk(app, "retry", task="bulk.task", up_to=seen.up_to)
    made = runner.take(app, "test", begun.id)
    assert made is not None
    while made.open:
        runner.step(app, made)
        app.execute(
            "WITH gone AS (DELETE FROM pgqueue.job_available RETURNING *) INSERT INTO pgqueue.job "
            "(id, enqueued_at, state, task, attempt, finished_at, reason, bin) "
            "SELECT id, enqueued_at, 'failed', task, attempt + 1, now(), 'error', 0 FROM gone"
        )
    done = pgqueue.get_bulk(app, begun.id)
    assert done.counts == {"retried": 50} and done.ids["retried"] == tuple(ids)
    attempts = app.execute("SELECT attempt, count(*) FROM pgqueue.job GROUP BY attempt ORDER BY 1").fetchall()
    assert attempts == [(0, 5), (1, 50)]


# Locks, keys, refusals ------------------------------------------------------------------------------------------------


@pytest.mark.promise("F86")
@pytest.mark.parametrize(("action", "state"), [("cancel", "available"), ("retry", "failed"), ("discard", "failed")])
def test_a_step_waits_for_no_locked_job_and_tries_it_again(
    action: str, state: str, dsn: str, app: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STEP_MOST", 4)
    ids = put(app, 10, state)
    held, kept = ids[3:6], ids[5:6]
    did = {"cancel": "cancelled", "retry": "retried", "discard": "discarded"}[action]
    with psycopg.connect(dsn) as other, psycopg.connect(dsn) as longer:
        other.execute("SELECT FROM pgqueue.job WHERE id = ANY (%s) FOR UPDATE", [held[:2]])
        longer.execute("SELECT FROM pgqueue.job WHERE id = ANY (%s) FOR UPDATE", [kept])
        begun = pgqueue.bulk(app, action, task="bulk.task")
        made = runner.take(app, "test", begun.id)
        assert made is not None
        app.execute("SET statement_timeout = '5s'")
        while pgqueue.get_bulk(app, begun.id).round == 0:
            runner.step(app, made)
        seen = pgqueue.get_bulk(app, begun.id)
        assert seen.counts == {did: 7, "locked": 3} and seen.ids["locked"] == tuple(held) and seen.state == "running"
        other.rollback()
        done = finish(app, begun.id)
    assert done.counts == {did: 9, "locked": 1} and done.ids["locked"] == tuple(kept)
    assert (done.changed, done.left_out) == (9, 1)


@pytest.mark.promise("F86")
def test_a_job_that_has_moved_when_it_is_tried_again_is_left_alone(dsn: str, app: Conn) -> None:
    ids = put(app, 3, "available")
    begun = pgqueue.bulk(app, "cancel", state="available")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [ids[1]])
        made = runner.take(app, "test", begun.id)
        assert made is not None
        runner.step(app, made)
        other.execute(
            "WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING *) INSERT INTO pgqueue.job "
            "(id, state, task, enqueued_at, worker_id, claim, started_at) "
            "SELECT id, 'running', task, enqueued_at, 1, 1, now() FROM gone",
            [ids[1]],
        )
        other.commit()
    done = finish(app, begun.id)
    assert done.counts == {"cancelled": 2, "moved": 1} and done.ids["moved"] == (ids[1],)


@pytest.mark.promise("F86")
def test_a_key_that_another_job_has_and_one_that_is_just_taken(dsn: str, app: Conn) -> None:
    """The first is `held`. The second is waited for, half a second, and only by its own step."""
    ids = put(app, 30, more="unique_key = 'k' || g")
    task = pgqueue.remote("bulk.task")
    holder = task.using(unique="k7").enqueue(app)
    with psycopg.connect(dsn) as other:
        task.using(unique="k9").enqueue(other)
        begun = pgqueue.bulk(app, "retry", state="failed")
        made = runner.take(app, "test", begun.id)
        assert made is not None
        while pgqueue.get_bulk(app, begun.id).round == 0:
            runner.step(app, made)
        assert pgqueue.get_bulk(app, begun.id).counts == {"retried": 28, "held": 1, "locked": 1}
        other.rollback()
    done = finish(app, begun.id)
    assert done.counts == {"retried": 29, "held": 1} and done.ids["held"] == (ids[6],)
    assert holder.id not in done.ids["retried"]


@pytest.mark.promise("F86")
def test_a_job_that_the_server_refuses_to_change_harms_no_other(app: Conn) -> None:
    ids = put(app, 25, "available")
    app.execute(
        "CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;"
        f"CREATE TRIGGER no BEFORE INSERT ON pgqueue.job_dead_0 FOR EACH ROW WHEN (NEW.id = {ids[7]})"
        " EXECUTE FUNCTION public.no()"
    )
    begun = pgqueue.bulk(app, "cancel", state="available")
    told: list[tuple[int, str]] = []
    made = runner.take(app, "test", begun.id)
    assert made is not None
    while made.open:
        runner.step(app, made, lambda id, error: told.append((id, str(error).splitlines()[0])))
    done = pgqueue.get_bulk(app, begun.id)
    assert done.counts == {"cancelled": 24, "refused": 1} and done.ids["refused"] == (ids[7],)
    assert told == [(ids[7], "not this one")]


FAIL = (
    "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING *) INSERT INTO pgqueue.job "
    "(id, enqueued_at, state, task, finished_at, reason, bin) "
    "SELECT id, enqueued_at, 'failed', task, now(), 'error', 0 FROM gone"
)
"""What runs, fails."""


def refuse(app: Conn, table: str, id: int) -> None:
    """A trigger of the application lets no row of this job into the table."""
    app.execute(
        "CREATE OR REPLACE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;"
        f"CREATE TRIGGER no BEFORE INSERT ON pgqueue.{table} FOR EACH ROW WHEN (NEW.id = {id})"
        " EXECUTE FUNCTION public.no()"
    )


@pytest.mark.promise("F86")
@pytest.mark.parametrize("named", [True, False], ids=["named", "naive"])
@pytest.mark.parametrize("comes", ["before the question", "before the step", "before it is left out"])
def test_a_job_that_was_not_tried_is_not_left_out_for_another_one(
    comes: str, named: bool, app: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a lower id fails while the process is about to leave out the one that the server has refused."""
    [before, late, refused, behind] = put(app, 4)
    app.execute(
        "WITH gone AS (DELETE FROM pgqueue.job_dead WHERE id = %s RETURNING *) INSERT INTO pgqueue.job "
        "(id, enqueued_at, state, task, worker_id, claim, started_at) "
        "SELECT id, enqueued_at, 'running', task, 1, 1, now() FROM gone",
        [late],
    )
    refuse(app, "job_available", refused)
    begun = pgqueue.bulk(app, "retry", state="failed")
    made = runner.take(app, "test", begun.id)
    assert made is not None
    if not named:
        usual = statements.text
        monkeypatch.setattr(
            steps, "text", lambda name, schema: NAMELESS if name == "bulk_pass" else usual(name, schema)
        )
    told: list[int] = []
    name = {"before the question": "bulk_first", "before the step": "bulk_retry", "before it is left out": "bulk_pass"}
    awaited = NAMELESS if name[comes] == "bulk_pass" and not named else statements.text(name[comes], "pgqueue")
    failed = False
    while made.open:
        step = made.step()
        alone = name[comes] == "bulk_first" or step.params["only"] == refused
        if not failed and step.sql == awaited and alone:
            app.execute(FAIL.encode())
            failed = True
        try:
            left_out = made.stepped(drivers.run(app, step))
        except psycopg.Error as error:
            assert made.refused(error)
        else:
            told += [] if left_out is None else [left_out]
    assert failed
    done = pgqueue.get_bulk(app, begun.id)
    if not named and comes == "before it is left out":
        assert told == [late, refused] and done.ids["refused"] == (late, refused), "the job that was never tried"
        return
    assert told == [refused]
    assert done.ids == {"retried": (before, late, behind), "refused": (refused,)} and done.left_out == 1


@pytest.mark.promise("F85")
@pytest.mark.parametrize("looks", [True, False], ids=["looks again", "naive"])
@pytest.mark.parametrize("becomes", ["another queue", "another task", "the same"])
@pytest.mark.parametrize(("action", "state"), [("cancel", "cancelled"), ("reschedule", "scheduled")])
def test_a_job_that_is_replaced_meanwhile_has_to_fit_again(
    action: str, state: str, becomes: str, looks: bool, dsn: str, app: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The enqueue that replaces it has it locked, and keeps its id. The naive version locks by id and state."""
    task, other_task = pgqueue.remote("bulk.task"), pgqueue.remote("other.task")
    kept = pgqueue.Unique("u", on_duplicate="replace")
    job = task.using(unique=kept, queue="mail").enqueue(app)
    more: dict[str, Any] = {"at": LATER} if action == "reschedule" else {}
    begun = pgqueue.bulk(app, action, queue="mail", task="bulk.task", **more)
    if not looks:
        usual, locks = statements.text, "pgqueue.bulk_lock(mine.id, ARRAY(SELECT id FROM fitting))"
        by_id = (
            "(SELECT j.id FROM pgqueue.job j WHERE j.id = ANY (ARRAY(SELECT id FROM fitting)) "
            "AND j.state = ANY (mine.states) FOR UPDATE SKIP LOCKED)"
        )
        monkeypatch.setattr(steps, "text", lambda name, schema: usual(name, schema).replace(locks, by_id))
    with psycopg.connect(dsn) as conn:
        asked = other_task if becomes == "another task" else task
        put_in = asked.using(unique=kept, queue="sms" if becomes == "another queue" else "mail").enqueue(conn)
        assert put_in.replaced and put_in.id == job.id
        made = runner.take(app, "test", begun.id)
        assert made is not None
        runner.step(app, made)
        assert pgqueue.get_bulk(app, begun.id).counts == {"locked": 1}
        conn.commit()
    done = finish(app, begun.id)
    if looks and becomes != "the same":
        assert done.counts == {"moved": 1} and states(app) == {"available": 1}
    else:
        assert done.changed == 1 and states(app) == {state: 1}


@pytest.mark.promise("F85")
@pytest.mark.parametrize("action", ["retry", "discard"])
def test_a_job_that_has_ended_anew_is_not_as_old_as_it_was(action: str, dsn: str, app: Conn) -> None:
    [job] = put(app, 1, more="finished_at = now() - interval '3 hours'")
    begun = pgqueue.bulk(app, action, state="failed", older_than="2h")
    with psycopg.connect(dsn) as other:
        other.execute(
            "WITH gone AS (DELETE FROM pgqueue.job_dead RETURNING *) INSERT INTO pgqueue.job "
            "(id, enqueued_at, state, task, finished_at, reason, bin) "
            "SELECT id, enqueued_at, state, task, now(), reason, 0 FROM gone"
        )
        made = runner.take(app, "test", begun.id)
        assert made is not None
        runner.step(app, made)
        other.commit()
    done = finish(app, begun.id)
    assert done.counts == {"moved": 1} and done.ids["moved"] == (job,) and states(app) == {"failed": 1}


# Leases, fences, stops ------------------------------------------------------------------------------------------------


def expire(app: Conn) -> None:
    app.execute("UPDATE pgqueue.bulk SET leased_until = pgqueue.now()")


NAMELESS = statements.text("bulk_pass", "pgqueue").replace(
    "f.id = coalesce(%(only)s::bigint, f.id)", "%(only)s::bigint IS NOT NULL"
)
"""Without the name of the job: the first one is left out."""
NAIVE = NAMELESS.replace("b.fence = %(fence)s::bigint", "%(fence)s::bigint IS NOT NULL")
"""And without the fence."""


@pytest.mark.promise("F87")
@pytest.mark.parametrize("fenced", [True, False], ids=["fence", "naive"])
def test_a_suspended_process_changes_nothing_afterwards(
    fenced: bool, app: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was about to leave out the job that the server had refused; another process has dealt with it meanwhile."""
    monkeypatch.setattr(steps, "STEP_MOST", 1)
    ids = put(app, 5, "available")
    begun = pgqueue.bulk(app, "cancel", state="available")
    suspended = runner.take(app, "suspended", begun.id)
    assert suspended is not None and runner.take(app, "other", begun.id) is None
    assert suspended.refused(psycopg.errors.CheckViolation("refused"))
    runner.step(app, suspended)  # which job that was
    assert suspended.refused(psycopg.errors.CheckViolation("refused"))
    stale = suspended.step()
    expire(app)
    other = runner.take(app, "other", begun.id)
    assert other is not None
    runner.step(app, other)
    assert pgqueue.get_bulk(app, begun.id).ids == {"cancelled": (ids[0],)}
    if not fenced:
        app.execute(NAIVE.encode(), dict(stale.params))
        assert pgqueue.get_bulk(app, begun.id).ids == {"cancelled": (ids[0],), "refused": (ids[1],)}
        return
    assert suspended.stepped(app.execute(stale.sql.encode(), dict(stale.params)).fetchall()) is None
    assert not suspended.open
    done = finish(app, begun.id, "other")
    assert done.counts == {"cancelled": 5}


@pytest.mark.promise("F87")
def test_a_step_whose_answer_was_lost_is_not_made_again(app: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEP_MOST", 2)
    put(app, 5, "available")
    begun = pgqueue.bulk(app, "cancel", state="available")
    made = runner.take(app, "test", begun.id)
    assert made is not None
    sent = made.step()
    for answers in (1, 0):
        assert len(app.execute(sent.sql.encode(), dict(sent.params)).fetchall()) == answers
    assert pgqueue.get_bulk(app, begun.id).counts == {"cancelled": 2}
    assert finish(app, begun.id).counts == {"cancelled": 5}


@pytest.mark.promise("F87")
def test_while_one_process_has_it_no_other_takes_it_and_afterwards_at_once(app: Conn) -> None:
    put(app, 5, "available")
    begun = pgqueue.bulk(app, "cancel", state="available", pace="1/s")
    made = runner.take(app, "one", begun.id)
    assert made is not None and runner.take(app, "two") is None
    assert pgqueue.get_bulk(app, begun.id).holder == "one"
    runner.release(app, made)
    assert pgqueue.get_bulk(app, begun.id).holder is None
    taken = runner.take(app, "two")
    assert taken is not None
    runner.step(app, made)
    assert not made.open
    runner.step(app, taken)
    assert taken.open and 0.5 < taken.pause <= 1.0
    assert runner.take(app, "two") is None  # before its time
    app.execute("UPDATE pgqueue.bulk SET next_at = pgqueue.now()")
    assert runner.take(app, "two") is not None


@pytest.mark.promise("F87")
@pytest.mark.parametrize("pace", [None, 4.0, 0.01])
@pytest.mark.parametrize("stepped", [3_600, 86_400 * 365])
def test_an_operation_goes_on_after_the_clock_was_set_back(
    stepped: float, pace: float | None, app: Conn, eyes: Eyes
) -> None:
    """Its times are of a clock that was ahead. The naive version waits until the true time has come up to them."""
    put(app, 12, "available")
    step_clock(eyes, stepped)
    begun = pgqueue.bulk(app, "cancel", state="available", pace=pace)
    made = runner.take(app, "one", begun.id)
    assert made is not None
    if pace is not None:
        runner.step(app, made)
        assert made.pause > 0.0
    step_clock(eyes, 0.0)
    assert drivers.run(app, steps.due("pgqueue", "two")) <= 0.0  # type: ignore[operator]
    taken = runner.take(app, "two", begun.id)
    assert taken is not None
    runner.step(app, made)
    assert not made.open, "the process that had it changes nothing more"
    runner.step(app, taken)
    n = {None: 12, 4.0: 8, 0.01: 2}[pace]
    assert pgqueue.get_bulk(app, begun.id).counts == {"cancelled": n}
    if pace is not None:  # and its times are believed again
        left = drivers.run(app, steps.due("pgqueue", "two"))
        assert left is not None and 0.0 < left <= taken.pause and runner.take(app, "two", begun.id) is None
        assert runner.take(app, "three", begun.id) is None


@pytest.mark.promise("F87")
def test_a_stop_waits_for_the_step_and_says_what_was_done(dsn: str, app: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEP_MOST", 2)
    put(app, 7, "available")
    begun = pgqueue.bulk(app, "cancel", state="available", actor="ann")
    made = runner.take(app, "test", begun.id)
    assert made is not None
    runner.step(app, made)
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgqueue.bulk FOR UPDATE")
        runner.step(app, made)  # the row is locked: this process has it no more, and takes it anew
        assert not made.open and runner.take(app, "test", begun.id) is None
    made = runner.take(app, "test", begun.id)
    assert made is not None
    stopped = pgqueue.stop_bulk(app, begun.id, actor="bob")
    assert stopped is not None
    assert (stopped.state, stopped.stopped_by, stopped.counts) == ("stopped", "bob", {"cancelled": 2})
    runner.step(app, made)
    assert not made.open and runner.take(app, "test") is None and pgqueue.stop_bulk(app, begun.id) is None
    assert states(app) == {"available": 5, "cancelled": 2}
    [stop, start] = pgqueue.audit(app)
    assert (stop.actor, stop.action, stop.target, stop.details) == (
        "bob",
        "bulk stop",
        {"bulk": begun.id},
        {"changed": 2},
    )
    assert (start.actor, start.action, start.count) == ("ann", "bulk cancel", 2)


# What is told of them -------------------------------------------------------------------------------------------------


@pytest.mark.promise("F88")
def test_an_operation_is_one_row_of_the_record_whose_count_grows(app: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEP_MOST", 2)
    put(app, 5)
    begun = pgqueue.bulk(app, "retry", task="bulk.task", actor="ann")
    made = runner.take(app, "test", begun.id)
    assert made is not None
    counts = []
    while made.open:
        [entry] = pgqueue.audit(app)
        counts.append(entry.count)
        runner.step(app, made)
    [entry] = pgqueue.audit(app)
    assert [*counts, entry.count] == [0, 2, 4, 5]
    assert (entry.actor, entry.action, entry.target) == (
        "ann",
        "bulk retry",
        {"states": ["failed", "cancelled"], "task": "bulk.task"},
    )
    assert entry.details == {"bulk": begun.id, "up_to": begun.up_to, "again": False}


@pytest.mark.promise("F88")
def test_an_operation_that_is_rolled_back_was_never_there(dsn: str, app: Conn) -> None:
    put(app, 1)
    with psycopg.connect(dsn) as undone:
        pgqueue.bulk(undone, "retry", task="bulk.task")
        undone.rollback()
    assert pgqueue.bulks(app) == [] and pgqueue.audit(app) == []


@pytest.mark.promise("F88")
def test_the_first_thousand_ids_of_each_reason_are_kept(app: Conn) -> None:
    ids = put(app, 2_500)
    done = finish(app, pgqueue.bulk(app, "retry", task="bulk.task").id)
    assert done.counts == {"retried": 2_500} and done.ids == {"retried": tuple(ids[:1_000])}
    [listed] = pgqueue.bulks(app)
    assert listed.ids == {} and listed.counts == done.counts
    more = [pgqueue.bulk(app, "cancel", queue="none").id for _ in range(3)]
    assert [each.id for each in pgqueue.bulks(app, limit=2)] == [more[2], more[1]]
    assert [each.id for each in pgqueue.bulks(app, before=more[0])] == [done.id]


@pytest.mark.promise("F88")
def test_a_preview_is_exact_up_to_its_bound_and_an_estimate_beyond(app: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgqueue.admin.bulk.operations.LOOKED_MOST", 400)
    app.execute(
        "INSERT INTO pgqueue.job (task, queue) SELECT CASE WHEN g % 4 = 0 THEN 'bulk.task' ELSE 'x' END, "
        "CASE WHEN g > 20000 THEN 'late' ELSE 'default' END FROM generate_series(1, 40000) AS g"
    )
    found = pgqueue.preview_bulk(app, "cancel", task="bulk.task")
    assert not found.count.exact and abs(found.count.n - 10_000) < 2_000 and len(found.ids) == 10
    found = pgqueue.preview_bulk(app, "cancel", queue="late")
    assert not found.count.exact and abs(found.count.n - 20_000) < 2_000
    app.execute("DELETE FROM pgqueue.job WHERE id > (SELECT min(id) + 399 FROM pgqueue.job)")
    found = pgqueue.preview_bulk(app, "cancel", task="bulk.task")
    assert (found.count.n, found.count.exact) == (100, True)


READ = """
    SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = 'pgqueue')
         + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = 'pgqueue')
"""


@pytest.mark.promise("F88")
@pytest.mark.parametrize("what", ["preview", "step"])
def test_what_is_read_has_a_bound_whenever_the_session_planned(
    what: str, app: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.admin.bulk.operations.LOOKED_MOST", 400)
    monkeypatch.setattr(steps, "STEP_MOST", 100)
    monkeypatch.setattr(steps, "WALK_MOST", 400)
    app.execute("VACUUM ANALYZE")

    def ask() -> None:
        if what == "preview":
            pgqueue.preview_bulk(app, "retry", task="bulk.task")
            return
        begun = pgqueue.bulk(app, "retry", task="bulk.task")
        made = runner.take(app, "test", begun.id)
        assert made is not None
        runner.step(app, made)
        pgqueue.stop_bulk(app, begun.id)

    def read() -> int:
        app.execute("SELECT pg_stat_force_next_flush()")
        [[rows]] = app.execute(READ.encode()).fetchall()
        return int(rows)

    for _ in range(10):  # psycopg prepares, and PostgreSQL makes its mind up
        ask()
    put(app, 20_000)
    before = read()
    ask()
    assert 0 < read() - before < 5_000


@pytest.mark.promise("F88")
def test_paces(app: Conn) -> None:
    assert [pace_of(each) for each in ("50/s", "300/minute", "1.5 / s", 7, "3600/h")] == [50, 5, 1.5, 7, 1]
    put(app, 30)
    begun = pgqueue.bulk(app, "retry", task="bulk.task", pace="10/s")
    made = runner.take(app, "test", begun.id)
    assert made is not None
    runner.step(app, made)
    [(ahead,)] = app.execute("SELECT extract(epoch FROM next_at - pgqueue.now()) FROM pgqueue.bulk").fetchall()
    assert pgqueue.get_bulk(app, begun.id).counts == {"retried": 10} and 0.5 < float(ahead) <= 1.0


@pytest.mark.promise("F88")
@pytest.mark.parametrize("pace", [0.5, 50.5, 1_000, 1_001, 1_500, 1_999.5, 10_000, 1e9])
def test_the_steps_of_a_second_are_not_more_than_the_pace(pace: float) -> None:
    """Naive: two steps of 1,000 jobs fall into a second at 1,500 jobs a second."""
    size = steps.size_of(pace)
    many = ceil(pace / size)  # a step is followed by a pause of size / pace seconds
    assert 1 <= size <= 1_000 and many * size < pace + many


@pytest.mark.promise("F88")
@pytest.mark.parametrize("late", ["0 s", "0.5 s", "1 h"])
def test_a_step_that_is_late_is_followed_by_its_whole_pause(late: str, app: Conn) -> None:
    """Else an operation that another process takes over would do twice the jobs of a second."""
    put(app, 30)
    begun = pgqueue.bulk(app, "retry", task="bulk.task", pace="10/s")
    app.execute("UPDATE pgqueue.bulk SET next_at = pgqueue.now() - %s::interval", [late])
    made = runner.take(app, "test", begun.id)
    assert made is not None
    runner.step(app, made)
    assert made.pause == pytest.approx(1.0) and runner.take(app, "test", begun.id) is None


# Connections and roles ------------------------------------------------------------------------------------------------


@pytest.mark.promise("F88")
@pytest.mark.parametrize("kind", KINDS)
def test_on_every_kind_of_connection(kind: str, dsn: str) -> None:
    async def look() -> None:
        async with KINDS[kind](dsn, True) as app:

            async def call(name: str, *args: Any, **options: Any) -> Any:
                if kind in ASYNC:
                    return await getattr(pgqueue, f"a{name}")(app.conn, *args, **options)
                return getattr(pgqueue, name)(app.conn, *args, **options)

            found = await call("preview_bulk", "cancel", queue="mail")
            begun = await call("bulk", "cancel", queue="mail", up_to=found.up_to, pace=5)
            assert (await call("get_bulk", begun.id)).pace == 5
            assert [each.id for each in await call("bulks")] == [begun.id]
            assert (await call("stop_bulk", begun.id)).state == "stopped"

    drive(kind, look())


@pytest.mark.promise("F85", "F113")
@pytest.mark.parametrize(
    ("state", "meant"),
    [
        ("retrying", [2, 3]),
        ("scheduled", [1, 2, 3]),
        (["retrying", "scheduled"], [1, 2, 3]),
        (["retrying", "available"], [2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("action", ["cancel", "reschedule"])
def test_retrying_are_the_scheduled_jobs_that_wait_for_another_attempt(
    action: str, state: str | list[str], meant: list[int], app: Conn
) -> None:
    for place, more in enumerate(("", "attempt = 1", "crashes = 1"), 1):
        put(app, 1, "scheduled", more=f"id = {place}" + f"; {more}" * bool(more))
    for place, more in enumerate(("", "attempt = 1"), 4):
        put(app, 1, "available", more=f"id = {place}" + f"; {more}" * bool(more))
    app.execute("SELECT setval('pgqueue.job_id_seq', 5)")
    assert pgqueue.preview_bulk(app, action, state=state).ids == tuple(meant)
    begun = pgqueue.bulk(app, action, state=state, **ACTIONS[action][0])
    done = finish(app, begun.id)
    [(did, ids)] = done.ids.items()
    assert (did, ids) == (next(iter(ACTIONS[action][1])), tuple(meant))


@pytest.mark.promise("F89")
@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["operate", "work"])
@pytest.mark.parametrize("action", ACTIONS)
def test_roles_that_operate_or_work_make_the_steps_and_forge_no_record(
    action: str, kind: Any, app: Conn, role: Role
) -> None:
    """An operator begins an operation, and a worker goes on with it."""
    operator, mine = role("operate"), role(kind)
    for state in ("available", "scheduled", "blocked", "running", "failed", "completed"):
        put(app, 2, state, more="unique_key = 'u' || g" if state == "failed" else "")
    with psycopg.connect(operator, autocommit=True) as conn:
        begun = pgqueue.bulk(conn, action, task="bulk.task", **ACTIONS[action][0])
        begun_by = conn.info.user
    with psycopg.connect(mine, autocommit=True) as conn:
        done = finish(conn, begun.id)
        assert done.left_out == 0 and done.changed > 0
        [entry] = pgqueue.audit(conn)
        assert (entry.count, entry.role) == (done.changed, begun_by)
    refused(
        mine,
        "UPDATE pgqueue.bulk SET audit_id = 7",
        "UPDATE pgqueue.bulk SET up_to = 7",
        "UPDATE pgqueue.audit SET count = 7",
        "INSERT INTO pgqueue.bulk (actor, action, target, states, up_to, audit_id)"
        " VALUES ('a', 'cancel', '{}', '{x}', 1, 7)",
    )


@pytest.mark.promise("F89")
@pytest.mark.parametrize("over", [False, True])
def test_a_worker_may_take_only_what_an_open_operation_means(app: Conn, role: Role, over: bool) -> None:
    """`over`: the operations that mean the jobs have been stopped."""
    [fits], [other] = put(app, 1), put(app, 1, task="bulk.other")
    begun = {action: pgqueue.bulk(app, action, task="bulk.task").id for action in ("retry", "discard", "cancel")}
    ids = [fits, other, *put(app, 1)]  # the last id was given after they began
    if over:
        for id in begun.values():
            pgqueue.stop_bulk(app, id)
    since = "ARRAY(SELECT enqueued_at FROM pgqueue.job WHERE id = ANY (%s) ORDER BY id)"
    took, discarded = (
        f"SELECT id FROM pgqueue.bulk_take_dead(%s, %s, {since})",  # noqa: S608
        "SELECT id FROM pgqueue.bulk_discard(%s, %s) WHERE discarded",
    )
    meant = [] if over else [(fits,)]
    with psycopg.connect(role("work")) as conn:
        for action in ("discard", "cancel"):
            assert conn.execute(took, [begun[action], ids, ids]).fetchall() == []
        assert conn.execute(took, [begun["retry"], ids, ids]).fetchall() == meant
        conn.rollback()
        for action in ("retry", "cancel"):
            assert conn.execute(discarded, [begun[action], ids]).fetchall() == []
        assert conn.execute(discarded, [begun["discard"], ids]).fetchall() == meant


@pytest.mark.promise("F89")
@pytest.mark.parametrize("by", ["ids", "error_type"])
def test_a_worker_may_take_only_the_chosen_jobs_and_those_of_the_cause(app: Conn, role: Role, by: str) -> None:
    fits, other = put(app, 2)
    fail(app, [fits], "KeyError")
    fail(app, [other], "ValueError")
    chosen: dict[str, Any] = {"ids": [fits]} if by == "ids" else {"error_type": "KeyError"}
    began = pgqueue.bulk(app, "discard", **chosen).id
    with psycopg.connect(role("work")) as conn:
        taken = conn.execute("SELECT id FROM pgqueue.bulk_discard(%s, %s) WHERE discarded", [began, [fits, other]])
        assert taken.fetchall() == [(fits,)]


@pytest.mark.promise("F89")
def test_a_role_that_reads_looks_and_changes_nothing(app: Conn, role: Role) -> None:
    mine = role("read")
    put(app, 2)
    begun = pgqueue.bulk(app, "retry", task="bulk.task")
    with psycopg.connect(mine, autocommit=True) as conn:
        assert pgqueue.preview_bulk(conn, "retry", task="bulk.task").count.n == 2
        assert pgqueue.get_bulk(conn, begun.id).state == "running" and len(pgqueue.bulks(conn)) == 1
        for call in (
            lambda: pgqueue.bulk(conn, "retry", task="bulk.task"),
            lambda: pgqueue.stop_bulk(conn, begun.id),
            lambda: runner.take(conn, "mine"),
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                call()

"""A worker frozen (SIGSTOP) at the worst moments holds nothing after its lease, and does no harm when it returns.

In the middle of a claim: worker/liveness/test_rescue.py. Here: of a completion, and of a transactional handler.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from faults import TASKS, keys, notes, put
from workers import Eyes, Stalls, wait_until, workers

import pgqueue

LEASE = 2.5
# The worker stops itself once, when it may: its next completion is sent without the COMMIT, so that its rows are
# locked; or all of it is sent, and nothing of the answer read.
STOPS = """
import signal
from pgqueue.database import statements
from pgqueue.database.pipeline import Wire

put, where, sent = Wire.put, os.environ["STOPS"], []

def stopping_put(self, message):
    parts = put(self, message)
    if not sent and message.sql == statements.text("complete_plain", "pgqueue") and os.path.exists(os.environ["GO"]):
        sent.append(where)
    if sent == ["open"] or sent == ["unread"] and message.sql == "COMMIT":
        sent.append("stopped")
        while self.pgconn.flush():
            pass
        say("stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    return parts

Wire.put = stopping_put
"""

# The first run of a transfer is stopped with its writes made: in its handler, or when it may not be stopped any more.
TRANSFERS = """
import signal, threading
from pgqueue import Job
from pgqueue.worker.transactions.commit import Commit

MOVE = "UPDATE account SET balance = balance + CASE id WHEN 1 THEN -50 ELSE 50 END"

def stop(where):
    if os.environ.get("STOPS") == where:
        os.environ["STOPS"] = ""
        say("stops")
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # else this thread would go on for a moment

@pgqueue.task(name="fault.thread", transactional=True)
def thread(job: Job) -> None:
    job.connection.execute(MOVE)
    stop("handler")

@pgqueue.task(name="fault.loop", transactional=True)
async def loop(job: Job) -> None:
    await (await job.aconnection()).execute(MOVE)
    stop("handler")

commit = Commit._commit_end

async def stopping_commit(self, *args):
    stop("commit")
    await commit(self, *args)

Commit._commit_end = stopping_commit
"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file whose coming lets the waiting handlers end."""
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    return tmp_path / "go"


LISTED = """
    SELECT count(*) FROM pgqueue.worker w, jsonb_to_recordset(w.sessions) AS s (pid integer)
    JOIN pg_stat_activity a USING (pid) WHERE a.application_name <> 'pgqueue housekeeping'
"""
"""How many of its sessions a worker has told, but for the one that only a leader keeps open."""


@pytest.mark.second
@pytest.mark.promise("F01", "F24")
@pytest.mark.parametrize("where", ["open", "unread"])
def test_a_worker_stopped_in_the_middle_of_a_completion_holds_nothing_after_its_lease(
    where: str, go: Path, tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    """`open`: what it had finished runs again, its late outcomes are dropped and counted. `unread`: all that was
    committed, so nothing of it runs again, and on its return it finds out that it was done."""
    (tmp_path / "stops").mkdir()
    put(dsn, notes.new(key=-1))
    with workers(tmp_path, dsn, TASKS) as made, workers(tmp_path / "stops", dsn, TASKS + STOPS) as stopping:
        first = stopping.start({"STOPS": where}, lease=LEASE, concurrency=20)
        wait_until(lambda: eyes.one(LISTED) == 4)
        go.touch()
        put(dsn, *(notes.new(key=key) for key in range(500)))
        first.event("stops")
        wait_until(lambda: where == "open" or eyes.states().get("completed", 0) > 0)  # the first may come alone
        ended, held = eyes.states().get("completed", 0), eyes.known()
        running = eyes.all("SELECT id FROM pgqueue.job_running")
        free = len(eyes.all("SELECT id FROM pgqueue.job_running FOR UPDATE SKIP LOCKED"))
        assert (free < len(running)) == (where == "open"), "the stop did not come in the middle of a completion"
        [second] = made.ready(lease=LEASE, concurrency=20)
        with Stalls() as stalls:
            began = time.monotonic()
            wait_until(lambda: not held & {pid for pid, _ in eyes.backends()})
            mine = first.event("ready")["worker"]
            wait_until(lambda: not eyes.all("SELECT id FROM pgqueue.job_running WHERE worker_id = %s", mine))
            took = time.monotonic() - began
        print(f"{where}: {ended} ended, {len(running) - free} locked; free after {took:.1f} s")
        assert took - stalls.seconds < LEASE + 5.0
        wait_until(eyes.done(501))
        first.signal(signal.SIGCONT)
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NULL") == 2)

        # The first alone is left to run one more: when that is written, all it had to write before is, or dropped.
        assert second.stop() == 0
        put(dsn, notes.new(key=1000))
        wait_until(eyes.done(502))
        assert first.event("ran", key=1000)
        assert first.stop() == 0
        dropped = first.written().count("the outcome of this run is dropped")
        # What both have run; the first may have run more of it before it heard that it was taken for dead.
        late = {*keys(first.all("ran"))} & {*keys(second.all("ran"))}
        assert dropped == len(late) == first.event("stopped")["fenced"]
        assert dropped >= len(running) - free
        assert second.event("stopped")["fenced"] == 0
        assert len(keys(second.all("ran"))) == 501 - ended
    assert eyes.states() == {"completed": 502}
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE attempt > 2") == 0


@pytest.mark.second
@pytest.mark.promise("F01", "F24", "L06")
@pytest.mark.parametrize(("kind", "where"), [("thread", "handler"), ("loop", "commit")])
def test_a_worker_stopped_in_a_transactional_handler_holds_nothing_after_its_lease(
    kind: str, where: str, tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    """The other run needs the rows it has locked, and commits; the one that was stopped cannot: one effect."""
    eyes.do("CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)")
    eyes.do("INSERT INTO account VALUES (1, 100), (2, 200)")
    [job] = put(dsn, pgqueue.remote(f"fault.{kind}").new())
    with workers(tmp_path, dsn, TRANSFERS) as made:
        first = made.start({"STOPS": where}, lease=LEASE)
        first.event("stops")
        [second] = made.ready(lease=LEASE)
        with Stalls() as stalls:
            began = time.monotonic()
            wait_until(eyes.done(1))
            took = time.monotonic() - began
        print(f"{kind}, {where}: run by another after {took:.1f} s; the lease is {LEASE} s")
        assert took - stalls.seconds < LEASE + 5.0
        first.signal(signal.SIGCONT)
        wait_until(lambda: f"job {job} (fault.{kind}): had been given to another worker" in first.written())
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NULL") == 2)
        assert first.stop() == second.stop() == 0
        assert first.event("stopped")["fenced"] == 1
        assert second.event("stopped")["fenced"] == 0
    assert eyes.all("SELECT id, balance FROM account ORDER BY id") == [(1, 50), (2, 250)]
    assert eyes.all("SELECT state, attempt, crashes FROM pgqueue.job") == [("completed", 2, 1)]

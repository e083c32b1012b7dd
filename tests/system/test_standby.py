"""With a standby: workers follow a failover by themselves, and what its feedback holds back changes no claim.

Strict with synchronous replication: what was committed is worked. Without, what the standby had seen is worked, and
what the lost primary had done after that disturbs nothing: ids and positions are given a second time.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psycopg
import pytest
from claim_plans import beside
from faults import TASKS, Stream, account, waits
from servers import VERSION, Server
from standby import Pair, feedback, pair, standby
from workers import Eyes, Process, Taker, Workers, wait_until, workers

from bench.flat import after, claimed
from bench.samples import alternate, ratio
from bench.server import Lab
from pgqueue.database import migrations

HEAD = "SELECT pg_sequence_last_value('pgqueue.job_pos_seq')"


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file whose coming lets the waiting handlers end."""
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    return tmp_path / "go"


def reconnected(processes: list[Process], eyes: Eyes) -> bool:
    """Whether each worker has its sessions, on the server `eyes` looks at."""
    names = [name for _, name in eyes.backends()]
    return all(names.count(f"pgqueue {name}") >= len(processes) for name in ("fetch", "listen", "beat"))


def leave(made: Workers) -> None:
    for process in made.all:
        assert process.stop() == 0, process.written()


@pytest.mark.long
@pytest.mark.promise("F06")
@pytest.mark.parametrize(
    ("how", "attributes"), [("killed", "read-write"), ("immediate", "read-write"), ("killed", "any")]
)
def test_a_failover_to_a_synchronous_standby_loses_no_committed_job(
    how: str, attributes: str, tmp_path: Path, own_server: Server
) -> None:
    """With `any` the workers come to the standby before it is promoted, and wait for that."""
    assert own_server.cluster is not None
    with ExitStack() as stack:
        both = stack.enter_context(pair(own_server.cluster, synchronous=True))
        dsn = both.dsn(attributes)
        migrations.migrate(dsn)
        made = stack.enter_context(workers(tmp_path, dsn, TASKS))
        stream = stack.enter_context(Stream(dsn, 100.0, seconds=0.5))
        made.ready(2, lease=6.0, concurrency=100)
        stream.more(300)
        before = len(stream.committed)
        if how == "killed":
            both.crash()
        else:
            own_server.stop("immediate")
        if attributes == "any":
            wait_until(lambda: all("the database is read only" in process.written() for process in made.all))
        began = time.monotonic()
        both.promote()
        eyes = Eyes(dsn)
        wait_until(lambda: reconnected(made.all, eyes))
        print(f"{how}: promoted and reconnected after {time.monotonic() - began:.1f} s")
        stream.more(300)
        stream.end()
        found = account(eyes, stream, made.all, 150.0)
        print(f"{before} committed before, {len(stream.committed)} in all; {found}")
        assert (found.lost, found.crashes) == ([], 0)
        assert stream.committed.keys() <= found.runs.keys()
        leave(made)
        assert all("taken for dead" not in process.written() for process in made.all)
        eyes.close()


@pytest.mark.long
@pytest.mark.promise("F06", "F21")
def test_a_failover_that_turns_back_the_time_works_what_survived(go: Path, tmp_path: Path, own_server: Server) -> None:
    """The standby has heard nothing for a while: committed jobs are gone, and their ids and positions come again."""
    assert own_server.cluster is not None
    with ExitStack() as stack:
        both = stack.enter_context(pair(own_server.cluster, synchronous=False))
        migrations.migrate(both.dsn())
        made = stack.enter_context(workers(tmp_path, both.dsn(), TASKS))
        stream = stack.enter_context(Stream(both.dsn(), 100.0, seconds=0.2))
        made.ready(2, lease=6.0, concurrency=100)
        stream.more(200)
        survived = set(stream.committed)
        both.caught_up()
        both.cut()
        held = go_back(both, stream, made)
        after = stream.committed.keys() - held.keys()
        go.touch()
        stream.more(100)
        stream.end()
        eyes = Eyes(both.dsn())
        found = account(eyes, stream, made.all, 60.0)
        ids = {stream.committed[key] for key in stream.committed.keys() - held.keys()}
        again = ids & set(held.values())
        print(f"{len(found.lost)} lost with the primary, {len(again)} ids given twice; {found}")
        assert found.crashes == 0
        assert not set(found.lost) & (survived | after)
        # None of them was completed by a handler that had its id before.
        assert survived | after <= found.runs.keys()
        assert len(again) > 100
        leave(made)
        eyes.close()


def go_back(both: Pair, stream: Stream, made: Workers) -> dict[int, int]:
    """Work on the primary unseen by the standby, with jobs that run on, then fail over; what was committed before."""
    with psycopg.connect(both.dsn()) as conn:
        for key in range(20):
            waits.enqueue(conn, key=-1 - key)
    stream.more(300)
    wait_until(lambda: sum(event["key"] < 0 for process in made.all for event in process.all("ran")) == 20)
    eyes = Eyes(both.dsn())
    head = eyes.one(HEAD)
    eyes.close()
    both.crash()
    # A commit that was answered may not be noted yet. So what was committed here is told by the keys that were drawn.
    drawn = len(stream.committed | dict.fromkeys(stream.doubtful, 0))
    both.promote()
    eyes = Eyes(both.dsn())
    assert eyes.one(HEAD) < head
    wait_until(lambda: reconnected(made.all, eyes))
    stream.more(300)
    eyes.close()
    return {key: job for key, job in stream.committed.copy().items() if key < drawn}


FEEDBACK = {"hot_standby_feedback": "on", "wal_receiver_status_interval": "1s"}


@pytest.mark.second
@pytest.mark.promise("F08")
async def test_a_standbys_feedback_changes_nothing_in_what_a_claim_reads(own_server: Server) -> None:
    primary, dsn = own_server.cluster, own_server.dsn("postgres")
    assert primary is not None
    migrations.migrate(dsn)
    with standby(primary, **FEEDBACK) as second, psycopg.connect(dsn) as conn:
        eyes, taker = Eyes(dsn), Taker(dsn)
        without, during, naive = await beside(feedback(primary, second, "postgres"), taker, eyes, conn)
        await taker.close()
        eyes.close()
    print(f"buffers for 10 jobs: {without} before, {during} beside the feedback, {naive} from the head of the index")
    assert naive > 2 * without, "the test does not show the effect it is about"
    assert during <= 1.1 * without


@pytest.mark.long
@pytest.mark.promise("F08")
def test_a_standbys_feedback_changes_neither_rate_nor_buffers_nor_the_slowest_claims(tmp_path: Path) -> None:
    """As `bench held`: a drain after 200,000 jobs have passed, and claims alone, with the feedback of a long query on
    the standby held all the while, and without; a median of five, in turn."""
    lab = Lab(int(VERSION))
    try:
        primary = lab._server.cluster
        with standby(primary, **FEEDBACK) as second:
            holders = {
                name: lambda dsn, hold=name == "held": feedback(primary, second, database(dsn), hold=hold)
                for name in ("held", "free")
            }
            held, free = alternate(
                5, {name: partial(after, lab, 200_000, 100_000, holder) for name, holder in holders.items()}
            )
            claims, alone = alternate(
                5, {name: partial(claimed, lab, 100_000, holder) for name, holder in holders.items()}
            )
    finally:
        lab.close()
    slower = ratio(claims, alone, lambda sample: sample.more["claim_p99_ms"])
    print(f"claim p99 {slower:.2f} of {alone.samples[0].more['claim_p99_ms']:.2f} ms")
    rate, buffers = ratio(held, free), ratio(held, free, lambda sample: sample.more["buffers"])
    print(
        f"rate {rate:.2f} of {free.rate:,.0f}/s, buffers per job {buffers:.2f} of {free.samples[0].more['buffers']:.1f}"
    )
    for side in (held, free):
        print(f"{side.name}: CPU per job {side.client:.1f} us in the worker, {side.server:.1f} us in the server")
    # On a machine that is busy with other things, the time on the clock says little, and the CPU's own all the same.
    cheap = (free.client + free.server) / (held.client + held.server)
    assert max(rate, cheap) >= 0.9
    assert buffers <= 1.1
    assert slower <= 2


def database(dsn: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])

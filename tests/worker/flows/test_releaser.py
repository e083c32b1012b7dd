"""Jobs that wait for jobs start after all of them, once; none waits for ever. With real workers, and step by step."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from flow_rows import Desk, Made, end, put
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import statements
from pgqueue.database.sessions import Link
from pgqueue.database.statements import text
from pgqueue.worker.flows import releaser

LEAVES = "WITH gone AS (DELETE FROM pgqueue.job WHERE id = %s RETURNING id, task, node) "
MOVE = {
    "scheduled": "INSERT INTO pgqueue.job (state, id, task, node, run_at) SELECT 'scheduled', gone.*, now() FROM gone",
    "blocked": "INSERT INTO pgqueue.job (state, id, task, node, key, lock_key) "
    "SELECT 'blocked', gone.*, 'lock:a', 'a' FROM gone",
    "running": "INSERT INTO pgqueue.job (state, id, task, node, worker_id, claim, started_at) "
    "SELECT 'running', gone.*, 1, 1, now() FROM gone",
}
STOP = """
CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM set_config('lock_timeout', '0', true), pg_advisory_xact_lock(7);
    RETURN NEW;
END $$;
CREATE TRIGGER stop BEFORE INSERT ON pgqueue.job_blocked FOR EACH ROW EXECUTE FUNCTION stop();
"""
SLOW = """
ALTER FUNCTION pgqueue.release_results RENAME TO all_results;
CREATE FUNCTION pgqueue.release_results(nodes bigint[], many_of boolean[], most integer, whole bigint)
RETURNS TABLE (node bigint, many boolean, value jsonb, bytes integer, ended boolean) LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT abs(b.node) - 1 FROM pgqueue.job_blocked b WHERE b.task = 'slow') = ANY (nodes) THEN
        PERFORM pg_cancel_backend(pg_backend_pid()), pg_sleep(30);
    END IF;
    RETURN QUERY SELECT * FROM pgqueue.all_results(nodes, many_of, most, whole);
END $$;
"""
STOPPED = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted)"
TOO_LARGE = "with the results that it waited for its arguments have more than 2097152 bytes"
READ = """
    SELECT (SELECT sum(seq_tup_read)::bigint FROM pg_stat_user_tables WHERE schemaname = 'pgqueue')
         + (SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE schemaname = 'pgqueue')
"""
FLUSH = "SELECT pg_stat_force_next_flush()"
ran: list[str] = []
RETRY = pgqueue.RetryPolicy(attempts=1)


@task(name="flows.note", store_result=True)
async def note(word: str, got: Any = "nothing") -> Any:
    ran.append(word if got == "nothing" else f"{word} {got!r}")
    return word


@task(name="flows.fail", retry=RETRY)
async def fail(word: str) -> None:
    ran.append(word)
    raise ValueError(word)


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    made = Desk(dsn)
    yield made
    await made.close()


def noted(word: str, **more: Any) -> Made:
    return Made("flows.note", [{"word": word}], **more)


def over(eyes: Eyes, number: int) -> Any:
    """Whether so many jobs have ended and none lives."""
    sql = """SELECT count(*) = %s AND NOT EXISTS (
        SELECT FROM pgqueue.job WHERE state IN ('available', 'scheduled', 'blocked', 'running')
    ) FROM pgqueue.job WHERE state IN ('completed', 'skipped', 'failed', 'cancelled')"""
    return lambda: eyes.one(sql, number)


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is released is released by a look: no sweep finds anything."""
    monkeypatch.setattr(releaser.Releaser, "swept", lambda self: None)


# With workers --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F370")
@pytest.mark.usefixtures("no_sweep")
async def test_a_job_starts_after_all_jobs_of_all_nodes_it_waits_for(dsn: str, eyes: Eyes) -> None:
    """A chain behind a fan-out and a fan-in, by two workers, without a sweep."""
    many = Made("flows.note", [{"word": f"many {n}"} for n in range(30)], after=[0])
    put(eyes.conn, noted("first"), many, noted("other"), noted("last", after=[1, 2]), noted("end", after=[3]))
    async with work(dsn, note, poll=60.0), work(dsn, note, poll=60.0):
        await until(over(eyes, 34))
    assert ran.index("first") < min(ran.index(f"many {n}") for n in range(30))
    assert ran[-2:] == ["last", "end"]
    assert len(ran) == 34


@pytest.mark.promise("F371")
@pytest.mark.usefixtures("no_sweep")
async def test_a_failure_cancels_what_must_complete_and_runs_what_waits_for_it(dsn: str, eyes: Eyes) -> None:
    made = put(
        eyes.conn,
        Made("flows.fail", [{"word": "fails"}], name="the first"),
        noted("cancelled", after=[0]),
        noted("cancelled, too", after=[1]),
        noted("told of the end", after_end=[1]),
        noted("told of the failure", after_failure=[0]),
        noted("branch"),
        noted("branch goes on", after=[5]),
        noted("skipped", after_failure=[5]),
        noted("after the skipped one", after=[7]),
    )
    async with work(dsn, note, fail, poll=60.0):
        await until(over(eyes, 9))
    assert sorted(ran) == sorted([
        "fails", "told of the end", "told of the failure", "branch", "branch goes on", "after the skipped one"
    ])  # fmt: skip
    (cancelled,), (second,), (skipped,) = made[1][1], made[2][1], made[7][1]
    ends = "SELECT state, reason FROM pgqueue.job WHERE id = %s"
    assert eyes.all(ends, cancelled) == eyes.all(ends, second) == [("cancelled", "dependency")]
    assert eyes.all(ends, skipped) == [("skipped", "dependency")]
    said = "SELECT outcome, message FROM pgqueue.attempt WHERE job_id = %s"
    [failed] = made[0][1]
    assert eyes.all(said, cancelled) == [
        ("cancelled", f"dependency: job {failed} of node 'the first' failed or was cancelled")
    ]
    assert eyes.all(said, second) == [("cancelled", f"dependency: job {cancelled} of node 2 failed or was cancelled")]
    assert eyes.happened("cancelled") == 2
    assert eyes.happened("skipped") == 1


@pytest.mark.promise("F370")
async def test_a_released_job_waits_for_its_delay_and_its_lock_as_others_do(dsn: str, eyes: Eyes) -> None:
    """The delay counts from the release, and stands in the headers no more."""
    put(eyes.conn, noted("first"), noted("later", after=[0], headers={"pgqueue:delay": 0.2, "kept": 1}))
    async with work(dsn, note, poll=60.0):
        await until(over(eyes, 2), 10.0)
    [(waited, headers)] = eyes.all(
        "SELECT extract(epoch FROM b.started_at - a.finished_at)::float8, b.headers FROM pgqueue.job a, pgqueue.job b "
        "WHERE a.args ->> 'word' = 'first' AND b.args ->> 'word' = 'later'"
    )
    assert waited >= 0.2
    assert headers == {"kept": 1}


@pytest.mark.promise("F374")
@pytest.mark.usefixtures("no_sweep")
async def test_results_become_arguments_at_the_release(dsn: str, eyes: Eyes) -> None:
    """Of one job its result, of many a list in the order of their ids, with null where a job did not complete."""
    put(
        eyes.conn,
        noted("one"),
        Made("flows.note", [{"word": "a"}, {"word": "b"}]),
        Made("flows.fail", [{"word": "c"}]),
        noted("got one:", after=[0], results={"got": (0, False)}),
        noted("got many:", after=[1], results={"got": (1, True)}),
        noted("got failed:", after_end=[2], results={"got": (2, True)}),
    )
    async with work(dsn, note, fail, poll=60.0):
        await until(over(eyes, 7))
    assert {word for word in ran if word.startswith("got")} == {
        "got one: 'one'", "got many: ['a', 'b']", "got failed: [None]"
    }  # fmt: skip


@pytest.mark.promise("F373")
async def test_a_lost_look_is_found_by_the_sweep(dsn: str, eyes: Eyes) -> None:
    """The worker that ended the first job died between its commit and its look: the next sweep of any worker."""
    [(_, [first]), (_, [second])] = put(eyes.conn, noted("first"), noted("second", after=[0]))
    end(eyes, first)
    async with work(dsn, note, poll=60.0):
        await until(eyes.is_in(second, "completed"), 15.0)
    assert ran == ["second"]


# Step by step --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F370")
@pytest.mark.parametrize("state", ["available", "scheduled", "blocked", "running"])
async def test_a_node_lives_in_whatever_table_its_last_job_is(state: str, eyes: Eyes, desk: Desk) -> None:
    [(node, [first, last]), (_, [waiting])] = put(eyes.conn, Made(jobs=[{}, {}]), Made(after=[0]))
    if state != "available":
        eyes.do(LEAVES + MOVE[state], last)
    end(eyes, first)
    await desk.look(node)
    assert await desk.sweep() == 0
    assert eyes.state(waiting) == "blocked"
    end(eyes, last)
    await desk.look(node)
    assert eyes.all("SELECT state, key, node > 0 FROM pgqueue.job WHERE id = %s", waiting) == [
        ("available", None, True)
    ]


@pytest.mark.promise("F370")
async def test_jobs_that_wait_live_for_those_that_wait_for_them(eyes: Eyes, desk: Desk) -> None:
    [(one, [a]), (two, [b]), (_, [c])] = put(eyes.conn, Made(), Made(after=[0]), Made(after=[1]))
    await desk.look(two)
    assert [eyes.state(id) for id in (a, b, c)] == ["available", "blocked", "blocked"]
    end(eyes, a)
    await desk.look(one)
    assert [eyes.state(id) for id in (b, c)] == ["available", "blocked"]


@pytest.mark.promise("F373")
async def test_a_watcher_that_is_locked_is_passed_over_and_found_later(eyes: Eyes, desk: Desk, dsn: str) -> None:
    [(node, [first]), (_, [waiting])] = put(eyes.conn, Made(), Made(after=[0]))
    end(eyes, first)
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgqueue.job_blocked WHERE id = %s FOR KEY SHARE", [waiting])
        async with asyncio.timeout(10):
            await desk.look(node)
        assert eyes.state(waiting) == "blocked"
    assert await desk.sweep() == 1
    assert eyes.state(waiting) == "available"


@pytest.mark.promise("F374")
@pytest.mark.parametrize("length", [2_097_000, 2_097_200])
async def test_arguments_that_grow_too_large_fail_the_job(length: int, eyes: Eyes, desk: Desk) -> None:
    [(node, [first]), (_, [waiting])] = put(
        eyes.conn, Made(), Made(after=[0], results={"got": (0, False)}, jobs=[{"n": 1}])
    )
    end(eyes, first, result=f'"{length * "x"}"')
    await desk.look(node)
    fits = length < 2_097_152
    assert eyes.state(waiting) == ("available" if fits else "failed")
    assert eyes.one("SELECT reason FROM pgqueue.job WHERE id = %s", waiting) == (None if fits else "arguments")
    said = eyes.one("SELECT message FROM pgqueue.attempt WHERE job_id = %s", waiting)
    assert said == (None if fits else TOO_LARGE)


@pytest.mark.promise("F374")
async def test_a_result_that_a_worker_may_return_fits_however_the_server_writes_it(eyes: Eyes, desk: Desk) -> None:
    """A list of 400,000 numbers: 800 kB as a worker sends it, 1.2 MB with the server's spaces."""
    [(node, [first]), (_, [waiting])] = put(eyes.conn, Made(), Made(after=[0], results={"got": (0, False)}))
    end(eyes, first, result=f"[{','.join('1' * 400_000)}]")
    await desk.look(node)
    assert eyes.state(waiting) == "available"


@pytest.mark.promise("F374")
@pytest.mark.parametrize("jobs", [1, 50])
async def test_results_that_are_stored_in_little_are_measured_by_their_length(
    jobs: int, eyes: Eyes, desk: Desk
) -> None:
    """300 results of 1 MB each lie compressed in 4 MB. What the naive release sums is that; then the server puts 300 MB
    together, more than a value may have: no release ever. Those that wait fail, and nothing is put together."""
    [(node, parts), (_, waiting)] = put(
        eyes.conn, Made(jobs=[{}] * 300), Made(after=[0], results={"got": (0, True)}, jobs=[{}] * jobs)
    )
    end(eyes, *parts, result=f'"{1_000_000 * "x"}"')
    assert eyes.one("SELECT sum(pg_column_size(result)) < 16777216 FROM pgqueue.job_done")
    await desk.look(node)
    assert eyes.states() == {"completed": 300, "failed": jobs}
    assert eyes.all("SELECT DISTINCT reason, args FROM pgqueue.job WHERE id = ANY (%s)", waiting) == [("arguments", {})]
    assert eyes.all("SELECT DISTINCT message FROM pgqueue.attempt") == [(TOO_LARGE,)]


@pytest.mark.promise("F374")
async def test_results_of_several_nodes_count_together(eyes: Eyes, desk: Desk) -> None:
    made = put(
        eyes.conn,
        *[Made() for _ in range(3)],
        Made(after=range(3), results={n: (at, False) for at, n in enumerate("abc")}),
    )
    *parts, (_, [waiting]) = made
    end(eyes, *[ids[0] for _, ids in parts], result=f'"{700_000 * "x"}"')
    await desk.look(*[node for node, _ in parts])
    assert eyes.one("SELECT reason FROM pgqueue.job WHERE id = %s", waiting) == "arguments"


@pytest.mark.promise("F374")
@pytest.mark.parametrize("many", [False, True])
async def test_a_job_fails_if_no_job_is_left_of_a_node_whose_result_it_gets(many: bool, eyes: Eyes, desk: Desk) -> None:
    """Its rows were deleted by hand, or a restore left them out. Null and [] would be results that nothing returned."""
    [(node, [first]), (_, [waiting])] = put(eyes.conn, Made(), Made(after=[0], results={"got": (0, many)}))
    eyes.do("DELETE FROM pgqueue.job WHERE id = %s", first)
    await desk.look(node)
    assert eyes.one("SELECT reason FROM pgqueue.job WHERE id = %s", waiting) == "arguments"
    said = eyes.one("SELECT message FROM pgqueue.attempt WHERE job_id = %s", waiting)
    assert said == "no job is left of a node whose result it waited for"


@pytest.mark.promise("F374")
async def test_what_a_node_answers_is_read_no_further_than_it_fits(eyes: Eyes) -> None:
    """Of 20,000 results of 1 kB each 2,048 are read: along the indexes, in the order of the ids, without a sort."""
    [(node, parts)] = put(eyes.conn, Made(jobs=[{}] * 20_000))
    end(eyes, *parts, result=f'"{1_000 * "x"}"')
    eyes.do(FLUSH)
    before = eyes.one(READ)
    assert eyes.all("SELECT * FROM pgqueue.node_result(%s, 2097152)", node) == [(None, None, True)]
    eyes.do(FLUSH)
    assert 2_000 < eyes.one(READ) - before < 5_000


@pytest.mark.promise("F373")
async def test_a_row_that_the_server_refuses_keeps_no_other(eyes: Eyes, desk: Desk) -> None:
    """A trigger of the application refuses one of 50 watchers: 49 are released, and it stays where it is."""
    [(node, [first]), (_, waiting)] = put(eyes.conn, Made(), Made(jobs=[{"n": n} for n in range(50)], after=[0]))
    eyes.do("""CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.args = '{"n": 20}' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$""")
    eyes.do("CREATE TRIGGER no BEFORE INSERT ON pgqueue.job_available FOR EACH ROW EXECUTE FUNCTION no()")
    end(eyes, first)
    await desk.look(node)
    assert eyes.states() == {"completed": 1, "available": 49, "blocked": 1}
    assert eyes.state(waiting[20]) == "blocked"


REFUSE = """
CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.args ? 'no' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$;
CREATE TRIGGER no BEFORE INSERT ON pgqueue.job_available FOR EACH ROW EXECUTE FUNCTION no();
"""


@pytest.mark.promise("F373")
@pytest.mark.parametrize("naive", [False, True])
async def test_a_node_with_many_refused_jobs_keeps_no_node_behind_it(
    naive: bool, eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More refused jobs than a release tries wait for a node; one job waits for the node behind it."""
    if naive:
        monkeypatch.setattr(releaser, "RESTS_MOST", 1)
    made = put(
        eyes.conn, Made(), Made(), Made(jobs=[{"no": n} for n in range(300)], after=[0]), Made(jobs=[{}], after=[1])
    )
    [(one, [a]), (two, [b]), _, (_, [waiting])] = made
    eyes.do(REFUSE)
    end(eyes, a, b)
    assert await desk.sweep() == 2
    assert eyes.state(waiting) == ("blocked" if naive else "available")
    eyes.do("DROP TRIGGER no ON pgqueue.job_available")
    monkeypatch.setattr(desk.releaser._left, "_until", {})  # their time is over
    await desk.look(one, two)
    assert eyes.states() == {"completed": 2, "available": 301}


@pytest.mark.promise("F373")
async def test_behind_any_number_of_refused_jobs_a_node_is_reached_by_some_sweep(
    eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one node more jobs are refused than one sweep leaves alone; they are left alone for longer than it takes."""
    monkeypatch.setattr(releaser, "RESTS_MOST", 1)
    jobs = [{"no": n} for n in range(50)]
    [(_, [first]), (_, waiting)] = put(eyes.conn, Made(), Made(jobs=[*jobs, {"yes": 1}], after=[0]))
    eyes.do(REFUSE)
    end(eyes, first)
    sweeps = 0
    while eyes.state(waiting[-1]) == "blocked":
        await desk.sweep()
        sweeps += 1
        assert sweeps <= 10
    assert sweeps > 1 and len(desk.releaser._left.rows()) >= 40
    left = sorted(desk.releaser._left._until.values())
    assert left[-1] - left[0] > 0.4 * len(left)  # the later ones for longer


@pytest.mark.promise("F321")
@pytest.mark.parametrize("most", [1, 1_000])
async def test_a_node_that_stays_because_its_jobs_are_refused_is_counted_once(
    most: int, eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: each sweep counts it. However few nodes a walk looks at, it is forgotten when it is gone, not before."""
    monkeypatch.setattr(releaser, "KEYS_MOST", most)
    waits = [Made(jobs=[{"no": 1}], after=[at]) for at in range(3)]
    [(_, [a]), (_, [b]), (_, [c]), *_, (_, [last])] = put(eyes.conn, Made(), Made(), Made(), *waits)
    eyes.do(REFUSE)
    end(eyes, a, b)
    assert [await desk.sweep() for _ in range(3)] == [2, 0, 0]
    end(eyes, c)
    assert [await desk.sweep() for _ in range(2)] == [1, 0]
    eyes.do("DROP TRIGGER no ON pgqueue.job_available")
    monkeypatch.setattr(desk.releaser._left, "_until", {})  # their time is over
    assert [await desk.sweep() for _ in range(2)] == [0, 0]
    assert eyes.state(last) == "available"
    assert desk.releaser._found == set()


@pytest.mark.promise("F372")
async def test_what_is_judged_is_judged_by_the_nodes_that_the_row_names_however_many(eyes: Eyes, desk: Desk) -> None:
    """Nodes end in any order: the watch moves down, and comes back up to one that lives."""
    made = put(eyes.conn, *[Made() for _ in range(6)], Made(after=range(6)))
    nodes, jobs = [node for node, _ in made], [ids[0] for _, ids in made]
    for place in (5, 2, 4, 0, 1):
        end(eyes, jobs[place])
        await desk.look(nodes[place])
        key = eyes.one("SELECT key FROM pgqueue.job_blocked WHERE id = %s", jobs[6])
        assert eyes.state(jobs[nodes.index(int(key.removeprefix("node:")))]) == "available"
    end(eyes, jobs[3])
    await desk.look(nodes[3])
    assert eyes.state(jobs[6]) == "available"


@pytest.mark.promise("F372")
@pytest.mark.parametrize("naive", [False, True])
async def test_a_node_that_ends_while_a_watch_moves_to_it_is_looked_at_once_more(
    naive: bool, eyes: Eyes, dsn: str, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move has its snapshot, and has not committed: the look after that node's end is in vain. The naive releaser
    looks at nothing again, and leaves the job to the sweep."""
    [(one, [a]), (two, [b]), (_, [waiting])] = put(eyes.conn, Made(), Made(), Made(after=[0, 1]))
    end(eyes, b)
    eyes.do(STOP)
    other = Desk(dsn)
    with psycopg.connect(dsn) as gate:
        gate.execute("SELECT pg_advisory_xact_lock(7)")
        desk.releaser.look_at([two])
        if naive:
            monkeypatch.setattr(desk.releaser, "look_at", lambda nodes: None)
        moving = asyncio.ensure_future(desk.releaser._step())
        await until(lambda: eyes.one(STOPPED))
        end(eyes, a)
        await other.look(one)
        assert eyes.state(waiting) == "blocked"
    await moving
    assert eyes.state(waiting) == ("blocked" if naive else "available")
    assert await other.sweep() == naive
    assert eyes.state(waiting) == "available"
    await other.close()


@pytest.mark.promise("F373")
async def test_a_walk_comes_to_each_node_some_at_a_time(
    eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releaser, "KEYS_MOST", 3)
    monkeypatch.setattr(releaser, "WALK_SECONDS", 0.0)
    made = [put(eyes.conn, Made(), Made(after=[0])) for _ in range(10)]
    for [(_, [first]), _] in made:
        end(eyes, first)
    found = []
    for _ in range(4):
        desk.releaser.swept()
        await desk.releaser._step()
        found.append(eyes.states()["available"])
    assert found == [3, 6, 9, 10]


@pytest.mark.promise("F372")
async def test_ten_thousand_nodes_before_one_cost_bounded_work(
    eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended in the worst order, from the last watched one down, in batches of 500: two looks and one release for each.
    The naive way asks for each node by itself."""
    sent = list[str]()
    statement = Link.statement

    def counted(link: Link, name: str, *args: Any, **params: Any) -> Any:
        sent.append(name)
        return statement(link, name, *args, **params)

    monkeypatch.setattr(Link, "statement", counted)
    made = put(eyes.conn, *[Made() for _ in range(10_000)], Made(after=range(10_000)))
    *before, (_, [waiting]) = made
    for at in range(10_000, 0, -500):
        part = before[at - 500 : at]
        end(eyes, *[ids[0] for _, ids in part])
        await desk.look(*[node for node, _ in part])
        assert (eyes.state(waiting) == "available") is (at == 500)
    print({name: sent.count(name) for name in sent})
    assert sent.count("release_look") <= 40 and sent.count("release_jobs") <= 20


@pytest.mark.promise("F227")
def test_no_row_of_a_job_is_updated_in_place(eyes: Eyes) -> None:
    """A release counts the rows that it has locked. One that was updated meanwhile would be locked in its new version,
    which the DELETE of the same snapshot does not find: then jobs would be cancelled below a job that lives."""
    tables = [name for (name,) in eyes.all("SELECT relid::regclass::text FROM pg_partition_tree('pgqueue.job')")]
    assert "pgqueue.job_blocked" in tables
    parts = "|".join(re.escape(name.removeprefix("pgqueue.")) for name in tables)
    in_place = re.compile(rf"UPDATE\s+(ONLY\s+)?pgqueue\.({parts})\b|INTO\s+pgqueue\.({parts})\b[^;]*?\bDO\s+UPDATE")
    files = sorted(statements.sql_directory().rglob("*.sql"))
    assert [(file.name, found[0]) for file in files for found in in_place.finditer(file.read_text("utf-8"))] == []
    assert in_place.search("UPDATE pgqueue.job_blocked SET key = NULL")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="never updated"):
        eyes.do("UPDATE pgqueue.job_blocked SET priority = 2")


@pytest.mark.promise("F226")
@pytest.mark.parametrize("many", [False, True])
async def test_a_release_gives_so_many_bytes_at_once_and_goes_on_at_once(
    many: bool, eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven jobs get results of 400 bytes each, another one gets none. The first statement releases those that have
    1,000 bytes together, and the one whose turn it was when they had; the other one goes with the first."""
    monkeypatch.setattr(releaser, "BYTES_MOST", 1_000)
    sizes = released(desk, monkeypatch)
    made = put(
        eyes.conn,
        *[Made() for _ in range(7)],
        *[Made(after=[at], results={"got": (at, many)}) for at in range(7)],
        Made(after=[6]),
    )
    heads, waiting = [ids[0] for _, ids in made[:7]], [ids[0] for _, ids in made[7:]]
    end(eyes, *heads, result=f'"{380 * "x"}"')
    await desk.look(*[node for node, _ in made[:7]])
    assert {eyes.state(id) for id in waiting} == {"available"}
    got = eyes.all("SELECT DISTINCT length(args::text) FROM pgqueue.job_available WHERE id = ANY (%s)", waiting)
    assert len(got) == 2
    assert sizes == [4, 3, 1]


@pytest.mark.promise("F226")
async def test_a_job_whose_result_has_more_bytes_than_one_release_gives_is_released(
    eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releaser, "BYTES_MOST", 10)
    sizes = released(desk, monkeypatch)
    [(node, [first]), (_, waiting)] = put(
        eyes.conn, Made(), Made(after=[0], results={"got": (0, False)}, jobs=[{}] * 3)
    )
    end(eyes, first, result=f'"{100 * "x"}"')
    await desk.look(node)
    assert {eyes.state(id) for id in waiting} == {"available"}
    assert sizes == [1, 1, 1]


@pytest.mark.promise("F226")
async def test_results_that_are_too_many_bytes_for_a_job_are_not_all_read(eyes: Eyes, desk: Desk) -> None:
    """The first job waits for 200 results of 1 MB: it fails, and does not keep the one behind it."""
    made = put(
        eyes.conn,
        *[Made() for _ in range(200)],
        Made(after=range(200), results={f"p{at}": (at, False) for at in range(200)}),
        Made(after=[199], results={"got": (199, False)}),
    )
    end(eyes, *[ids[0] for _, ids in made[:200]], result=f'"{1_000_000 * "x"}"')
    [_, (_, [fails]), (_, [goes])] = made[199:]
    nodes = [node for node, _ in made[:200]]
    read = eyes.one("SELECT count(*) FROM pgqueue.release_results(%s, %s, 2097152, 1000)", nodes, [False] * 200)
    assert read == 64
    await desk.look(*nodes)
    assert (eyes.state(fails), eyes.state(goes)) == ("failed", "available")


@pytest.mark.promise("F226")
async def test_a_job_whose_release_takes_too_long_keeps_no_other_flow(
    eyes: Eyes, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """The server cancels each release of one job, with the error of `statement_timeout`. The naive mover raises it."""
    got: dict[str, Any] = {"results": {"got": (0, False)}}
    flows = [put(eyes.conn, Made(), Made("slow" if each == 1 else "quick", after=[0], **got)) for each in range(4)]
    waiting = [ids[0] for _, (_, ids) in flows]
    end(eyes, *[ids[0] for (_, ids), _ in flows], result="7")
    eyes.do(SLOW)
    await desk.look(*[node for (node, _), _ in flows])
    assert [eyes.state(id) for id in waiting] == ["available", "blocked", "available", "available"]
    assert f"job {waiting[1]} (slow) cannot be released" in caplog.text


@pytest.mark.promise("F226")
def test_a_release_puts_no_large_values_together_as_the_slow_aggregate_does() -> None:
    assert "jsonb_object_agg(" not in text("release_jobs", "pgqueue")


def released(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs each release has moved, as they come."""
    sizes: list[int] = []
    run = desk.session.run

    async def noted(*statements: Any, **more: Any) -> list[Any]:
        answers = await run(*statements, **more)
        if "bytes" in statements[0].params:
            sizes.append(answers[0][0][0])
        return answers

    monkeypatch.setattr(desk.session, "run", noted)
    return sizes

"""Flows on the dashboard: the list, one as a graph and as a table, and a retry and a cancel of all its jobs."""

from __future__ import annotations

import re
from typing import Any

import httpx
import psycopg
import pytest
from dashboards import SAME_SITE, browsing, dashboard_of, forms, reading
from workers import Eyes

import pgqueue
from pgqueue import Flow
from pgqueue.admin import flows
from pgqueue.admin.flows import NodeInfo
from pgqueue.web.access import ACTIONS
from pgqueue.web.flow_graph import EDGES_MOST, NODES_MOST, graph_of
from pgqueue.web.pages import flows as page
from pgqueue.web.pages.changes import NOTICES

Conn = psycopg.Connection[Any]

JSON = {"accept": "application/json"}
step = pgqueue.remote("step")
ROW = '<th role="rowheader" scope="row"'


def enqueued(conn: Conn, name: str = "order 7") -> pgqueue.FlowHandle:
    """A flow of one job, then three, then one after their end and one after a failure."""
    flow = Flow(name)
    paid = flow.add(step.new(n=1), name="paid")
    picked = flow.add_many([step.new(n=n) for n in (2, 3, 4)], after=[paid])
    flow.add(step.new(n=5), after=[picked.ended])
    flow.add(step.new(n=6), after=[picked.failed, paid])
    handle = flow.enqueue(conn)
    conn.commit()
    return handle


def failed(conn: Conn, id: int) -> None:
    """The job has failed, as its worker would have it."""
    conn.execute(
        "WITH gone AS (DELETE FROM pgqueue.job WHERE id = %s RETURNING id, queue, task, args, enqueued_at, node) "
        "INSERT INTO pgqueue.job_dead (state, reason, finished_at, attempt, id, queue, task, args, enqueued_at, node) "
        "SELECT 'failed', 'error', now(), 1, gone.* FROM gone",
        [id],
    )
    conn.commit()


def hrefs(answer: httpx.Response) -> list[str]:
    return [link.replace("&amp;", "&") for link in re.findall(r'<a [^>]*?href="([^"]*)"', answer.text)]


# The graph -----------------------------------------------------------------------------------------------------------


def node(number: int, *after: int, ended: tuple[int, ...] = (), failed: tuple[int, ...] = ()) -> NodeInfo:
    return NodeInfo(number, None, "t", {"completed": 1}, 0, after, ended, failed)


@pytest.mark.promise("F318")
def test_a_node_stands_behind_all_that_it_waits_for() -> None:
    graph = graph_of([node(1), node(2), node(3, 1), node(4, ended=(3, 2)), node(5, failed=(2,))])
    assert graph is not None
    assert [column.x for column in graph.columns] == [0, 256, 512]
    assert [[at for at, _ in column.nodes] for column in graph.columns] == [[0, 1], [2, 4], [3]]
    assert (graph.width, graph.height) == (2 * 256 + 200, 60 + 44)
    assert graph.lines == {
        "completed": "M200 22h56",
        "ended": "M456 22h56" + "M200 82c28 0 28 30 56 30h200c28 0 28 -90 56 -90",
        "failed": "M200 82h56",
    }


@pytest.mark.promise("F318")
def test_lines_that_need_not_cross_do_not() -> None:
    """By their numbers alone, the naive way, all of them would."""
    graph = graph_of([node(1), node(2), node(3), node(4, 3), node(5, 2), node(6, 1)])
    assert graph is not None
    assert [at for at, _ in graph.columns[1].nodes] == [5, 4, 3]


@pytest.mark.promise("F318")
def test_what_is_too_much_for_a_graph_has_none() -> None:
    assert graph_of([]) is None
    assert graph_of([node(n) for n in range(1, NODES_MOST + 1)]) is not None
    assert graph_of([node(n) for n in range(1, NODES_MOST + 2)]) is None
    many = [*(node(n) for n in range(1, 101)), *(node(n, *range(1, 101)) for n in range(101, 111))]
    assert graph_of(many) is not None and sum(len(each.after) for each in many) == EDGES_MOST
    assert graph_of([*many, node(111, 1)]) is None


# The pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F318")
async def test_the_list_has_the_newest_flows_fifty_a_page(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SHOWN", 2)
    first, second, third = (enqueued(conn, name) for name in ("a", "b", "<b>c</b>"))
    async with reading(dsn) as browser:
        shown = await browser.get("/flows")
        links = [link for link in hrefs(shown) if re.fullmatch(r"/flows/\d+", link)]
        assert links == [f"/flows/{third.id}", f"/flows/{second.id}"]
        assert "&lt;b&gt;c&lt;/b&gt;" in shown.text and "1 available, 5 blocked" in shown.text
        assert f"/flows?before={second.id}" in hrefs(shown)
        shown = await browser.get(f"/flows?before={second.id}")
        assert f"/flows/{first.id}" in hrefs(shown) and "Older flows" not in shown.text
        assert "There is no older flow." in (await browser.get(f"/flows?before={first.id}")).text
        found = (await browser.get("/flows", headers=JSON)).json()
        assert [(item["id"], item["state"], item["exact"]) for item in found["items"]] == [
            (third.id, "running", True),
            (second.id, "running", True),
        ]
        assert found["before"] == second.id
        monkeypatch.setattr(flows, "COUNTED_MOST", 2)
        assert "more than 10,000" in (await browser.get("/flows")).text


@pytest.mark.promise("F318")
async def test_a_flow_is_a_graph_and_a_table_whose_nodes_lead_to_their_jobs(dsn: str, conn: Conn) -> None:
    handle = enqueued(conn)
    failed(conn, min(handle._ids))
    async with reading(dsn) as browser:
        shown = await browser.get(f"/flows/{handle.id}")
        nodes = [f"/jobs?flow={handle.id}&node={number}" for number in (1, 2, 3, 4)]
        assert [link for link in hrefs(shown) if "node=" in link] == nodes + nodes
        assert '<path class="after-ended" d="M456 22h56"/>' in shown.text and "after-failed" in shown.text
        assert (
            'class="state-failed" transform="translate(0,0)"><rect/><text>1 paid</text> <text>failed</text>'
            in shown.text
        )
        assert "<text>2 step</text> <text>waiting, 3 jobs</text>" in shown.text
        assert 'data-label="waits for">1, 2 failed</td>' in shown.text and "style=" not in shown.text
        found = (await browser.get(nodes[1], headers=JSON)).json()["items"]
        assert [job["args"]["n"] for job in found] == [4, 3, 2]
        [item] = (await browser.get(f"/flows/{handle.id}", headers=JSON)).json()["items"]
        assert (item["name"], item["state"], item["nodes_count"]) == ("order 7", "running", 4)
        assert [each["state"] for each in item["nodes"]] == ["failed", "waiting", "waiting", "waiting"]
        job = await browser.get(f"/jobs/{max(handle._ids)}")
        assert {f"/flows/{handle.id}", nodes[3]} <= set(hrefs(job))
        answer = await browser.get("/flows/4711")
        assert (answer.status_code, "No such flow" in answer.text) == (404, True)
        for wrong in ("/jobs?node=1", f"/jobs?flow={handle.id}&node=0", "/jobs?flow=0"):
            assert (await browser.get(wrong)).status_code == 400, wrong


@pytest.mark.promise("F318")
async def test_a_flow_of_two_hundred_nodes_is_a_graph_and_one_of_more_a_table(dsn: str, conn: Conn) -> None:
    handles = []
    for n in (200, 201):
        flow = Flow(f"import of {n} files")
        layer: list[pgqueue.Node[Any]] = []
        for first in range(0, n, 20):
            layer = [
                flow.add(step.new(n=at), name=f"file {at}", after=layer[at - first :][:1])
                for at in range(first, min(n, first + 20))
            ]
        handles.append(flow.enqueue(conn))
    conn.commit()
    async with reading(dsn) as browser:
        shown = await browser.get(f"/flows/{handles[0].id}")
        assert shown.text.count("<rect/>") == 200 and len(shown.content) <= 60_000, len(shown.content)
        shown = await browser.get(f"/flows/{handles[1].id}")
        assert "<rect/>" not in shown.text and shown.text.count(ROW) == 50
        assert "Nodes 1 to 50 of 201; all of task" in shown.text
        shown = await browser.get(f"/flows/{handles[1].id}?from=201")
        assert shown.text.count(ROW) == 1 and "Nodes 201 to 201 of 201" in shown.text


@pytest.mark.promise("F318", "F451")
async def test_the_pages_of_a_flow_lead_to_all_nodes_once_and_the_first_one_has_the_graph(dsn: str, conn: Conn) -> None:
    flow = Flow("import")
    for at in range(120):
        flow.add(step.new(n=at), name=f"file {at}")
    handle = flow.enqueue(conn)
    conn.commit()
    seen, graphs, path = list[str](), list[bool](), f"/flows/{handle.id}"
    async with reading(dsn) as browser:
        while path:
            shown = await browser.get(path)
            seen += re.findall(r'scope="row"[^>]*><a href="[^"]*node=(\d+)"', shown.text)
            graphs.append("<rect/>" in shown.text)
            assert "Waits for" not in shown.text, "no node waits: each row would say the same"
            path = "".join(re.findall(r'rel="next" href="([^"]+)"', shown.text))
    assert seen == [str(number) for number in range(1, 121)] and graphs == [True, False, False]


@pytest.mark.promise("F318")
async def test_what_is_hidden_of_a_flow_is_hidden_in_its_graph_too(dsn: str, conn: Conn) -> None:
    flow = Flow("order token=abc12345")
    flow.add(step.new(), name="charge password=hunter22")
    handle = flow.enqueue(conn)
    conn.commit()
    async with reading(dsn) as browser:
        for path in ("/flows", f"/flows/{handle.id}"):
            for headers in ({}, JSON):
                text = (await browser.get(path, headers=headers)).text
                assert "abc12345" not in text and "hunter22" not in text and "order token=" in text, path


@pytest.mark.promise("F318")
async def test_the_page_says_that_history_has_forgotten_jobs(dsn: str, conn: Conn, eyes: Eyes) -> None:
    handle = enqueued(conn)
    async with reading(dsn) as browser:
        assert "forgotten" not in (await browser.get(f"/flows/{handle.id}")).text
        eyes.do("UPDATE pgqueue.flow SET enqueued_at = now() - interval '400 days'")
        assert "This flow is older, so jobs of it may be forgotten" in (await browser.get(f"/flows/{handle.id}")).text
        eyes.do("INSERT INTO pgqueue.flow_kept (node, id, state) VALUES (%s, 1, 'completed')", handle.id << 20 | 1)
        assert "History has forgotten 1 job of it" in (await browser.get(f"/flows/{handle.id}")).text
        eyes.do("DELETE FROM pgqueue.job_blocked")
        eyes.do("DELETE FROM pgqueue.job_available")
        assert "No job of it is there." in (await browser.get(f"/flows/{handle.id}")).text


# What an operator does -----------------------------------------------------------------------------------------------


@pytest.mark.promise("F319")
async def test_a_flow_is_cancelled_and_retried_after_a_preview(dsn: str, conn: Conn, eyes: Eyes) -> None:
    handle = enqueued(conn)
    here = f"/flows/{handle.id}"
    failed(conn, min(handle._ids))
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for action, states in (("cancel", "5 blocked"), ("retry", "5 cancelled, 1 failed")):
            n = 5 if action == "cancel" else 6
            assert f"{here}/change?action={action}" in hrefs(await browser.get(here))
            preview = await browser.get(f"{here}/change?action={action}")
            assert f"{states}. Nothing has happened yet." in preview.text
            assert f'value="{action}"><button>{action.capitalize()} {n} jobs</button>' in preview.text
            assert forms(preview) == {f"{here}/change"}
            answer = await browser.post(f"{here}/change", data={"action": action}, headers=SAME_SITE)
            assert answer.headers["location"] == f"{here}?did=flow+{action}"
            assert NOTICES[f"flow {action}"] in (await browser.get(answer.headers["location"])).text
        assert pgqueue.get_flow(eyes.conn, handle.id).flow.jobs == {"available": 1, "blocked": 5}
        assert [(each.actor, each.action) for each in pgqueue.audit(eyes.conn)] == [
            ("dashboard", "retry"),
            ("dashboard", "cancel"),
        ]
        assert [link for link in hrefs(await browser.get(here)) if "/change?" in link] == [
            f"{here}/change?action=cancel"
        ]
        answer = await browser.post(f"{here}/change", data={"action": "retry"}, headers=SAME_SITE | JSON)
        assert answer.json() == {"items": [], "changed": False}


@pytest.mark.promise("F319")
@pytest.mark.parametrize(
    ("rights", "offered", "status"),
    [
        (ACTIONS - {"bulk"}, [], 403),
        (ACTIONS - {"cancel"}, [], 403),
        ({"bulk", "cancel"}, ["cancel"], 303),
        ("read", [], 403),
    ],
)
async def test_who_may_not_cancel_sees_no_button_and_is_refused(
    dsn: str, conn: Conn, rights: Any, offered: list[str], status: int
) -> None:
    handle = enqueued(conn)
    async with dashboard_of(dsn, lambda visitor: rights) as made, browsing(made) as browser:
        shown = await browser.get(f"/flows/{handle.id}")
        assert re.findall(r"change\?action=(\w+)", shown.text) == offered and forms(shown) == set()
        sent = await browser.post(f"/flows/{handle.id}/change", data={"action": "cancel"}, headers=SAME_SITE)
        assert sent.status_code == status
        assert (await browser.get(f"/flows/{handle.id}/change?action=discard")).status_code in (400, 403)


@pytest.mark.promise("F319")
async def test_a_flow_with_too_many_jobs_is_left_to_the_command(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "CHANGED_MOST", 5)
    handle = enqueued(conn)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        preview = await browser.get(f"/flows/{handle.id}/change?action=cancel")
        assert f"pgqueue cancel --flow {handle.id}" in preview.text and forms(preview) == set()
        sent = await browser.post(f"/flows/{handle.id}/change", data={"action": "cancel"}, headers=SAME_SITE)
        assert sent.status_code == 409 and f"pgqueue cancel --flow {handle.id}" in sent.text
    assert pgqueue.get_flow(conn, handle.id).flow.jobs == {"available": 1, "blocked": 5}


@pytest.mark.promise("F229")
async def test_a_flow_with_more_jobs_than_can_be_counted_is_shown(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive page counts every job, and a large flow meets the time that a statement of the dashboard has."""
    monkeypatch.setattr(page, "JOBS_MOST", 5)
    monkeypatch.setattr(page, "CHANGED_MOST", 3)
    monkeypatch.setattr(page, "aget_flow", None)
    handle = enqueued(conn)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        shown = await browser.get(f"/flows/{handle.id}")
        assert "It has more than 5 jobs" in shown.text and f"pgqueue flows {handle.id}" in shown.text
        assert f"/flows/{handle.id}/change?action=cancel" in hrefs(shown)
        [item] = (await browser.get(f"/flows/{handle.id}", headers=JSON)).json()["items"]
        assert (item["exact"], item["state"], item["nodes"]) == (False, "running", [])
        preview = await browser.get(f"/flows/{handle.id}/change?action=cancel")
        assert "Cancel more than 3 jobs of flow" in preview.text and forms(preview) == set()
        assert f"pgqueue cancel --flow {handle.id}" in preview.text
        nothing = await browser.get(f"/flows/{handle.id}/change?action=retry")
        assert "no job is in such a state" in nothing.text
        assert (await browser.get(f"/flows/{handle.id + 1}")).status_code == 404
        for action in ("cancel", "retry"):
            gone = await browser.post(f"/flows/{handle.id + 1}/change", data={"action": action}, headers=SAME_SITE)
            assert gone.status_code == 404


@pytest.mark.promise("F229")
def test_what_would_be_changed_is_counted_up_to_a_bound(conn: Conn) -> None:
    handle = enqueued(conn)
    failed(conn, min(handle._ids))
    live, dead = page.STATES["cancel"], page.STATES["retry"]
    assert flows.in_states(conn, handle.id, live, 100) == {"blocked": 5}
    assert flows.in_states(conn, handle.id, live, 2) == {"blocked": 2}
    assert flows.in_states(conn, handle.id, dead, 100) == {"failed": 1}
    pgqueue.cancel(conn, flow=handle.id)
    assert flows.in_states(conn, handle.id, live, 100) == {}
    assert flows.in_states(conn, handle.id, dead, 100) == {"failed": 1, "cancelled": 5}

"""Enqueue by hand: the form of a signature, arguments that are checked, JSON for other tasks, the record, secrets."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import httpx
import msgspec
import psycopg
import pytest
from dashboards import SAME_SITE, browsing, dashboard_of, forms, press, reading, without_our_script
from roles import create_role, drop_role
from workers import Eyes

import pgqueue
from pgqueue import Job, Unique
from pgqueue.client import tasks
from pgqueue.client.tasks import task
from pgqueue.database import grants
from pgqueue.web.access import ACTIONS
from pgqueue.web.pages.changes import NOTICES
from pgqueue.web.redaction import Redaction
from pgqueue.web.task_form import fields_of, values_of

EVIL = "<script>alert('x')</script>\u202e"
JSON = {"accept": "application/json"}


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Item(msgspec.Struct):
    sku: str
    count: int = 1


Count = Annotated[int, msgspec.Meta(ge=1)]


@pytest.fixture
def order() -> Any:
    """A task with a parameter of each kind. No other task is known."""
    tasks.registry.clear()

    @task(name="web.order", queue="orders", priority=2)
    def order(
        job: Job,
        customer: Count,
        price: Decimal,
        express: bool,
        size: Size,
        at: datetime,
        items: list[Item],
        way: Literal["air", "sea"] = "sea",
        note: str = "no note",
        ratio: float | None = None,
        api_token: str = "sesame-4711",
        **rest: Any,
    ) -> None: ...

    return order


GOOD = {
    "customer": "7",
    "price": "9.90",
    "express": "true",
    "size": '"l"',
    "at": "2026-12-24T18:00:00+01:00",
    "items": '[{"sku": "a"}, {"sku": "b", "count": 2}]',
}


def filled(**fields: str) -> dict[str, str]:
    """The fields of the form of `web.order`."""
    return {"form": "1", "task": "web.order"} | {f"arg.{name}": value for name, value in (GOOD | fields).items()}


async def send(browser: httpx.AsyncClient, fields: Mapping[str, str], **headers: str) -> httpx.Response:
    return await browser.post("/enqueue", data=dict(fields), headers=SAME_SITE | headers)


def stored(eyes: Eyes) -> list[Any]:
    return eyes.all("SELECT args FROM pgqueue.job ORDER BY id")


@pytest.mark.promise("F150")
async def test_the_form_of_a_task_has_a_field_for_each_parameter(dsn: str, order: Any) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        listed = await browser.get("/enqueue")
        assert "/enqueue?task=web.order" in listed.text and forms(listed) == {"/enqueue"}
        page = await browser.get("/enqueue?task=web.order")
        fields = re.findall(r'<(input|select|textarea) id="f-arg.(\w+)"(?: type="(\w+)")?', page.text)
        assert fields == [
            ("input", "customer", "number"), ("textarea", "price", ""),
            ("select", "express", ""), ("select", "size", ""),
            ("textarea", "at", ""), ("textarea", "items", ""), ("select", "way", ""), ("textarea", "note", ""),
            ("input", "ratio", "number"), ("input", "api_token", "password"),
        ]  # fmt: skip
        assert 'id="f-more"' in page.text and "default no note" in page.text and ">SMALL<" in page.text
        # What is redacted by its name has no default here, in no form.
        as_json = await browser.get("/enqueue?task=web.order", headers=JSON)
        assert "sesame" not in listed.text + page.text + as_json.text
        assert [each["needs"] for each in as_json.json()["fields"]][:1] == ["Annotated[int, msgspec.Meta(ge=1)]"]
        assert (await browser.get("/enqueue?task=none")).status_code == 404


@pytest.mark.promise("F150")
async def test_a_form_enqueues_what_the_task_would_and_is_recorded(dsn: str, eyes: Eyes, order: Any) -> None:
    with psycopg.connect(dsn) as conn:
        at = datetime.fromisoformat(GOOD["at"])
        items = [Item("a"), Item("b", 2)]
        order.enqueue(conn, 7, Decimal("9.90"), True, Size.LARGE, at, items=items, note="a\nb", gift={"x": 1})
    ann = dashboard_of(dsn, lambda visitor: ACTIONS, actor=lambda visitor: "ann")
    async with ann as made, browsing(made) as browser:
        page = await press(browser, "/enqueue", **filled(note="a\r\nb"), more='{"gift": {"x": 1}}')
    [(by_code,), (by_hand,)] = stored(eyes)
    assert by_hand == by_code, "no default is kept, and each value as the task writes it"
    [(id, queue, priority)] = eyes.all("SELECT id, queue, priority FROM pgqueue.job ORDER BY id DESC LIMIT 1")
    assert (queue, priority, page.url.path) == ("orders", 2, f"/jobs/{id}") and NOTICES["made"] in page.text
    [entry] = pgqueue.audit(eyes.conn)
    assert (entry.actor, entry.action, entry.jobs) == ("ann", "enqueue", (id,))
    assert entry.target == {"task": "web.order", "queue": "orders"}


@pytest.mark.promise("F150")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"customer": ""}, "missing &#39;customer&#39;"),
        ({"customer": "seven"}, "parameter customer"),
        ({"customer": "0"}, "parameter customer"),
        ({"customer": "1.5"}, "parameter customer"),
        ({"price": "cheap"}, "parameter price"),
        ({"express": "maybe"}, "express: is not JSON"),
        ({"size": '"xl"'}, "parameter size"),
        ({"at": "tomorrow"}, "parameter at"),
        ({"at": "2026-12-24T18:00:00"}, "parameter at"),
        ({"items": "[{"}, "items: is not JSON"),
        ({"items": '[{"count": 1}]'}, "missing &#39;sku&#39;"),
        ({"items": "[" * 50_00}, "items: is not JSON"),
        ({"ratio": "NaN"}, "parameter ratio"),
        ({"way": '"land"'}, "parameter way"),
        ({"note": "a\0b"}, "NUL"),
    ],
)
async def test_what_does_not_fit_comes_back_and_reaches_no_database(
    dsn: str, eyes: Eyes, order: Any, fields: dict[str, str], says: str
) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        sent = filled(**{"note": "kept & <b>", **fields})
        answer = await send(browser, sent)
        assert answer.status_code == 422, answer.text
        [said] = re.findall(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
        assert says in said and "Nothing was enqueued" in said
        for name, value in (GOOD | fields).items():
            assert value in typed(answer, f"arg.{name}"), name
        if "note" not in fields:
            assert typed(answer, "arg.note") == "kept & <b>"
        document = (await send(browser, sent, accept="application/json")).json()
        assert (document["items"], document["error"]["code"]) == ([], 422)
    assert stored(eyes) == eyes.all("TABLE pgqueue.audit") == []


def typed(page: httpx.Response, name: str) -> str:
    """What stands in a field of a page: of a choice everything, as only what can be chosen stands there."""
    found = re.search(
        rf'name="{re.escape(name)}"[^>]*?(?: value="([^"]*)"[^>]*>|>\n?(.*?)</(?:textarea|select)>)',
        page.text,
        re.DOTALL,
    )
    assert found is not None, name
    text = html.unescape(found[1] if found[1] is not None else found[2])
    return f'{text} "xl" "land" maybe' if "<option" in text else text.replace("\ufffd", "\0")


@pytest.mark.promise("F150")
async def test_options_are_checked_and_a_key_is_taken_once(dsn: str, eyes: Eyes, order: Any) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for option, value in (("queue", "no name!"), ("priority", "10"), ("priority", "x"), ("at", "soon")):
            assert (await send(browser, filled() | {option: value})).status_code == 422
        assert stored(eyes) == []
        options = {"queue": "fast", "priority": "0", "at": "2100-01-02T03:04", "idempotency_key": "order:7"}
        for did in ("made", "key taken"):
            page = await press(browser, "/enqueue", **filled(), **options)
            assert NOTICES[did] in page.text
    columns = "SELECT queue, priority, state, run_at, idempotency_key FROM pgqueue.job"
    assert eyes.all(columns) == [("fast", 0, "scheduled", datetime(2100, 1, 2, 3, 4, tzinfo=UTC), "order:7")]
    assert eyes.one("SELECT count(*) FROM pgqueue.audit") == 1


@pytest.mark.promise("F150")
async def test_any_other_task_is_enqueued_by_name_with_json(dsn: str, eyes: Eyes, order: Any) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        other = {"task": "of.another", "args": '{"to": "a", "n": [1, null]}', "lock": "k", "unique": "u"}
        assert NOTICES["made"] in (await press(browser, "/enqueue", **other)).text
        assert NOTICES["key taken"] in (await press(browser, "/enqueue", **other)).text
        assert NOTICES["made"] in (await press(browser, "/enqueue", task="of.another")).text
        # By name, but known here: checked all the same.
        known = {"task": "web.order", "args": json.dumps({name: "x" for name in GOOD})}
        wrong = [
            known,
            known | {"args": "{}"},
            {"task": "web.order", "args": "{}", "unique": "u"},
            other | {"args": "[1]"},
            other | {"args": "{"},
            other | {"args": '{"a": NaN}'},
            other | {"args": '{"a": "\\u0000"}'},
            other | {"args": '{"a": "\\ud800"}'},
            other | {"lock": "x" * 501},
            other | {"task": "no name"},
            {"args": "{}"},
        ]
        for fields in wrong:
            answer = await send(browser, fields)
            assert answer.status_code == 422, (fields, answer.text)
            assert html.escape(fields["args"], quote=True).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in (
                answer.text
            )
    found = eyes.all("SELECT task, args, lock_key, unique_key FROM pgqueue.job ORDER BY id")
    assert found == [("of.another", {"to": "a", "n": [1, None]}, "k", "u"), ("of.another", {}, None, None)]
    assert eyes.one("SELECT count(*) FROM pgqueue.audit") == 2


@pytest.mark.promise("F150")
async def test_a_form_that_is_sent_twice_enqueues_once(dsn: str, eyes: Eyes, order: Any) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, fields in (("?task=web.order", filled()), ("", {"task": "of.another"})):
            names = [
                re.findall(r'name="once" value="(\w+)"', (await browser.get(f"/enqueue{path}")).text) for _ in range(2)
            ]
            assert names[0] != names[1]
            for [name], did in zip(names[:1] * 2 + names[1:], ("made", "key taken", "made"), strict=True):
                assert NOTICES[did] in (await press(browser, "/enqueue", **fields, once=name)).text
        sent = await asyncio.gather(*(send(browser, filled() | {"once": "together"}) for _ in range(4)))
        assert len({answer.headers["location"].partition("?")[0] for answer in sent}) == 1
        given = filled() | {"once": "x", "idempotency_key": "mine"}
        assert (await send(browser, given)).status_code == 303
    keys = [key for (key,) in eyes.all("SELECT idempotency_key FROM pgqueue.job ORDER BY id")]
    assert len(keys) == 6 and keys[-2:] == ["form:together", "mine"]
    assert eyes.one("SELECT count(*) FROM pgqueue.audit") == 6


@pytest.mark.promise("F150")
async def test_no_field_is_ignored(dsn: str, eyes: Eyes, order: Any) -> None:
    """The form may be older than the code, or come from a process that has imported other modules."""
    by_name = {"task": "of.another", "args": "{}"}
    wrong = [
        (filled(gone="1"), 422, "no field &#39;gone&#39;"),
        (filled() | {"delay": "30"}, 422, "no field &#39;delay&#39;"),
        (filled() | {"args": "{}"}, 422, "no field &#39;args&#39;"),
        (filled() | {"unique": "u"}, 422, "no field &#39;unique&#39;"),
        (filled() | {"task": "not.here"}, 404, "known here"),
        (by_name | {"arg.to": "a"}, 422, "no field &#39;to&#39;"),
        (by_name | {"more": "{}"}, 422, "no field &#39;more&#39;"),
    ]
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for fields, status, says in wrong:
            answer = await send(browser, fields)
            assert answer.status_code == status and says in answer.text, (fields, answer.text)
        assert stored(eyes) == []
        assert (await send(browser, filled(note="") | {"lock": "", "args": ""})).status_code == 303


@pytest.mark.promise("F150", "F138", "F139")
async def test_secrets_are_not_repeated_and_foreign_text_is_escaped(dsn: str, eyes: Eyes, order: Any) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        secret = await send(browser, filled(api_token="hunter2-xyz", customer="no", note=EVIL, size=EVIL))
        assert secret.status_code == 422 and "hunter2" not in secret.text
        quoted = {"task": "web.order", "args": json.dumps({"api_token": "hunter2-xyz", EVIL: EVIL})}
        by_name = await send(browser, quoted)
        [said] = re.findall(r'role="alert">(.*?)</p>', by_name.text, re.DOTALL)
        assert by_name.status_code == 422 and "hunter2" not in said
        evil = await send(browser, {"task": EVIL, "args": EVIL, "lock": EVIL, "queue": EVIL})
        for page in (secret, by_name, evil, await browser.get("/enqueue", params={"task": EVIL})):
            assert "<script" not in without_our_script(page.text) and "\u202e" not in page.text
    assert stored(eyes) == []


@pytest.mark.promise("F150", "F138")
async def test_an_error_that_quotes_a_secret_is_shown_without_it(dsn: str) -> None:
    def refuse(**arguments: object) -> str:
        raise ValueError(f"cannot use {arguments}")

    @task(name="web.paid", lock=refuse)
    def paid(api_token: str, card_number: int, customer: str) -> None: ...

    typed = {"api_token": "hunter2-xyz", "card_number": "41114111", "customer": "ada-lovelace"}
    by_form = {f"arg.{name}": value for name, value in typed.items()} | {"task": "web.paid", "form": "1"}
    by_name = {"task": "web.paid", "args": json.dumps(typed | {"card_number": 41114111})}
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for fields in (by_form, by_name):
            for accept in ("text/html", "application/json"):
                answer = await send(browser, fields, accept=accept)
                [said] = re.findall(r"making the job raised ValueError: .*", answer.text)
                assert answer.status_code == 422 and "ada-lovelace" in said
                shown = answer.text if fields is by_form else said
                assert "hunter2" not in shown and "41114111" not in shown


@pytest.mark.promise("F150")
@pytest.mark.parametrize("field", ["lock", "unique", "idempotency_key"])
async def test_a_key_keeps_its_blanks(dsn: str, eyes: Eyes, field: str) -> None:
    tasks.registry.clear()
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for key in ("a", "a ", " a"):
            fields = {"task": " web.other ", "priority": " 4 ", field: key}
            assert (await send(browser, fields)).status_code == 303
    found = eyes.all("SELECT coalesce(lock_key, unique_key, idempotency_key), task FROM pgqueue.job ORDER BY id")
    assert found == [("a", "web.other"), ("a ", "web.other"), (" a", "web.other")]


@pytest.mark.promise("F150")
async def test_a_task_that_refuses_duplicates_and_one_whose_own_code_fails(dsn: str, eyes: Eyes) -> None:
    @task(name="web.once", unique=Unique("once", on_duplicate="raise"))
    def once() -> None: ...

    @task(name="web.keyed", lock=lambda order: order["id"])
    def keyed(order: dict[str, str]) -> None: ...

    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert NOTICES["made"] in (await press(browser, "/enqueue", task="web.once", form="1")).text
        again = await send(browser, {"task": "web.once", "form": "1"})
        assert again.status_code == 409 and "Nothing was enqueued" in again.text
        failing = await send(browser, {"task": "web.keyed", "form": "1", "arg.order": "{}"})
        assert failing.status_code == 422 and "KeyError" in failing.text and "Traceback" not in failing.text
    assert len(stored(eyes)) == eyes.one("SELECT count(*) FROM pgqueue.audit") == 1


@pytest.mark.promise("F150")
async def test_only_the_right_to_enqueue_opens_the_page(dsn: str, eyes: Eyes, order: Any) -> None:
    async with reading(dsn) as browser:
        assert 'href="/enqueue"' not in (await browser.get("/queues")).text
        assert (await browser.get("/enqueue")).status_code == 403
    async with dashboard_of(dsn, lambda visitor: ACTIONS - {"enqueue"}) as made, browsing(made) as browser:
        assert (await send(browser, filled())).status_code == 403
    async with dashboard_of(dsn, lambda visitor: {"enqueue"}) as made, browsing(made) as browser:
        assert 'href="/enqueue"' in (await browser.get("/queues")).text
        foreign = await browser.post("/enqueue", data=filled(), headers={"origin": "http://evil.example"})
        assert foreign.status_code == 403 and stored(eyes) == []
        assert (await send(browser, filled())).status_code == 303


@pytest.mark.promise("F150")
@pytest.mark.parametrize("kinds", [["read", "operate", "enqueue"], ["read", "enqueue"]])
async def test_it_needs_the_grants_to_enqueue_and_to_record(dsn: str, eyes: Eyes, order: Any, kinds: list[Any]) -> None:
    name = create_role(dsn)
    try:
        with psycopg.connect(dsn) as conn:
            for kind in kinds:
                grants.grant(conn, name, kind, "pgqueue")
        role = psycopg.conninfo.make_conninfo(dsn, user=name, password="secret")
        async with dashboard_of(role, lambda visitor: ACTIONS) as made, browsing(made) as browser:
            allowed = "operate" in kinds
            for keys in ({}, {"idempotency_key": "k"}):
                assert (await send(browser, filled() | keys)).status_code == (303 if allowed else 503)
        assert len(stored(eyes)) == (2 if allowed else 0), "without its record no job is enqueued"
    finally:
        with psycopg.connect(dsn, autocommit=True) as conn:
            drop_role(conn, name)


@pytest.mark.promise("F150")
async def test_where_the_application_stages_its_jobs_the_dashboard_enqueues(dsn: str, eyes: Eyes, order: Any) -> None:
    pgqueue.configure(outbox=True)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert (await send(browser, filled())).status_code == 303
    assert len(stored(eyes)) == 1


def test_arguments_by_position_only_and_in_a_list_are_given_as_such() -> None:
    @task(name="web.places")
    def places(first: int, second: int = 2, /, third: int = 3, *more: int, last: str | None) -> None: ...

    def call(**typed: str) -> Any:
        fields = fields_of(places, Redaction())
        values = values_of(fields, {f"arg.{name}": [text] for name, text in typed.items()})
        return places.codec.call_of(json.dumps(values))

    assert call(first="1") == ((1,), {"last": None})
    assert call(first="1", third="5", last="x") == ((1,), {"third": 5, "last": "x"})
    assert call(first="1", second="4") == ((1, 4), {"last": None})
    assert call(first="1", more="[8, 9]", last="x") == ((1, 2, 3, 8, 9), {"last": "x"})

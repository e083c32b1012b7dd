"""The page of the outbox: relays and what they report, the outbox of the same database, and what is hidden."""

from __future__ import annotations

import pytest
from dashboards import forms, reading, without_our_script
from workers import Eyes

from pgqueue.database import migrations
from pgqueue.web.redaction import HIDDEN

EVIL = "<script>alert('x')</script>"
JSON = {"accept": "application/json"}


@pytest.mark.promise("F151")
async def test_without_an_outbox_the_page_says_so(dsn: str) -> None:
    async with reading(dsn) as browser:
        assert "There is no outbox" in (await browser.get("/outbox")).text
        assert (await browser.get("/outbox", headers=JSON)).json() == {
            "items": [],
            "outbox": None,
            "refused": [],
            "refused_cut_at": None,
        }


@pytest.mark.promise("F151")
async def test_relays_are_shown_with_what_they_reported_and_a_silent_one_as_silent(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.relay_fence (source, epoch, name, waiting, oldest, refused, reported_at) VALUES "
        "(gen_random_uuid(), 1, %s, 10001, 90, 2, now()), "
        "(gen_random_uuid(), 1, 'db2/shop', 0, NULL, 0, now() - interval '10 minutes'), "
        "(gen_random_uuid(), 1, NULL, NULL, NULL, NULL, NULL)",
        EVIL,
    )
    async with reading(dsn) as browser:
        page = await browser.get("/outbox")
        assert "more than 10,000" in page.text and "silent: no relay works for it" in page.text
        assert "&lt;script&gt;" in page.text and "<script" not in without_our_script(page.text) and forms(page) == set()
        found = (await browser.get("/outbox", headers=JSON)).json()["items"]
        assert [(each["name"], each["waiting"], each["is_silent"]) for each in found] == [
            (EVIL, 10_001, False),
            ("db2/shop", 0, True),
        ]


@pytest.mark.promise("F151", "F138")
async def test_the_outbox_of_the_queues_own_database_is_shown_without_reasons_that_may_quote(
    dsn: str, eyes: Eyes
) -> None:
    migrations.migrate(dsn, line=migrations.OUTBOX)
    eyes.do("INSERT INTO pgqueue.outbox (task) VALUES ('waits'), (%s)", EVIL)
    eyes.do(
        "INSERT INTO pgqueue.outbox_refused (id, task, args, format, uid, staged_at, reason) "
        "SELECT id, task, args, format, uid, staged_at, 'no hunter2' FROM pgqueue.outbox WHERE id = 2"
    )
    for redact, seen in ((None, False), ((), True)):
        async with reading(dsn, redact=redact) as browser:
            page = await browser.get("/outbox")
            assert "2 staged jobs wait for a relay" in page.text and "1 was refused" in page.text
            assert "&lt;script&gt;" in page.text and "<script" not in without_our_script(page.text)
            listed = (await browser.get("/outbox", headers=JSON)).json()
            assert [each["reason"] for each in listed["refused"]] == ["no hunter2" if seen else HIDDEN]
            assert ("hunter2" in page.text) == seen
            assert (listed["outbox"]["waiting"], listed["outbox"]["refused"]) == (2, 1)

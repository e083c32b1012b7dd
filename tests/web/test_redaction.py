"""What is hidden: by key at any depth, in texts, by a function; and that no filter finds it out."""

from __future__ import annotations

import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading

import pgqueue
from pgqueue.admin.error_groups import ErrorGroup
from pgqueue.errors import InvalidOption
from pgqueue.jobs import outcomes
from pgqueue.jobs.outcomes import problem
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.testing import drain
from pgqueue.web.access import ACTIONS
from pgqueue.web.pages import lists
from pgqueue.web.pages.jobs import ROOM, refused_filter
from pgqueue.web.redaction import FOUND_MOST, HIDDEN, Redaction
from pgqueue.web.routes import ROUTES

DEFAULT = Redaction()
HIDE_NUMBERS = Redaction((), lambda path, value: "hidden" if path[-1] == "number" else value)


@pytest.mark.promise("F138")
@pytest.mark.parametrize(
    ("item", "shown"),
    [
        ({"args": {"password": "x", "to": "a"}}, {"args": {"password": HIDDEN, "to": "a"}}),
        ({"args": {"user": {"API_Token": 5}}}, {"args": {"user": {"API_Token": HIDDEN}}}),
        ({"args": [[{"DbPassword": ["a"]}]]}, {"args": [[{"DbPassword": HIDDEN}]]}),
        ({"args": {"secret": {"inner": "x"}}}, {"args": {"secret": HIDDEN}}),
        ({"args": {"password": None}}, {"args": {"password": None}}),
        ({"headers": {"Authorization": "Bearer abc"}}, {"headers": {"Authorization": HIDDEN}}),
        ({"reason": "no password=hunter2 here"}, {"reason": f"no password={HIDDEN} here"}),
        ({"reason": 'sent {"token": "a b c", "n": 1}'}, {"reason": f'sent {{"token": {HIDDEN}, "n": 1}}'}),
        ({"reason": "{'api_key': 'it\\'s', 'n': 1}"}, {"reason": f"{{'api_key': {HIDDEN}, 'n': 1}}"}),
        ({"reason": "Authorization: Bearer abc.def"}, {"reason": f"Authorization: {HIDDEN}"}),
        ({"reason": "run --password hunter2 now"}, {"reason": f"run --password {HIDDEN} now"}),
        ({"reason": "of postgresql://app:hunter2@db/x"}, {"reason": f"of postgresql://app:{HIDDEN}@db/x"}),
        ({"lock_key": "token:abc"}, {"lock_key": f"token:{HIDDEN}"}),
        ({"reason": "the password is wrong"}, {"reason": "the password is wrong"}),
        ({"task": "token:refresh", "queue": "secret:q"}, {"task": "token:refresh", "queue": "secret:q"}),
        ({"args": {"task": "token:refresh"}}, {"args": {"task": f"token:{HIDDEN}"}}),
    ],
)
def test_what_patterns_hide(item: Any, shown: Any) -> None:
    assert DEFAULT.shown(item) == shown


@pytest.mark.promise("F138")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{'password': b'hunter2', 'n': 1}", "{'password': •••, 'n': 1}"),
        ('password = r"hunter2" now', "password = ••• now"),
        ("password=f'hunter2'", "password=•••"),
        ('password = """hunter2""", 7', "password = •••, 7"),
        ('password="hun\nter2" now', "password=••• now"),
        ("password='hun\nter2 unfinished", "password=•••"),
        ("password=SecretStr('hunter2'), 7", "password=•••"),
        ("password='hun' 'ter'", "password=••• 'ter'"),
        ("{'tokens': ['a', 'hunter2']}", "{'tokens': •••"),
        ("token=('a', 'hunter2')", "token=•••"),
        ("token=[a, hunter2]", "token=•••"),
        ("token={a, hunter2}\nnext line", "token=•••\nnext line"),
        ('{"secret": {"inner": "hunter2"}}', '{"secret": •••'),
        ('{"secret": {\n  "a": 1,\n  "inner": "hunter2"\n}}', '{"secret": •••'),
        ("password: 'it''s hunter2'", "password: •••"),
        ('password=hun"ter2', "password=•••"),
        ("'password=hunter2' is bad", "'password=•••' is bad"),
        (r"{\"password\": \"a\\\"hunter2\"}", r"{\"password\": •••"),
        ("Cookie: theme=dark; sessionid=hunter2\nHost: a", "Cookie: •••\nHost: a"),
        ("{'Set-Cookie': 'a=b'; c=hunter2}", "{'Set-Cookie': •••"),
        ("Authorization: Negotiate hunter2", "Authorization: •••"),
        ("401 for Bearer eyJhbGciOi.eyJzdWI-_x.s=, 7", "401 for Bearer •••, 7"),
        ("sent 'BASIC  dXNlcjpwYXNz'", "sent 'BASIC  •••'"),
        ("bearer understanding of Basic principles, Bearer v2", "bearer understanding of Basic principles, Bearer v2"),
        ("Authorization: ApiKey a, b=hunter2", "Authorization: •••"),
        ("password    =    hunter2", "password    =    •••"),
        ("password == hunter2", "password == •••"),
        ("password := hunter2", "password := •••"),
        ("environ['SECRET'] = 'hunter2'", "environ['SECRET'] = •••"),
        ("next=%2F%3Ftoken%3Dhunter2&n=1", "next=%2F%3Ftoken%3D•••&n=1"),
        ("<password>hunter2</password>", "<password>•••"),
        ("Key (token)=(hunter2) already exists.", "Key (token)=(•••"),
        ("Key (password, email)=(hunter2, a@b)", "Key (password, email)=(•••"),
        ("Key (email, lower(token))=(a@b, hunter2)\nHint", "Key (email, lower(token))=(•••\nHint"),
        ("a" * 300 + "_password=hunter2", "a" * 300 + "_password=•••"),
        ("Key (email)=(a@b) already exists.", "Key (email)=(a@b) already exists."),
        ("name='it''s', n=[1, 2]", "name='it''s', n=[1, 2]"),
        ("a cookie is refused; a token, too", "a cookie is refused; a token, too"),
    ],
)
def test_what_follows_a_name_in_a_text_is_hidden_however_it_is_written(text: str, shown: str) -> None:
    assert DEFAULT.shown({"reason": text, "attempts": [{"message": text}]}) == {
        "reason": shown,
        "attempts": [{"message": shown}],
    }


@pytest.mark.promise("F138")
def test_a_hidden_value_is_hidden_in_every_text_of_its_item() -> None:
    item = {
        "args": {"password": "hunter2", "pin": {"token": 123_456}, "pwd": "abc"},
        "reason": "user 'hunter2' is unknown",
        "attempts": [{"message": "hunter2", "traceback": 'f("hunter2", 123456)', "error_type": "abc"}],
        "unique_key": "login:hunter2",
        "result": ["hunter2!"],
    }
    shown = DEFAULT.shown(item)
    assert "hunter2" not in repr(shown) and "123456" not in repr(shown)
    assert shown["attempts"][0]["error_type"] == "abc", "too short to be looked for"
    assert shown["unique_key"] == f"login:{HIDDEN}"


@pytest.mark.promise("F138")
def test_a_hidden_value_is_found_however_a_text_quotes_it() -> None:
    secret = 'pä"ss\nwörd'
    texts = [secret, repr(secret), json.dumps(secret), json.dumps(secret, ensure_ascii=False), f"x{secret}y"]
    shown = DEFAULT.shown({"args": {"password": secret}, "attempts": [{"message": text} for text in texts]})
    assert not [each for each in shown["attempts"] if "rd" in each["message"]], shown


@pytest.mark.promise("F138")
def test_where_arguments_were_not_read_no_text_is_shown() -> None:
    item = {
        "id": 7, "task": "a.b", "state": "failed", "args": {"pgqueue": "too large"}, "headers": {"to": "hunter2"},
        "reason": "hunter2", "unique_key": "hunter2", "attempts": [{"message": "hunter2", "outcome": "failed"}],
    }  # fmt: skip
    shown = DEFAULT.shown(item)
    assert "hunter2" not in repr(shown)
    assert (shown["task"], shown["state"], shown["args"]) == ("a.b", "failed", {"pgqueue": "too large"})
    assert Redaction(()).shown(item) == item


@pytest.mark.promise("F138")
async def test_messages_of_error_groups_are_shown_only_where_nothing_is_redacted(
    dsn: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments that they quote are not at hand there. Groups are made by workers: here as if one had."""
    at = datetime.now(UTC)
    group = ErrorGroup("f", "default", "a.b", "ValueError", "a.f", "card hunter2", at, at, 3, (7,), "1")

    async def groups(conn: object, **asked: object) -> list[ErrorGroup]:
        return [group]

    monkeypatch.setattr(lists, "aerror_groups", groups)
    for redact, seen in ((None, False), ((), True)):
        async with reading(dsn, redact=redact) as browser:
            for accept in ("text/html", "application/json"):
                text = (await browser.get("/errors", headers={"accept": accept})).text
                assert "ValueError" in text and ("hunter2" in text) == seen


@pytest.mark.promise("F138")
def test_the_function_sees_every_path_and_a_failing_one_hides(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, ...]] = []

    def see(path: tuple[str, ...], value: Any) -> Any:
        seen.append(path)
        return value

    item = {"args": {"cards": [{"number": 4111}]}, "reason": "x"}
    assert Redaction((), see).shown(item) == item
    assert seen == [
        ("args",),
        ("args", "cards"),
        ("args", "cards"),
        ("args", "cards", "number"),
        ("reason",),
    ]
    shown = HIDE_NUMBERS.shown({"args": {"cards": [{"number": "4111"}]}, "reason": "card 4111 is refused"})
    assert shown == {"args": {"cards": [{"number": "hidden"}]}, "reason": f"card {HIDDEN} is refused"}

    def fail(path: tuple[str, ...], value: Any) -> Any:
        raise ValueError

    def fail_inside(path: tuple[str, ...], value: Any) -> Any:
        return value if len(path) == 1 else fail(path, value)

    with caplog.at_level(logging.ERROR):
        assert Redaction((), fail).shown({"reason": "x"}) == {"reason": HIDDEN}
    assert "redact has failed at reason" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        for key in ("a\n2026-01-01 ERROR forged", "a\x1b[31m", "a\u202eb", "a" * 100_000):
            Redaction((), fail_inside).shown({"args": {key: "x"}})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4 and all(each.isprintable() and len(each) < 300 for each in said), said


def test_without_patterns_and_function_nothing_is_hidden() -> None:
    item = {"args": {"password": "x"}, "reason": "password=x"}
    assert Redaction(()).shown(item) is item
    with pytest.raises(InvalidOption, match="redact"):
        Redaction(("",))


@pytest.mark.promise("F138")
@pytest.mark.parametrize(
    ("args", "key", "error", "refused"),
    [
        ({"password": "x"}, None, None, True),
        ({"user": {"password": "x"}}, None, None, True),
        ({"password": {"first": "x"}}, None, None, True),
        ({"users": [{"token": 1}]}, None, None, True),
        ({"to": "password=x"}, None, None, True),
        ({"to": "a"}, None, None, False),
        (None, "token:abc", None, True),
        (None, "order:7", None, False),
        (None, "order:token=7", None, True),
        (None, None, "hunter", True),
        (None, None, None, False),
    ],
)
def test_a_filter_by_what_is_hidden_is_refused(args: Any, key: str | None, error: str | None, refused: bool) -> None:
    assert (refused_filter(args, key, error, DEFAULT) is not None) == refused
    assert refused_filter(args, key, error, Redaction(())) is None


@pytest.mark.promise("F138")
def test_a_filter_by_what_the_function_hides_is_refused() -> None:
    assert refused_filter({"cards": [{"number": 1}]}, None, None, HIDE_NUMBERS) is not None
    assert refused_filter({"cards": [{"name": 1}]}, None, None, HIDE_NUMBERS) is None
    keys = Redaction((), lambda path, value: HIDDEN if path == ("unique_key",) else value)
    assert refused_filter(None, "abc", None, keys) is not None
    awaited = Redaction((), lambda path, value: HIDDEN if path == ("key",) and value == "rate:abc" else value)
    assert refused_filter(None, "abc", None, awaited) is not None
    assert refused_filter(None, "abd", None, awaited) is None


@pytest.mark.second
def test_a_long_text_is_read_once() -> None:
    """A pattern that tries each letter anew would take minutes for these."""
    begun = time.perf_counter()
    for text in (
        *("a" * 500_000, "a " * 250_000, "password" * 60_000, '"' * 500_000, "token=" * 80_000),
        *("A" * 500_000 + "://", "x://" * 100_000, "https://a.example " + "ab12" * 100_000),
        " ".join(f"http://host{n}:8080/path/{n}" for n in range(15_000)),
        *(
            "token= " * 80_000,
            "token" + " " * 500_000,
            "token: [\n" * 50_000,
            "token='\\" * 60_000,
            "cookie: " * 60_000,
        ),
        *("token=" + "''" * 250_000 + "x", "(token)=(" * 50_000, ")=(" * 150_000, "a.b-" * 120_000, "--a " * 120_000),
    ):
        DEFAULT.shown({"reason": text, "args": {"text": text}})
    assert time.perf_counter() - begun < 20


@pytest.mark.promise("F138")
def test_many_hidden_values_hide_all_texts() -> None:
    """Each would have to be looked for in each text."""
    begun = time.perf_counter()
    for n, seen in ((FOUND_MOST, True), (FOUND_MOST + 1, False), (60_000, False)):
        args = {"tokens": [f"tok{each}" for each in range(n)], "notes": [f"note {each}" for each in range(n)]}
        shown = DEFAULT.shown({"task": "a.b", "args": args, "reason": f"tok{n - 1} is refused", "attempt": 7})
        assert shown["args"]["tokens"] == HIDDEN
        assert shown["args"]["notes"][0] == ("note 0" if seen else HIDDEN)
        assert shown["reason"] == (f"{HIDDEN} is refused" if seen else HIDDEN)
        assert (shown["task"], shown["attempt"]) == ("a.b", 7)
    assert time.perf_counter() - begun < 10


def _function_for(*fields: str) -> Any:
    return lambda path, value: HIDDEN if len(path) == 1 and path[0] in fields else value


@pytest.mark.promise("F138")
@pytest.mark.each_value
@pytest.mark.parametrize("field", ["lock_key", "limit_key", "rate_key"])
@pytest.mark.parametrize("by", ["pattern", "function"])
async def test_a_key_that_a_job_hides_is_hidden_on_every_page(
    dsn: str, conn: psycopg.Connection[Any], field: str, by: str
) -> None:
    """Short ones, too, which are not looked for in other texts. The name of a limit is shown, its jobs are not."""
    kind, before = field.removesuffix("_key"), "mail:" if field == "rate_key" else ""
    for key in ("alice@example", "q7z"):
        keys = {"lock_key": None, "limit_key": None, "rate_key": None, field: before + key}
        conn.execute(
            "INSERT INTO pgqueue.job (task, state, lock_key, limit_key, rate_key, key) "
            "VALUES ('a.b', 'blocked', %(lock_key)s, %(limit_key)s, %(rate_key)s, %(key)s)",
            keys | {"key": f"{kind}:{before}{key}"},
        )
    conn.execute("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('mail', 10, 60, now())")
    conn.commit()
    ids = [id for (id,) in conn.execute("SELECT id FROM pgqueue.job")]
    of_jobs = ["/limits/jobs?rate=mail"] if before else []
    asked = [f"/jobs?key={before}{key}" for key in ("alice@example", "q7z", "other")]
    if kind != "lock":
        asked += [f"/limits/jobs?{kind}={before}{key}" for key in ("alice@example", "q7z", "other:1")]
    redact: dict[str, Any] = {"redact": [field]} if by == "pattern" else {"redact_with": _function_for(field, "key")}
    async with reading(dsn, **redact) as browser:
        for path in ("/jobs", *(() if kind == "limit" else ("/", "/limits")), *of_jobs, *(f"/jobs/{id}" for id in ids)):
            for accept in ("text/html", "application/json"):
                text = (await browser.get(path, headers={"accept": accept})).text
                assert "alice" not in text, path
                assert "q7z" not in text or path.startswith("/jobs/"), path
        if before:
            waiters = (await browser.get(of_jobs[0], headers={"accept": "application/json"})).json()["items"][0]
            assert [each["id"] for each in waiters["waiters"]] == ids
        for path in asked:
            answer = await browser.get(path)
            assert (answer.status_code, "redacted" in answer.text) == (400, True), path
    async with reading(dsn, redact=()) as browser:
        for path in ("/jobs", of_jobs[0] if before else "/limits", *(path for path in asked if "q7z" in path)):
            assert "q7z" in (await browser.get(path, headers={"accept": "application/json"})).text, path


@pytest.mark.promise("F64", "F138")
@pytest.mark.parametrize("query", ["", "?state=failed", "?key=k", "?task=a.b&limit=500"])
async def test_a_list_reads_few_bytes_and_leaves_out_the_largest(
    dsn: str, conn: psycopg.Connection[Any], query: str
) -> None:
    """It shows no arguments as HTML. What was not read hides the texts of its job, and of no other."""
    conn.execute(
        "INSERT INTO pgqueue.job (task, state, started_at, finished_at, reason, unique_key, lock_key, args) "
        "SELECT 'a.b', 'failed', now(), now(), 'why ' || n, 'u' || n, 'k', "
        "jsonb_build_object('a', repeat('x', CASE WHEN n % 4 = 0 THEN 300000 ELSE 7 END)) "
        "FROM generate_series(1, 40) AS n"
    )
    conn.commit()
    async with reading(dsn) as browser:
        items = (await browser.get(f"/jobs{query}", headers={"accept": "application/json"})).json()["items"]
        page = await browser.get(f"/jobs{query}")
        [large] = {job["args"]["pgqueue"] for job in items if "pgqueue" in job["args"]}
        alone = (await browser.get(f"/jobs/{items[-4]['id']}", headers={"accept": "application/json"})).json()["items"]
    assert len(items) == 40 and large == "not shown: 300009 bytes"
    assert 600_000 < sum(len(json.dumps(job["args"])) for job in items) <= ROOM
    for job in items:
        n = int(job["unique_key"][1:]) if job["unique_key"] != HIDDEN else 4
        assert job["reason"] == (f"why {n}" if "a" in job["args"] else HIDDEN)
        assert "a" in job["args"] or n % 4 == 0
    assert page.status_code == 200 and "why 1<" in page.text and "why 4<" not in page.text
    assert len(alone[0]["args"]["a"]) in (7, 300_000)


class Refused(Exception):
    pass


@pytest.mark.promise("F138")
async def test_a_secret_is_on_no_page_and_in_no_json(dsn: str, conn: psycopg.Connection[Any]) -> None:
    @pgqueue.task(name="redacted.pay", retry=RetryPolicy(attempts=1))
    def pay(card: dict[str, str], to: str) -> None:
        raise Refused(f"card {card['card_number']} of {to}: token=hunter2")

    @pgqueue.task(name="redacted.ask")
    def ask(password: str) -> dict[str, str]:
        return {"password": password, "said": f"it was {password}"}

    failed = pay.using(headers={"authorization": "hunter2"}, lock="order:hunter2", unique="hunter2").enqueue(
        conn, {"card_number": "hunter2"}, "Ada"
    )
    done = ask.enqueue(conn, "hunter2")
    drain(conn)
    waits = pgqueue.remote("redacted.later").using(delay=900, lock="password:hunter2").enqueue(conn, secret="hunter2")
    conn.commit()
    assert "hunter2" in repr(pgqueue.get(conn, failed.id).attempts)
    paths = ["/", "/jobs", "/limits", "/errors", *(f"/jobs/{job.id}" for job in (failed, done, waits))]
    async with reading(dsn) as browser:
        for path in paths:
            for accept in ("text/html", "application/json"):
                answer = await browser.get(path, headers={"accept": accept})
                assert answer.status_code == 200, answer.text
                assert "hunter2" not in answer.text, (path, accept)
        for query in ("arg=password=hunter2", "arg=card.card_number=hunter2", "key=password:hunter2", "error=hunter2"):
            refused = await browser.get(f"/jobs?{query}")
            assert (refused.status_code, "redacted" in refused.text) == (400, True), query
            assert "Ada" not in refused.text
        assert "Ada" in (await browser.get(f"/jobs/{failed.id}")).text
    async with reading(dsn, redact=()) as browser:
        assert "hunter2" in (await browser.get(f"/jobs/{failed.id}")).text
        found = await browser.get("/jobs?error=HUNTER2&arg=to=Ada", headers={"accept": "application/json"})
        assert [job["id"] for job in found.json()["items"]] == [failed.id]


QUOTED = [
    (json.dumps({"card_token": "zq0letters" * 80 + "z"}), None, "the card '%s' is refused", "card_token"),
    (json.dumps({"password": "firstlinesecret\nsecond"}), None, "\n the password %s is wrong", "password"),
    ("{}", '{"session_token": "zq0stepsecret"}', "the session %s has ended", "session_token"),
    (json.dumps({"card_token": "zq0letters" * 150}), None, "x" * 600 + "%s", "card_token"),
    (json.dumps({"card_token": "zq0letters" * 150}), None, "the end " * 60 + "\n%s", "card_token"),
    (json.dumps({"card_token": "zq0lettersecret"}), None, "y" * 1993 + " %s", "card_token"),
]
"""Arguments, the answer of a step, an error that quotes a secret, and the name of that secret."""


@pytest.mark.promise("F138")
async def test_no_cut_of_an_error_shows_a_part_of_a_secret(dsn: str, conn: psycopg.Connection[Any]) -> None:
    """A long secret, one of several lines, one that a step has answered, and one that storing the error has cut."""
    ids = []
    for n, (args, step, said, name) in enumerate(QUOTED):
        secret = json.loads(step or args)[name]
        message = (said % secret)[:2000]
        [[id]] = conn.execute(
            "WITH made AS (INSERT INTO pgqueue.job (state, task, finished_at, bin, reason, args, attempt) "
            "VALUES ('failed', 't', now(), 0, 'error', %s::jsonb, 1) RETURNING id, enqueued_at), tried AS ("
            "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin,"
            " outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'Refused', %s "
            "FROM made), stepped AS (INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result) "
            "SELECT id, enqueued_at, 'login', %s::jsonb FROM made WHERE %s::text IS NOT NULL) SELECT id FROM made",
            [args, message, step, step],
        ).fetchall()
        ids.append(id)
        conn.execute(
            "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, message, first_at, last_at, count, "
            "job_ids) VALUES (%s, 'q', 't', 'Refused', %s, now(), now(), 1, ARRAY[%s::bigint])",
            [str(n), message[:500], id],
        )
    conn.commit()
    async with reading(dsn) as browser:
        for path in ("/", "/errors", "/task?name=t", "/jobs?state=failed", *(f"/jobs/{id}" for id in ids)):
            for accept in ("text/html", "application/json"):
                text = (await browser.get(path, headers={"accept": accept})).text
                assert "Refused" in text and "zq0" not in text, (path, accept, text[text.find("zq0") - 200 :][:300])
        items = (await browser.get("/errors", headers={"accept": "application/json"})).json()["items"]
        messages = {each["job_ids"][0]: each["message"] for each in items}
        listed = (await browser.get("/jobs?state=failed", headers={"accept": "application/json"})).json()["items"]
    assert messages == {each["id"]: each["error"]["message"] for each in listed}
    shown = [messages[id] for id in ids]
    assert shown[:3] == [
        f"the card '{HIDDEN}' is refused",
        f"the password {HIDDEN} is wrong",
        f"the session {HIDDEN} has ended",
    ]
    assert shown[3:] == ["x" * 500, "the end " * 60, "y" * 500]


@pytest.mark.promise("F138")
async def test_steps_that_are_not_read_hide_the_error(dsn: str, conn: psycopg.Connection[Any]) -> None:
    """Too many of them, or one that is too large. Those of another job do not."""
    cases = {"few": (200, 7), "many": (201, 7), "large": (1, 20_000)}
    for name, (n, size) in cases.items():
        conn.execute(
            "WITH made AS (INSERT INTO pgqueue.job (state, task, finished_at, bin, reason, attempt) "
            "VALUES ('failed', %s, now(), 0, 'error', 1) RETURNING id, enqueued_at), tried AS ("
            "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin,"
            " outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'Refused', 'no' "
            "FROM made) INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result) SELECT id, enqueued_at, n, "
            "to_jsonb((SELECT string_agg(md5(n::text || m), '') FROM generate_series(1, %s) AS m)) "
            "FROM made, generate_series(1, %s) AS n",
            [name, size // 7, n],
        )
    conn.commit()
    async with reading(dsn) as browser:
        items = (await browser.get("/jobs?state=failed", headers={"accept": "application/json"})).json()["items"]
    assert {each["task"]: each["error"]["message"] for each in items} == {"few": "no", "many": HIDDEN, "large": HIDDEN}


@pytest.mark.promise("F138")
@pytest.mark.parametrize(
    ("end", "shown"), [("abcd", HIDDEN), ("abc", "abc"), ("abcdefg", HIDDEN), ("abcdefgx", "abcdefgx")]
)
def test_the_end_of_a_cut_error_hides_the_beginning_of_a_secret(end: str, shown: str) -> None:
    item = {"args": {"token": "abcdefgh"}, "reason": " " * (2000 - len(end)) + end}
    assert DEFAULT.shown(item)["reason"].lstrip(" ") == shown
    assert DEFAULT.shown(item | {"reason": "x abcd"})["reason"] == "x abcd", "an error that was not cut"
    assert DEFAULT.shown(item | {"reason": f"x {end}… y"})["reason"] == f"x {shown}… y"


def stored(text: str, most: int = outcomes.TRACEBACK_MOST) -> str:
    """The traceback of an error that says this, as it is stored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcomes, "TRACEBACK_MOST", most)
        try:
            raise ValueError(text)
        except ValueError as error:
            found = problem("error", error).traceback
    assert found is not None and ("characters left out" in found) is (len(text) > most)
    return found


SECRET = "zq0ZQ1zq2-ZQ3zq4ZQ5"
LINES = {
    "a name": (f"the password={SECRET} is wrong", {}),
    "a name in a line with blanks": (f"Cookie: a=1; session={SECRET}; b={SECRET}", {}),
    "the argument alone": (f"no {SECRET} here", {"card_token": SECRET}),
}


@pytest.mark.promise("F138", "F468")
@pytest.mark.parametrize("case", LINES)
def test_no_cut_in_the_middle_of_a_traceback_shows_a_part_of_a_secret(case: str) -> None:
    """Naive: what follows the cut begins with the end of a secret, of which neither name nor value is known.

    The cut is at each character of the line.
    """
    line, args = LINES[case]
    for after in range(len(line) + 1):
        text = stored("x\n" * 9_000 + f"{line}\n" + "y" * (9_999 - after))
        shown = DEFAULT.shown({"args": args, "attempts": [{"traceback": text}]})["attempts"][0]["traceback"]
        assert not any(SECRET[at : at + 4] in shown for at in range(len(SECRET) - 3)), (after, shown[-11_000:-9_900])


@pytest.mark.promise("F468")
def test_the_end_of_a_cut_traceback_is_whole_lines() -> None:
    text = stored("x\n" * 9_000 + "password=a long line: " + "y" * 20_000)
    assert text.endswith(" characters left out …\n") and text.startswith("Traceback ")
    said = "x\n" * 9_000 + f"{'y' * 50}\n" * 190 + "the end"
    text, whole = stored(said), stored(said, 1 << 30)
    _, _, end = text.partition("left out …\n")
    assert set(end.split("\n")) >= {"y" * 50, "the end"} and end[0] in "xy" and 9_600 < len(end) <= 10_000
    [left] = re.findall(r"… (\d+) characters", text)
    assert int(left) == len(whole) - 10_000 - len(end)


@pytest.mark.promise("F468")
@pytest.mark.parametrize(
    ("begin", "shown"), [("efgh", HIDDEN), ("fgh", "fgh"), ("bcdefgh", HIDDEN), ("xbcdefgh", "xbcdefgh")]
)
def test_the_beginning_behind_a_cut_hides_the_end_of_a_secret(begin: str, shown: str) -> None:
    item = {"args": {"token": "abcdefgh"}, "reason": f"x … y …\n{begin} z"}
    assert DEFAULT.shown(item)["reason"] == f"x … y …\n{shown} z"
    assert DEFAULT.shown(item | {"reason": f"x {begin} z"})["reason"] == f"x {begin} z", "an error that was not cut"
    twice = {"args": {"token": "abababab"}, "reason": "x …bababab!"}
    assert DEFAULT.shown(twice)["reason"] == f"x …{HIDDEN}!", "the longest end counts"


@pytest.mark.promise("F64", "F138")
async def test_causes_read_few_bytes_and_leave_out_the_largest(dsn: str, conn: psycopg.Connection[Any]) -> None:
    """And where what causes say cannot be read, the other parts of the pages are shown."""
    conn.execute(
        "WITH made AS (INSERT INTO pgqueue.job (task, state, finished_at, bin, reason, attempt, args) "
        "SELECT 't', 'failed', now(), 0, 'error', 1, "
        "jsonb_build_object('a', n, 'b', repeat('x', CASE WHEN n % 5 = 0 THEN 600000 ELSE 7 END)) "
        "FROM generate_series(1, 20) AS n RETURNING id, enqueued_at, args), tried AS ("
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin,"
        " outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'E', 'no ' || "
        "(args->>'a') FROM made) INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, first_at, "
        "last_at, count, job_ids) SELECT id::text, 'q', 't', 'E', now(), now(), (args->>'a')::int, ARRAY[id] FROM made"
    )
    conn.commit()
    async with reading(dsn) as browser:
        items = (await browser.get("/errors", headers={"accept": "application/json"})).json()["items"]
        assert len(items) == 20
        large = [each["message"] for each in items if each["count"] % 5 == 0]
        assert sorted(large) == sorted([f"no {next(n for n in (5, 10, 15, 20) if f'no {n}' in large)}", *[HIDDEN] * 3])
        assert all(each["message"] == f"no {each['count']}" for each in items if each["count"] % 5)
        conn.execute("ALTER FUNCTION pgqueue.step_rows RENAME TO gone")
        conn.commit()
        for path in ("/", "/errors", "/task?name=t"):
            answer = await browser.get(path)
            assert answer.status_code == 200 and answer.text.count("A part of this page is missing") == 1, path
            assert HIDDEN in answer.text and "no 1<" not in answer.text


# What a page is built of ---------------------------------------------------------------------------------------------

QUERIES = {
    "preview": "?action=retry&state=failed",
    "jobs": "?state=failed",
    "task": "?name=cards.charge",
    "queue": "?name=mail",
    "preview_flow": "?action=cancel",
}
"""What these pages are asked for; the others need nothing."""
ASKED_BY_A_KEY = "limit_jobs"
"""The page that is asked for by a limit, whose key may be hidden: then it is refused."""


def _fails(path: tuple[str, ...], value: Any) -> Any:
    raise ValueError


@pytest.mark.second
@pytest.mark.promise("F498")
@pytest.mark.parametrize(
    "options",
    [
        {"redact": ["*"]},
        {"redact": (), "redact_with": lambda path, value: HIDDEN},
        {"redact": (), "redact_with": lambda path, value: 7},
        {"redact": (), "redact_with": lambda path, value: None},
        {"redact": (), "redact_with": lambda path, value: [1, "two"]},
        {"redact": (), "redact_with": _fails},
    ],
    ids=["all keys", "a text", "a number", "nothing", "a list", "failing"],
)
async def test_each_page_is_there_whatever_is_hidden(shop: str, options: dict[str, Any]) -> None:
    flow = pgqueue.Flow("order 7")
    step = pgqueue.remote("orders.step").using(queue="orders")
    flow.add(step.new(n=2), after=[flow.add(step.new(n=1), name="paid")])
    with psycopg.connect(shop) as conn:
        made = flow.enqueue(conn).id
        [(job, bulk)] = conn.execute(
            "SELECT (SELECT max(id) FROM pgqueue.job_dead WHERE state = 'failed'), (SELECT max(id) FROM pgqueue.bulk)"
        ).fetchall()
    ids = {"job": job, "bulk": bulk, "flow": made, "preview_flow": made}
    pages = [each for each in ROUTES if each.page and each.method == "GET" and each.name != ASKED_BY_A_KEY]
    async with dashboard_of(shop, lambda visitor: ACTIONS, **options) as dashboard, browsing(dashboard) as browser:
        for page in pages:
            path = page.path.replace("{id}", str(ids.get(page.name))) + QUERIES.get(page.name, "")
            for accept in ("text/html", "application/json"):
                answer = await browser.get(path, headers={"accept": accept})
                assert answer.status_code == 200, f"{path}: {answer.text[-1000:]}"
    assert len(pages) > 20


@pytest.mark.promise("F498")
def test_of_its_own_values_a_page_hides_texts_alone() -> None:
    at = datetime.now(UTC)
    built = {"id": 7, "enqueued_at": at, "is_paused": True, "attempts": [{"number": 1}], "none": None}
    texts = {"reason": "x", "task": "a.b", "attempts": [{"at": at, "message": "x"}], "why": {"n": 1, "text": "x"}}
    everything = Redaction(("*",))
    assert everything.shown(built) == built
    assert everything.shown(texts) == {
        "reason": HIDDEN,
        "task": HIDDEN,
        "attempts": [{"at": at, "message": HIDDEN}],
        "why": {"n": 1, "text": HIDDEN},
    }
    whole = Redaction(("attempts",)).shown(texts)
    assert whole == texts | {"attempts": [{"at": at, "message": HIDDEN}]}
    drawn = {"figures": [{"name": "failed", "jobs": 3}], "durations": {"parts": [{"name": "whole"}]}}
    assert everything.shown(drawn) == drawn


@pytest.mark.promise("F498")
@pytest.mark.parametrize("name", ["args", "headers", "result"])
@pytest.mark.parametrize("above", [(), ("target",), ("steps",)])
def test_of_the_applications_values_all_may_be_hidden(name: str, above: tuple[str, ...]) -> None:
    def at(value: Any) -> Any:
        for each in (name, *above):
            value = {each: value}
        return value

    values = {"number": 1, "flag": True, "task": "a.b", "list": ["x"], "none": None}
    hidden = {"number": HIDDEN, "flag": HIDDEN, "task": HIDDEN, "list": HIDDEN, "none": None}
    assert Redaction(tuple(values)).shown(at(values)) == at(hidden)
    assert Redaction(("*",)).shown(at(values)) == at(HIDDEN)
    assert Redaction((), lambda path, value: 7 if path[-1] == name else value).shown(at(values)) == at(7)
    known = Redaction((), lambda path, value: "hidden" if path[-1] == "none" else value)
    assert known.shown(at(values)) == at(values | {"none": "hidden"}), "whether it is null is a secret, too"
    assert known.shown({"target": {name: None}}) == {"target": {name: None}}


@pytest.mark.promise("F498")
def test_a_function_may_change_a_part_of_a_list_or_an_object_of_a_page() -> None:
    at = datetime.now(UTC)
    attempts = [{"at": at, "number": 1, "message": "x", "outcome": "failed"}, {"at": at, "number": 2, "message": "y"}]

    def masked(path: tuple[str, ...], value: Any) -> Any:
        return {**value, "message": "masked", "number": "none"} if path == ("attempts",) and "at" in value else value

    shown = Redaction((), masked).shown({"attempts": attempts})
    assert shown == {"attempts": [each | {"message": "masked"} for each in attempts]}
    fewer = Redaction((), lambda path, value: value[:1] if path == ("attempts",) and len(value) == 2 else value)
    assert [each["message"] for each in fewer.shown({"attempts": attempts})["attempts"]] == [HIDDEN, HIDDEN]


class Odd:
    """An answer that cannot be compared, and has no JSON."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        return 7


@pytest.mark.promise("F498")
@pytest.mark.parametrize(
    "answer", [float("nan"), float("inf"), [float("nan")], Odd()], ids=["nan", "inf", "list", "odd"]
)
def test_what_has_no_json_is_hidden(answer: Any) -> None:
    made = Redaction((), lambda path, value: answer if path == ("args", "a") else value)
    assert made.shown({"args": {"a": 1, "b": 2}}) == {"args": {"a": HIDDEN, "b": 2}}


@pytest.mark.promise("F498")
def test_the_progress_of_a_job_is_hidden_whole() -> None:
    """Its numbers are the handler's."""
    item = {"id": 7, "progress": {"done": 1234567.0, "total": 9.0, "updated_at": datetime.now(UTC)}}
    assert Redaction(("progress",)).shown(item) == {"id": 7, "progress": None}
    hiding = Redaction((), lambda path, value: "-" if path == ("progress",) else value)
    assert hiding.shown(item) == {"id": 7, "progress": None}


@pytest.mark.promise("F138")
def test_a_cut_text_in_the_answer_of_a_step_hides_the_end_of_a_hidden_value() -> None:
    item = {"args": {"token": "abcdefghijklmnop"}, "steps": [{"name": "x", "result": "failed: …ijklmnop"}]}
    assert Redaction(("*token*",)).shown(item)["steps"] == [{"name": "x", "result": f"failed: …{HIDDEN}"}]


@pytest.mark.promise("F498")
@pytest.mark.parametrize(("answer", "shown"), [(7, "7"), (None, HIDDEN), (["a"], "['a']"), ("b", "b")])
def test_a_function_replaces_a_text_of_a_page_by_a_text(answer: Any, shown: str) -> None:
    asked: list[tuple[str, ...]] = []

    def function(path: tuple[str, ...], value: Any) -> Any:
        asked.append(path)
        return value if path == ("attempts",) or (isinstance(value, dict) and path[0] != "args") else answer

    at = datetime.now(UTC)
    item = {"id": 7, "reason": "x", "attempts": [{"at": at, "message": "x"}], "args": {"a": 1}}
    redacted = Redaction((), function).shown(item)
    assert redacted == {"id": 7, "reason": shown, "attempts": [{"at": at, "message": shown}], "args": answer}
    assert asked == [("reason",), ("attempts",), ("attempts",), ("attempts", "message"), ("args",)]

"""The page of all databases: a row for each that says how it stands, and the way from an id to its database.

Called by `dashboard.py` with what each source has answered. Pure: it reads no database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from pgqueue.databases import number_in
from pgqueue.jobs.values import HIGHEST_ID, digits
from pgqueue.web.pages.findings import verdict
from pgqueue.web.pages.page import Page, plain
from pgqueue.web.standing import Answer

LEVELS = ("away", "critical", "warning", "well")


def page_of(answers: Mapping[str, Answer], query: str | None) -> Page:
    """A row for each database, those that need somebody first. `query`: what is typed into the search field."""
    rows = sorted((_row(name, answer) for name, answer in answers.items()), key=_severity)
    search = None
    if query is not None:
        to, search = _found(query, answers)
        if to is not None:
            return Page("databases.html", (), to=to)
    return Page("databases.html", rows, {"search": search}, {"now": datetime.now(UTC)})


def _row(name: str, answer: Answer) -> dict[str, Any]:
    standing, problem = answer.standing, answer.problem
    numbers = ("number", "waiting", "running", "failed", "completed", "oldest", "workers")
    row: dict[str, Any] = {"database": name, "place": f"/db/{name}/"}
    if standing is None:
        text = "" if problem is None else problem.text
        said = {"level": "away", "title": "Not known" if problem is None else problem.title, "text": text}
        return row | {"verdict": said, "finding": None, "since": answer.since, "as_of": None} | dict.fromkeys(numbers)
    finding = standing.findings[0] if standing.findings else None
    return row | {
        "verdict": verdict(standing.findings, standing.failed, standing.in_need),
        "finding": plain(finding),
        "since": None,
        "as_of": answer.as_of,
        **{each: plain(getattr(standing, each)) for each in numbers},
    }


def _severity(row: Mapping[str, Any]) -> int:
    return LEVELS.index(row["verdict"]["level"])


def _found(query: str, answers: Mapping[str, Answer]) -> tuple[str | None, dict[str, Any] | None]:
    """Where the job of this id is; else what to do, and the databases in which to search on."""
    words = query.split()
    id = digits(words[0].removeprefix("id:")) if len(words) == 1 else None
    if id is None or not 1 <= id <= HIGHEST_ID:
        text = "Over all databases only the id of a job is found. Choose the database in which to search."
        return None, _choice(query, text, answers)
    number = number_in(id)
    names = [name for name, each in answers.items() if each.standing is not None and each.number == number]
    # One that is away may have this number, too: all that were never numbered have 0.
    away = [name for name, each in answers.items() if each.standing is None and each.number in (None, number)]
    if len(names) == 1 and not away:
        return f"/db/{names[0]}/jobs/{id}", None
    if names and away:
        text = (
            f"Job {id} is in a database with the number {number}. {' and '.join(names)} {_have(names)} it; "
            f"{' and '.join(away)} may have it, and {'does' if len(away) == 1 else 'do'} not answer."
        )
        return None, _choice(query, text, [*names, *away])
    if names:
        text = f"Job {id} is in a database with the number {number}, and {' and '.join(names)} have one number."
        return None, _choice(query, text, names)
    if away:
        return None, _choice(query, f"No database that answers has the number {number} of job {id}.", away)
    return None, _choice(query, f"No database has the number {number} of job {id}.", ())


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _choice(query: str, text: str, names: Sequence[str] | Mapping[str, object]) -> dict[str, Any]:
    # A list, for redaction hides what stands under a key such as `tokens`.
    places = [{"database": name, "place": f"/db/{name}/jobs?{urlencode({'q': query})}"} for name in names]
    return {"query": query, "text": text, "places": places}

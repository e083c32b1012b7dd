"""The headers of a job as the carrier of a trace: texts that an enqueue writes and a run reads.

Used by `otel` and `sentry`. Headers may come from anywhere, such as SQL: what is no short text is left out, and nothing
here raises for a job's sake.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.sizes import JSON_MOST

TEXT_MOST = 8_192
"""The most characters of a header that is read as part of a trace: W3C's baggage may have so many."""


def carrying(jobs: Sequence[NewJob[Any]], texts: Mapping[str, str]) -> list[NewJob[Any]]:
    """These jobs with these texts in their headers.

    A header of that name that a job has already stays. A job whose headers would be too large stays as it is.
    """
    made: dict[str | None, str | None] = {}
    for headers in {job.headers for job in jobs}:
        made[headers] = _with(headers, texts)
    return [msgspec.structs.replace(job, headers=made[job.headers]) for job in jobs]


def carried(headers: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """The texts in these headers under these names.

    >>> carried({"traceparent": "00-4b", "tracestate": 5, "shop": "x"}, ["traceparent", "tracestate"])
    {'traceparent': '00-4b'}
    """
    found = {name: headers.get(name) for name in names}
    return {name: text for name, text in found.items() if isinstance(text, str) and len(text) <= TEXT_MOST}


def headers_of(job: Job) -> dict[str, Any]:
    """The headers of a job; none if they cannot be read, such as a number that Python does not take."""
    try:
        return job.headers
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def _with(headers: str | None, texts: Mapping[str, str]) -> str | None:
    """These headers (the text of a JSON object) with these texts, put in front of its end: the rest stays as it is."""
    own: Mapping[str, Any] = {} if headers is None else msgspec.json.decode(headers, type=dict[str, msgspec.Raw])
    added = msgspec.json.encode({name: text for name, text in texts.items() if name not in own}).decode()
    if not own:
        return added
    if added == "{}":
        return headers
    made = f"{(headers or '').rstrip()[:-1]},{added[1:]}"
    return made if len(made.encode()) <= JSON_MOST else headers

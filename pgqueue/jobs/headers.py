"""Options of one job in its headers: how long an attempt may run, and how long the job waits between attempts.

Tasks write them when a job is made. `timeouts` reads the first when the job is to run, `outcomes` the second when an
attempt has failed. They are headers and not columns, because then only jobs that have them pay for them. Other headers
with a reserved name are those of a tick (`cron`), and `pgqueue:attempt`, of traces. A successor names its job in
`pgqueue:parent`. Any enqueuer may write any of them, for example from SQL: the values read here are
therefore checked.
"""

from __future__ import annotations

import json

import msgspec

from pgqueue.jobs.retry import RetryPolicy
from pgqueue.jobs.values import MAX_SECONDS, whole

TIMEOUT = "pgqueue:timeout"
"""The header with the seconds that an attempt of the job may run."""


RETRY = "pgqueue:retry"
"""The header with the waits between the attempts of the job: `first`, `factor`, `most` of its RetryPolicy."""


PARENT = "pgqueue:parent"
"""The header of a successor (`job.enqueue`) with the id of the job that has enqueued it. Only people read it."""

DELAY = "pgqueue:delay"
"""The header of a job that waits for nodes of its flow: how many seconds after its release it may start."""

ATTEMPT_TRACE = "pgqueue:attempt"
"""The header with the span of the last attempt that has ended by asking for another, as W3C's traceparent."""


class _Waits(msgspec.Struct, forbid_unknown_fields=True):
    first: float = 10.0
    factor: float = 3.0
    most: float = 21_600.0


class _Timeout(msgspec.Struct):
    timeout: float | None = msgspec.field(default=None, name=TIMEOUT)


class _Retry(msgspec.Struct):
    waits: _Waits | None = msgspec.field(default=None, name=RETRY)


_timeout, _retry = msgspec.json.Decoder(_Timeout), msgspec.json.Decoder(_Retry)


def with_timeout(headers: str | None, seconds: float | None) -> str | None:
    """Return these headers (the text of a JSON object) with this timeout; None leaves them as they are.

    >>> with_timeout('{"trace":"00-4b"}', 30.0)
    '{"trace":"00-4b","pgqueue:timeout":30.0}'
    """
    return headers if seconds is None else _with(headers, TIMEOUT, seconds)


def with_delay(headers: str | None, seconds: float | None) -> str | None:
    """Return these headers with the delay after the release; None leaves them as they are.

    >>> with_delay(None, 30.0)
    '{"pgqueue:delay":30.0}'
    """
    return headers if seconds is None else _with(headers, DELAY, seconds)


def with_waits(headers: str | None, policy: RetryPolicy | None) -> str | None:
    """Return these headers with the waits of this policy; None leaves them as they are.

    >>> with_waits(None, RetryPolicy(first=1, factor=2, most="1m"))
    '{"pgqueue:retry":{"first":1.0,"factor":2.0,"most":60.0}}'
    """
    if policy is None:
        return headers
    return _with(headers, RETRY, {"first": policy.first, "factor": policy.factor, "most": policy.most})


def with_parent(headers: str | None, id: int) -> str:
    """Return these headers with the id of the job that enqueues the one that has them.

    >>> with_parent('{"trace":"00-4b"}', 7), with_parent(None, 7)
    ('{"trace":"00-4b","pgqueue:parent":7}', '{"pgqueue:parent":7}')
    """
    return f'{{"{PARENT}":{id}}}' if headers is None else _with(headers, PARENT, id)


def parent_of(value: object) -> int | None:
    """The id of a job in the value of a header; None if it is none.

    >>> parent_of(7), parent_of("7"), parent_of(-7), parent_of(None)
    (7, None, None, None)
    """
    return value if whole(value, 1) else None


def _with(headers: str | None, name: str, value: object) -> str:
    return json.dumps({**json.loads(headers or "{}"), name: value}, ensure_ascii=False, separators=(",", ":"))


def timeout_of(headers: str | None) -> float | None:
    """The timeout in these headers, in seconds; None if there is none. Raises ValueError if it is no valid timeout.

    >>> timeout_of('{"pgqueue:timeout":30.0}'), timeout_of('{"trace":"00-4b"}'), timeout_of(None)
    (30.0, None, None)
    """
    if headers is None or TIMEOUT not in headers:
        return None
    try:
        seconds = _timeout.decode(headers).timeout
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{seconds!r} is not more than 0 seconds, or more than 100 years")
    return seconds


def waits_of(headers: str | None) -> RetryPolicy | None:
    """The waits in these headers, as a policy; None if there are none. Raises ValueError if they are no valid ones.

    >>> waits_of('{"pgqueue:retry":{"first":1,"factor":2,"most":60}}').delay(3, lambda: 1.0)
    4.0
    """
    if headers is None or RETRY not in headers:
        return None
    try:
        said = _retry.decode(headers).waits
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return None if said is None else RetryPolicy(first=said.first, factor=said.factor, most=said.most)

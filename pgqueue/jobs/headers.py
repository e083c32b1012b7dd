"""The timeout in a job's headers: how long an attempt may run, if the enqueuer has said so.

Tasks write it when a job is made, `timeouts` reads it when the job is to run. It is a header and not a column, because
then only jobs that have it pay for it. Other headers with a reserved name are `pgqueue:tick` and `pgqueue:schedule`
(`cron`). Any enqueuer may write any of them, for example from SQL: the value read here is therefore checked.
"""

from __future__ import annotations

import json

import msgspec

from pgqueue.jobs.retry import MAX_SECONDS

TIMEOUT = "pgqueue:timeout"
"""The header with the seconds that an attempt of the job may run."""


class _Said(msgspec.Struct):
    timeout: float | None = msgspec.field(default=None, name=TIMEOUT)


_said = msgspec.json.Decoder(_Said)


def with_timeout(headers: str | None, seconds: float | None) -> str | None:
    """Return these headers (the text of a JSON object) with this timeout; None leaves them as they are.

    >>> with_timeout('{"trace":"00-4b"}', 30.0)
    '{"trace":"00-4b","pgqueue:timeout":30.0}'
    """
    if seconds is None:
        return headers
    said = {**json.loads(headers or "{}"), TIMEOUT: seconds}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def timeout_of(headers: str | None) -> float | None:
    """The timeout in these headers, in seconds; None if there is none. Raises ValueError if it is no valid timeout.

    >>> timeout_of('{"pgqueue:timeout":30.0}'), timeout_of('{"trace":"00-4b"}'), timeout_of(None)
    (30.0, None, None)
    """
    if headers is None or TIMEOUT not in headers:
        return None
    try:
        seconds = _said.decode(headers).timeout
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{seconds!r} is not more than 0 seconds, or more than 100 years")
    return seconds

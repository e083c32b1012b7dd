"""The values of jobs as parameters of one statement. Used by `enqueue` and `unique_enqueue`. No I/O.

One job has a parameter for each value. Of a batch each parameter is a column, as text: thousands of jobs become a few
parameters. The SQL splits these texts by `string_to_table`. Which ones there are is said by the table in fields.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from pgqueue.errors import InvalidArguments, PayloadTooLarge
from pgqueue.jobs.fields import FIELDS, KEY_FIELDS, Field, compiled, mapping
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import Keys
from pgqueue.jobs.values import utc

Values = Callable[[NewJob[Any]], dict[str, object]]
Columns = Callable[[Sequence[NewJob[Any]]], dict[str, object]]

# A parameter of PostgreSQL holds 1 GB; a character takes at most 4 bytes.
_MOST_CHARACTERS = 250_000_000


def column(values: Sequence[Any], form: Callable[[Any], str | None] | None = None) -> str:
    """One column of a batch as text: a line for each job, or a single line if all jobs have the same value."""
    if len(set(values)) == 1:
        values = values[:1]
    if form is not None:
        values = [None if value is None else form(value) for value in values]
    return lines(["" if value is None else value for value in values])


def lines(values: Sequence[str]) -> str:
    """Join the values by line breaks. No value has a line break: JSON escapes them, and names do not have them.

    This is cheaper than one JSON document and much cheaper than psycopg's arrays.
    """
    joined = "\n".join(values)
    if joined.count("\n") != len(values) - 1:
        raise InvalidArguments("a line break in the JSON of a job: build jobs with task.new(…)")
    if len(joined) > _MOST_CHARACTERS:
        raise PayloadTooLarge(
            f"enqueue_many: {len(joined):,} characters in one batch, the limit is {_MOST_CHARACTERS:,}; split it"
        )
    return joined


def quoted(key: str) -> str:
    """A key as JSON, because a key may have line breaks."""
    return msgspec.json.encode(key).decode()


def moment(value: datetime | None) -> str | None:
    return None if value is None else utc(value).isoformat()


_NAMES = {"column": column, "lines": lines, "moment": moment, "quoted": quoted}
_PLAIN = [field for field in FIELDS if field.plain]
_LATER = [name for name in NewJob.__struct_fields__ if name in {each.name for each in FIELDS if not each.plain}]


def _value(field: Field) -> str:
    return f"moment({field.read})" if field.line == "moment" else field.read


def _column(field: Field) -> str:
    if field.line == "each":
        return f"lines([{field.read} for job in jobs])"
    return f"column([{field.read} for job in jobs], {field.line})"


def _key_column(field: Field) -> str:
    return f"column([{field.default!r} if keys is None else {field.read} for keys in all_keys], {field.line})"


def of_one(fields: Iterable[Field]) -> Values:
    """The function of a job that makes its parameters, a value each."""
    return compiled(f"lambda job: {mapping({field.name: _value(field) for field in fields})}", _NAMES)


def of_batch(fields: Iterable[Field]) -> Columns:
    """The function of jobs that makes their parameters, a column of text each."""
    return compiled(f"lambda jobs: {mapping({field.name: _column(field) for field in fields})}", _NAMES)


def of_arrays(fields: Iterable[Field]) -> Columns:
    """The function of jobs that makes their parameters, an array each."""
    arrays = {field.name: f"[{_value(field)} for job in jobs]" for field in fields}
    return compiled(f"lambda jobs: {mapping(arrays)}", _NAMES)


values = of_one(FIELDS)
"""The values of one job, without its unique keys."""
plain_values = of_one(_PLAIN)
columns = of_batch(FIELDS)
"""The jobs column by column, without their unique keys."""
plain_columns = of_batch(_PLAIN)
arrays = of_arrays(FIELDS)

_SENT_KEYS = [field for field in KEY_FIELDS if field.line]
key_values: Callable[[Keys], dict[str, object]] = compiled(
    f"lambda keys: {mapping({field.name: field.read for field in _SENT_KEYS})}", {}
)
_key_columns: Callable[[Sequence[Keys | None]], dict[str, object]] = compiled(
    f"lambda all_keys: {mapping({field.name: _key_column(field) for field in _SENT_KEYS})}", _NAMES
)


def key_columns(jobs: Sequence[NewJob[Any]]) -> dict[str, object]:
    """The unique keys of the jobs, column by column."""
    return _key_columns([job.keys for job in jobs])


is_plain: Callable[[NewJob[Any]], bool] = compiled(
    "lambda job: " + " and ".join(f"job.{name} is None" for name in [*_LATER, "results", "node"]), {}
)
"""Whether the job may run at once, has no deadline, lock, limit or rate, and is of no flow."""


def has_keys(jobs: Sequence[NewJob[Any]]) -> bool:
    return any([job.keys is not None for job in jobs])

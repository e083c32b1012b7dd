"""One table of a job's fields: every list is what the table says, and the SQL names the same columns in the same order.

A field that is made up here, in the table alone, is in every list that is made from it.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields as fields_of
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pytest

import pgqueue
from pgqueue.client import job_parameters, schedules
from pgqueue.client.tasks import Task
from pgqueue.database import statements
from pgqueue.jobs import fields, staged
from pgqueue.jobs.fields import CLAIMED, FIELDS, KEY_FIELDS, Field
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.keys import Keys

NAMES = [field.name for field in FIELDS]
SENT = [*NAMES, *(field.name for field in KEY_FIELDS if field.line)]
SPLIT = {"deadline_seconds": "deadline"}
"""Parameters that say one field of a job together with another parameter."""
MADE: NewJob[Any] = NewJob("t", "{}", "q", 3, None, None, '{"a":1}', 7, 60.0, "k", 1, "wait", "l", "r", Keys("u", "i"))


def fragment(name: str) -> str:
    return statements._fragments()[name]


def parameters(sql: str) -> list[str]:
    """The parameters of this SQL in their order, each once."""
    return list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))


def columns(sql: str) -> list[str]:
    """The columns of this list, or with which names its values are."""
    bare = sql
    while bare != (bare := re.sub(r"\([^()]*\)", "", bare)):
        pass
    return [each.split()[-1] for each in bare.split(",") if each.strip()]


# The table and what it is about --------------------------------------------------------------------------------------


def test_each_field_of_a_new_job_is_in_the_table_and_nothing_else_is() -> None:
    assert {SPLIT.get(name, name) for name in NAMES} | {"keys", "results", "node"} == set(NewJob.__struct_fields__)
    assert [field.read for field in KEY_FIELDS] == [f"keys.{name}" for name in Keys.__struct_fields__]


def test_the_options_of_using_are_those_that_the_table_names() -> None:
    assert inspect.signature(Task.using).parameters.keys() - {"self", "unknown"} == fields.OF_USING


def test_what_people_are_shown_has_each_field_of_a_job_but_how_its_lock_works() -> None:
    shown = {field.name for field in fields_of(pgqueue.JobInfo)}
    assert {SPLIT.get(name, name) for name in NAMES} - shown == {"delay", "lock_limit", "on_locked"}
    assert set(CLAIMED) - shown == {"pos", "rank", "unique_keys", "too_large"}
    assert shown - set(columns(fragment("shown"))) == {"progress", "attempts", "steps"}


# The lists that are made ---------------------------------------------------------------------------------------------


def test_a_job_and_a_batch_have_a_parameter_for_each_field() -> None:
    assert list(job_parameters.values(MADE)) == list(job_parameters.columns([MADE])) == NAMES
    assert list(job_parameters.arrays([MADE])) == NAMES
    assert list(job_parameters.plain_values(MADE)) == list(job_parameters.plain_columns([MADE])) == NAMES[:6]
    assert list(job_parameters.key_values(cast("Keys", MADE.keys))) == SENT[len(NAMES) :]
    assert list(job_parameters.key_columns([MADE])) == SENT[len(NAMES) :]


@pytest.mark.parametrize("name", [name for name in NewJob.__struct_fields__ if name not in NAMES[:6]])
def test_a_job_that_says_more_than_the_plain_statements_is_not_plain(name: str) -> None:
    plain: NewJob[Any] = NewJob("t", "{}", "q", 3, None, None, '{"a":1}', 7)
    assert job_parameters.is_plain(plain)
    if name != "keys":  # a job with keys takes another way before
        assert not job_parameters.is_plain(msgspec.structs.replace(plain, **{name: "x"}))


def test_a_staged_job_comes_back_with_each_field() -> None:
    back = staged.job_of(MADE.task, MADE.args, staged.options_of(MADE), datetime(2026, 1, 1, tzinfo=UTC))
    assert back == msgspec.structs.replace(MADE, deadline=datetime(2026, 1, 1, 0, 1, tzinfo=UTC))
    assert {"task", "args", *staged.Options.__struct_fields__} == {*NAMES, *(field.name for field in KEY_FIELDS)}


def test_a_schedule_keeps_each_field_or_refuses_it() -> None:
    kept = schedules.spec(pgqueue.Every("1h"), msgspec.structs.replace(MADE, keys=None), "x")
    in_columns = {"task", "args", "queue", "priority"}
    assert {*kept["options"], *in_columns} == {*NAMES} - {"run_at", "delay", "deadline_seconds"}
    assert kept.keys() >= in_columns
    with pytest.raises(pgqueue.InvalidOption, match="a schedule cannot keep keys"):
        schedules.spec(pgqueue.Every("1h"), MADE, "x")


def test_a_made_up_field_is_in_all_that_is_made_of_the_table() -> None:
    class Job(msgspec.Struct):
        colour: str | None

    table = (Field("colour", "job.colour", "quoted", staged=str | None),)
    blue = cast("NewJob[Any]", Job("blue"))
    assert job_parameters.of_one(table)(blue) == {"colour": "blue"}
    assert job_parameters.of_batch(table)([blue]) == {"colour": '"blue"'}
    assert job_parameters.of_arrays(table)([blue, cast("NewJob[Any]", Job(None))]) == {"colour": ["blue", None]}
    options = staged.options_type(table)
    made = staged.making(options, table)(blue)
    assert msgspec.json.encode(made) == b'{"colour":"blue"}'
    assert staged.reading(Job)("t", "{}", made, None, None, None, None) == blue


# The SQL -------------------------------------------------------------------------------------------------------------


def test_the_fragments_name_the_fields_in_the_order_of_the_table() -> None:
    assert parameters(fragment("lines")) == columns(fragment("line_names")) == NAMES
    assert parameters(fragment("line_values")) == [name for name in NAMES if name != "args"]  # no line holds for all
    assert parameters(fragment("keyed_job")) == SENT
    assert sorted(parameters(fragment("keyed_jobs"))) == sorted(SENT)
    stored = [name for name in NAMES if name not in ("delay", "deadline_seconds")]
    assert columns(fragment("line_values")) == columns(fragment("new_job")) == stored


@pytest.mark.parametrize(("name", "more"), [("enqueue_later", {"notify"}), ("enqueue_now", {"notify"})])
def test_the_statements_of_one_job_have_the_parameters_that_are_sent(name: str, more: set[str]) -> None:
    sent = NAMES if name == "enqueue_later" else NAMES[:6]
    assert set(parameters(statements.text(name, "pgqueue"))) == {*sent, *more}


def test_a_schedule_names_its_options_as_the_table_does() -> None:
    said = re.findall(r"options ->>? '(\w+)'", fragment("scheduled_values"))
    assert said == schedules.OPTIONS


def test_successors_are_sent_as_arrays_in_the_order_of_the_table() -> None:
    sent = parameters(statements.text("complete_successors", "pgqueue"))
    assert [name for name in sent if name in NAMES] == NAMES


# A claimed job -------------------------------------------------------------------------------------------------------


def test_a_claim_answers_the_columns_of_a_job_in_their_order() -> None:
    renamed = {"coalesce": "pos"}
    said = [renamed.get(name, name) for name in columns(fragment("claimed"))]
    assert len(said) == len(CLAIMED) == fragment("no_job").count("NULL")
    assert [name for name in said if name in CLAIMED] == [name for name in CLAIMED if name in said]


@pytest.mark.parametrize("name", CLAIMED)
def test_a_job_reads_each_column_at_its_place(name: str) -> None:
    """A value in this column is seen in the property of this name, and in no other."""
    value = {"headers": '{"a": 1}', "unique_keys": '["u", "i"]', "too_large": "[1, 1, true, 501]"}.get(name, 8)
    others = {"too_large": "[1, 1, true, 501]", "args": None} if name == "too_large" else {}
    plain, said = Job(fields.claimed(), 1), Job(fields.claimed(**others | {name: value}), 1)
    seen = {
        each
        for each in (*CLAIMED, "unique_key", "idempotency_key")
        if hasattr(Job, each) and each != "too_large" and getattr(plain, each) != getattr(said, each)
    }
    expected = {"unique_keys": {"unique_key", "idempotency_key"}, "too_large": {"args"}}
    assert seen == expected.get(name, {name})
    if name == "too_large":
        assert said.too_large


def test_a_row_for_tests_has_no_column_that_a_claim_has_not() -> None:
    with pytest.raises(TypeError, match="a claimed job has no colour"):
        fields.claimed(colour="blue")

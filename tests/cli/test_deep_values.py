"""Values that are nested very deep: each command shows them, or says that it cannot."""

from __future__ import annotations

import json

import psycopg
import pytest
from commands import items
from commands import pgqueue as command
from psycopg import sql

COMMANDS = ("jobs", "jobs --json", "jobs --task deep", "why 1", "why 1 --json", "status")
INSERT = "INSERT INTO pgqueue.job (task, {}) VALUES ('deep', %s)"


@pytest.mark.promise("F187")
@pytest.mark.parametrize(
    "depth",
    [600, pytest.param(300, marks=pytest.mark.second), pytest.param(1_200, marks=pytest.mark.second), 5_000],
)
def test_no_command_ends_for_a_value_that_is_nested_deep(dsn: str, depth: int) -> None:
    """Naive is to copy a job with all that is in it: Python's stack has an end at 1,000 calls."""
    deep = '{"a": ' + "[" * depth + "]" * depth + "}"
    with psycopg.connect(dsn) as conn:
        conn.execute("SET max_stack_depth = '6MB'")
        for column in ("args", "headers"):
            conn.execute(sql.SQL(INSERT).format(sql.Identifier(column)), [deep])
    for line in COMMANDS:
        assert command(*line.split(), dsn=dsn).returncode == 0, line
    for number, column in enumerate(("args", "headers"), 1):
        text, [job] = command("jobs", str(number), dsn=dsn), items(command("jobs", str(number), "--json", dsn=dsn))
        assert text.returncode == 0
        if depth < 1_000:
            assert job[column] == json.loads(deep) and f'{column}:{" " * (15 - len(column))} {{"a": [[[' in text.stdout
        else:
            assert "not shown" in json.dumps(job[column]) and "not shown" in text.stdout

"""Made-up migrations in place of ours: numbered, each entering itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pgqueue.database import migrations

ENTER = "INSERT INTO pgqueue.migration (version, name, breaking) VALUES ({}, '{}', {});"
GROUND = """CREATE SCHEMA IF NOT EXISTS pgqueue;
CREATE TABLE pgqueue.migration (version int PRIMARY KEY, name text NOT NULL, breaking boolean NOT NULL);
CREATE TABLE pgqueue.job (id int, note text DEFAULT '100%');
"""
LOG = "CREATE TABLE pgqueue.log (file int); INSERT INTO pgqueue.log VALUES ({});"

THREE = (
    GROUND + LOG.format(1),
    "CREATE FUNCTION pgqueue.take() RETURNS text LANGUAGE plpgsql AS $$ BEGIN RETURN 'a:b 100%'; END $$;"
    "INSERT INTO pgqueue.log VALUES (2);",
    "ALTER TABLE pgqueue.job ADD COLUMN more int; INSERT INTO pgqueue.log VALUES (3);",
)
"""Three files that say in `pgqueue.log` that they were applied. None can be applied twice, or out of order."""


def written(home: Path, *sqls: str, breaking: bool = False) -> Path:
    """A folder in `home` as `sql/` is, with `migrations/0001_step_1.sql` and so on; `breaking` is the last of them."""
    place = Path(tempfile.mkdtemp(dir=home))
    (place / "migrations").mkdir()
    for number, sql in enumerate(sqls, 1):
        last = breaking and number == len(sqls)
        text = f"-- breaking: {'yes' if last else 'no'}\n{sql}\n{ENTER.format(number, f'step_{number}', last)}\n"
        (place / "migrations" / f"{number:04}_step_{number}.sql").write_text(text)
    return place


Release = Callable[[int], None]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """`release(2)` installs a pgqueue whose newest migration is the second, of made-up ones."""

    def install(newest: int) -> None:
        place = written(tmp_path, *THREE[:newest])
        monkeypatch.setattr(migrations, "sql_directory", lambda: place)

    return install

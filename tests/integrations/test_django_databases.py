"""Two databases: a job is in that on whose alias it was enqueued, each has a worker; what is seldom meant is said."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM

import psycopg
import pytest
from django_projects import DjangoProject, database
from workers import wait_until

from pgqueue.database import migrations

pytestmark = pytest.mark.promise("F275")

SCRIPT = """
from django.db import connections, transaction
from shop.tasks import greet

class Undo(Exception): ...

def view(name):
    try:
        with transaction.atomic():
            greet.enqueue("default", name)
            greet.enqueue("jobs", name)  # LINE
            greet.enqueue_many(connections["jobs"], [("Eve",)])  # LINE
            raise Undo
    except Undo: ...

view("Ann")
view("Bob")
with transaction.atomic(), transaction.atomic("jobs"):
    greet.enqueue("jobs", "Cleo")
greet.enqueue("jobs", "Dora")
connections["jobs"].set_autocommit(False)
with transaction.atomic():
    greet.enqueue("jobs", "Fay")
connections["jobs"].commit()
"""


def test_a_job_on_another_alias_than_that_of_the_block_is_warned_of_once_a_line(
    tmp_path: Path, dsn: str, empty_dsn: str
) -> None:
    migrations.migrate(empty_dsn)
    project = DjangoProject(tmp_path, {"default": database(dsn), "jobs": database(empty_dsn)})
    said = [line for line in project.python(SCRIPT).splitlines() if "inside of atomic() of 'default'" in line]
    lines = [number for number, line in enumerate(SCRIPT.splitlines(), 3) if "# LINE" in line]
    assert [line.split(" enqueues on 'jobs'")[0].rpartition(":")[2] for line in said] == [str(each) for each in lines]

    jobs = "SELECT args ->> 'name' FROM pgqueue.job ORDER BY id"
    with psycopg.connect(dsn) as default, psycopg.connect(empty_dsn, autocommit=True) as other:
        assert default.execute(jobs).fetchall() == []
        names = ["Ann", "Eve", "Bob", "Eve", "Cleo", "Dora", "Fay"]
        assert [name for (name,) in other.execute(jobs)] == names
        with project.working("--database", "jobs") as worker:
            done = "SELECT count(*) FROM pgqueue.job_done"
            wait_until(lambda: other.execute(done).fetchone() == (len(names),))
            worker.signal(SIGTERM)
            assert worker.ends() == 0, worker.output

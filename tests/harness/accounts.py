"""Accounts with money, for tests whose handlers write two rows that belong together."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from workers import Eyes


@pytest.fixture
def accounts(eyes: Eyes) -> Eyes:
    """Accounts 1, 2, 3 with 100, 200 and 50, and a table of effects."""
    eyes.do("CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL CHECK (balance >= 0))")
    eyes.do("CREATE TABLE effect (job bigint NOT NULL, note text)")
    eyes.do("INSERT INTO account VALUES (1, 100), (2, 200), (3, 50)")
    return eyes


def balances(eyes: Eyes) -> list[int]:
    return [balance for (balance,) in eyes.all("SELECT balance FROM account ORDER BY id")]


def move(conn: psycopg.Connection[Any], giver: int, taker: int, amount: int) -> None:
    """Two writes that belong together, and nothing that guards them."""
    conn.execute("UPDATE account SET balance = balance - %s WHERE id = %s", [amount, giver])
    conn.execute("UPDATE account SET balance = balance + %s WHERE id = %s", [amount, taker])

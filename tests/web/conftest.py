"""What the tests of the dashboard have in common: their patience, a browser, the queue of a shop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import shop_queue
from browsers import launched

from pgqueue.pytest_plugin import Databases
from pgqueue.web import connections

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the server may take a while to make a connection. That is no reason for a test to fail."""
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 30.0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real one, for the tests of a file."""
    with launched() as made:
        yield made


@pytest.fixture(scope="module")
def shop(pgqueue_databases: Databases) -> Iterator[str]:
    """The database of a shop, for the tests of a file."""
    with pgqueue_databases.copy() as made:
        shop_queue.fill(made)
        yield made

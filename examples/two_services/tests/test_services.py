"""Each service by itself: what orders stages, and what mailing does with it."""

from typing import Any

import mailing.tables
import orders.tables
import psycopg
import pytest
from mailing.tasks import send_receipt
from orders.app import app
from starlette.testclient import TestClient

import pgqueue
from pgqueue.database import migrations
from pgqueue.testing import drain


@pytest.fixture
def client(pgqueue_db: str, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    pgqueue.migrate(line=migrations.OUTBOX)  # an outbox may stand beside a queue: one database is enough for a test
    with psycopg.connect(pgqueue_db) as conn:
        conn.execute(orders.tables.TABLE)
    monkeypatch.setenv("ORDERS_DSN", pgqueue_db)
    return TestClient(app)


def test_an_order_and_its_staged_job_are_one_commit(client: TestClient, pgqueue_db: str) -> None:
    assert client.post("/orders/tea").status_code == 201
    assert client.post(f"/orders/{'x' * 40}").status_code == 422
    with psycopg.connect(pgqueue_db) as conn:
        assert conn.execute("SELECT item FROM shop_order").fetchall() == [("tea",)]
        [(task, args)] = conn.execute("SELECT task, args FROM pgqueue.outbox").fetchall()
    assert task == send_receipt.name
    assert args["item"] == "tea"


def test_a_receipt_is_written_by_its_job(pgqueue_conn: Any) -> None:
    pgqueue_conn.execute(mailing.tables.TABLE)
    send_receipt.enqueue(pgqueue_conn, order=7, item="tea")
    assert drain(pgqueue_conn).check().completed == 1
    assert pgqueue_conn.execute("SELECT * FROM receipt").fetchall() == [(7, "thank you for tea")]

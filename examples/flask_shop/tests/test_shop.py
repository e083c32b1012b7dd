"""The shop is tested as any application: each test has a database, and a drain runs what was enqueued."""

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from shop.app import create_app
from shop.tasks import charge, send_receipt

import pgqueue
from pgqueue.testing import assert_enqueued, assert_not_enqueued, drain


@pytest.fixture
def client(pgqueue_db: str) -> Iterator[FlaskClient]:
    app = create_app(pgqueue_db)
    assert app.test_cli_runner().invoke(args=["tables"]).exit_code == 0
    yield app.test_client()
    app.extensions["pool"].close()


@pytest.fixture
def conn(pgqueue_db: str) -> Iterator[Any]:
    with pgqueue.connect(autocommit=True) as conn:
        yield conn


def test_an_order_is_charged_by_its_job(client: FlaskClient, conn: Any) -> None:
    answer = client.post("/orders/tea")
    assert answer.status_code == 202
    assert_enqueued(conn, charge)
    assert drain().check().completed == 2  # the receipt, too
    assert client.get(answer.headers["Location"]).json["result"] == "charged tea"
    assert conn.execute("SELECT item, charged FROM shop_order").fetchall() == [("tea", True)]


def test_an_order_that_is_refused_leaves_no_job(client: FlaskClient, conn: Any) -> None:
    assert client.post(f"/orders/{'x' * 40}").status_code == 422
    assert_not_enqueued(conn)


def test_an_order_that_is_gone_fails_its_job_and_sends_nothing(client: FlaskClient, conn: Any) -> None:
    charge.using(retry=1).enqueue(conn, 404)
    assert drain().failed == 1
    assert_not_enqueued(conn, send_receipt)


def test_an_unknown_job_is_404(client: FlaskClient) -> None:
    assert client.get("/jobs/999999").status_code == 404

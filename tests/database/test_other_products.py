"""Servers that are no PostgreSQL are named at once, and nothing is sent to them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from other_products import other_product

import pgqueue
from pgqueue import UnsupportedServer
from pgqueue.cli import main

PRODUCTS = {
    "CockroachDB": {"server_version": "16.0.0", "crdb_version": "CockroachDB CCL v25.1.0"},
    "YugabyteDB": {"server_version": "15.2-YB-2.25.1.0-b0"},
}


@pytest.mark.promise("F402")
@pytest.mark.parametrize("name", PRODUCTS)
def test_another_product_is_named(name: str) -> None:
    with other_product(**PRODUCTS[name]) as dsn:
        with pytest.raises(UnsupportedServer, match=f"is {name}; pgqueue needs PostgreSQL"):
            pgqueue.migrate(dsn)
        for command in (["migrate"], ["status"], ["cancel", "1"]):
            done = CliRunner().invoke(main, [*command, "--dsn", dsn])
            assert (done.exit_code, name in done.stderr) == (4, True), (command, done.stderr)

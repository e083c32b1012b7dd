"""The example of docs/relay.md, with two databases."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pages import ROOT, blocks
from relays import app_dsn
from workers import Eyes, until, work

from pgqueue.relay.relay import Relay

__all__ = ["app_dsn"]

PAGE = ROOT / "docs" / "relay.md"


@pytest.mark.promise("E10")
async def test_the_example_of_the_page(app_dsn: str, dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    [source] = [block.text for block in blocks(PAGE) if block.text.startswith("# shop.py")]
    (tmp_path / "shop.py").write_text(source)
    spec = importlib.util.spec_from_file_location("shop", tmp_path / "shop.py")
    assert spec is not None and spec.loader is not None
    shop: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shop)
    shop.APP = app_dsn
    with psycopg.connect(app_dsn) as app:
        app.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    shop.order(7)
    with pytest.raises(psycopg.errors.UniqueViolation):
        shop.order(7)  # its job is as little there as its order
    assert await Relay(app_dsn, dsn).once()
    async with work(dsn, shop.send_receipt):
        await until(eyes.done(1))
    assert eyes.all("SELECT args FROM pgqueue.job WHERE state = 'completed'") == [({"order_id": 7},)]
    with psycopg.connect(app_dsn) as app:
        assert app.execute("SELECT count(*) FROM pgqueue.outbox").fetchall() == [(0,)]

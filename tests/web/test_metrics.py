"""`/metrics` of the dashboard: the gauges, for whom it lets read."""

from __future__ import annotations

import psycopg
import pytest
from dashboards import OPERATOR_SECRET, READER_SECRET, bearer, browsing, dashboard_of, reading
from prometheus_client.parser import text_string_to_metric_families

from pgqueue.telemetry.metrics import OF_DATABASE
from pgqueue.web import question


@pytest.mark.promise("F171")
async def test_a_token_reads_the_gauges_and_nobody_else_does(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'mail' FROM generate_series(1, 7)")
    conn.commit()
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        for secret in (READER_SECRET, OPERATOR_SECRET):
            answer = await browser.get("/metrics", headers=bearer(secret))
            assert (answer.status_code, answer.headers["content-type"][:10]) == (200, "text/plain")
            assert 'pgqueue_depth{queue="mail",state="available"} 7.0' in answer.text
            assert answer.headers["x-content-type-options"] == "nosniff"
        wrong = await browser.get("/metrics", headers=bearer("w" * 20))
        assert (wrong.status_code, "pgqueue_" in wrong.text) == (401, False)
        text = (await browser.get("/metrics", headers=bearer(READER_SECRET))).text
        names = {family.name for family in text_string_to_metric_families(text)}
        assert names == {metric.name for metric in OF_DATABASE if not {"outbox", "duty"} & set(metric.labels)}


@pytest.mark.promise("F171")
async def test_scrapes_within_a_second_are_read_once(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "SAME_SECONDS", 3_600.0)
    async with reading(dsn) as browser:
        first = await browser.get("/metrics")
        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('t', 'mail')")
        assert (await browser.get("/metrics")).text == first.text
        assert (await browser.head("/metrics")).status_code == 200
        strict = await browser.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert strict.text.endswith("# EOF\n")


async def test_without_its_database_it_says_so(dsn: str) -> None:
    async with reading(f"{dsn}&dbname=nowhere") as browser:
        assert (await browser.get("/metrics")).status_code == 503

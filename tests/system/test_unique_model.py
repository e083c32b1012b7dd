"""At most one job holds a unique key, and no key is stuck, in whatever order things happen: harness/unique_model.py."""

from __future__ import annotations

import psycopg
import pytest
from unique_model import NAMES, mail, played
from workers import Eyes


@pytest.mark.second
@pytest.mark.promise("F29")
@pytest.mark.parametrize("seed", range(4))
async def test_a_key_has_one_holder_and_no_key_is_stuck(dsn: str, eyes: Eyes, seed: int) -> None:
    async with played(dsn, eyes, seed, 150) as model:
        eyes.do("SELECT pgqueue.advance_sequences(true)")
        with psycopg.connect(dsn) as conn:
            for name in NAMES:
                holders = {id for id, _ in model.holders(conn, name)}
                kind, _, key = name.partition(":")
                asked = mail.using(unique=lambda **_: key) if kind == "unique" else mail.using(idempotency_key=key)  # noqa: B023
                handle = asked.enqueue(conn)
                assert holders == set() if handle.created else handle.id in holders, name
                conn.rollback()


BY_ID = """
    DO $$ DECLARE function text; BEGIN
        FOR function IN SELECT pg_get_functiondef(oid) FROM pg_proc
            WHERE pronamespace = 'pgqueue'::regnamespace AND proname IN ('key_states', 'take_keys', 'take_many_keys')
        LOOP
            EXECUTE regexp_replace(function, 'AND k.enqueued_at = j.enqueued_at', '', 'g');
        END LOOP;
    END $$
"""


@pytest.mark.second
async def test_the_model_finds_keys_that_are_judged_by_ids_alone(dsn: str, eyes: Eyes) -> None:
    """The naive version: the row of a key names a job by its id, and ids are given again."""
    eyes.do(BY_ID)
    with pytest.raises(AssertionError):
        for seed in range(6):
            async with played(dsn, eyes, seed, 150):
                pass
            eyes.do("TRUNCATE pgqueue.job, pgqueue.unique_key, pgqueue.discarded_key, pgqueue.job_signal")

"""Sequences that lag behind the tables are advanced, before a number is given a second time.

They lag after a switchover to a server that was fed by logical replication, which carries no sequences; after a restore
of data only; after a TRUNCATE with RESTART IDENTITY. Then the next job would get an id that another job has, or a
position that strands it.

Asked by `migrations.migrate`, by a worker that registers, and by its sessions when they connect to another server than
before. Not with each connection: under an old snapshot the highest numbers lie behind dead rows. Why no number is given
twice is said at `advance_sequences` (sql/migrations/0001_schema.sql).
"""

from __future__ import annotations

import logging

from pgqueue.database.statements import Row, Statement, text

log = logging.getLogger("pgqueue")


def advancing(schema: str, *, whole: bool) -> Statement[int]:
    """The statement that advances what lags; answers how many. Each is logged.

    `whole`: unique keys are read, which costs one scan.
    """

    def read(rows: list[Row]) -> int:
        for sequence, given, highest, advanced_to in rows:
            log.warning(
                "sequence %s had given %d, but there is %d in the tables (a restore, a switchover or a TRUNCATE?): it "
                "goes on from %d",
                sequence,
                given,
                highest,
                advanced_to,
            )
        return len(rows)

    return Statement(text("sequences_advance", schema), {"whole": whole}, read)

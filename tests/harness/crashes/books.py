"""The books of the crash harness: what was counted, and whether every job's end agrees with enqueue and effects.

Read after a series, in one snapshot, from the tables of tasks.py and the queue's own. Never changes anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import psycopg

NOTHING = ("lost", "doubled", "mismatched", "ghosts", "totals")


@dataclass(slots=True)
class Report:
    """What happened, and what was wrong."""

    kills: int = 0
    seed: int = 0
    seconds: float = 0.0
    points: int = 0
    lives: int = 0
    cuts: int = 0
    taken_away: int = 0
    jobs: int = 0
    completed: int = 0
    failed: int = 0
    crashed: int = 0
    """Put aside with their third crash, and completed when they were retried by hand."""
    repeated: int = 0
    """Effects of plain tasks that happened more than once: they may."""
    late: int = 0
    """Outcomes that came after their job had been given to others: dropped."""
    lost: int = 0
    doubled: int = 0
    mismatched: int = 0
    ghosts: int = 0
    """Jobs or effects whose enqueue was rolled back."""
    totals: int = 0
    """Times somebody saw a total other than 350."""
    missed: list[str] = field(default_factory=list)
    """Points that no process came to again."""
    at: dict[str, int] = field(default_factory=dict)
    """How many were killed at each point."""

    def wrongs(self) -> dict[str, Any]:
        """What must be nothing and is not."""
        wrong = {name: value for name, value in asdict(self).items() if name in NOTHING and value}
        return wrong if self.kills else wrong | {"kills": 0}

    def text(self) -> str:
        """For people."""
        counts = {name: value for name, value in asdict(self).items() if name != "at"}
        return "\n".join(
            [
                *(f"{name:12} {value}" for name, value in counts.items()),
                "",
                *(f"{n:5} {at}" for at, n in self.at.items()),
            ]
        )


# A job's end, its task, how many effects it had. What its application entered counts, not what the queue remembers.
ENDS = """
CREATE TEMPORARY TABLE ends AS
SELECT l.token, l.kind, l.kind = ANY (%(transactional)s) AS transactional, j.state, j.reason,
       coalesce(e.number, 0) AS effects, coalesce(f.number, 0) AS successors, f.done IS TRUE AS followed,
       a.balances
FROM ledger l
LEFT JOIN pgqueue.job j ON j.id = l.job_id
LEFT JOIN (SELECT token, array_agg(balance ORDER BY name) AS balances FROM account GROUP BY token) AS a
       ON a.token = l.token
LEFT JOIN (SELECT token, count(*) AS number FROM effect GROUP BY token) AS e ON e.token = l.token
LEFT JOIN (SELECT (args ->> 'token')::bigint AS token, count(*) AS number, bool_and(state = 'completed') AS done
           FROM pgqueue.job WHERE task = 'crash.follow' GROUP BY 1) AS f ON f.token = l.token
"""
UNEVEN = "SELECT FROM account WHERE token > %(after)s GROUP BY token HAVING sum(balance) <> 350"
COUNTS = {
    "jobs": "SELECT count(*) FROM ends",
    "completed": "SELECT count(*) FROM ends WHERE state = 'completed'",
    "failed": "SELECT count(*) FROM ends WHERE state = 'failed'",
    "repeated": """SELECT coalesce(sum(effects - 1), 0) FROM ends
                   WHERE effects > 1 AND NOT transactional AND kind <> 'flaky'""",
    # `fails` ends as failed, everything else as completed; and what is not transactional has happened once at least.
    "lost": """SELECT count(*) FROM ends
               WHERE state IS DISTINCT FROM CASE kind WHEN 'fails' THEN 'failed' ELSE 'completed' END
                  OR kind = 'fails' AND reason <> 'error' OR effects = 0 AND NOT transactional
                  OR kind LIKE '%chain' AND NOT followed""",
    "doubled": """SELECT (SELECT count(*) FROM ends WHERE effects > 1 AND transactional OR successors > 1)
                       + (SELECT count(*) FROM (SELECT FROM pgqueue.job GROUP BY id HAVING count(*) > 1) AS twice)""",
    "mismatched": """SELECT count(*) FROM ends
                     WHERE transactional
                       AND (state IS NOT DISTINCT FROM 'completed', balances) <> (effects > 0, CASE effects
                           WHEN 0 THEN '{100,200,50}'::int[] ELSE '{50,250,50}' END)""",
    "ghosts": """SELECT (SELECT count(*) FROM effect e WHERE NOT EXISTS (SELECT FROM ledger l WHERE l.token = e.token))
                      + (SELECT count(*) FROM pgqueue.job j
                         WHERE task <> 'crash.follow' AND NOT EXISTS (SELECT FROM ledger l WHERE l.job_id = j.id))""",
}


def account(conn: psycopg.Connection[Any], report: Report, transactional: tuple[str, ...], promised: set[int]) -> None:
    """Fill in what the tables say; `promised` are jobs whose COMMIT had been answered when their enqueuer died."""
    conn.execute(ENDS, {"transactional": list(transactional)})
    for name, sql in COUNTS.items():
        setattr(report, name, getattr(report, name) + number(conn, sql))
    look(conn, report, 0)
    entered = number(conn, "SELECT count(*) FROM ledger WHERE token = ANY (%s)", list(promised))
    report.lost += len(promised) - entered


def look(conn: psycopg.Connection[Any], report: Report, after: int) -> None:
    """Whether the total is 350 in each group of accounts, now; only groups younger than that token."""
    report.totals += len(conn.execute(UNEVEN, {"after": after}).fetchall())


def number(conn: psycopg.Connection[Any], sql: str, *params: Any) -> int:
    """The one number of an answer."""
    row = conn.execute(sql.encode(), params or None).fetchone()
    assert row is not None
    return int(row[0])

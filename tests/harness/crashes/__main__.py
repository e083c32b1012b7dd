"""Kill workers, applications and rescuers at every statement boundary, by the thousand, and account for every job.

    python -m tests.harness.crashes --kills 10000 --seed 1 [--json]

First some lives are lived to their end and record the points they cross (points.py); then each point kills one
process at least: a life dies at the first of its points where nobody has died yet, so that hardly one is lived in vain.
The rest of the kills hit points drawn by the seed, three processes at a time (a seed repeats the draw, not who is
faster). The jobs of a dead process are rescued at once, as by a supervisor that knows; now and then
those of a living one are taken away, and connections are cut at a COMMIT. In the end a worker that nobody kills runs
what is left, and the books must balance. Exit code 1 if anything is lost, doubled, at odds with its effect, or ran
though its enqueue was rolled back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from servers import embedded_server

from crashes.series import series
from pgqueue.database import migrations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.crashes", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("pgqueue").setLevel(logging.ERROR)  # each rescue would be a line
    server = embedded_server()
    try:
        migrations.migrate(server.dsn("postgres"))
        report = asyncio.run(series(server.dsn("postgres"), options.kills, options.seed))
    finally:
        server.end()
    print(json.dumps(asdict(report)) if options.json else report.text())
    return 1 if report.wrongs() else 0


if __name__ == "__main__":
    sys.exit(main())

"""`pgqueue` and `python -m pgqueue`: the command line. If psycopg finds no libpq, one clear message says so."""

from __future__ import annotations

import atexit
import gc
import signal
import sys

from pgqueue import early_signals, init_process

NO_LIBPQ = (
    "pgqueue: psycopg found no libpq, PostgreSQL's client library: pip install 'psycopg[binary]', "
    "or install your system's libpq (Debian and Ubuntu: libpq5)"
)

INTERRUPTED = 130


def main() -> None:
    """Run the command line and end the process. The console script `pgqueue` is this function."""
    init_process.fork_if_first()
    _hide_passwords()
    if sys.argv[1:2] == ["health"]:
        # A probe runs every few seconds, on every host: garbage collection would only cost time in so short a process.
        gc.disable()
        atexit.register(gc.freeze)
    if sys.argv[1:2] == ["work"]:
        early_signals.keep(signal.SIGHUP, signal.SIGUSR1, signal.SIGTTIN, signal.SIGTTOU)
    try:
        from pgqueue.cli import main as cli

        cli(prog_name="pgqueue")
    except KeyboardInterrupt:  # in the middle of an import; a command has its own answer
        sys.exit(INTERRUPTED)
    except ImportError as error:
        # psycopg's own message is longer: it has a line for each of the three ways it tried.
        if "no pq wrapper available" not in str(error):
            raise
        sys.exit(NO_LIBPQ)


def _hide_passwords() -> None:
    """Where a DSN on the command line has a password, show the command without it in the process list.

    From its start until here the process shows it: a DSN in PGQUEUE_DSN is never shown.
    """
    if not any("://" in word or "passw" in word.lower() for word in sys.argv[1:]):
        return  # what follows takes time to import
    from pgqueue.config import safe

    shown = [safe(word) for word in sys.argv[1:]]
    if shown != sys.argv[1:]:
        import setproctitle

        setproctitle.setproctitle(" ".join(["pgqueue", *shown]))


if __name__ == "__main__":
    main()

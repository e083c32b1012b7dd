"""`pgqueue web` as a process: the dashboard on a socket, served by uvicorn.

The access rules are the dashboard's own. So uvicorn is told to believe no header of a proxy, and to name no server.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType

import uvicorn

from pgqueue.errors import InvalidOption
from pgqueue.jobs.values import digits
from pgqueue.web.access import loopback
from pgqueue.web.dashboard import Dashboard

log = logging.getLogger("pgqueue")

DRAIN_SECONDS = 5


def serve(dashboard: Dashboard, host: str, port: int) -> None:
    """Serve the dashboard until SIGTERM or Ctrl-C; then end with 0. Raises InvalidOption if it cannot listen there."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, _end)  # uvicorn stops in order, and raises the signal again for this
    listening = bound(host, port)
    config = uvicorn.Config(
        dashboard,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    with listening:
        log.warning("the dashboard is at http://%s:%d/", f"[{host}]" if ":" in host else host, *_port(listening))
        server = uvicorn.Server(config)
        dashboard.end_streams_when(lambda: server.should_exit)
        server.run(sockets=[listening])


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InvalidOption."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise InvalidOption(f"cannot listen at {host}:{port}: {error.strerror or error}") from None


def address_of(bind: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:8300` or `[::1]:8300`. Raises InvalidOption.

    >>> address_of("localhost:8300"), address_of("[::1]:0")
    (('localhost', 8300), ('::1', 0))
    """
    host, separator, port = bind.rpartition(":")
    number = digits(port)
    if not separator or not host or number is None or number > 65_535:
        raise InvalidOption(f"bind {bind!r}: write HOST:PORT, such as 127.0.0.1:8300 or [::1]:8300")
    return host.removeprefix("[").removesuffix("]"), number


def check_open(host: str, options: Mapping[str, object]) -> None:
    """Raise InvalidOption unless a dashboard without a login stays on this machine."""
    if not loopback(host):
        raise InvalidOption(f"--open has no login, so it listens on loopback only, not at {host}; use --auth")
    if given := sorted(name for name, value in options.items() if value):
        raise InvalidOption(f"--open is for this machine only, without {' and '.join(given)}; use --auth")


def _port(listening: socket.socket) -> tuple[int]:
    return (listening.getsockname()[1],)

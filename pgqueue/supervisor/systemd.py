"""Reports to systemd (`Type=notify`): ready, reloading, stopping, a status text, and that we live (watchdog).

Each report is one datagram to the socket that `NOTIFY_SOCKET` names. Without this variable nothing is sent. Processes
that we start do not inherit it: only the supervisor reports.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from time import monotonic_ns

from pgqueue.steady_clock import monotonic


class Systemd:
    """Reports to systemd, if systemd has started us."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(os.getpid()))
        self.every = int(usec) / 2e6 if usec.isdigit() and pid == str(os.getpid()) else None
        """Seconds between signs of life; None: systemd waits for none."""
        self._due = 0.0
        self._status = ""

    def ready(self) -> None:
        self._send("READY=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """Set the text of `systemctl status`; sent if it has changed."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def alive(self) -> None:
        """Send a sign of life, if one is due."""
        if self.every is not None and monotonic() >= self._due:
            self._due = monotonic() + self.every
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if self._address:
            # An abstract address begins with NUL, which an environment cannot hold.
            address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
                to.sendto(text.encode(), address)

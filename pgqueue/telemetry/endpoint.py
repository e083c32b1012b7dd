"""The endpoint of `pgqueue work --metrics`: one path, served by a few threads of their own.

A slow or silent client holds one thread, for seconds at most, and never the worker. If all are held, further clients
are turned away. Nothing is read from the network but a request line and headers, whose size http.server bounds. All of
them must be there at one time, so a client gains nothing by sending byte after byte.
"""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pgqueue.database import forks
from pgqueue.errors import InvalidOption
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

PATH = "/metrics"
CLIENTS_MOST = 8
CLOSE_SECONDS, CLIENT_SECONDS = 0.2, 5.0
"""How often the thread looks whether it is to end; and how long a client may take to send its request, or to read."""

Text = Callable[[str], tuple[bytes, str]]
"""For an Accept header, the text of a scrape and its content type."""


class Endpoint:
    """Listens from the time when it is made; answers from `serve` on."""

    def __init__(self, host: str, port: int) -> None:
        self._server = _Server(_listening(host, port))

    @property
    def port(self) -> int:
        """The port, if 0 was asked for."""
        return int(self._server.server_address[1])

    def serve(self, text: Text) -> None:
        """Answer scrapes with this text, in threads that end with the process."""
        self._server.text = text
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=[CLOSE_SECONDS], name="pgqueue-metrics", daemon=True).start()

    def close(self) -> None:
        """Answer no more, and listen no more."""
        if self._server.text is not None:
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """http.server's own, with so many threads at most and a socket that forked children do not keep."""

    daemon_threads = True
    block_on_close = False
    text: Text | None = None

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_address = listening.getsockname()
        self._room = threading.BoundedSemaphore(CLIENTS_MOST)
        forks.cut_in_children(listening)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread could be started: none will give the room back
                self._room.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow, is no news."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.error("a scrape could not be answered", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of one path. One request a connection."""

    timeout = CLIENT_SECONDS
    server_version, sys_version = "pgqueue", ""
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()  # it would wait as long for each byte
        self.rfile = io.BufferedReader(_Request(self.connection, self.timeout))

    def do_GET(self) -> None:
        """The text of a scrape; without its body for HEAD."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        assert self.server.text is not None
        body, kind = self.server.text(self.headers.get("accept", ""))
        self.connection.settimeout(self.timeout)  # for all of a write
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged: there is one every few seconds."""


class _Request(io.RawIOBase):
    """What a client sends within these seconds, counted from when it has connected. Later reads raise TimeoutError."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end = connection, monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - monotonic()
        if left <= 0:
            raise TimeoutError("the request is not complete in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def address_of(bind: str) -> tuple[str, int]:
    """Host and port of `:9000` (all interfaces, host is empty), `localhost:9000` or `[::1]:9000`.

    >>> address_of(":9000"), address_of("[::1]:0")
    (('', 9000), ('::1', 0))
    """
    host, separator, port = bind.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not separator or host not in (bare, f"[{bare}]") or (":" in bare) != (host != bare) or not port.isdecimal():
        raise InvalidOption(f"metrics {bind!r}: write :PORT for all interfaces, or HOST:PORT, such as 127.0.0.1:9000")
    if int(port) > 65_535:
        raise InvalidOption(f"metrics {bind!r}: a port is at most 65535")
    return bare, int(port)


def _listening(host: str, port: int) -> socket.socket:
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidOption(f"metrics: cannot listen at {host}:{port}: {error.strerror or error}") from None

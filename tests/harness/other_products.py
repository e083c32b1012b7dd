"""Servers that speak PostgreSQL's protocol and are something else: they end a session at its first message."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ACCEPTED = b"R" + struct.pack("!ii", 8, 0)
READY = b"Z" + struct.pack("!i", 5) + b"I"
NO_SSL = b"N"
SSL_REQUEST = 80877103


@contextmanager
def other_product(**said: str) -> Iterator[str]:
    """The DSN of a server that says this of itself when a session begins."""
    parameters = {"server_encoding": "UTF8", "client_encoding": "UTF8", "standard_conforming_strings": "on"} | said
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_serve, args=[listening, parameters], daemon=True).start()
        port = listening.getsockname()[1]
        yield f"postgresql://u@127.0.0.1:{port}/d?target_session_attrs=any&sslmode=disable&gssencmode=disable"
        listening.shutdown(socket.SHUT_RDWR)


def _serve(listening: socket.socket, parameters: dict[str, str]) -> None:
    with suppress(OSError):
        while True:
            conn, _ = listening.accept()
            with conn, suppress(OSError):
                _accept(conn, parameters)


def _accept(conn: socket.socket, parameters: dict[str, str]) -> None:
    length, code = struct.unpack("!ii", conn.recv(8, socket.MSG_WAITALL))
    if code == SSL_REQUEST:
        conn.sendall(NO_SSL)
        length, code = struct.unpack("!ii", conn.recv(8, socket.MSG_WAITALL))
    conn.recv(length - 8, socket.MSG_WAITALL)
    texts = [f"{name}\0{value}\0".encode() for name, value in parameters.items()]
    said = [b"S" + struct.pack("!i", 4 + len(text)) + text for text in texts]
    conn.sendall(b"".join([ACCEPTED, *said, READY]))
    conn.recv(4096)

"""What the bench asks RabbitMQ itself, in AMQP 0-9-1: how many messages are ready in a queue, and to delete it.

A client library would be one more thing to install beside pgqueue. Five methods are enough, one at a time.
"""

from __future__ import annotations

import socket
import struct

_HEADER = b"AMQP\x00\x00\x09\x01"
_METHOD, _HEARTBEAT, _END = 1, 8, 0xCE
_NO_TABLE = bytes(4)
_START, _START_OK, _TUNE, _TUNE_OK, _OPEN, _OPEN_OK = ((10, n) for n in (10, 11, 30, 31, 40, 41))
_CHANNEL_OPEN, _CHANNEL_OPEN_OK, _CHANNEL_CLOSE, _CHANNEL_CLOSE_OK = ((20, n) for n in (10, 11, 40, 41))
_DECLARE, _DECLARE_OK, _DELETE, _DELETE_OK = ((50, n) for n in (10, 11, 40, 41))
_NOT_FOUND = 404

Method = tuple[int, int]


class Refused(RuntimeError):
    """The server has answered something else than what it was asked."""


class Connection:
    """A connection of the user `guest` with one channel."""

    def __init__(self, port: int, timeout: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._answers = self._socket.makefile("rb")
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it without a word: the server takes that for an end."""
        self._answers.close()
        self._socket.close()

    def ready(self, queue: str) -> int:
        """How many messages wait there, those delivered left out; 0 where there is no such queue."""
        self._send(1, _DECLARE, bytes(2) + _short(queue) + b"\x01" + _NO_TABLE)  # passive: it makes none
        method, body = self._hear(_DECLARE_OK, _CHANNEL_CLOSE)
        if method == _DECLARE_OK:
            count: int = struct.unpack_from(">I", body, 1 + body[0])[0]  # behind the queue's name
            return count
        if struct.unpack_from(">H", body)[0] != _NOT_FOUND:
            raise Refused(f"RabbitMQ says of queue {queue}: {body[:200]!r}")
        self._send(1, _CHANNEL_CLOSE_OK, b"")
        self._open_channel()
        return 0

    def delete(self, queue: str) -> None:
        """Delete this queue, if there is one."""
        self._send(1, _DELETE, bytes(2) + _short(queue) + b"\x00")
        self._hear(_DELETE_OK)

    def _open(self) -> None:
        self._socket.sendall(_HEADER)
        self._hear(_START)
        self._send(0, _START_OK, _NO_TABLE + _short("PLAIN") + _long(b"\x00guest\x00guest") + _short("en_US"))
        _, limits = self._hear(_TUNE)
        self._send(0, _TUNE_OK, limits[:6] + bytes(2))  # no heartbeats
        self._send(0, _OPEN, _short("/") + _short("") + b"\x00")
        self._hear(_OPEN_OK)
        self._open_channel()

    def _open_channel(self) -> None:
        self._send(1, _CHANNEL_OPEN, _short(""))
        self._hear(_CHANNEL_OPEN_OK)

    def _send(self, channel: int, method: Method, body: bytes) -> None:
        payload = struct.pack(">HH", *method) + body
        self._socket.sendall(struct.pack(">BHI", _METHOD, channel, len(payload)) + payload + bytes([_END]))

    def _hear(self, *wanted: Method) -> tuple[Method, bytes]:
        """The next method, which is one of these."""
        while True:
            kind, _, size = struct.unpack(">BHI", self._read(7))
            payload = self._read(size + 1)
            if kind == _HEARTBEAT:
                continue
            method: Method = struct.unpack_from(">HH", payload)
            if kind != _METHOD or method not in wanted:
                raise Refused(f"RabbitMQ sent {method} in place of {wanted}: {payload[:200]!r}")
            return method, payload[4:-1]

    def _read(self, size: int) -> bytes:
        found = self._answers.read(size)
        if len(found) < size:
            raise ConnectionResetError("RabbitMQ has closed the connection")
        return found


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _long(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text

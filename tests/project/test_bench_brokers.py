"""The servers of peers whose jobs are not in PostgreSQL: what is asked of them, and what is said without them."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from bench.peers import amqp, install, peer
from bench.peers.install import Home, NotInstalled, server_program
from bench.peers.rabbitmq import RabbitMQ

TABLE = bytes(4)
HELLO = [(10, 10, bytes(2) + TABLE + bytes(8)), (10, 30, struct.pack(">HIH", 2047, 131_072, 60)), (10, 41, b"\x00")]
OPENED = (20, 11, TABLE)
DELETED = (50, 41, bytes(4))


def counted(messages: int) -> tuple[int, int, bytes]:
    return 50, 11, b"\x05bench" + struct.pack(">II", messages, 0)


def closed(code: int) -> tuple[int, int, bytes]:
    return 20, 40, struct.pack(">H", code) + b"\x02no" + struct.pack(">HH", 50, 10)


@contextmanager
def serving(answers: list[tuple[int, int, bytes]]) -> Iterator[int]:
    """A server on loopback that sends one of these methods, in turn, for each that wants an answer; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_serve, args=(server, answers))
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join(60)
    assert not thread.is_alive()


def _serve(server: socket.socket, answers: list[tuple[int, int, bytes]]) -> None:
    link, _ = server.accept()
    silent = {(10, 31), (20, 41)}  # tune-ok and close-ok want none
    with link, link.makefile("rb") as asked, suppress(ConnectionError):
        asked.read(8)
        for kind, number, body in answers:
            payload = struct.pack(">HH", kind, number) + body
            link.sendall(struct.pack(">BHI", 8, 0, 0) + b"\xce")  # a heartbeat between
            link.sendall(struct.pack(">BHI", 1, 0, len(payload)) + payload + b"\xce")
            while True:
                head = asked.read(7)
                if not head:
                    return
                said = asked.read(struct.unpack(">BHI", head)[2] + 1)
                if struct.unpack(">HH", said[:4]) not in silent:
                    break


def test_messages_that_wait_are_counted_and_a_queue_that_there_is_not_has_none() -> None:
    answers = [*HELLO, OPENED, counted(7), closed(404), OPENED, counted(70_000), DELETED]
    with serving(answers) as port:
        link = amqp.Connection(port, 60)
        assert [link.ready("bench") for _ in range(3)] == [7, 0, 70_000]
        link.delete("bench")
        link.close()


def test_an_answer_to_something_else_is_an_error() -> None:
    with serving([*HELLO, OPENED, closed(403)]) as port:
        link = amqp.Connection(port, 60)
        with pytest.raises(amqp.Refused, match="bench"):
            link.ready("bench")
        link.close()
    with serving([*HELLO, OPENED, DELETED]) as port:
        link = amqp.Connection(port, 60)
        with pytest.raises(amqp.Refused):
            link.ready("bench")
        link.close()


@pytest.mark.promise("F260")
def test_a_peer_whose_server_is_not_on_the_machine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "RABBITMQ", tmp_path / "nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    home = Home(tmp_path, peer.read())
    for name, program in (("celery-rabbitmq", "rabbitmq-server"), ("celery-redis", "redis-server")):
        this = peer.read().peers[name]
        home._fresh(this.name).mkdir()
        home._done(this.name, this.packages)
        with pytest.raises(NotInstalled, match=f"it needs {program}"):
            home.require(this)
    assert not (tmp_path / "rabbitmq").exists()


@pytest.mark.long
@pytest.mark.skipif(server_program("rabbitmq") is None, reason="there is no RabbitMQ on this machine")
def test_a_rabbitmq_of_our_own_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    server = RabbitMQ(tmp_path / "rabbitmq")
    try:
        server.empty()
        assert server.numbers(["READY bench", "READY elsewhere"]) == [0, 0]
        started = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        open_to_all = [
            each.laddr
            for process in started
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.ip not in ("127.0.0.1", "::1")
        ]
        assert open_to_all == []
    finally:
        server.close()
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert server._mapper.poll() is not None, "the port mapper would serve the whole machine"

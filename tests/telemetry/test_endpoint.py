"""The endpoint of `pgqueue work --metrics`: what it answers, and that no client of it stops it, or the worker."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from workers import wait_until

from pgqueue.errors import InvalidOption
from pgqueue.telemetry import endpoint as endpoint_module
from pgqueue.telemetry.endpoint import CLIENTS_MOST, Endpoint, address_of


@contextmanager
def serving(text: bytes = b"numbers 1\n") -> Iterator[tuple[str, int]]:
    made = Endpoint("127.0.0.1", 0)
    made.serve(lambda accept: (text, "text/plain"))
    try:
        yield "127.0.0.1", made.port
    finally:
        made.close()


def asked(address: tuple[str, int], path: str = "/metrics", method: str = "GET") -> tuple[int, bytes, Any]:
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b"", error.headers


@pytest.mark.promise("F165")
def test_it_answers_one_path_by_two_methods() -> None:
    with serving() as address:
        status, body, headers = asked(address)
        assert (status, body, headers["server"].strip()) == (200, b"numbers 1\n", "pgqueue")
        assert asked(address, "/metrics?name=x")[0] == 200
        status, body, headers = asked(address, method="HEAD")
        assert (status, body, headers["content-length"]) == (200, b"", "10")
        assert [asked(address, path)[0] for path in ("/", "/metrics/x")] == [404] * 2
        assert [asked(address, method=method)[0] for method in ("POST", "PUT", "DELETE")] == [501] * 3


def turned_away(address: tuple[str, int]) -> bool:
    with socket.create_connection(address, 10) as late:
        late.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        try:
            return late.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.mark.promise("F165")
@pytest.mark.parametrize("drip", [b"", b"a"], ids=["silent", "dripping"])
def test_clients_that_say_nothing_or_little_hold_so_many_threads_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    monkeypatch.setattr(endpoint_module._Handler, "timeout", 0.5)
    with serving() as address:
        slow = [socket.create_connection(address) for _ in range(CLIENTS_MOST)]
        if drip:
            for each in slow:
                each.sendall(b"GET /metrics HTTP/1.0\r\nX: ")

        def served() -> bool:
            for each in slow:
                with suppress(OSError):  # it has been hung up on
                    each.sendall(drip)
            return not turned_away(address)

        wait_until(lambda: turned_away(address))
        wait_until(served, 10)
        for each in slow:
            each.close()
        assert asked(address)[0] == 200


@pytest.mark.promise("F165")
def test_scrapes_for_which_no_thread_could_be_started_take_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if "process_request_thread" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving() as address:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", starts)
            assert [turned_away(address) for _ in range(CLIENTS_MOST)] == [True] * CLIENTS_MOST
        assert asked(address)[0] == 200
    assert {record.getMessage() for record in caplog.records} == {"a scrape could not be answered"}


@pytest.mark.promise("F165")
def test_a_client_that_reads_nothing_lets_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module._Handler, "timeout", 0.3)
    with serving(b"x" * 10_000_000) as address, socket.create_connection(address) as slow:
        slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert slow.recv(1)
        assert len(asked(address)[1]) == 10_000_000


def test_an_address_that_is_taken_or_none_is_said() -> None:
    with serving() as (host, port), pytest.raises(InvalidOption, match=f"cannot listen at {host}:{port}"):
        Endpoint(host, port)
    assert address_of(":9000") == ("", 9000) and address_of("localhost:1") == ("localhost", 1)
    for wrong in ("", "9000", "a:", ":b", ":70000", "::1:9000", "[::1:9000"):
        with pytest.raises(InvalidOption, match=r"write :PORT|at most 65535"):
            address_of(wrong)


def test_without_a_host_it_listens_on_all_interfaces() -> None:
    made = Endpoint("", 0)
    made.serve(lambda accept: (b"numbers 1\n", "text/plain"))
    assert asked(("127.0.0.1", made.port))[0] == 200
    made.close()

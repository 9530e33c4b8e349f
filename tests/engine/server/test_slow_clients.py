"""Clients that are slow, stall or vanish cost the server a bounded wait."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from engine.connections import UNREAD_S, bound_waits
from tests.engine.live_server import TEXT, LiveServer, body, live_server

HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n"


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def trickle(connection: socket.socket, text: str) -> None:
    """Send slowly, until the server has closed."""
    with contextlib.suppress(OSError):
        for letter in text:
            connection.sendall(letter.encode())
            time.sleep(0.05)


@pytest.fixture
def hasty_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr("engine.connections.HEADERS_S", 0.3)
    monkeypatch.setattr("engine.server.BODY_S", 0.3)
    with live_server() as server:
        yield server


@pytest.mark.parametrize("earlier_requests", [0, 1])
def test_headers_that_trickle_in_end_with_the_connection(
    hasty_server: LiveServer, earlier_requests: int
) -> None:
    with connect(hasty_server) as connection:
        for _ in range(earlier_requests):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in connection.recv(65536)
        began = time.monotonic()
        trickle(connection, HEAD * 10)
        assert time.monotonic() - began < 2


def test_connection_that_says_nothing_is_closed(hasty_server: LiveServer) -> None:
    with connect(hasty_server) as connection:
        assert read_all(connection) == b""


def test_body_that_stalls_is_answered_with_408(hasty_server: LiveServer) -> None:
    with connect(hasty_server) as connection:
        connection.sendall(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        answer = read_all(connection)
    assert b" 408 " in answer.splitlines()[0]
    assert b"1 bytes of the body" in answer


def test_long_answer_outlives_the_waits(hasty_server: LiveServer) -> None:
    hasty_server.runner.delay_s = 0.01
    answer = hasty_server.client.post(TEXT, json=body(max_tokens=60))
    assert answer.json()["usage"]["completion_tokens"] == 60


def test_body_of_a_request_that_offers_an_upgrade_is_read(server: LiveServer) -> None:
    data = json.dumps(body())
    offer = (
        "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    )
    with connect(server) as connection:
        connection.sendall(f"{HEAD}{offer}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        assert b"200 OK" in connection.recv(65536)


def test_the_kernel_cuts_off_who_reads_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bound_waits(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            waits_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert waits_ms == UNREAD_S * 1000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1

"""Clients that are slow, stall or vanish cost the server a bounded wait."""

from __future__ import annotations

import json
import socket
import time

import pytest

from engine.connections import UNREAD_S, bound_waits
from tests.engine.fake_runner import FakeRunner
from tests.engine.live_server import TEXT, LiveServer, body, live_server
from tests.waiting import PATIENCE_S

HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n"


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the server closes while headers trickle in, which they do for over a minute."""
    try:
        for letter in HEAD * 30:
            connection.sendall(letter.encode())
            time.sleep(0.05)
    except OSError:
        return True
    return False


def test_headers_that_trickle_in_end_with_the_connection(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.connections.HEADERS_S", 0.3)
    with connect(server) as connection:
        assert is_cut_off(connection)


def test_headers_of_a_later_request_may_not_trickle_in_either(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        monkeypatch.setattr("engine.connections.HEADERS_S", 0.3)
        assert is_cut_off(connection)


def test_connection_that_says_nothing_is_closed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.connections.HEADERS_S", 0.3)
    with connect(server) as connection:
        assert read_all(connection) == b""


def test_body_that_stalls_is_answered_with_408(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.BODY_S", 0.3)
    with connect(server) as connection:
        connection.sendall(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        answer = read_all(connection)
    assert b" 408 " in answer.splitlines()[0]
    assert b"1 bytes of the body" in answer


def test_long_answer_outlives_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.connections.HEADERS_S", 1.0)
    monkeypatch.setattr("engine.server.BODY_S", 1.0)
    data = json.dumps(body(max_tokens=60))
    request = f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n{data}"
    with live_server(FakeRunner(delay_s=0.03)) as server, connect(server) as connection:
        connection.sendall(request.encode())
        answer = read_all(connection).partition(b"\r\n\r\n")[2]
    assert json.loads(answer)["usage"]["completion_tokens"] == 60


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

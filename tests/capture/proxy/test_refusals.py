"""What the proxy does not pass on: requests and answers that two readers could take for different
ones, and sides that stop in the middle."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.capture.proxy.nasty import Conversation, Nasty, answer_hello
from tests.capture.proxy.processes import ProxyProcess, raw
from tests.waiting import PATIENCE_S, until

GET = b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
EMPTY = b"\r\n0\r\n\r\n"

REFUSED_REQUESTS = {
    "no request": b"nonsense\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    "signed length": POST + b"Content-Length: +1\r\n\r\nx",
    "length and chunks": POST + b"Content-Length: 5\r\n" + CHUNKED + EMPTY,
    "chunks and length": POST + CHUNKED + b"Content-Length: 5\r\n" + EMPTY,
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: h\r\n" + CHUNKED + EMPTY,
    "two codings": POST + CHUNKED + CHUNKED + EMPTY,
    "other coding": POST + b"Transfer-Encoding: gzip, chunked\r\n" + EMPTY,
    "space before colon": POST + b"Transfer-Encoding : chunked\r\n" + EMPTY,
    "control in coding": POST + b"Transfer-Encoding: \x0bchunked\r\n" + EMPTY,
    "carriage return in value": POST + b"X: a\rContent-Length: 1\r\n\r\n",
    "NUL in value": POST + b"X: s3cret\0\r\n\r\n",
    "NUL in target": b"GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "websocket": GET.replace(b"\r\n\r\n", b", Upgrade\r\nUpgrade: websocket\r\n\r\n"),
    "tunnel": b"CONNECT h:443 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
}
STATUS = {"HTTP/2": 505, "websocket": 501, "tunnel": 501, "two codings": 501, "other coding": 501}


@pytest.mark.parametrize("kind", REFUSED_REQUESTS)
def test_request_that_is_refused(proxy: ProxyProcess, upstream: Nasty, kind: str) -> None:
    """The connection ends, so that what was smuggled behind it is read by nobody."""
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
    answer = raw(proxy.port, REFUSED_REQUESTS[kind] + smuggled)
    assert answer.startswith(b"HTTP/1.1 %d " % STATUS.get(kind, 400))
    assert answer.count(b"HTTP/1.1 ") == 1 + answer.count(b"speaks HTTP/1.1 ")
    assert b"bytearray" not in answer
    assert b"s3cret" not in answer
    assert not upstream.seen


@pytest.mark.parametrize(
    ("request_bytes", "passed"),
    [
        (b"GET http://other/x HTTP/1.1\r\nHost: h\r\n", b"GET http://other/x HTTP/1.1\r\nHost: h"),
        (b"OPTIONS * HTTP/1.1\r\nHost: h\r\n", b"OPTIONS * HTTP/1.1\r\nHost: h"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n  b\r\n", b"GET / HTTP/1.1\r\nHost: h\r\nX: a b"),
        (b"GET / HTTP/1.1\nHost: h\nX: a\n", b"GET / HTTP/1.1\r\nHost: h\r\nX: a"),
    ],
)
def test_odd_request_that_passes(
    proxy: ProxyProcess, upstream: Nasty, request_bytes: bytes, passed: bytes
) -> None:
    raw(proxy.port, request_bytes + b"Connection: close\r\n\r\n")
    assert upstream.seen[0].head == passed


OK = b"HTTP/1.1 200 OK\r\n"
REFUSED_ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "length and chunks": OK + b"Content-Length: 5\r\n" + CHUNKED + EMPTY,
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "other coding": OK + b"Transfer-Encoding: gzip\r\n\r\nx",
    "carriage return in value": OK + b"X: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
    "other protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "status below 100": b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
    "endless head": OK + b"X: " + b"a" * 1_400_000 + b"\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("kind", REFUSED_ANSWERS)
def test_answer_that_is_a_bad_gateway(proxy: ProxyProcess, upstream: Nasty, kind: str) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(REFUSED_ANSWERS[kind])

    upstream.script = script
    answer = raw(proxy.port, GET)
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b'"message": "the upstream s' in answer


@pytest.fixture(scope="module")
def impatient(
    shared_upstream: Nasty, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    """A proxy that waits for nobody; a pause of the machine must not matter to who asks it."""
    shared_upstream.script = answer_hello
    home, options = tmp_path_factory.mktemp("impatient"), ("--timeout-s", "0.2")
    with ProxyProcess(shared_upstream.url, home, *options) as process:
        until(process.knows_its_upstream, "it knows its upstream")
        yield process
        assert process.stop() == 0


def test_silent_upstream_is_a_timeout(impatient: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.gone()

    upstream.script = script
    answer = raw(impatient.port, GET)
    assert answer.startswith(b"HTTP/1.1 504 ")
    assert b"silent for 0.2 s" in answer
    assert b'"code": "upstream_timeout"' in answer


def test_client_that_stops_in_its_upload_is_not_the_upstreams_fault(
    impatient: ProxyProcess, upstream: Nasty
) -> None:
    answer = raw(impatient.port, POST + b"Content-Length: 100\r\n\r\nsome")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the rest of the request did not come for 0.2 s" in answer


def test_endless_head_is_refused(proxy: ProxyProcess, upstream: Nasty) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 1_400_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")
    assert not upstream.seen

"""What goes through the proxy is what was sent, in both directions, at the pace it was sent."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.capture.proxy.nasty import Conversation, Nasty, chat_event, chunk
from tests.capture.proxy.processes import PATIENT, ProxyProcess, raw
from tests.waiting import PATIENCE_S, until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def get(path: str = "/x", *, close: bool = True, method: str = "GET") -> bytes:
    ending = "Connection: close\r\n" if close else ""
    return f"{method} {path} HTTP/1.1\r\nHost: here\r\n{ending}\r\n".encode()


def connect(proxy: ProxyProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    data = b""
    while marker not in data:
        piece = connection.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    return data


def test_heads_keep_case_order_and_raw_target(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(
            b"HTTP/1.1 299 Rather OK\r\nX-Zed: 1\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
            b"X-Odd: \xff\xfe\r\nConnection: X-Private\r\nX-Private: 1\r\nKeep-Alive: 3\r\n"
            b"Content-Length: 2\r\n\r\nok"
        )

    upstream.script = script
    answer = raw(
        proxy.port,
        b"GET /a%2Fb/../c?q=%20&&x=\xc3\xa9 HTTP/1.1\r\n".replace(b"\xc3\xa9", b"%C3%A9")
        + b"Host: here\r\naUTHORIZATION: Bearer s3cret\r\nX-B: 2\r\nX-A: 1\r\nX-B: 3\r\n"
        b"TE: trailers\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nAccept-Encoding: br\r\n\r\n",
    )
    assert upstream.seen[0].head == (
        b"GET /a%2Fb/../c?q=%20&&x=%C3%A9 HTTP/1.1\r\nHost: here\r\naUTHORIZATION: Bearer s3cret"
        b"\r\nX-B: 2\r\nX-A: 1\r\nX-B: 3\r\nAccept-Encoding: br"
    )
    assert answer == (
        b"HTTP/1.1 299 Rather OK\r\nX-Zed: 1\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
        b"X-Odd: \xff\xfe\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    )


NAMES = st.from_regex(r"[Xx]-[A-Za-z0-9_.~!#$%&'*+^`|-]{1,12}", fullmatch=True)
VALUES = st.binary(min_size=0, max_size=20).map(
    lambda value: bytes(b for b in value if b >= 0x20 and b != 0x7F).strip()
)
HEADERS = st.lists(st.tuples(NAMES.map(str.encode), VALUES), max_size=6)
BODIES = st.lists(st.binary(min_size=1, max_size=300), max_size=6)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(HEADERS, BODIES, st.booleans(), HEADERS, BODIES, st.sampled_from(["chunked", "length"]))
def test_any_message_arrives_unchanged(
    proxy: ProxyProcess,
    upstream: Nasty,
    asked: list[tuple[bytes, bytes]],
    upload: list[bytes],
    upload_chunked: bool,
    answered: list[tuple[bytes, bytes]],
    download: list[bytes],
    framing: str,
) -> None:
    got: dict[str, Any] = {}

    async def script(talk: Conversation) -> None:
        got["head"], got["body"] = talk.head, await talk.body()
        lines = [b"HTTP/1.1 200 OK", *(b"%b: %b" % pair for pair in answered)]
        if framing == "chunked":
            await talk.send(b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n")
            await talk.send(*map(chunk, download), b"0\r\n\r\n")
        else:
            length = b"Content-Length: %d" % sum(map(len, download))
            await talk.send(b"\r\n".join([*lines, length]) + b"\r\n\r\n", *download)

    upstream.script = script
    head = b"POST /any HTTP/1.1\r\nHost: h\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in asked)
    if upload_chunked:
        body = b"".join(map(chunk, upload)) + b"0\r\n\r\n"
        request = head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + body
    else:
        length = b"Content-Length: %d\r\n" % sum(map(len, upload))
        request = head + length + b"Connection: close\r\n\r\n" + b"".join(upload)
    answer = raw(proxy.port, request)

    assert got["body"] == b"".join(upload)
    assert got["head"].split(b"\r\n")[2 : 2 + len(asked)] == [b"%b: %b" % pair for pair in asked]
    answer_head, _, rest = answer.partition(b"\r\n\r\n")
    assert answer_head.split(b"\r\n")[1 : 1 + len(answered)] == [
        b"%b: %b" % pair for pair in answered
    ]
    assert (dechunked(rest) if framing == "chunked" else rest) == b"".join(download)


def dechunked(data: bytes) -> bytes:
    found = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        if not int(size, 16):
            assert data == b"\r\n"
            return found
        found, data = found + data[: int(size, 16)], data[int(size, 16) + 2 :]


def test_every_chunk_leaves_as_soon_as_it_came(proxy: ProxyProcess, upstream: Nasty) -> None:
    gate = threading.Event()

    async def script(talk: Conversation) -> None:
        await talk.start_stream()
        for byte in b"data: one byte at a time\n\n":
            await talk.events(bytes([byte]))
            while not gate.is_set():
                await asyncio.sleep(0.001)
            gate.clear()
        await talk.end_stream()

    upstream.script = script
    with connect(proxy) as connection:
        connection.sendall(get())
        got = read_until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")[2]
        expected = b""
        for byte in b"data: one byte at a time\n\n":
            expected += chunk(bytes([byte]))
            while len(got) < len(expected):
                got += connection.recv(65536)
            assert got == expected
            gate.set()
        assert read_until(connection, b"0\r\n\r\n")


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_answers_without_a_body(proxy: ProxyProcess, upstream: Nasty, status: bytes) -> None:
    async def script(talk: Conversation) -> None:
        length = b"Content-Length: 77\r\n" if status.startswith(b"304") else b""
        await talk.send(b"HTTP/1.1 " + status + b"\r\n" + length + b"ETag: x\r\n\r\n")

    upstream.script = script
    with connect(proxy) as connection:
        for _ in range(2):  # the connection stays usable
            connection.sendall(get(close=False))
            answer = read_until(connection, b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert (b"Content-Length: 77" in answer) == status.startswith(b"304")


def test_head_keeps_its_content_length(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        body = b"" if talk.head.startswith(b"HEAD") else b"x" * 10
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + body)

    upstream.script = script
    with connect(proxy) as connection:
        connection.sendall(get(close=False, method="HEAD") + get(close=False))
        got = b""
        while not got.endswith(b"x" * 10):
            got += connection.recv(65536)
    assert got == b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" * 2 + b"x" * 10


def test_body_that_ends_with_the_connection(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(b"HTTP/1.0 200 OK\r\nX-Old: 1\r\n\r\nuntil", b" the end")
        talk.writer.close()

    upstream.script = script
    answer = raw(proxy.port, get(close=False))
    assert answer == b"HTTP/1.1 200 OK\r\nX-Old: 1\r\nConnection: close\r\n\r\nuntil the end"


def test_chunks_for_a_client_that_knows_none(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.start_stream()
        await talk.events(b"a", b"b")
        await talk.end_stream()

    upstream.script = script
    answer = raw(proxy.port, b"GET /x HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"Connection: close\r\n\r\nab")
    assert b"Transfer-Encoding" not in answer
    assert upstream.seen[0].header("host") == upstream.url.removeprefix("http://")


def test_trailers_pass(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.start_stream("Trailer: X-Sum")
        await talk.send(chunk(b"abc"), b"0\r\nX-Sum: 3\r\n\r\n")

    upstream.script = script
    answer = raw(proxy.port, get())
    assert answer.endswith(b"3\r\nabc\r\n0\r\nX-Sum: 3\r\n\r\n")


def test_expect_100_continue_is_the_upstreams_to_answer(
    proxy: ProxyProcess, upstream: Nasty
) -> None:
    async def script(talk: Conversation) -> None:
        if talk.path == "/refuses":
            await talk.send(b"HTTP/1.1 417 No\r\nContent-Length: 0\r\n\r\n")
            return
        await talk.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await talk.body()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    upstream.script = script
    expecting = b"Host: h\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    with connect(proxy) as connection:
        connection.sendall(b"POST /takes HTTP/1.1\r\n" + expecting)
        assert read_until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"body")
        assert read_until(connection, b"body").startswith(b"HTTP/1.1 200 OK\r\n")
    answer = raw(proxy.port, b"POST /refuses HTTP/1.1\r\n" + expecting)
    assert answer == b"HTTP/1.1 417 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def test_early_answer_reaches_a_client_that_still_sends(
    proxy: ProxyProcess, upstream: Nasty
) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        while await talk.reader.read(65536):
            pass  # closing with unread data would be a reset, which may overtake the answer

    upstream.script = script
    with connect(proxy) as connection:
        connection.sendall(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 50000000\r\n\r\n")
        for _ in range(20):
            connection.sendall(b"x" * 100_000)
        parts = []
        while data := connection.recv(65536):
            parts.append(data)
    assert b"".join(parts).endswith(b"\r\n\r\nbig")


def test_content_coding_is_left_alone(proxy: ProxyProcess, upstream: Nasty) -> None:
    packed = gzip.compress(b"secret of the wire" * 100)

    async def script(talk: Conversation) -> None:
        await talk.send(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
            + packed
        )

    upstream.script = script
    assert raw(proxy.port, get()).endswith(b"\r\n\r\n" + packed)


def test_pipelined_requests_are_answered_in_order(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.body()
        name = talk.path.encode()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(name) + name)

    upstream.script = script
    post = b"POST /2 HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
    health = get("/inferloop/health", close=False)
    answer = raw(proxy.port, get("/1", close=False) + post + health + get("/4"))
    places = [answer.index(b"\r\n\r\n" + part) for part in (b"/1", b"/2", b'{"status"', b"/4")]
    assert places == sorted(places)


def test_clients_that_offer_http2_are_served_over_http1(
    proxy: ProxyProcess, upstream: Nasty
) -> None:
    request = (
        b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Length: 3\r\n\r\nabc"
    )
    assert raw(proxy.port, request).endswith(b"hello")
    assert upstream.seen[0].header("upgrade") is None


def test_client_that_leaves_ends_the_upstreams_work(proxy: ProxyProcess, upstream: Nasty) -> None:
    left: list[bool] = []

    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.start_stream()
        await talk.events(chat_event("a"))
        left.append(await talk.gone())

    upstream.script = script
    connection = connect(proxy)
    body = json.dumps(CHAT).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-Conversation: leaver\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    read_until(connection, b"data:")
    connection.close()
    assert until(lambda: left, "the client's leave is passed on") == [True], (
        "long before the proxy would give the upstream up"
    )
    record = proxy.record("leaver")
    assert (record["status"], record["error_type"]) == (499, "cancelled")


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("how", ["reset", "close"])
def test_upstream_that_dies_mid_answer_is_no_clean_end(
    proxy: ProxyProcess, upstream: Nasty, framing: str, how: str
) -> None:
    if (framing, how) == ("close", "close"):
        pytest.skip("that is such an answer's clean end")
    got: list[bytes] = []

    async def script(talk: Conversation) -> None:
        extra = {"chunked": "Transfer-Encoding: chunked", "length": "Content-Length: 99"}
        line = extra.get(framing, "X-None: 1")
        await talk.send(f"HTTP/1.1 200 OK\r\n{line}\r\n\r\n".encode())
        await talk.send(chunk(b"part") if framing == "chunked" else b"part")
        await talk.until(lambda: got)
        if how == "reset":
            talk.reset()
        else:
            talk.writer.close()

    upstream.script = script

    def read() -> None:
        with httpx.stream("GET", proxy.url + "/x", **PATIENT) as answer:
            for piece in answer.iter_raw():
                got.append(piece)

    with pytest.raises(httpx.HTTPError):
        read()
    assert got == [b"part"]


def test_stale_connection_is_replaced_for_a_get(proxy: ProxyProcess, upstream: Nasty) -> None:
    """The upstream closes a connection at the moment in which it is used again."""
    first: list[object] = []

    async def script(talk: Conversation) -> None:
        if talk.path == "/first":
            first[:] = [talk.writer]
        elif talk.writer in first:
            talk.writer.close()
            return
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def second_was_repeated() -> bool:
        upstream.seen.clear()
        assert raw(proxy.port, get("/first")).endswith(b"ok")
        assert raw(proxy.port, get("/second")).endswith(b"ok")
        return [talk.path for talk in upstream.seen] == ["/first", "/second", "/second"]

    upstream.script = script
    # Else the proxy gave the connection up before: a slow machine.
    until(second_was_repeated, "the second request is sent again")


def test_connections_are_reused(proxy: ProxyProcess, upstream: Nasty) -> None:
    def all_took_one() -> bool:
        raw(proxy.port, get())
        before = upstream.connections
        for _ in range(5):
            raw(proxy.port, get())
        return upstream.connections == before

    # Else it was idle for too long between two: a slow machine.
    until(all_took_one, "five requests take one connection")


def test_own_pages(proxy: ProxyProcess, upstream: Nasty) -> None:
    raw(proxy.port, get())
    with httpx.Client(base_url=proxy.url, **PATIENT) as http:
        health = http.get("/inferloop/health").json()
        assert health["status"] == "ok"
        assert health["upstream"] == upstream.url
        assert http.head("/inferloop/health").content == b""
        metrics = http.get("/inferloop/metrics").text
        assert http.post("/inferloop/metrics").status_code == 405
        for path in ("/inferloop/marks", "/inferloop/%6darks", "/%69nferloop%2Fmarks"):
            assert http.post(path, json={"text": "x"}).status_code == 403, path
    assert 'inferloop:proxy_requests_total{endpoint="other",error_type="",status="200"}' in metrics
    assert [talk.path for talk in upstream.seen] == ["/x"]

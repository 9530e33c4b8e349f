"""Connections to the upstream and the pool that keeps the idle ones.

Parses responses with httptools and hands their parts to the exchange at once. Not for what
becomes of them: that is `capture.proxy.exchange`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from capture.proxy.address import Address
from capture.proxy.messages import (
    Framing,
    Headers,
    RequestHead,
    ResponseHead,
    tokens_of,
)

CONNECT_S = 10.0
IDLE_S = 1.5
"""Idle connections are given up before any usual server gives them up (2 s and more): a request
sent into a closing connection would fail, and a POST may not be repeated."""

HEAD_BYTES = 1 << 20
"""Longest head of a response: no server sends more, and endless ones must end somewhere."""


class Receiver(Protocol):
    """Who gets a response's parts, in the order of the methods."""

    def informational(self, head: ResponseHead) -> None: ...
    def response(self, head: ResponseHead, framing: Framing) -> None: ...
    def body(self, data: bytes) -> None: ...
    def received(self) -> None: ...
    def complete(self, trailers: Headers, *, reusable: bool) -> None: ...
    def lost(self, reason: str, *, untouched: bool) -> None: ...
    def upstream_full(self, full: bool) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection; it serves one exchange at a time. `reused`: it has served one before;
    `received_ns`: when its last bytes came, on the monotonic clock."""

    def __init__(self, on_idle_end: Callable[[UpstreamConnection], None]) -> None:
        self.reused = False
        self.received_ns = 0
        self._on_idle_end = on_idle_end
        self._method = b""
        self._untouched = True
        self._framing: Framing | None = None
        self._keeps_alive = False
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._trailers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, receiver: Receiver, head: RequestHead) -> None:
        """Serve an exchange from now on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._receiver = receiver
        self._method = head.method
        self._next_message()
        self._untouched = True
        self._parser = httptools.HttpResponseParser(self)

    def write(self, data: bytes) -> None:
        if self._transport is not None and self.is_open:
            self._transport.write(data)

    def pause(self, paused: bool) -> None:
        """Stop or go on reading, while the client takes no more."""
        if self._transport is None or paused == self._paused or self._transport.is_closing():
            return
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def rest(self) -> None:
        """The exchange is over; wait for the next one."""
        self._receiver = None
        self.reused = True
        self.pause(False)
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    def close(self) -> None:
        """End the connection at once; the upstream sees it as a client that has gone."""
        self._receiver = None
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Until `begin`, which comes at once unless the proxy is busy.
        self._timer = asyncio.get_running_loop().call_later(CONNECT_S, self.close)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # nothing was asked
            self.close()
            return
        self.received_ns = time.monotonic_ns()
        self._untouched = False
        if self._framing is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._receiver is not None:
                self._fail(f"sent what is not HTTP/1.1: {error.args[0] if error.args else error}")
            return
        if self._receiver is receiver:
            receiver.received()
            if self._framing is None and self._head_bytes > HEAD_BYTES:
                self._fail(f"sent a response head of more than {HEAD_BYTES} bytes")

    def eof_received(self) -> None:
        if self._receiver is not None and self._framing == "close":
            self._finish((), reusable=False)

    def connection_lost(self, error: Exception | None) -> None:
        if self._receiver is not None:
            self._fail("closed the connection" if error is None else f"failed: {error}")
        else:
            self._on_idle_end(self)
        self._transport = None

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.upstream_full(True)

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.upstream_full(False)

    # httptools

    def on_message_begin(self) -> None:
        if self._receiver is None:  # more than was asked for
            self.close()
        self._next_message()

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        pairs = self._headers if self._framing is None else self._trailers
        pairs.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._receiver is None:
            return
        head = ResponseHead(self._parser.get_status_code(), self._reason, self._headers)
        if head.status == 101:
            self._fail("switched protocols, which nobody asked for")
        elif head.status < 100:
            self._fail(f"sent what is no status: {head.status}")
        elif head.status < 200:
            self._receiver.informational(head)
        elif tokens_of(head.headers, b"transfer-encoding") not in ([], [b"chunked"]):
            self._fail("sent a transfer coding other than chunked")
        else:
            self._framing = head.framing(self._method)
            self._keeps_alive = self._parser.should_keep_alive()
            self._receiver.response(head, self._framing)
            if self._method == b"HEAD":
                self._finish((), reusable=self._keeps_alive)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data)
        else:
            self.close()

    def on_message_complete(self) -> None:
        if self._receiver is not None and self._framing is not None:
            self._finish(self._trailers, reusable=self._keeps_alive)

    def _next_message(self) -> None:
        self._framing = None
        self._keeps_alive = False
        self._reason = b""
        self._headers, self._trailers = [], []
        self._head_bytes = 0

    def _finish(self, trailers: Headers, *, reusable: bool) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.complete(trailers, reusable=reusable and self.is_open)

    def _fail(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        untouched = self._untouched
        self.close()
        if receiver is not None:
            receiver.lost(reason, untouched=untouched)


class UpstreamPool:
    """Makes connections and keeps the idle ones, the most recently used first."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[UpstreamConnection] = []

    def take_idle(self) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises OSError (also ssl.SSLError) or TimeoutError."""
        address = self.address
        making = asyncio.get_running_loop().create_connection(
            lambda: UpstreamConnection(self._forget), address.host, address.port, ssl=address.tls
        )
        _, connection = await asyncio.wait_for(making, CONNECT_S)
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        connection.rest()
        self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

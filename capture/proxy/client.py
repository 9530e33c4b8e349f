"""Connections of clients: takes requests apart with h11 and writes answers back.

The proxy's own pages are answered here; everything else becomes an `Exchange`. Not for reading
bodies or judging them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import TYPE_CHECKING, cast

import h11

from capture.proxy.exchange import Exchange
from capture.proxy.messages import (
    RequestHead,
    error_body,
    own_response,
    why_refused,
)

if TYPE_CHECKING:
    from capture.proxy.core import Proxy

HEAD_BYTES = 1 << 20
"""Longest head of a request: longer ones no server takes, and endless ones must end somewhere."""

PIPELINED_BYTES = 64 * 1024
"""How much of the requests after the current one is read ahead."""

HEAD_S = 30.0
"""A request's head must be complete this long after its first byte."""

IDLE_S = 75.0
"""A connection without a request is closed after this."""

LINGER_S = 2.0
"""How long the rest of an upload that was answered early is read and thrown away, so that the
client gets to read the answer instead of a reset."""


RESET_S = 0.05
"""What was written before goes out in this time, if it can, before TLS is cut off."""


class ClientConnection(asyncio.Protocol):
    """One connection: its requests one after the other. `address` is the client's; `full`:
    its socket takes no more for now."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._parser = _parser()
        self._exchange: Exchange | None = None
        self._out: list[bytes] = []
        self._pauses: set[str] = set()
        self._lingering = False
        self._unread = 0
        self._since_s = time.monotonic()
        self.address: str | None = None
        self.full = False

    # for the exchange

    def write(self, data: bytes) -> None:
        """Add to what the next `flush` sends."""
        self._out.append(data)

    def flush(self) -> None:
        """Hand everything to the socket."""
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def pause(self, reason: str, paused: bool) -> None:
        """Stop or go on reading; reading goes on when no reason is left."""
        was_paused = bool(self._pauses)
        (self._pauses.add if paused else self._pauses.discard)(reason)
        if bool(self._pauses) == was_paused or self._transport.is_closing():
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def break_off(self, *, reset: bool) -> None:
        """End the connection in the middle of an answer, after what was received of it.

        `reset`: an answer that ends by the connection's close must end by a reset instead."""
        self.flush()
        if reset and self._is_tls:  # TLS would say in its own words that the end is in order
            self._lingering = True
            asyncio.get_running_loop().call_later(RESET_S, self._transport.abort)
            return
        endpoint = self._transport.get_extra_info("socket")
        if reset and endpoint is not None:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.close()

    def exchange_over(self, *, close: bool) -> None:
        """The answer is out; take the next request, or end the connection."""
        exchange, self._exchange = self._exchange, None
        self._since_s = time.monotonic()
        self.pause("upload", False)
        self.pause("connecting", False)
        if self._transport.is_closing() or self._lingering:
            return
        if close:
            self._end(linger=exchange is not None and not exchange.request_ended)
        else:
            self._next_request()

    # for the proxy

    def check(self, now_s: float, silence_s: float) -> None:
        """End what has waited too long."""
        waited_s = now_s - self._since_s
        if self._exchange is not None:
            self._exchange.check_silence(now_s, silence_s)
        elif self._lingering:
            if waited_s > LINGER_S:
                (self._transport.close if self._is_tls else self._transport.abort)()
        elif self._unread and waited_s > HEAD_S:
            self._refuse(408, f"no complete request head within {HEAD_S:g} s")
        elif waited_s > IDLE_S:
            self._transport.close()

    def drain(self) -> None:
        """Close now when nothing is going on; else after the answer."""
        if self._exchange is None:
            self._transport.close()

    def stop(self) -> None:
        """Wait no longer."""
        if self._exchange is not None:
            self._exchange.stop()
        self._transport.abort()

    @property
    def _is_tls(self) -> bool:
        return self._transport.get_extra_info("ssl_object") is not None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._is_tls:  # whose transport would be full without a byte then
            self._transport.set_write_buffer_limits(high=0)  # with uvloop: write at once, too
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else None
        self._proxy.clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._exchange is None and not self._unread:
            self._since_s = time.monotonic()
        self._unread += len(data)
        self._parser.receive_data(data)
        self._advance()

    def eof_received(self) -> None:
        if self._exchange is not None:  # as other servers do: who closes, does not listen
            self._transport.abort()
            self._exchange.client_gone()

    def connection_lost(self, error: Exception | None) -> None:
        self._proxy.clients.discard(self)
        if self._exchange is not None:
            self._exchange.client_gone()
        self._proxy.client_left()

    def pause_writing(self) -> None:
        self.full = True
        if self._exchange is not None:
            self._exchange.client_full(True)

    def resume_writing(self) -> None:
        self.full = False
        if self._exchange is not None:
            self._exchange.client_full(False)

    # inside

    def _advance(self) -> None:
        """Read on, to the end of the current request at most."""
        while not self._lingering and not self._transport.is_closing():
            if self._exchange is not None and self._exchange.request_ended:
                self.pause("pipelining", self._unread > PIPELINED_BYTES)
                return
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError as error:
                reason = str(error).partition(": bytearray")[0]  # what follows quotes the client
                self._refuse(error.error_status_hint, reason)
                return
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            self._take(event)

    def _take(self, event: object) -> None:
        match event:
            case h11.Request():
                self._unread = len(self._parser.trailing_data[0])
                self._begin(event)
            case h11.Data() if self._exchange is not None:
                self._unread = 0
                self._exchange.upload(bytes(event.data))
            case h11.EndOfMessage() if self._exchange is not None:
                self._unread = len(self._parser.trailing_data[0])
                self._exchange.upload_end(event.headers.raw_items())

    def _begin(self, event: h11.Request) -> None:
        headers = event.headers.raw_items()
        head = RequestHead(event.method, event.target, event.http_version, headers)
        refused = why_refused(head)
        own = None if refused else self._proxy.own_page(head)
        if refused is not None:
            status, message = refused
            self._answer(head, status, error_body(message, "not_supported"))
        elif own is not None:
            status, kind, body = own
            self._answer(head, status, body, kind)
        else:
            self._exchange = Exchange(self._proxy, self, head)
            self._exchange.start()

    def _answer(
        self, head: RequestHead, status: int, body: bytes, kind: str = "application/json"
    ) -> None:
        close = head.has_body or head.wants_close or self._proxy.draining
        answer = own_response(status, body, kind=kind, close=close)
        if head.method == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        self._transport.write(answer)
        if close:
            self._end(linger=head.has_body)
        else:
            self._next_request()

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, and end the connection."""
        exchange = self._exchange
        if exchange is not None:  # the body's framing is broken: no answer can follow
            self._transport.abort()
            exchange.client_gone()
            return
        self._transport.write(
            own_response(status, error_body(message, "not_supported"), close=True)
        )
        self._end(linger=True)

    def _next_request(self) -> None:
        if self._proxy.draining:
            self._transport.close()
            return
        unread = self._parser.trailing_data[0]
        self._parser = _parser()
        self._unread = len(unread)
        self.pause("pipelining", False)
        if unread:
            self._parser.receive_data(unread)
            asyncio.get_running_loop().call_soon(self._advance)

    def _end(self, *, linger: bool) -> None:
        """Close, once the client has taken the answer."""
        self._lingering = linger
        if not linger:
            self._transport.close()
            return
        self._pauses.clear()
        self._transport.resume_reading()
        if self._transport.can_write_eof():  # TLS has no half-closed connections
            self._transport.write_eof()


def _parser() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)

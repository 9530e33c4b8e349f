"""One request on its way through the proxy: joins a client's and an upstream's connection.

Bytes go on as they come, in both directions; a side that cannot take more stops the other side's
reading. An observation, where there is one, gets copies. Not for parsing either side.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from capture.proxy.messages import (
    Framing,
    Headers,
    RequestHead,
    ResponseHead,
    chunk,
    error_body,
    last_chunk,
    own_response,
    request_bytes,
    response_bytes,
    values_of,
)
from capture.proxy.outcome import Outcome
from capture.proxy.upstream import CONNECT_S, UpstreamConnection

if TYPE_CHECKING:
    from capture.proxy.client import ClientConnection
    from capture.proxy.core import Proxy

PENDING_BYTES = 64 * 1024
"""How much of a request is taken from the client before the upstream is connected."""

REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS"})


class Exchange:
    """Created when a request's head is complete; ends exactly once, in `_end`. It is the
    `upstream.Receiver` of its answer."""

    def __init__(self, proxy: Proxy, client: ClientConnection, head: RequestHead) -> None:
        self.head = head
        self.request_ended = False
        self.over = False
        self._proxy, self._client = proxy, client
        self._started_ns = time.monotonic_ns()
        self._moved_s = time.monotonic()
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._refusal: tuple[int, str, str, Outcome] | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._response: ResponseHead | None = None
        self._status = 0
        self._chunked = self._closing = False
        self._client_full, self._upstream_full = client.full, False
        self._observation = proxy.observe(head, client.address, self._started_ns)

    def start(self) -> None:
        """Find a connection and send the head on."""
        self._proxy.metrics.in_flight.inc()
        self._send(self._head_bytes())
        idle = self._proxy.pool.take_idle()
        if idle is None:
            self._connect()
        else:
            self._attach(idle)

    # from the client

    def upload(self, data: bytes) -> None:
        """A piece of the request's body."""
        self._moved_s = time.monotonic()
        self._send(chunk(data) if self.head.is_chunked else data)
        if self._observation is not None:
            self._observation.upload(data)

    def upload_end(self, trailers: Headers) -> None:
        self.request_ended = True
        if self.head.is_chunked:
            self._send(last_chunk(trailers))
        if self._observation is not None:
            self._observation.upload_end()
        self._refuse_if_read()

    def client_gone(self) -> None:
        self._end(Outcome.CLIENT_GONE, "the client closed the connection", reusable=False)

    def client_full(self, full: bool) -> None:
        """The client's socket is full, or takes more again."""
        self._moved_s = time.monotonic()
        self._client_full = full
        if self._upstream is not None:
            self._upstream.pause(full)

    # from the proxy

    def check_silence(self, now_s: float, limit_s: float) -> None:
        """Give up when the side that is waited for has not moved for `limit_s`."""
        if self._client_full or now_s - self._moved_s <= limit_s:
            return
        if self.request_ended or self._upstream_full:
            message = f"the upstream was silent for {limit_s:g} s"
            self._fail(504, "upstream_timeout", message, Outcome.UPSTREAM_TIMEOUT)
        else:
            message = f"the rest of the request did not come for {limit_s:g} s"
            self._fail(408, "request_timeout", message, Outcome.CLIENT_GONE)

    def stop(self) -> None:
        """The proxy stops and waits no longer."""
        self._fail(503, "proxy_stopped", "the proxy is stopping", Outcome.STOPPED)

    # from the upstream

    def informational(self, head: ResponseHead) -> None:
        if self.head.version == b"1.1":
            self._client.write(response_bytes(head, chunked=False, close=False))

    def response(self, head: ResponseHead, framing: Framing) -> None:
        self._response, self._status = head, head.status
        self._chunked = framing == "chunked" and self.head.version == b"1.1"
        ends_by_close = framing == "close" or (framing == "chunked" and not self._chunked)
        self._closing = ends_by_close or self._must_close()
        self._client.write(response_bytes(head, chunked=self._chunked, close=self._closing))
        if self._observation is not None:
            self._observation.response(head)

    def body(self, data: bytes) -> None:
        self._client.write(chunk(data) if self._chunked else data)
        if self._observation is not None and self._upstream is not None:
            self._observation.download(data, self._upstream.received_ns)

    def received(self) -> None:
        """All that came in one piece was handed over: send it."""
        self._moved_s = time.monotonic()
        self._client.flush()
        if self._upstream is not None:
            spent_ns = time.monotonic_ns() - self._upstream.received_ns
            self._proxy.metrics.held(spent_ns)

    def complete(self, trailers: Headers, *, reusable: bool) -> None:
        if self._chunked:
            self._client.write(last_chunk(trailers))
        self.received()
        self._end(Outcome.COMPLETE, "", reusable=reusable and self.request_ended)

    def lost(self, reason: str, *, untouched: bool) -> None:
        """The upstream's connection has failed; `untouched`: before any byte of an answer."""
        upstream, self._upstream = self._upstream, None
        stale = untouched and upstream is not None and upstream.reused
        if stale and self.head.method in REPEATABLE and not self.head.has_body:
            self._send(self._head_bytes())
            self._connect()
            return
        self._fail(502, "upstream_closed", f"the upstream {reason}", Outcome.UPSTREAM_ERROR)

    def upstream_full(self, full: bool) -> None:
        self._moved_s = time.monotonic()
        self._upstream_full = full
        self._client.pause("upload", full)

    # inside

    def _head_bytes(self) -> bytes:
        address = self._proxy.pool.address
        return request_bytes(
            self.head, authority=address.authority, rewrite_host=address.tls is not None
        )

    def _must_close(self) -> bool:
        return not self.request_ended or self.head.wants_close or self._proxy.draining

    def _connect(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._make_connection())

    async def _make_connection(self) -> None:
        address = self._proxy.pool.address
        try:
            connection = await self._proxy.pool.connect()
        except TimeoutError:
            message = f"the upstream {address.url} did not accept a connection within {CONNECT_S} s"
            self._refusal = 504, "upstream_timeout", message, Outcome.UPSTREAM_TIMEOUT
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"the upstream {address.url} cannot be reached: {reason}"
            self._refusal = 502, "upstream_unreachable", message, Outcome.UPSTREAM_ERROR
        else:
            self._attach(connection)
        self._refuse_if_read()

    def _refuse_if_read(self) -> None:
        """Tell a client that there is no upstream, once its request has been read: what is refused
        is captured, too. At once if it is long, or if the client waits to be told to send it."""
        if self._refusal is None:
            return
        self._proxy.last_upstream_error = self._refusal[2]
        is_long = self._pending_bytes > PENDING_BYTES
        if self.request_ended or is_long or values_of(self.head.headers, b"expect"):
            self._fail(*self._refusal)

    def _attach(self, connection: UpstreamConnection) -> None:
        self._upstream = connection
        connection.begin(self, self.head)
        connection.pause(self._client_full)
        pending, self._pending, self._pending_bytes = b"".join(self._pending), [], 0
        self._client.pause("connecting", False)
        connection.write(pending)

    def _send(self, data: bytes) -> None:
        if self._upstream is not None:
            self._upstream.write(data)
            return
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes > PENDING_BYTES:
            self._client.pause("connecting", True)
            self._refuse_if_read()

    def _fail(self, status: int, code: str, message: str, outcome: Outcome) -> None:
        """Tell the client: by an error while it has no answer yet, else by a broken connection."""
        if self.over:
            return
        if outcome is not Outcome.CLIENT_GONE:
            self._proxy.last_upstream_error = message
        if self._response is None:
            self._status = status
            self._closing = self._must_close()
            body = error_body(f"{message} (inferloop proxy)", code)
            self._client.write(own_response(status, body, close=self._closing))
            self._client.flush()
            self._end(outcome, message, reusable=False)
        else:
            self._client.break_off(reset=not self._chunked)
            self._end(outcome, message, reusable=False)

    def _end(self, outcome: Outcome, detail: str, *, reusable: bool) -> None:
        if self.over:
            return
        self.over = True
        if self._connecting is not None:
            self._connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None and reusable:
            self._proxy.pool.give_back(upstream)
        elif upstream is not None:
            upstream.close()
        ended_ns = time.monotonic_ns()
        if self._observation is not None:
            self._observation.end(outcome, detail, self._status, ended_ns)
        self._proxy.served(
            self.head.path, self._status, outcome.value, (ended_ns - self._started_ns) / 1e9
        )
        self._client.exchange_over(close=self._closing or self._must_close())

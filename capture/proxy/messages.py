"""Heads of HTTP/1.1 messages as the proxy passes them on: raw names and values in their order.

Only what RFC 9110 7.6.1 calls hop-by-hop is taken out, and framing is put in again. Not for
parsing (h11 and httptools do that) and not for bodies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal
from urllib.parse import unquote_to_bytes

Headers = Sequence[tuple[bytes, bytes]]
Framing = Literal["none", "length", "chunked", "close"]

HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"}
)
NEVER_NAMED = frozenset({b"content-length", b"host"})
"""Headers that a Connection header must not take out: framing and routing hang on them."""

LAST_CHUNK = b"0\r\n"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """`target` is the raw path and query; `version` such as b"1.1"; names keep their case."""

    method: bytes
    target: bytes
    version: bytes
    headers: Headers

    @property
    def path(self) -> bytes:
        """As the upstream reads it: without the query, "%6d" is "m"."""
        return unquote_to_bytes(self.target.partition(b"?")[0])

    @property
    def is_chunked(self) -> bool:
        return bool(values_of(self.headers, b"transfer-encoding"))

    @property
    def has_body(self) -> bool:
        lengths = values_of(self.headers, b"content-length")
        return self.is_chunked or any(value.strip() != b"0" for value in lengths)

    @property
    def wants_close(self) -> bool:
        return self.version != b"1.1" or b"close" in tokens_of(self.headers, b"connection")


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int
    reason: bytes
    headers: Headers

    def framing(self, method: bytes) -> Framing:
        """How the end of the body is told (RFC 9112 6.3)."""
        if method == b"HEAD" or self.status < 200 or self.status in (204, 304):
            return "none"
        codings = tokens_of(self.headers, b"transfer-encoding")
        if codings:
            return "chunked" if codings[-1] == b"chunked" else "close"
        return "length" if values_of(self.headers, b"content-length") else "close"


def why_refused(head: RequestHead) -> tuple[int, str] | None:
    """Status and message for a request that cannot be passed on, or that two servers could read
    as different ones."""
    if head.version not in (b"1.1", b"1.0"):
        return 505, "the proxy speaks HTTP/1.1 and 1.0 only"
    if head.is_chunked and values_of(head.headers, b"content-length"):
        return 400, "a request has Content-Length or Transfer-Encoding, not both"
    if head.is_chunked and head.version == b"1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding"
    if head.method == b"CONNECT" or b"websocket" in tokens_of(head.headers, b"upgrade"):
        return 501, "the proxy forwards HTTP requests only: no WebSocket, no CONNECT"
    return None


def values_of(headers: Headers, name: bytes) -> list[bytes]:
    """All values of a header; `name` in lower case."""
    return [value for key, value in headers if key.lower() == name]


def tokens_of(headers: Headers, name: bytes) -> list[bytes]:
    """The comma-separated items of a header in lower case."""
    items = b",".join(values_of(headers, name)).lower().split(b",")
    return [item.strip() for item in items if item.strip()]


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers that are meant for the other end, unchanged."""
    named = set(tokens_of(headers, b"connection")) - NEVER_NAMED
    dropped = HOP_BY_HOP | named
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def request_bytes(head: RequestHead, *, authority: bytes, rewrite_host: bool) -> bytes:
    """The request's head for the upstream. `authority` becomes its Host where it has none, or
    always with `rewrite_host`."""
    headers = end_to_end(head.headers)
    if head.is_chunked:
        headers.append((b"Transfer-Encoding", b"chunked"))
    if not values_of(headers, b"host"):
        headers.insert(0, (b"Host", authority))
    elif rewrite_host:
        headers = [(n, authority if n.lower() == b"host" else v) for n, v in headers]
    return b"%b %b HTTP/1.1\r\n%b" % (head.method, head.target, _lines(headers))


def response_bytes(head: ResponseHead, *, chunked: bool, close: bool) -> bytes:
    """The response's head for the client."""
    headers = end_to_end(head.headers)
    if chunked:
        headers.append((b"Transfer-Encoding", b"chunked"))
    if close:
        headers.append((b"Connection", b"close"))
    return b"HTTP/1.1 %d %b\r\n%b" % (head.status, head.reason, _lines(headers))


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def last_chunk(trailers: Headers) -> bytes:
    return LAST_CHUNK + _lines(trailers)


def error_body(message: str, code: str) -> bytes:
    """An error in the shape of OpenAI's API."""
    is_clients = code in ("not_supported", "request_timeout")
    kind = "invalid_request_error" if is_clients else "upstream_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def own_response(
    status: int, body: bytes, *, kind: str = "application/json", close: bool = False
) -> bytes:
    """A whole response of the proxy's own."""
    headers = [(b"Content-Type", kind.encode()), (b"Content-Length", b"%d" % len(body))]
    head = ResponseHead(status, HTTPStatus(status).phrase.encode(), headers)
    return response_bytes(head, chunked=False, close=close) + body


def _lines(headers: Headers) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in headers) + b"\r\n"

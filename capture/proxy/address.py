"""Where the upstream is: a URL without a path, taken apart once.

Not for connections to it: that is `capture.proxy.upstream`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from capture.errors import CaptureError


class ProxyError(CaptureError):
    """The proxy cannot start: bad upstream, no trace directory, port in use."""


@dataclass(frozen=True)
class Address:
    """`authority` is what a Host header says; `tls` None for plain HTTP."""

    url: str
    host: str
    port: int
    authority: bytes
    tls: ssl.SSLContext | None


def parse_upstream(url: str) -> Address:
    """Take `http[s]://host[:port]` apart. Raises ProxyError that says what is wrong with it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError as error:
        raise ProxyError(f"--upstream {url!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host or " " in host:
        raise ProxyError(f"--upstream {url!r}: give http://HOST:PORT or https://HOST")
    if port == 0:
        raise ProxyError(f"--upstream {url!r}: nothing listens on port 0")
    if parts.username is not None:
        raise ProxyError(
            "--upstream holds a user name: credentials come from the clients' requests, "
            "which the proxy passes on"
        )
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ProxyError(
            f"--upstream {url!r} has a path: give only scheme, host and port; clients put the "
            f"path (such as {parts.path or '/v1'}) into their own base URL"
        )
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    authority = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
    default = 443 if tls is not None else 80
    return Address(f"{parts.scheme}://{parts.netloc}", host, port or default, authority, tls)

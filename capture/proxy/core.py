"""The proxy: what its connections share, and its life from the first request to the last.

Not for the command line or for making rings and mirrors: those are handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable

from capture.proxy.address import Address
from capture.proxy.client import HEAD_S, ClientConnection
from capture.proxy.messages import RequestHead, error_body
from capture.proxy.metrics import CONTENT_TYPE, ProxyMetrics
from capture.proxy.observation import Observation
from capture.proxy.recorder import Recorder
from capture.proxy.upstream import UpstreamPool

log = logging.getLogger("inferloop.proxy")

DRAIN_S = 30.0
"""How long a stop waits for the requests in flight."""

CHECK_S = 1.0
"""How often waits are looked at."""

UNREAD_S = 60
"""A client that takes nothing of what is sent to it, or has vanished, is cut off after this."""

ENDPOINTS = {b"/v1/chat/completions": "chat", b"/v1/completions": "completions"}


class Proxy:
    """Forwards what its clients send. `silence_s`: how long the upstream may say nothing; `tls`:
    what clients are met with, None: plain HTTP."""

    def __init__(
        self,
        address: Address,
        metrics: ProxyMetrics,
        recorder: Recorder,
        *,
        silence_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.pool = UpstreamPool(address)
        self.metrics = metrics
        self.clients: set[ClientConnection] = set()
        self.draining = False
        self.last_upstream_error: str | None = None
        self._recorder = recorder
        self._silence_s = silence_s
        self._tls = tls
        self._all_left = asyncio.Event()

    def observe(self, head: RequestHead, client: str | None, arrival_ns: int) -> Observation | None:
        """Someone to show a request to, if it is captured."""
        try:
            return self._recorder.observe(head, client, arrival_ns)
        except Exception:  # noqa: BLE001 - forwarding must not depend on the capture
            self._recorder.failed("-")
            self.metrics.skipped("failed")
            return None

    def served(self, path: bytes, status: int, error_type: str, duration_s: float) -> None:
        """Count a request's end."""
        endpoint = next((name for end, name in ENDPOINTS.items() if path.endswith(end)), "other")
        self.metrics.served(endpoint, status, error_type, duration_s)

    def own_page(self, head: RequestHead) -> tuple[int, str, bytes] | None:
        """Status, content type and body of a page of the proxy's own; None: not one of them."""
        if head.path == b"/inferloop/marks":
            # An engine takes them from its own machine only, and there we are.
            text = "marks are taken by the engine itself, not through the proxy"
            return 403, "application/json", error_body(text, "not_supported")
        if head.path not in (b"/inferloop/health", b"/inferloop/metrics"):
            return None
        if head.method not in (b"GET", b"HEAD"):
            return 405, "application/json", error_body("GET only", "not_supported")
        if head.path == b"/inferloop/metrics":
            return 200, CONTENT_TYPE, self.metrics.exposition()
        state = {
            "status": "draining" if self.draining else "ok",
            "upstream": self.pool.address.url,
            "last_upstream_error": self.last_upstream_error,
            "trace": self._recorder.trace.failure or "ok",
        }
        return 503 if self.draining else 200, "application/json", json.dumps(state).encode()

    def client_left(self) -> None:
        """A client's connection has ended."""
        if not self.clients:
            self._all_left.set()

    async def run(self, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve until SIGINT or SIGTERM, then finish what is in flight, at most for `DRAIN_S`; a
        second signal ends the wait."""
        loop = asyncio.get_running_loop()
        _bound_waits(listener)
        server = await loop.create_server(
            lambda: ClientConnection(self),
            sock=listener,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HEAD_S,
        )
        stop, hurry = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        checking = loop.create_task(self._check_waits())
        on_ready()
        await stop.wait()
        server.close()
        await self._drain(hurry)
        checking.cancel()
        self.pool.close()
        self._recorder.finish()

    async def _drain(self, hurry: asyncio.Event) -> None:
        self.draining = True
        self._all_left.clear()
        for client in list(self.clients):
            client.drain()
        if self.clients:
            waits = [asyncio.create_task(event.wait()) for event in (self._all_left, hurry)]
            await asyncio.wait(waits, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        for client in list(self.clients):
            client.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until_left(), 1.0)

    async def _until_left(self) -> None:
        while self.clients:
            await asyncio.sleep(0.01)

    async def _check_waits(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            for client in list(self.clients):
                client.check(now_s, self._silence_s)


def _bound_waits(listener: socket.socket) -> None:
    """Let the kernel cut off clients that read nothing or have vanished: set on the listening
    socket, inherited by its connections."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREAD_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNREAD_S // 4)

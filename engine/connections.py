"""Connections of clients that are slow or gone: how long the server waits for them.

Below HTTP's requests, which `engine.server` answers. uvicorn waits for ever; here every wait ends.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 30.0
"""A request's headers must be complete this long after their first byte (or the connection)."""

UNREAD_S = 60
"""A client that takes nothing of what is sent to it, or has vanished, is cut off after this."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it on h11, which also reads the bodies of requests that offer an
    upgrade (Java's client does). A connection without a request in `HEADERS_S` is closed."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()


def bound_waits(listener: socket.socket) -> None:
    """Let the kernel cut off clients that read nothing or have vanished: set on the listening
    socket, inherited by its connections."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREAD_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNREAD_S // 4)

"""Telling systemd how a service is: ready, stopping, alive, and a line for `systemctl status`.

One datagram to the socket named by NOTIFY_SOCKET (man sd_notify); without one nothing happens.
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*lines: str) -> None:
    """Send `READY=1`, `STOPPING=1`, `WATCHDOG=1` or `STATUS=...`; never raises, never blocks."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # a socket in the abstract name space
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client,
    ):
        client.setblocking(False)
        client.connect(address)
        client.send("\n".join(lines).encode(errors="replace"))

"""Work that must not hold up the wire: done after it, in order, a little at a time.

It runs in the event loop, between the wire's turns: a thread would make the wire wait for the
interpreter's lock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

WAIT_S = 0.001
"""Copies wait so long: what comes at the same time is done together, and what the wire still has
to do about it comes first."""

SLICE_S = 0.0005
"""After so long the wire gets its turn, however much is left."""

QUEUE_BYTES = 16 << 20
"""Copies that may wait; more is not captured."""


class OffWire:
    """A queue of calls. `after_turn` runs once after each turn's calls."""

    def __init__(self, after_turn: Callable[[], None]) -> None:
        self._after_turn = after_turn
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...], int]] = deque()
        self._bytes = 0
        self._scheduled = False

    def post(self, work: Callable[..., None], *arguments: Any, size: int = 0) -> bool:
        """Queue a call; False when too much waits already. `work` must not raise."""
        if self._bytes + size > QUEUE_BYTES:
            return False
        self._bytes += size
        self._queue.append((work, arguments, size))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(WAIT_S, self._turn)
        return True

    def finish(self) -> None:
        """Do all that is left now."""
        while self._queue:
            self._do_one()
        self._after_turn()

    def _turn(self) -> None:
        until_s = time.monotonic() + SLICE_S
        while self._queue and time.monotonic() < until_s:
            self._do_one()
        self._after_turn()
        self._scheduled = bool(self._queue)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._turn)

    def _do_one(self) -> None:
        work, arguments, size = self._queue.popleft()
        self._bytes -= size
        work(*arguments)

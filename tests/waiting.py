"""Waiting for what another thread or process does, on a machine that may be slow and busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 300.0
"""For whatever must happen, but may take its time."""

COMPILING_S = 600.0
"""For a server that may be the first to compile the CPU kernels; a test's limit is 900 s."""

T = TypeVar("T")


def until(
    condition: Callable[[], T], what: str, *, poll_s: float = 0.01, limit_s: float = PATIENCE_S
) -> T:
    """What `condition()` returns, once that is true. Fails with `what` after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(poll_s)
    return found

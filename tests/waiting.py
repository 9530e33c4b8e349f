"""Waiting for what another thread or process does, on a machine that may be slow and busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0
"""For whatever must happen, but may take its time: less than the limit of a test (300 s)."""

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, *, poll_s: float = 0.01) -> T:
    """What `condition()` returns, once that is true. Fails with `what` after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(poll_s)
    return found

"""Garbage collection pauses of this process: Python stops every thread for them, tokens wait.

The hook runs inside the collection, in whichever thread set it off, which may be holding any lock:
it takes none, it only measures and hands the pause over. Not for writing it down: `engine.tracer`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

MIN_PAUSE_NS = 1_000_000
"""Shorter pauses are not worth a line in the trace: nobody sees them in a token's latency."""


class Pause(NamedTuple):
    """A collection that stopped the process. Times are `time.monotonic_ns()`."""

    ended_ns: int
    duration_ns: int
    generation: int
    collected: int


class GcWatch:
    """Tells of every pause of at least `MIN_PAUSE_NS`. `tell` runs inside the collection: it must
    neither block nor take a lock (`queue.SimpleQueue.put` is made for such places)."""

    def __init__(self, tell: Callable[[Pause], None]) -> None:
        self._tell = tell
        self._began_ns = 0

    def start(self) -> None:
        gc.callbacks.append(self._collection)

    def stop(self) -> None:
        """Watch no more; harmless when it was never started."""
        if self._collection in gc.callbacks:
            gc.callbacks.remove(self._collection)

    def _collection(self, phase: str, info: dict[str, Any]) -> None:
        # Collections never nest, whatever thread they start in: one beginning is enough.
        if phase == "start":
            self._began_ns = time.monotonic_ns()
            return
        began_ns, self._began_ns = self._began_ns, 0
        ended_ns = time.monotonic_ns()
        if began_ns and ended_ns - began_ns >= MIN_PAUSE_NS:
            self._tell(Pause(ended_ns, ended_ns - began_ns, info["generation"], info["collected"]))

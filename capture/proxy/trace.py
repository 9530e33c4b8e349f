"""Writes what passes through the proxy into the trace ring: requests, tokens, ends.

All tokens that were seen in one turn of the event loop are one STEP, whose own timings are not
known. A trace that cannot be written is given up, loudly once, and never stops the proxy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from capture.frames import NONE, Phase, TraceWriter

log = logging.getLogger("inferloop.proxy")

TOKEN_COLUMNS = ("slots", "positions", "token_ids", "phases", "latency_us", "logprobs")
UNKNOWN_TIMES = dict.fromkeys(
    ("schedule_us", "prepare_us", "forward_us", "sample_us", "device_us"), math.nan
)


class ProxyTrace:
    """The proxy's frames. `failure` says why it has stopped, None while it works, `OFF` without a
    writer."""

    OFF = "off"

    def __init__(self, writer: TraceWriter | None) -> None:
        self.failure: str | None = None if writer is not None else self.OFF
        self._writer = writer
        self._slots = 0
        self._steps = 0
        self._step_ns = 0
        self._rows: list[tuple[int, int, int, int, float, float]] = []

    def new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def write(self, call: Callable[[TraceWriter], None]) -> None:
        """Write a frame; an error ends the trace."""
        if self.failure is not None or self._writer is None:
            return
        try:
            call(self._writer)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.exception("tracing stopped, forwarding goes on")

    def token(
        self,
        slot: int,
        position: int,
        token_id: int | None,
        latency_us: float,
        logprob: float,
        at_ns: int,
        *,
        is_first: bool,
    ) -> None:
        """A token that was seen at `at_ns`; it is written by the next `flush`. `is_first`: of its
        choice; its latency is that since arrival, of the others since the choice's previous one."""
        if not self._rows:
            self._step_ns = at_ns
        known = NONE if token_id is None else token_id
        phase = int(Phase.FIRST if is_first else Phase.DECODE)
        self._rows.append((slot, position, known, phase, latency_us, logprob))

    def flush(self, *, running: int, waiting: int) -> None:
        """Write the tokens since the last flush as a step; `waiting` requests have none yet."""
        if not self._rows:
            return
        columns = np.array(self._rows).T  # float64 holds a u32 exactly
        count = len(self._rows)
        self._rows.clear()
        step: dict[str, Any] = {
            "step_id": self._steps,
            "start_ns": self._step_ns,
            "prefill_tokens": 0,
            "decode_tokens": count,
            "running": running,
            "waiting": waiting,
            "kv_used": 0,
            "kv_total": 0,
            "prefix_hit_tokens": 0,
            "graph_bucket": -1,
            **dict(zip(TOKEN_COLUMNS, columns, strict=True)),
            "margins": np.full(count, math.nan, np.float32),
            "kv_blocks": np.zeros(count, np.uint32),
            **UNKNOWN_TIMES,
        }
        self._steps += 1
        self.write(lambda writer: writer.step(**step))

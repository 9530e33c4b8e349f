"""Writes what passes through the proxy into the trace ring: requests, tokens, ends.

All tokens that were seen in one turn of the event loop are one STEP, whose own timings are not
known. A trace that cannot be written is given up, loudly once, and never stops the proxy.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from capture.frames import NONE, Phase, TraceWriter
from capture.proxy.answer import Piece

log = logging.getLogger("inferloop.proxy")

_FIRST, _DECODE = int(Phase.FIRST), int(Phase.DECODE)  # enum members are slow to look up
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
        self._rows = _Rows()

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

    def tokens(
        self,
        slot: int,
        position: int,
        piece: Piece,
        first_us: float,
        next_us: float,
        at_ns: int,
        *,
        is_first: bool,
    ) -> None:
        """A piece that was seen at `at_ns`; it is written by the next `flush`. `position` and
        `first_us` are those of its first token, `next_us` the latency of each further one;
        `is_first`: the first of its choice, whose latency is that since arrival."""
        if self.failure is not None:
            return
        rows, count = self._rows, piece.tokens
        if not rows.slots:
            self._step_ns = at_ns
        rows.slots.append(slot)
        rows.positions.append(position)
        rows.phases.append(_FIRST if is_first else _DECODE)
        rows.latency_us.append(first_us)
        if count > 1:
            more = count - 1
            rows.slots.extend([slot] * more)
            rows.positions.extend(range(position + 1, position + count))
            rows.phases.extend([_DECODE] * more)
            rows.latency_us.extend([next_us] * more)
        rows.token_ids.extend(piece.token_ids or [NONE] * count)
        rows.logprobs.extend(piece.logprobs or [math.nan] * count)

    def flush(self, *, running: int, waiting: int) -> None:
        """Write the tokens since the last flush as a step; `waiting` requests have none yet."""
        rows, count = self._rows, len(self._rows.slots)
        if not count:
            return
        self._rows = _Rows()
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
            **rows.columns(),
            "margins": _unknown(count),
            "kv_blocks": _none(count),
            **UNKNOWN_TIMES,
        }
        self._steps += 1
        self.write(lambda writer: writer.step(**step))


class _Rows:
    """Tokens that wait for their step, column by column."""

    def __init__(self) -> None:
        self.slots, self.positions = array("I"), array("I")
        self.token_ids, self.phases = array("I"), array("I")
        self.latency_us, self.logprobs = array("f"), array("f")

    def columns(self) -> dict[str, np.ndarray]:
        """By the names of `TraceWriter.step`."""
        return {name: np.frombuffer(column, column.typecode) for name, column in vars(self).items()}


@lru_cache(maxsize=64)
def _unknown(count: int) -> np.ndarray:
    return np.full(count, math.nan, np.float32)


@lru_cache(maxsize=64)
def _none(count: int) -> np.ndarray:
    return np.zeros(count, np.uint32)

"""An engine's memory as its allocator sees it: what PyTorch holds, uses and has in pieces.

Reads and nothing else; when, and where it is written to, is for the one who asks. Not for the
device as a whole, which other processes share: that is `capture.gpu.nvml`.
"""

from __future__ import annotations

import math
import os
import time
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch

WALK_PERIOD_S = 10.0
"""How often at most the allocator's blocks are walked: only that shows the largest free one."""

WALK_SHARE = 0.001
"""Share of the time that walks may take; they hold the interpreter's lock."""

NO_DEVICE = "no CUDA device is in use by this process"
_STATM = Path("/proc/self/statm")


class MemorySample(NamedTuple):
    """What a MEMORY frame holds: the device's number (-1: host memory only); resident bytes of the
    process, bytes reserved, allocated and allocated at most, largest free block in bytes,
    fragmentation 0-1 (NaN: not available); why something is not available; and the seconds that
    the last walk over the allocator's blocks took (NaN: none yet)."""

    index: int
    values: tuple[float, float, float, float, float, float]
    unavailable: str
    walk_s: float


class MemoryProbe:
    """Reads one device's allocator, once CUDA is in use. Not for several threads at once."""

    def __init__(self, device: int = 0) -> None:
        """`device` as CUDA counts."""
        self._device = device
        self._walk_due_s = 0.0
        self._walk_s = math.nan
        self._pieces = (math.nan, math.nan)

    def read(self) -> MemorySample:
        """The figures now. The last two come from a walk and are at most `WALK_PERIOD_S` old, or
        older where walks are slow."""
        rss = _resident_bytes()
        reasons = ["resident memory: no /proc/self/statm here"] if math.isnan(rss) else []
        if not torch.cuda.is_initialized():
            values = (rss, *[math.nan] * 5)
            return MemorySample(-1, values, "; ".join([*reasons, NO_DEVICE]), self._walk_s)
        stats = torch.cuda.memory_stats(self._device)
        if time.monotonic() >= self._walk_due_s:
            self._walk()
        values = (
            rss,
            float(stats.get("reserved_bytes.all.current", 0)),
            float(stats.get("allocated_bytes.all.current", 0)),
            float(stats.get("allocated_bytes.all.peak", 0)),
            *self._pieces,
        )
        return MemorySample(self._device, values, "; ".join(reasons), self._walk_s)

    def _walk(self) -> None:
        began_s = time.perf_counter()
        self._pieces = pieces(_segments(), self._device)
        self._walk_s = time.perf_counter() - began_s
        period_s = max(WALK_PERIOD_S, self._walk_s / WALK_SHARE)
        self._walk_due_s = time.monotonic() + period_s


def pieces(segments: list[dict[str, Any]], device: int) -> tuple[float, float]:
    """Largest free block in bytes and fragmentation, 1 - largest free / all free, of a device's
    segments as `torch.cuda.memory_snapshot` lists them. Nothing free is not fragmented."""
    free = [
        block["size"]
        for segment in segments
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    if not free:
        return 0.0, 0.0
    return float(max(free)), 1 - max(free) / sum(free)


def _segments() -> list[dict[str, Any]]:
    """The allocator's segments; without traces of allocations where torch can leave them out."""
    read = torch.cuda.memory_snapshot
    lean = "include_traces" in signature(read).parameters
    return read(include_traces=False) if lean else read()


def _resident_bytes() -> float:
    try:
        pages = int(_STATM.read_bytes().split()[1])
    except OSError:
        return math.nan
    return float(pages * os.sysconf("SC_PAGE_SIZE"))

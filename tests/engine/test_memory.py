"""The engine's memory: the process's own on any machine, the allocator's as PyTorch tells it.

The allocator's path runs on hardware in benchmarks/gpu_telemetry_check.py; here PyTorch's answers
stand in for a device.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import memory
from engine.memory import NO_DEVICE, WALK_PERIOD_S, MemoryProbe, pieces

MIB = 1 << 20


def segment(device: int, *blocks: tuple[int, str]) -> dict[str, Any]:
    return {"device": device, "blocks": [{"size": size, "state": state} for size, state in blocks]}


def test_pieces_are_those_of_one_device_and_free() -> None:
    segments = [
        segment(0, (6 * MIB, "active_allocated"), (2 * MIB, "inactive"), (8 * MIB, "inactive")),
        segment(0, (4 * MIB, "active_pending_free"), (6 * MIB, "inactive")),
        segment(1, (100 * MIB, "inactive")),
    ]
    assert pieces(segments, 0) == (8 * MIB, 0.5)
    assert pieces(segments, 1) == (100 * MIB, 0.0)


def test_nothing_free_is_not_fragmented() -> None:
    assert pieces([segment(0, (MIB, "active_allocated"))], 0) == (0.0, 0.0)
    assert pieces([], 0) == (0.0, 0.0)


def test_without_a_device_there_is_the_process_alone() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("another test uses CUDA in this process")
    probe = MemoryProbe()
    before = probe.read()
    assert (before.index, before.unavailable) == (-1, NO_DEVICE)
    assert all(math.isnan(value) for value in before.values[1:])
    assert math.isnan(before.walk_s)
    held = np.ones(64 * MIB, np.uint8)
    assert probe.read().values[0] - before.values[0] > 0.8 * held.nbytes


class Allocator:
    """What PyTorch answers for a device, and how often its blocks were walked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, walk_s: float) -> None:
        self.walks = 0
        self.now_s = 1000.0
        self.walk_s = walk_s
        stats = {
            "reserved_bytes.all.current": 20 * MIB,
            "allocated_bytes.all.current": 12 * MIB,
            "allocated_bytes.all.peak": 18 * MIB,
        }
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
        monkeypatch.setattr(memory, "time", clock)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces
        self.walks += 1
        self.now_s += self.walk_s
        return [segment(0, (12 * MIB, "active_allocated"), (6 * MIB, "inactive")),
                segment(0, (2 * MIB, "inactive"))]  # fmt: skip


def test_a_device_shows_what_its_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator(monkeypatch, walk_s=0.002)
    sample = MemoryProbe().read()
    assert sample.index == 0
    assert sample.unavailable == ""
    assert sample.values[1:] == (20 * MIB, 12 * MIB, 18 * MIB, 6 * MIB, 0.25)
    assert sample.walk_s == pytest.approx(0.002)


def test_blocks_are_walked_seldom_and_more_seldom_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator(monkeypatch, walk_s=0.001)
    probe = MemoryProbe()
    for _ in range(35):
        assert probe.read().values[4] == 6 * MIB
        allocator.now_s += 1.0
    assert allocator.walks == math.ceil(35 / WALK_PERIOD_S)
    allocator.walk_s = 0.1
    allocator.now_s += WALK_PERIOD_S
    probe.read()
    walks = allocator.walks
    for _ in range(90):
        probe.read()
        allocator.now_s += 1.0
    assert allocator.walks == walks, "a walk of 0.1 s is worth 100 s"

"""Open-loop pacing: each request is sent at its own time, however long the others take.

Targets are absolute on a monotonic clock, so that small delays do not add up. Only the order
within a conversation holds a request back: a turn is sent after the one before it was answered
(`replay.turns`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from capture.traffic import TrafficRecord
from replay.source import ScheduledRecord
from replay.turns import earlier_turns

Answer = TypeVar("Answer")
LEAD_S = 0.05
"""Between the start of a pass and its first request."""


@dataclass(frozen=True, slots=True)
class Slot:
    """When a request was due and when it was sent, in milliseconds after the pass began.

    `due_ms` is its place in the schedule, or the end of the conversation's previous turn if that
    came later (`held_back`).
    """

    scheduled_ms: float
    due_ms: float
    sent_ms: float

    @property
    def lateness_ms(self) -> float:
        return self.sent_ms - self.due_ms

    @property
    def held_back(self) -> bool:
        return self.due_ms > self.scheduled_ms


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How well a pass kept to its schedule."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    held_back: int


def fidelity(slots: Sequence[Slot]) -> Fidelity:
    """Lateness over the requests of a pass (at least one)."""
    lateness = np.array([slot.lateness_ms for slot in slots])
    p50, p99 = np.percentile(lateness, [50, 99])
    held_back = sum(slot.held_back for slot in slots)
    return Fidelity(float(p50), float(p99), float(lateness.max()), held_back)


async def run_schedule(
    records: Sequence[ScheduledRecord],
    send: Callable[[TrafficRecord], Awaitable[Answer]],
    finished: Callable[[TrafficRecord, Slot, Answer], None],
    *,
    speed: float,
) -> None:
    """Send `records` at `offset_s / speed` and call `finished` for each as its answer is complete.

    `send` must return failures, not raise them. Returns when all are answered; cancelling it
    cancels the requests in flight.
    """
    earlier = earlier_turns(item.record for item in records)
    tasks: list[asyncio.Task[None]] = []
    origin_ns = time.monotonic_ns() + int(LEAD_S * 1e9)

    async def one(item: ScheduledRecord, before: asyncio.Task[None] | None) -> None:
        scheduled_ns = due_ns = origin_ns + int(item.offset_s / speed * 1e9)
        if before is not None and not before.done():
            await asyncio.wait([before])
            due_ns = time.monotonic_ns()
        sent_ns = time.monotonic_ns()
        answer = await send(item.record)
        times = (scheduled_ns, due_ns, sent_ns)
        finished(item.record, Slot(*((at - origin_ns) / 1e6 for at in times)), answer)

    async with asyncio.TaskGroup() as group:
        for item, place in zip(records, earlier, strict=True):
            await sleep_until(origin_ns + int(item.offset_s / speed * 1e9))
            before = None if place is None else tasks[place]
            tasks.append(group.create_task(one(item, before)))


async def sleep_until(target_ns: int) -> None:
    """Sleep until `time.monotonic_ns()` reaches `target_ns`; returns at once if it has."""
    while (left_ns := target_ns - time.monotonic_ns()) > 0:
        await asyncio.sleep(left_ns / 1e9)

"""Writes what devices and memory do into the trace, once a second, from a thread of its own.

GPU and MEMORY frames, and EVENTs where something changes: a device is attached, is not available,
slows its clocks down. Not for reading devices (`capture.gpu.monitor`) or Prometheus
(`capture.gpu.metrics`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from capture.gpu.monitor import FRAME_FIGURES, GpuMonitor, GpuSample, GpuView

if TYPE_CHECKING:
    from capture.frames import TraceWriter

log = logging.getLogger(__name__)

PERIOD_S = 1.0
ABSENT_EVERY_S = 60.0
"""How often the trace repeats that there is no device, and why."""

CALM_S = 5.0
"""A reason for slower clocks has ended when it has not been seen for so long: power caps come and
go many times a second."""


class MemorySample(Protocol):
    """A process's memory as a MEMORY frame has it, NaN: not available; and the seconds that the
    last walk over the allocator's blocks took, NaN: none yet."""

    @property
    def index(self) -> int: ...
    @property
    def values(self) -> tuple[float, ...]: ...
    @property
    def unavailable(self) -> str: ...
    @property
    def walk_s(self) -> float: ...


class Change(NamedTuple):
    """An EVENT to be written."""

    kind: str
    detail: str
    duration_ns: int | None = None


class ThrottleWatch:
    """Turns one device's samples into the beginnings and ends of slowdowns."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._seen: dict[str, float] = {}

    def update(self, sample: GpuSample) -> list[Change]:
        """The changes that `sample` brings."""
        now_s = sample.taken_s
        began = [reason for reason in sample.throttled if reason not in self._since]
        self._seen |= dict.fromkeys(sample.throttled, now_s)
        self._since |= dict.fromkeys(began, now_s)
        where = f"device {sample.ordinal}"
        changes = []
        if began:
            changes.append(Change("gpu_throttled", f"{where}: {', '.join(began)}"))
        for reason in [name for name, seen in self._seen.items() if now_s - seen > CALM_S]:
            lasted_ns = int((self._seen.pop(reason) - self._since.pop(reason)) * 1e9)
            changes.append(Change("gpu_throttle_ended", f"{where}: {reason}", lasted_ns))
        return changes


class Telemetry:
    """Samples until it is closed. `writer` None: nothing is traced, `gpus` and `memory` are there
    for metrics. `memory_probe` is called in this object's thread."""

    def __init__(
        self,
        writer: TraceWriter | None,
        monitor: GpuMonitor,
        memory_probe: Callable[[], MemorySample],
        *,
        period_s: float = PERIOD_S,
    ) -> None:
        self.memory: MemorySample | None = None
        self._writer = writer
        self._monitor = monitor
        self._probe = memory_probe
        self._period_s = period_s
        self._written_s: dict[int, float] = {}
        self._throttling: dict[int, ThrottleWatch] = {}
        self._trouble = ""
        self._absent_s = -math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="telemetry", daemon=True)

    def start(self) -> None:
        self._monitor.start()
        self._thread.start()

    def close(self) -> None:
        """Stop and wait: after this the writer is not used any more."""
        self._stop.set()
        self._thread.join()
        self._monitor.close()

    @property
    def gpus(self) -> GpuView:
        """The devices' last good figures."""
        return self._monitor.view()

    def _main(self) -> None:
        """Serving must not depend on its telemetry: the first fault ends it, loudly once."""
        try:
            while not self._stop.wait(self._period_s):
                self.memory = self._probe()
                if self._writer is not None:
                    self._trace(self._writer, self._monitor.view(), self.memory)
        except Exception:
            log.exception("telemetry has stopped, serving goes on")

    def _trace(self, writer: TraceWriter, view: GpuView, memory: MemorySample) -> None:
        now_s = time.monotonic()
        writer.memory(index=memory.index, values=memory.values, unavailable=memory.unavailable)
        for change in self._changes(view):
            writer.event(
                kind=change.kind,
                request_id=None,
                slot=None,
                detail=change.detail,
                duration_ns=change.duration_ns,
            )
        for sample in view.devices:
            if self._is_news(sample, now_s):
                reasons = filter(None, (view.unavailable, sample.unavailable()))
                writer.gpu(
                    index=sample.ordinal,
                    values=sample.frame_values(now_s),
                    unavailable="; ".join(reasons),
                )
        if not view.devices and view.unavailable and now_s - self._absent_s >= ABSENT_EVERY_S:
            self._absent_s = now_s
            nothing = [math.nan] * (len(FRAME_FIGURES) + 1)
            writer.gpu(index=0, values=nothing, unavailable=view.unavailable)

    def _changes(self, view: GpuView) -> Iterable[Change]:
        if self._trouble and not view.unavailable:
            number = len(view.devices)
            noun = "device" if number == 1 else "devices"
            yield Change("gpu_available", f"figures of {number} {noun} again")
        elif view.unavailable and not self._trouble:
            yield Change("gpu_unavailable", view.unavailable)
        self._trouble = view.unavailable
        for sample in view.devices:
            watch = self._throttling.get(sample.ordinal)
            if watch is None:
                watch = self._throttling[sample.ordinal] = ThrottleWatch()
                yield Change("gpu_attached", _described(sample))
            if sample.taken_s != self._written_s.get(sample.ordinal):
                yield from watch.update(sample)

    def _is_news(self, sample: GpuSample, now_s: float) -> bool:
        """Whether it was not written yet, or is overdue: then the growing age is the news."""
        fresh = self._written_s.get(sample.ordinal) != sample.taken_s
        self._written_s[sample.ordinal] = sample.taken_s
        return fresh or now_s - sample.taken_s > 2 * self._period_s


def _described(sample: GpuSample) -> str:
    kind = ", MIG instance" if sample.mig else ""
    return f"device {sample.ordinal}: {sample.name}, {sample.uuid}, index {sample.index}{kind}"

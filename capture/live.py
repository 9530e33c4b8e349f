"""What an engine did in the last seconds, summed up from its frames while they are written.

Percentiles come from the records themselves, kept for one sliding window in slices of 250 ms, so
memory is bounded. Pure: no ring, no clock, no terminal; `capture.watch` feeds it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from capture.decode import (
    EventFrame,
    FinishFrame,
    Frame,
    GpuFrame,
    MarkFrame,
    MemoryFrame,
    RequestFrame,
    StepColumns,
    decode,
    decode_steps,
    well_formed,
)
from capture.errors import FrameError
from capture.frames import FrameType, Phase
from capture.reader import FrameBatch, Gap
from capture.rings.frame_text import describe, gpu_text, memory_text

SLICE_NS = 250_000_000
MAX_TOKENS = 8_000_000  # in the window: beyond, it is shortened
MAX_REQUESTS = 65_536
LAST_EVENTS = 8
IDLE_NS = 2_000_000_000
UNKNOWN = "(not known)"

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Percentiles:
    """Of `count` records, milliseconds; None where there are none."""

    count: int
    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True)
class TenantActivity:
    """`running` now; the rest in the window."""

    tenant: str
    running: int
    finished: int
    tokens_per_s: float
    ttft: Percentiles


@dataclass(frozen=True)
class LiveEvent:
    """An operator's mark, or the newest of `count` events of one kind; `at_ns` monotonic."""

    at_ns: int
    text: str
    count: int = 1


@dataclass(frozen=True)
class LiveSnapshot:
    """An engine's last `window_s` seconds. Rates count lost and skipped tokens, percentiles not.

    `prefix_hit_share`: of the prompt tokens that had to be there, those not computed. KV figures
    are blocks; `step_age_s`: since the last step. `skipped_tokens` were passed over to keep up,
    `lost_tokens` overwritten, both since this view began; `sampled_share`: part of the window's
    tokens that the percentiles saw.
    """

    window_s: float
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    step_age_s: float | None
    steps_per_s: float
    tokens_per_s: float
    ttft: Percentiles
    itl: Percentiles
    prefix_hit_share: float | None
    preemptions: int
    finished: dict[str, int]
    tenants: list[TenantActivity]
    lost_frames: int
    lost_tokens: int
    skipped_tokens: int
    sampled_share: float
    undecodable: int
    devices: list[str]
    memory: list[str]
    events: list[LiveEvent]


@dataclass
class _Slice:
    """What happened in 250 ms."""

    start_ns: int
    itl_us: list[Floats] = field(default_factory=list)
    ttft_us: dict[str, list[float]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    missed_tokens: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    finished: Counter[tuple[str, str]] = field(default_factory=Counter)  # tenant, reason


class LiveEngine:
    """Feed it the batches of one ring in order; ask for a snapshot at any time."""

    def __init__(self, *, started_ns: int, window_s: float) -> None:
        """`started_ns`: monotonic time of the engine's start; times of frames are of that clock."""
        self._window_ns = int(window_s * 1e9)
        self._slices: deque[_Slice] = deque()
        self._kept_tokens = 0
        self._complete_from_ns = started_ns
        self._oldest_ns = started_ns  # of the slices that lie in the window as a whole
        self._tenants: dict[int, str] = {}
        self._step: Any = None
        self._step_ns = 0
        self._events: dict[str, LiveEvent] = {}  # by kind, a mark by itself; the newest last
        self._devices: dict[int, GpuFrame] = {}
        self._memory: dict[int, MemoryFrame] = {}
        self._lost_frames = self._lost_tokens = self._skipped_tokens = self._undecodable = 0

    def add(self, batch: FrameBatch, now_ns: int) -> None:
        """Take the frames of a batch in; of what is older than the window only states are kept."""
        self._expire(now_ns)
        for gap in batch.gaps:
            if gap.first_sequence:  # what was overwritten before this view began is no loss of it
                self._lost_frames += gap.frames
                self._lost_tokens += gap.tokens
                self._slice(now_ns).missed_tokens += gap.tokens
        if not len(batch):
            return
        is_step = batch.headers["type"] == FrameType.STEP
        is_finish = batch.headers["type"] == FrameType.FINISH
        for index in np.flatnonzero(~is_step & ~is_finish).tolist():
            self._add_one(batch, index)
        self._add_steps(batch, np.flatnonzero(is_step))
        for index in np.flatnonzero(is_finish).tolist():  # last: its tokens still have a tenant
            self._add_one(batch, index)
        self._expire(now_ns)

    def skip(self, gap: Gap, now_ns: int) -> None:
        """Frames that were passed over to keep up with the engine."""
        self._skipped_tokens += gap.tokens
        self._slice(now_ns).missed_tokens += gap.tokens

    def snapshot(self, now_ns: int) -> LiveSnapshot:
        self._expire(now_ns)
        slices = [piece for piece in self._slices if piece.start_ns <= now_ns]
        window_s = self._covered_s(now_ns)
        itl = [part for piece in slices for part in piece.itl_us]
        tokens = sum(piece.tokens.total() for piece in slices)
        missed = sum(piece.missed_tokens for piece in slices)
        hits = sum(piece.hit_tokens for piece in slices)
        prompts = hits + sum(piece.prefill_tokens for piece in slices)
        reasons: Counter[str] = Counter()
        for piece in slices:
            for (_, reason), count in piece.finished.items():
                reasons[reason] += count
        idle = now_ns - self._step_ns > IDLE_NS and not self._tenants
        step = self._step
        return LiveSnapshot(
            window_s=window_s,
            running=0 if step is None or idle else int(step["running"]),
            waiting=0 if step is None or idle else int(step["waiting"]),
            kv_used=0 if step is None else int(step["kv_used"]),
            kv_total=0 if step is None else int(step["kv_total"]),
            step_age_s=None if step is None else max(0.0, (now_ns - self._step_ns) / 1e9),
            steps_per_s=sum(piece.steps for piece in slices) / window_s,
            tokens_per_s=(tokens + missed) / window_s,
            ttft=_percentiles([us for piece in slices for us in _joined(piece.ttft_us)]),
            itl=_percentiles(np.concatenate(itl) if itl else []),
            prefix_hit_share=hits / prompts if prompts else None,
            preemptions=sum(piece.preemptions for piece in slices),
            finished=dict(reasons.most_common()),
            tenants=self._activities(slices, window_s),
            lost_frames=self._lost_frames,
            lost_tokens=self._lost_tokens,
            skipped_tokens=self._skipped_tokens,
            sampled_share=tokens / (tokens + missed) if missed else 1.0,
            undecodable=self._undecodable,
            devices=[f"GPU {i}: {gpu_text(gpu)}" for i, gpu in sorted(self._devices.items())],
            memory=[memory_text(sample) for _, sample in sorted(self._memory.items())],
            events=list(self._events.values()),
        )

    def _activities(self, slices: list[_Slice], window_s: float) -> list[TenantActivity]:
        """The tenants that did something or wait for something, the busiest first."""
        tokens: Counter[str] = Counter()
        finished: Counter[str] = Counter()
        ttft_us: dict[str, list[float]] = {}
        for piece in slices:
            tokens.update(piece.tokens)
            for (tenant, _), count in piece.finished.items():
                finished[tenant] += count
            for tenant, values in piece.ttft_us.items():
                ttft_us.setdefault(tenant, []).extend(values)
        running = Counter(self._tenants.values())
        activities = [
            TenantActivity(
                tenant,
                running[tenant],
                finished[tenant],
                tokens[tenant] / window_s,
                _percentiles(ttft_us.get(tenant, [])),
            )
            for tenant in {*tokens, *finished, *running}
        ]
        return sorted(activities, key=lambda one: (-one.tokens_per_s, -one.running, one.tenant))

    def _add_steps(self, batch: FrameBatch, indices: npt.NDArray[np.int64]) -> None:
        fits = well_formed(batch, indices)
        self._undecodable += int((~fits).sum())
        indices = indices[fits]
        if not len(indices):
            return
        times = batch.headers["time_ns"][indices]
        self._keep_last_step(batch, indices[-1:])
        recent = times >= self._oldest_ns
        indices, times = indices[recent], times[recent]
        if not len(indices):
            return
        decoded = decode_steps(batch, indices)
        ends = np.cumsum(decoded.counts)
        numbers = times // SLICE_NS
        borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(indices)]
        for first, last in pairwise(borders):
            rows = slice(int(ends[first] - decoded.counts[first]), int(ends[last - 1]))
            self._add_slice(decoded, slice(first, last), rows, int(times[first]))

    def _add_slice(self, decoded: StepColumns, steps: slice, rows: slice, time_ns: int) -> None:
        """Steps of one slice and their rows."""
        piece = self._slice(time_ns)
        whole = decoded.steps[steps][decoded.steps["part"][steps] == 0]
        piece.steps += len(whole)
        piece.prefill_tokens += int(whole["prefill_tokens"].sum(dtype=np.int64))
        piece.hit_tokens += int(whole["prefix_hit_tokens"].sum(dtype=np.int64))
        phase, latency = decoded.rows["phase"][rows], decoded.rows["latency_us"][rows]
        slots = decoded.rows["slot"][rows]
        itl = latency[(phase == Phase.DECODE) & np.isfinite(latency)]
        piece.itl_us.append(itl)
        self._kept_tokens += len(itl)
        for row in np.flatnonzero((phase == Phase.FIRST) & np.isfinite(latency)).tolist():
            tenant = self._tenants.get(int(slots[row]), UNKNOWN)
            piece.ttft_us.setdefault(tenant, []).append(float(latency[row]))
        emitting, counts = np.unique(slots[phase != Phase.PREFILL], return_counts=True)
        for slot, count in zip(emitting.tolist(), counts.tolist(), strict=True):
            piece.tokens[self._tenants.get(slot, UNKNOWN)] += count

    def _keep_last_step(self, batch: FrameBatch, index: npt.NDArray[np.int64]) -> None:
        self._step = decode_steps(batch, index).steps[0]
        self._step_ns = int(batch.headers["time_ns"][index[0]])

    def _add_one(self, batch: FrameBatch, index: int) -> None:
        try:
            self._add_frame(decode(batch, index))
        except FrameError:
            self._undecodable += 1

    def _add_frame(self, frame: Frame) -> None:
        match frame:
            case RequestFrame():
                if len(self._tenants) >= MAX_REQUESTS:  # their ends were lost
                    del self._tenants[next(iter(self._tenants))]
                self._tenants[frame.slot] = frame.tenant
            case FinishFrame():
                tenant = self._tenants.pop(frame.slot, UNKNOWN)
                if frame.time_ns >= self._oldest_ns:
                    self._slice(frame.time_ns).finished[tenant, frame.reason] += 1
            case EventFrame():
                if frame.kind == "preempted" and frame.time_ns >= self._oldest_ns:
                    self._slice(frame.time_ns).preemptions += 1
                self._add_event(frame.kind, frame.time_ns, describe(frame))
            case MarkFrame():
                text = f"mark: {frame.text}"
                self._add_event(f"{text} at {frame.time_ns}", frame.time_ns, text)
            case GpuFrame():
                self._devices[frame.device] = frame
            case MemoryFrame():
                self._memory[frame.device] = frame

    def _add_event(self, key: str, time_ns: int, text: str) -> None:
        """Events of one kind share a line: a hundred pauses must not hide the one mark."""
        before = self._events.pop(key, None)
        self._events[key] = LiveEvent(time_ns, text, 1 if before is None else before.count + 1)
        if len(self._events) > LAST_EVENTS:
            del self._events[next(iter(self._events))]

    def _slice(self, time_ns: int) -> _Slice:
        """The slice of a moment; one from before the newest goes into the newest that fits."""
        start = time_ns // SLICE_NS * SLICE_NS
        for piece in reversed(self._slices):
            if piece.start_ns == start:
                return piece
            if piece.start_ns < start:
                break
        piece = _Slice(start)
        at = sum(one.start_ns < start for one in self._slices)
        self._slices.insert(at, piece)
        return piece

    def _covered_s(self, now_ns: int) -> float:
        """How long the window really is: since the engine's start, or what memory allows."""
        start = max(self._oldest_ns, self._complete_from_ns)
        return max(now_ns - start, SLICE_NS) / 1e9

    def _expire(self, now_ns: int) -> None:
        oldest = -(-(now_ns - self._window_ns) // SLICE_NS) * SLICE_NS
        self._oldest_ns = oldest
        while self._slices and (
            self._slices[0].start_ns < oldest
            or (self._kept_tokens > MAX_TOKENS and len(self._slices) > 1)
        ):
            gone = self._slices.popleft()
            self._kept_tokens -= sum(map(len, gone.itl_us))
            if gone.start_ns >= oldest:
                self._complete_from_ns = gone.start_ns + SLICE_NS


def _joined(by_tenant: dict[str, list[float]]) -> list[float]:
    return [value for values in by_tenant.values() for value in values]


def _percentiles(latency_us: Floats | list[float]) -> Percentiles:
    if not len(latency_us):
        return Percentiles(0, None, None)
    p50, p99 = np.percentile(latency_us, (50, 99)) / 1000
    return Percentiles(len(latency_us), float(p50), float(p99))

"""One frame as a line for people, and as plain values for JSON.

Texts of clients are passed on as they are: whoever prints them makes control characters visible.
Not for decoding: that is `capture.decode`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture.decode import (
    EngineFrame,
    EventFrame,
    FinishFrame,
    Frame,
    GpuFrame,
    KernelFrame,
    MarkFrame,
    MemoryFrame,
    RequestFrame,
    StepFrame,
    decode,
)
from capture.errors import FrameError
from capture.frames import FrameType, Phase
from capture.reader import FrameBatch
from capture.ring import RingHeader


@dataclass(frozen=True)
class FrameLine:
    """A decoded frame: `at` UTC ns since 1970, `text` for people, `fields` for JSON."""

    sequence: int
    at_ns: int
    type: str
    bytes: int
    tokens: int
    text: str
    fields: dict[str, Any]


def frame_line(header: RingHeader, batch: FrameBatch, index: int) -> FrameLine:
    """Describe a frame; one that cannot be decoded is described by its error."""
    head = batch.headers[index]
    kind, time_ns = int(head["type"]), int(head["time_ns"])
    try:
        frame = decode(batch, index)
        text, fields = describe(frame), _plain(frame._asdict())
    except FrameError as error:
        text, fields = f"cannot be decoded: {error}", {}
    return FrameLine(
        sequence=int(head["sequence"]),
        at_ns=header.anchor_wall_ns + time_ns - header.anchor_monotonic_ns,
        type=frame_name(kind),
        bytes=int(head["length"]),
        tokens=int(head["tokens"]),
        text=text,
        fields=fields,
    )


def frame_name(kind: int) -> str:
    """The name of a frame's type, also of one that a newer version has added."""
    return FrameType(kind).name if kind in set(FrameType) else f"type {kind}"


def describe(frame: Frame) -> str:
    """What the frame says, in one line."""
    match frame:
        case EngineFrame():
            build = str(frame.info.get("fingerprint", "unknown"))[:12]
            return f"model {frame.info.get('model', 'unknown')}, build {build}"
        case RequestFrame():
            return (
                f"slot {frame.slot}: request {frame.request_id} of tenant {frame.tenant!r}, "
                f"class {frame.class_key!r}, {frame.prompt_tokens} prompt tokens "
                f"({frame.cached_tokens} cached), at most {frame.max_tokens} more, "
                f"priority {frame.priority + frame.adjustment}"
            )
        case StepFrame():
            return _step(frame)
        case FinishFrame():
            return f"slot {frame.slot}: {frame.reason!r} after {frame.output_tokens} tokens"
        case EventFrame():
            about = "" if frame.slot is None else f" slot {frame.slot}"
            spent = "" if frame.duration_ns is None else f" ({frame.duration_ns / 1e6:.2f} ms)"
            return f"{frame.kind}{about}{spent}: {frame.detail}".rstrip(": ")
        case KernelFrame():
            spent_us = float(np.sum(frame.duration_us))
            count = len(frame.kernel)
            return f"step {frame.step_id}: {count} kernel runs, {spent_us:,.0f} us on the device"
        case GpuFrame():
            return f"device {frame.device}: {gpu_text(frame)}"
        case MemoryFrame():
            return memory_text(frame)
        case MarkFrame():
            return frame.text


def gpu_text(frame: GpuFrame) -> str:
    """A telemetry sample: what was measured, and why the rest was not."""
    parts = [
        f"{value:,.0f} {unit}"
        for value, unit in (
            (frame.utilization_pct, "% busy"),
            (frame.memory_used_bytes / 2**20, "MiB used"),
            (frame.power_w, "W"),
            (frame.temperature_c, "C"),
            (frame.sm_clock_mhz, "MHz"),
        )
        if math.isfinite(value)
    ]
    if frame.unavailable:
        parts.append(f"not available: {frame.unavailable}")
    return ", ".join(parts)


def memory_text(frame: MemoryFrame) -> str:
    """Memory of the process and of its device allocator."""
    mib = 2**20
    parts = [
        f"{name} {value / mib:,.0f} MiB"
        for name, value in (
            ("resident", frame.rss_bytes),
            ("reserved", frame.reserved_bytes),
            ("allocated", frame.allocated_bytes),
        )
        if math.isfinite(value)
    ]
    if frame.unavailable:
        parts.append(f"the rest not available: {frame.unavailable}")
    return ", ".join(parts)


def _step(frame: StepFrame) -> str:
    step, phases = frame.step, frame.rows["phase"]
    rows = ", ".join(
        f"{count} {name}"
        for name, count in (
            ("decode", int((phases == Phase.DECODE).sum())),
            ("first", int((phases == Phase.FIRST).sum())),
            ("prefill", int((phases == Phase.PREFILL).sum())),
        )
        if count
    )
    names = ("schedule_us", "prepare_us", "forward_us", "sample_us")
    spent_ms = sum(step[name] for name in names) / 1000
    part = f" part {step['part']}" if step["part"] else ""
    return (
        f"step {step['step_id']}{part}: {len(phases)} rows ({rows or 'none'}), {spent_ms:.2f} ms, "
        f"{step['prefill_tokens']} prefill tokens, {step['running']} running, "
        f"{step['waiting']} waiting, KV {step['kv_used']}/{step['kv_total']}"
    )


def _plain(value: Any) -> Any:
    """What JSON can hold: arrays as lists, what was not measured as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value

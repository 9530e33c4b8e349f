"""Frames back into values: one typed object per frame, or columns for many STEP frames at once.

Columns are NumPy views of the copied bytes. A payload that does not have the shape its header
promises raises FrameError; a newer schema raises it too, so that nothing is half understood. Older
schemas are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from capture.errors import FrameError
from capture.frames import (
    EVENT,
    EVENT_1,
    FINISH,
    GPU,
    KERNEL,
    MEMORY,
    NONE,
    REQUEST,
    ROW_BYTES,
    ROW_COLUMNS,
    SCHEMA_VERSION,
    STEP,
    STEP_DTYPE,
    FrameType,
)
from capture.reader import FrameBatch
from capture.ring import FRAME_HEADER_BYTES

Column: TypeAlias = npt.NDArray[Any]


class EngineFrame(NamedTuple):
    time_ns: int
    info: dict[str, Any]


class RequestFrame(NamedTuple):
    time_ns: int
    request_id: str  # 32 hex digits
    slot: int
    arrival_ns: int
    prompt_tokens: int | None  # None: not known
    cached_tokens: int | None
    max_tokens: int | None
    priority: int
    adjustment: int
    tenant: str
    route: str
    class_key: str


class StepFrame(NamedTuple):
    """`step`: the fields of STEP_DTYPE; `rows`: one column per name of ROW_COLUMNS."""

    time_ns: int
    step: dict[str, Any]
    rows: dict[str, Column]


class FinishFrame(NamedTuple):
    """Times in ns; 0 = never happened."""

    time_ns: int
    slot: int
    reason: str
    output_tokens: int
    admitted_ns: int
    first_token_ns: int
    last_token_ns: int
    detokenized_ns: int
    serialized_ns: int
    flushed_ns: int


class EventFrame(NamedTuple):
    time_ns: int
    kind: str
    request_id: str | None
    slot: int | None
    detail: str
    duration_ns: int | None = None


class KernelFrame(NamedTuple):
    """Columns of equal length; `kernel` indexes `names`."""

    time_ns: int
    step_id: int
    names: list[str]
    start_ns: Column
    layer: Column
    kernel: Column
    duration_us: Column


class GpuFrame(NamedTuple):
    """NaN: not available, `unavailable` says why."""

    time_ns: int
    device: int
    utilization_pct: float
    sm_pct: float
    memory_bandwidth_pct: float
    memory_used_bytes: float
    power_w: float
    temperature_c: float
    sm_clock_mhz: float
    memory_clock_mhz: float
    age_ms: float
    unavailable: str


class MemoryFrame(NamedTuple):
    """`device` -1: host memory only. NaN: not available, `unavailable` says why."""

    time_ns: int
    device: int
    rss_bytes: float
    reserved_bytes: float
    allocated_bytes: float
    peak_allocated_bytes: float
    largest_free_bytes: float
    fragmentation: float
    unavailable: str


class MarkFrame(NamedTuple):
    time_ns: int
    text: str


Frame: TypeAlias = (
    EngineFrame
    | RequestFrame
    | StepFrame
    | FinishFrame
    | EventFrame
    | KernelFrame
    | GpuFrame
    | MemoryFrame
    | MarkFrame
)


def decode(batch: FrameBatch, index: int) -> Frame:
    """The frame at `index` of a batch.

    Raises FrameError for an unknown type, a newer schema version, or a payload whose size does
    not fit its counts.
    """
    _, sequence, _, time_ns, _, _, records, _, kind, schema, _, _ = batch.headers[index].item()
    if kind not in _DECODERS:
        raise FrameError(f"frame {sequence} has the unknown type {kind}")
    if not 1 <= schema <= SCHEMA_VERSION:
        raise FrameError(
            f"frame {sequence} has payload schema {schema}, this version reads up to "
            f"{SCHEMA_VERSION}: run the collector of the engine's version"
        )
    payload = batch.payload(index)
    try:
        decoder = _event_1 if (kind, schema) == (FrameType.EVENT, 1) else _DECODERS[kind]
        return decoder(time_ns, payload, records)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        name = FrameType(kind).name
        raise FrameError(
            f"{name} frame {sequence} of {len(payload)} bytes with {records} records "
            f"does not decode: {error}"
        ) from error


@dataclass(frozen=True)
class StepColumns:
    """Many STEP frames at once.

    `steps`: structured array of STEP_DTYPE, one element per frame; `counts`: rows of each frame;
    `rows`: the rows of all frames one after the other, a column per name of ROW_COLUMNS.
    """

    steps: npt.NDArray[np.void]
    counts: npt.NDArray[np.int64]
    rows: dict[str, Column]


def decode_steps(batch: FrameBatch, indices: npt.NDArray[np.int64]) -> StepColumns:
    """Decode the STEP frames at `indices` without a Python loop.

    Frames whose count disagrees with their length must have been sorted out with `well_formed`.
    """
    counts = batch.headers["records"][indices].astype(np.int64)
    words = batch.data.view(np.uint32)
    starts = (batch.offsets[indices] + FRAME_HEADER_BYTES) // 4
    width = STEP.size // 4
    fixed = words[starts[:, None] + np.arange(width)]
    steps = np.ascontiguousarray(fixed).view(STEP_DTYPE).reshape(-1)
    first_row = np.cumsum(counts) - counts
    cells = np.arange(int(counts.sum())) + np.repeat(starts + width - first_row, counts)
    stride = np.repeat(counts, counts)
    rows = {}
    for name, dtype in ROW_COLUMNS.items():
        rows[name] = words[cells].view(dtype)
        cells += stride
    return StepColumns(steps, counts, rows)


def well_formed(batch: FrameBatch, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of the STEP frames at `indices` have a schema we read and bytes for their rows."""
    headers = batch.headers[indices]
    needed = FRAME_HEADER_BYTES + STEP.size + headers["records"].astype(np.int64) * ROW_BYTES
    schema = headers["schema"]
    fits: npt.NDArray[np.bool_] = (
        (headers["length"] == needed) & (schema >= 1) & (schema <= SCHEMA_VERSION)
    )
    return fits


def _text(payload: memoryview, start: int, size: int) -> str:
    if start + size > len(payload):
        raise ValueError(f"a text of {size} bytes at {start} is cut off")
    return bytes(payload[start : start + size]).decode("utf-8", "replace")


def _exact(payload: memoryview, size: int) -> None:
    if len(payload) != size:
        raise ValueError(f"{size} bytes expected")


def _engine(time_ns: int, payload: memoryview, _: int) -> EngineFrame:
    info = json.loads(bytes(payload))
    if not isinstance(info, dict):
        raise ValueError("no JSON object")
    return EngineFrame(time_ns, info)


def _request(time_ns: int, payload: memoryview, _: int) -> RequestFrame:
    identity, arrival, slot, prompt, cached, limit, priority, adjustment, *sizes, _reserved = (
        REQUEST.unpack_from(payload)
    )
    _exact(payload, REQUEST.size + sum(sizes))
    names = []
    start = REQUEST.size
    for size in sizes:
        names.append(_text(payload, start, size))
        start += size
    prompt, cached, limit = (None if n == NONE else n for n in (prompt, cached, limit))
    return RequestFrame(
        time_ns, identity.hex(), slot, arrival, prompt, cached, limit, priority, adjustment, *names
    )


def _step(time_ns: int, payload: memoryview, records: int) -> StepFrame:
    _exact(payload, STEP.size + records * ROW_BYTES)
    fixed = np.frombuffer(payload, STEP_DTYPE, 1)[0]
    rows = {}
    start = STEP.size
    for name, dtype in ROW_COLUMNS.items():
        rows[name] = np.frombuffer(payload, dtype, records, start)
        start += 4 * records
    return StepFrame(time_ns, {name: fixed[name].item() for name in STEP_DTYPE.names or ()}, rows)


def _finish(time_ns: int, payload: memoryview, _: int) -> FinishFrame:
    slot, tokens, *times, size = FINISH.unpack_from(payload)
    _exact(payload, FINISH.size + size)
    return FinishFrame(time_ns, slot, _text(payload, FINISH.size, size), tokens, *times)


def _event(time_ns: int, payload: memoryview, _: int) -> EventFrame:
    identity, slot, kind_size, detail_size, spent_ns = EVENT.unpack_from(payload)
    _exact(payload, EVENT.size + kind_size + detail_size)
    return EventFrame(
        time_ns,
        _text(payload, EVENT.size, kind_size),
        identity.hex() if any(identity) else None,
        None if slot == NONE else slot,
        _text(payload, EVENT.size + kind_size, detail_size),
        None if spent_ns < 0 else spent_ns,
    )


def _event_1(time_ns: int, payload: memoryview, records: int) -> EventFrame:
    """Schema 1 had no duration: put in that there was none."""
    fixed = EVENT_1.unpack_from(payload)
    rest = bytes(payload[EVENT_1.size :])
    return _event(time_ns, memoryview(EVENT.pack(*fixed, -1) + rest), records)


def _kernel(time_ns: int, payload: memoryview, records: int) -> KernelFrame:
    step_id, names_size, _reserved = KERNEL.unpack_from(payload)
    start = KERNEL.size + names_size
    _exact(payload, start + 20 * records)
    names = json.loads(_text(payload, KERNEL.size, names_size))
    columns = []
    for dtype in ("<i8", "<i4", "<u4", "<f4"):
        columns.append(np.frombuffer(payload, dtype, records, start))
        start += columns[-1].nbytes
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("the names are no array of strings")
    if records and columns[2].max() >= len(names):
        raise ValueError("a kernel has no name")
    return KernelFrame(time_ns, step_id, names, *columns)


def _gpu(time_ns: int, payload: memoryview, _: int) -> GpuFrame:
    index, size, _reserved, *values = GPU.unpack_from(payload)
    _exact(payload, GPU.size + size)
    return GpuFrame._make((time_ns, index, *values, _text(payload, GPU.size, size)))


def _memory(time_ns: int, payload: memoryview, _: int) -> MemoryFrame:
    index, size, _reserved, *values = MEMORY.unpack_from(payload)
    _exact(payload, MEMORY.size + size)
    return MemoryFrame._make((time_ns, index, *values, _text(payload, MEMORY.size, size)))


def _mark(time_ns: int, payload: memoryview, _: int) -> MarkFrame:
    return MarkFrame(time_ns, bytes(payload).decode("utf-8", "replace"))


_DECODERS: dict[int, Callable[[int, memoryview, int], Frame]] = {
    int(FrameType.ENGINE): _engine,
    int(FrameType.REQUEST): _request,
    int(FrameType.STEP): _step,
    int(FrameType.FINISH): _finish,
    int(FrameType.EVENT): _event,
    int(FrameType.KERNEL): _kernel,
    int(FrameType.GPU): _gpu,
    int(FrameType.MARK): _mark,
    int(FrameType.MEMORY): _memory,
}

"""The nine kinds of frames in a trace ring, and the writer that encodes them.

The engine calls `TraceWriter`; the payload layouts here are the code's copy of docs/ring-format.md.
Not for reading frames back: that is `capture.decode`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from capture.ring import FRAME_HEADER_BYTES, RingWriter

SCHEMA_VERSION = 2
NONE = 0xFFFFFFFF
NAME_BYTES = 1024
TEXT_BYTES = 4096


class FrameType(IntEnum):
    """Types of frames; 0 is padding and never leaves the reader."""

    ENGINE = 1
    REQUEST = 2
    STEP = 3
    FINISH = 4
    EVENT = 5
    KERNEL = 6
    GPU = 7
    MARK = 8
    MEMORY = 9


class Phase(IntEnum):
    """What a request did in a step."""

    DECODE = 0
    FIRST = 1
    PREFILL = 2


_STEP, _PREFILL = int(FrameType.STEP), int(Phase.PREFILL)  # enum members cost a step 3 us

REQUEST = struct.Struct("<16sqIIIIiiHHHH")
STEP = struct.Struct("<QqfffffIIIIIIIiI")
FINISH = struct.Struct("<IIqqqqqqH")
EVENT = struct.Struct("<16sIHHq")
EVENT_1 = struct.Struct("<16sIHH")  # of payload schema 1: without the duration
KERNEL = struct.Struct("<QII")
GPU = struct.Struct("<IHH9d")
MEMORY = struct.Struct("<iHH6d")

STEP_DTYPE = np.dtype(
    [
        ("step_id", "<u8"),
        ("start_ns", "<i8"),
        ("schedule_us", "<f4"),
        ("prepare_us", "<f4"),
        ("forward_us", "<f4"),
        ("sample_us", "<f4"),
        ("device_us", "<f4"),
        ("prefill_tokens", "<u4"),
        ("decode_tokens", "<u4"),
        ("running", "<u4"),
        ("waiting", "<u4"),
        ("kv_used", "<u4"),
        ("kv_total", "<u4"),
        ("prefix_hit_tokens", "<u4"),
        ("graph_bucket", "<i4"),
        ("part", "<u4"),
    ]
)
ROW_COLUMNS: dict[str, str] = {
    "slot": "<u4",
    "position": "<u4",
    "token_id": "<u4",
    "phase": "<u4",
    "latency_us": "<f4",
    "logprob": "<f4",
    "margin": "<f4",
    "kv_blocks": "<u4",
}
ROW_BYTES = 4 * len(ROW_COLUMNS)

Column = npt.NDArray[Any]


def cut(text: str, limit: int) -> bytes:
    """UTF-8 of `text`, at most `limit` bytes, never ending inside a character."""
    data = text.encode("utf-8", "replace")
    return data if len(data) <= limit else data[:limit].decode("utf-8", "ignore").encode()


class TraceWriter:
    """Encodes frames into a ring. Threads may share it. All `*_ns` are `time.monotonic_ns()`."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._rows_per_frame = (ring.frame_limit - FRAME_HEADER_BYTES - STEP.size) // ROW_BYTES

    def engine(self, info: dict[str, Any]) -> None:
        """Describe the engine: fingerprint, model, configuration, kernel variants.

        Model and fingerprint go into the ring's header, too; a proxy's names its upstream. Raises
        FrameTooLargeError when the JSON is over the ring's frame limit.
        """
        names = [str(info.get(key) or "unknown") for key in ("model", "fingerprint")]
        if "upstream" in info:
            names[0] = f"{names[0]} through the proxy for {info['upstream']}"
        with self._ring.lock:
            self._ring.label(*names)
        self._append(FrameType.ENGINE, json.dumps(info, default=str).encode())

    def request(
        self,
        *,
        request_id: bytes,
        slot: int,
        arrival_ns: int,
        prompt_tokens: int,
        cached_tokens: int,
        max_tokens: int,
        priority: int,
        adjustment: int,
        tenant: str,
        route: str,
        class_key: str,
    ) -> None:
        """A request has entered the engine. `request_id`: 16 bytes; names are cut at 1024 bytes."""
        names = [cut(name, NAME_BYTES) for name in (tenant, route, class_key)]
        fixed = REQUEST.pack(
            request_id,
            arrival_ns,
            slot,
            prompt_tokens,
            cached_tokens,
            max_tokens,
            priority,
            adjustment,
            *map(len, names),
            0,
        )
        self._append(FrameType.REQUEST, fixed + b"".join(names))

    def step(
        self,
        *,
        step_id: int,
        start_ns: int,
        schedule_us: float,
        prepare_us: float,
        forward_us: float,
        sample_us: float,
        device_us: float,
        prefill_tokens: int,
        decode_tokens: int,
        running: int,
        waiting: int,
        kv_used: int,
        kv_total: int,
        prefix_hit_tokens: int,
        graph_bucket: int,
        slots: Column,
        positions: Column,
        token_ids: Column,
        phases: Column,
        latency_us: Column,
        logprobs: Column,
        margins: Column,
        kv_blocks: Column,
    ) -> None:
        """One engine step: its timings and a row for each request in it.

        Columns are one-dimensional and of equal length; any numeric dtype, uint32 / float32 are
        the fastest. `device_us` NaN: not measured; `graph_bucket` -1: eager. A step longer than the
        ring's frame limit is written as several parts.
        """
        columns = (
            slots,
            positions,
            token_ids,
            phases,
            latency_us,
            logprobs,
            margins,
            kv_blocks,
        )
        fields = (
            step_id,
            start_ns,
            schedule_us,
            prepare_us,
            forward_us,
            sample_us,
            device_us,
            prefill_tokens,
            decode_tokens,
            running,
            waiting,
            kv_used,
            kv_total,
            prefix_hit_tokens,
            graph_bucket,
        )
        rows = len(slots)
        limit = self._rows_per_frame
        if rows <= limit:
            self._step_frame(fields, 0, columns, rows)
            return
        for part, start in enumerate(range(0, rows, limit)):
            piece = tuple(column[start : start + limit] for column in columns)
            self._step_frame(fields, part, piece, len(piece[0]))

    def _step_frame(
        self, fields: tuple[float, ...], part: int, columns: tuple[Column, ...], rows: int
    ) -> None:
        slots, positions, token_ids, phases, latency_us, logprobs, margins, kv_blocks = columns
        payload_bytes = STEP.size + rows * ROW_BYTES
        ring = self._ring
        with ring.lock:
            offset = ring.begin(payload_bytes)
            words, floats = ring.words, ring.floats
            at = offset // 4
            STEP.pack_into(ring.data, offset, *fields, part)
            at += STEP.size // 4
            words[at : at + rows] = slots
            at += rows
            words[at : at + rows] = positions
            at += rows
            words[at : at + rows] = token_ids
            at += rows
            words[at : at + rows] = phases
            prefills = words[at : at + rows].tobytes().count(_PREFILL)  # faster than a ufunc
            at += rows
            floats[at : at + rows] = latency_us
            at += rows
            floats[at : at + rows] = logprobs
            at += rows
            floats[at : at + rows] = margins
            at += rows
            words[at : at + rows] = kv_blocks
            ring.commit(payload_bytes, _STEP, SCHEMA_VERSION, rows, rows - prefills)

    def finish(
        self,
        *,
        slot: int,
        reason: str,
        output_tokens: int,
        admitted_ns: int,
        first_token_ns: int,
        last_token_ns: int,
        detokenized_ns: int,
        serialized_ns: int,
        flushed_ns: int,
    ) -> None:
        """A request has left the engine; a time of 0 says that it never got there."""
        name = cut(reason, NAME_BYTES)
        fixed = FINISH.pack(
            slot,
            output_tokens,
            admitted_ns,
            first_token_ns,
            last_token_ns,
            detokenized_ns,
            serialized_ns,
            flushed_ns,
            len(name),
        )
        self._append(FrameType.FINISH, fixed + name)

    def event(
        self,
        *,
        kind: str,
        request_id: bytes | None,
        slot: int | None,
        detail: str,
        duration_ns: int | None = None,
    ) -> None:
        """Something that happened to a request or to the engine; `detail` is cut at 4096 bytes.

        `duration_ns`: of something that has just ended after that long.
        """
        name, text = cut(kind, NAME_BYTES), cut(detail, TEXT_BYTES)
        fixed = EVENT.pack(
            request_id or bytes(16),
            NONE if slot is None else slot,
            len(name),
            len(text),
            -1 if duration_ns is None else duration_ns,
        )
        self._append(FrameType.EVENT, fixed + name + text)

    def kernels(
        self,
        *,
        step_id: int,
        names: Sequence[str],
        start_ns: Column,
        layer: Column,
        kernel: Column,
        duration_us: Column,
    ) -> None:
        """Kernels of a sampled step; `kernel` indexes `names`.

        Raises FrameTooLargeError when they are over the ring's frame limit.
        """
        text = json.dumps(list(names)).encode()
        text += b" " * (-len(text) % 8)
        payload = b"".join(
            (
                KERNEL.pack(step_id, len(text), 0),
                text,
                np.asarray(start_ns, "<i8").tobytes(),
                np.asarray(layer, "<i4").tobytes(),
                np.asarray(kernel, "<u4").tobytes(),
                np.asarray(duration_us, "<f4").tobytes(),
            )
        )
        self._append(FrameType.KERNEL, payload, len(start_ns))

    def gpu(self, *, index: int, values: Sequence[float], unavailable: str) -> None:
        """One telemetry sample; `values` as in docs/ring-format.md, NaN: not available."""
        reason = cut(unavailable, NAME_BYTES)
        self._append(FrameType.GPU, GPU.pack(index, len(reason), 0, *values) + reason)

    def memory(self, *, index: int, values: Sequence[float], unavailable: str) -> None:
        """The process's memory as its allocator sees it; `index` -1: host memory only.

        `values` as in docs/ring-format.md, NaN: not available.
        """
        reason = cut(unavailable, NAME_BYTES)
        self._append(FrameType.MEMORY, MEMORY.pack(index, len(reason), 0, *values) + reason)

    def mark(self, text: str) -> None:
        """Free text of the operator, cut at 4096 bytes."""
        self._append(FrameType.MARK, cut(text, TEXT_BYTES))

    def _append(self, kind: FrameType, payload: bytes, records: int = 1) -> None:
        self._ring.append(kind, SCHEMA_VERSION, payload, records)

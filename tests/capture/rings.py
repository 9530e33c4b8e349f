"""Rings and traces that tests write: engines in a few lines, contents that check themselves."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np

from capture.frames import TraceWriter
from capture.reader import FrameBatch, RingReader
from capture.ring import RingWriter

MIB = 1 << 20


def new_ring(directory: Path, capacity: int = MIB, engine_id: UUID | None = None) -> RingWriter:
    engine_id = engine_id or uuid4()
    path = directory / f"{engine_id}.ring"
    return RingWriter.create(path, capacity_bytes=capacity, engine_id=engine_id)


def numbered(sequence: int, size: int) -> bytes:
    """A payload that says which frame it belongs to and in every byte."""
    return sequence.to_bytes(8, "little") + bytes([sequence % 251]) * (size - 8)


def check_numbered(batch: FrameBatch) -> None:
    """Every frame of the batch holds the payload that `numbered` made for it."""
    for index, sequence in enumerate(batch.headers["sequence"].tolist()):
        payload = bytes(batch.payload(index))
        assert payload == numbered(sequence, len(payload))


def read_all(reader: RingReader) -> int:
    """Read until nothing is left, checking each frame; the number delivered."""
    delivered = 0
    while True:
        batch = reader.read(64 * 1024)
        if not len(batch) and not batch.gaps:
            return delivered
        check_numbered(batch)
        delivered += len(batch)


def write_step(
    trace: TraceWriter,
    step_id: int,
    rows: int,
    *,
    phase: int = 0,
    prefill_tokens: int = 0,
    forward_us: float = 3000.0,
    latency_us: float = 3000.0,
    slot: int = 0,
    position: int | None = None,
    start_ns: int | None = None,
    schedule_us: float = 10.0,
    token_ids: np.ndarray | None = None,
    logprobs: np.ndarray | None = None,
) -> None:
    """A step of `rows` requests with slots `slot`, `slot` + 1, ...; token id = step id."""
    numbers = np.arange(slot, slot + rows, dtype=np.uint32)
    full = np.full(rows, step_id, np.uint32)
    floats = np.full(rows, -0.5, np.float32)
    trace.step(
        step_id=step_id,
        start_ns=start_ns if start_ns is not None else time.monotonic_ns(),
        schedule_us=schedule_us,
        prepare_us=20.0,
        forward_us=forward_us,
        sample_us=30.0,
        device_us=float("nan"),
        prefill_tokens=prefill_tokens,
        decode_tokens=rows,
        running=rows,
        waiting=0,
        kv_used=10,
        kv_total=100,
        prefix_hit_tokens=0,
        graph_bucket=-1,
        slots=numbers,
        positions=full if position is None else np.full(rows, position, np.uint32),
        token_ids=full if token_ids is None else token_ids,
        phases=np.full(rows, phase, np.uint32),
        latency_us=np.full(rows, latency_us, np.float32),
        logprobs=floats if logprobs is None else logprobs,
        margins=-floats,
        kv_blocks=np.ones(rows, np.uint32),
    )


def write_request(trace: TraceWriter, slot: int, **changed: object) -> str:
    """A REQUEST frame; returns the request id in hex."""
    request_id = uuid4().bytes
    fields: dict[str, object] = {
        "request_id": request_id,
        "slot": slot,
        "arrival_ns": time.monotonic_ns(),
        "prompt_tokens": 12,
        "cached_tokens": 4,
        "max_tokens": 64,
        "priority": 50,
        "adjustment": 0,
        "tenant": "acme",
        "route": "chat",
        "class_key": "acme/chat/-",
    }
    trace.request(**{**fields, **changed})  # type: ignore[arg-type]
    return request_id.hex()


def write_finish(trace: TraceWriter, slot: int, **changed: object) -> None:
    now = time.monotonic_ns()
    fields: dict[str, object] = {"slot": slot, "reason": "stop", "output_tokens": 1}
    for name in ("admitted", "first_token", "last_token", "detokenized", "serialized", "flushed"):
        fields[f"{name}_ns"] = now
    trace.finish(**{**fields, **changed})  # type: ignore[arg-type]


def engine(directory: Path, *, requests: int, steps: int, capacity: int = 8 * MIB) -> RingWriter:
    """A whole trace: ENGINE, requests, steps (the first one prefills), finishes; not closed."""
    ring = new_ring(directory, capacity)
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny", "fingerprint": "f00d", "weights": "int8"})
    for slot in range(requests):
        write_request(trace, slot)
    for step_id in range(steps):
        write_step(trace, step_id, requests, phase=1 if step_id == 0 else 0)
    for slot in range(requests):
        write_finish(trace, slot, output_tokens=steps, reason="length")
    return ring

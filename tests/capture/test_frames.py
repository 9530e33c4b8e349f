"""Frames: what the engine writes is what a reader gets, and what does not fit is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    decode_steps,
    well_formed,
)
from capture.errors import FrameError, FrameTooLargeError
from capture.frames import EVENT_1, NONE, STEP, FrameType, TraceWriter, cut
from capture.reader import FrameBatch, RingReader
from capture.ring import MIN_CAPACITY, RingWriter
from tests.capture.rings import new_ring, write_finish, write_request, write_step

NAMES = st.text(max_size=400)


def frames(ring: RingWriter) -> list[Frame]:
    batch = RingReader(ring.path).read()
    return [decode(batch, index) for index in range(len(batch))]


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    return new_ring(tmp_path)


def test_all_nine_types_come_back(ring: RingWriter) -> None:
    trace = TraceWriter(ring)
    trace.engine({"model": "m", "weights": "int8"})
    request_id = write_request(trace, 3, tenant="Zoë", class_key="Zoë/chat/ab12")
    write_step(trace, 9, 4)
    write_finish(trace, 3, reason="length", output_tokens=7, first_token_ns=0)
    trace.event(
        kind="preempted",
        request_id=bytes.fromhex(request_id),
        slot=3,
        detail="no blocks",
        duration_ns=5,
    )
    trace.event(kind="degraded", request_id=None, slot=None, detail="")
    trace.kernels(
        step_id=9,
        names=["attention", "matmul"],
        start_ns=np.array([5, 6]),
        layer=np.array([0, -1]),
        kernel=np.array([1, 0]),
        duration_us=np.array([1.5, 2.5]),
    )
    trace.gpu(index=1, values=[50.0, *[math.nan] * 8], unavailable="MIG")
    trace.memory(index=-1, values=[7.0, *[math.nan] * 5], unavailable="no CUDA")
    trace.mark("deploy 7")
    engine, request, step, finish, event, other, kernel, gpu, memory, mark = frames(ring)
    assert isinstance(engine, EngineFrame)
    assert engine.info == {"model": "m", "weights": "int8"}
    assert isinstance(request, RequestFrame)
    assert (request.request_id, request.slot, request.tenant) == (request_id, 3, "Zoë")
    assert request.class_key == "Zoë/chat/ab12"
    assert isinstance(step, StepFrame)
    assert step.step["step_id"] == 9
    assert math.isnan(step.step["device_us"])
    assert step.rows["slot"].tolist() == [0, 1, 2, 3]
    assert step.rows["margin"].tolist() == [0.5] * 4
    assert isinstance(finish, FinishFrame)
    assert (finish.reason, finish.output_tokens, finish.first_token_ns) == ("length", 7, 0)
    assert isinstance(event, EventFrame)
    assert (event.kind, event.request_id, event.slot) == ("preempted", request_id, 3)
    assert event.duration_ns == 5
    assert isinstance(other, EventFrame)
    assert (other.request_id, other.slot, other.detail) == (None, None, "")
    assert isinstance(kernel, KernelFrame)
    assert [kernel.names[index] for index in kernel.kernel] == ["matmul", "attention"]
    assert kernel.start_ns.tolist() == [5, 6]
    assert isinstance(gpu, GpuFrame)
    assert (gpu.utilization_pct, gpu.unavailable) == (50.0, "MIG")
    assert math.isnan(gpu.age_ms)
    assert isinstance(memory, MemoryFrame)
    assert (memory.device, memory.rss_bytes, memory.unavailable) == (-1, 7.0, "no CUDA")
    assert isinstance(mark, MarkFrame)
    assert mark.text == "deploy 7"


def test_events_of_the_first_schema_are_read(ring: RingWriter) -> None:
    payload = EVENT_1.pack(bytes(16), NONE, 8, 3) + b"degradedmem"
    ring.append(FrameType.EVENT, 1, payload)
    (frame,) = frames(ring)
    assert isinstance(frame, EventFrame)
    assert (frame.kind, frame.detail, frame.slot) == ("degraded", "mem", None)
    assert frame.duration_ns is None


@settings(max_examples=50, deadline=None)
@given(tenant=NAMES, route=NAMES, class_key=NAMES, priority=st.integers(-(2**31), 2**31 - 1))
def test_any_names_come_back_up_to_their_limit(
    tmp_path_factory: pytest.TempPathFactory,
    tenant: str,
    route: str,
    class_key: str,
    priority: int,
) -> None:
    ring = new_ring(tmp_path_factory.mktemp("ring"), MIN_CAPACITY)
    write_request(
        TraceWriter(ring), 0, tenant=tenant, route=route, class_key=class_key, priority=priority
    )
    (frame,) = frames(ring)
    assert isinstance(frame, RequestFrame)
    names = [cut(name, 1024).decode() for name in (tenant, route, class_key)]
    assert [frame.tenant, frame.route, frame.class_key] == names
    assert frame.priority == priority
    ring.close()


@given(st.text(), st.integers(0, 20))
def test_texts_are_cut_between_characters(text: str, limit: int) -> None:
    data = cut(text, limit)
    assert len(data) <= limit
    assert text.encode("utf-8", "replace").decode().startswith(data.decode())


def test_a_step_counts_its_tokens_and_not_its_chunks(ring: RingWriter) -> None:
    trace = TraceWriter(ring)
    for phase, dtype in ((0, np.uint8), (1, np.int64), (2, np.uint32)):
        rows = np.arange(5)
        trace.step(
            step_id=phase,
            start_ns=1,
            schedule_us=1,
            prepare_us=1,
            forward_us=1,
            sample_us=1,
            device_us=1,
            prefill_tokens=0,
            decode_tokens=5,
            running=5,
            waiting=0,
            kv_used=0,
            kv_total=0,
            prefix_hit_tokens=0,
            graph_bucket=-1,
            slots=rows,
            positions=rows,
            token_ids=np.full(5, NONE if phase == 2 else 7, np.int64),
            phases=np.full(5, phase, dtype),
            latency_us=rows,
            logprobs=rows,
            margins=rows,
            kv_blocks=rows,
        )
    assert ring.counters.tokens == 10
    assert RingReader(ring.path).read().headers["tokens"].tolist() == [5, 5, 0]


def test_a_step_over_the_limit_is_split_and_stays_one_step(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    write_step(TraceWriter(ring), 1, 1000)
    parts = frames(ring)
    assert [part.step["part"] for part in parts if isinstance(part, StepFrame)] == [0, 1, 2, 3]
    slots = np.concatenate([part.rows["slot"] for part in parts if isinstance(part, StepFrame)])
    assert slots.tolist() == list(range(1000))
    assert ring.counters.tokens == 1000


def test_an_engine_description_over_the_limit_is_a_clear_error(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    with pytest.raises(FrameTooLargeError):
        TraceWriter(ring).engine({"x": "y" * 100_000})


def test_many_steps_decode_as_each_alone_does(ring: RingWriter) -> None:
    trace = TraceWriter(ring)
    for step_id, rows in enumerate([3, 1, 0, 17, 256, 2]):
        write_step(trace, step_id, rows, slot=step_id)
        trace.mark("between")
    batch = RingReader(ring.path).read()
    indices = np.flatnonzero(batch.headers["type"] == FrameType.STEP)
    assert well_formed(batch, indices).all()
    together = decode_steps(batch, indices)
    alone = [decode(batch, index) for index in indices.tolist()]
    steps = [frame for frame in alone if isinstance(frame, StepFrame)]
    assert together.steps["step_id"].tolist() == [frame.step["step_id"] for frame in steps]
    assert together.counts.tolist() == [3, 1, 0, 17, 256, 2]
    for name, column in together.rows.items():
        expected = np.concatenate([frame.rows[name] for frame in steps])
        np.testing.assert_array_equal(column, expected)


def one_frame(ring: RingWriter, kind: int, schema: int, payload: bytes, records: int) -> FrameBatch:
    ring.append(kind, schema, payload, records)
    return RingReader(ring.path).read()


@pytest.mark.parametrize(
    ("kind", "schema", "payload", "records", "message"),
    [
        (99, 1, b"", 1, "unknown type 99"),
        (FrameType.MARK, 3, b"x", 1, "payload schema 3"),
        (FrameType.MARK, 0, b"x", 1, "payload schema 0"),
        (FrameType.ENGINE, 1, b"{", 1, "ENGINE frame 0 of 1 bytes"),
        (FrameType.ENGINE, 1, b"[]", 1, "no JSON object"),
        (FrameType.REQUEST, 1, b"short", 1, "REQUEST"),
        (FrameType.STEP, 1, bytes(STEP.size + 32), 2, "STEP"),
        (FrameType.FINISH, 1, bytes(57) + b"\x09", 1, "FINISH"),
        (FrameType.EVENT, 1, bytes(24) + b"tail", 1, "EVENT"),
        (FrameType.KERNEL, 1, bytes(16), 1, "KERNEL"),
        (FrameType.GPU, 1, bytes(10), 1, "GPU"),
    ],
)
def test_what_does_not_fit_is_an_error_and_no_guess(
    ring: RingWriter, kind: int, schema: int, payload: bytes, records: int, message: str
) -> None:
    batch = one_frame(ring, kind, schema, payload, records)
    with pytest.raises(FrameError, match=message):
        decode(batch, 0)


def test_steps_whose_count_disagrees_with_their_length_are_sorted_out(ring: RingWriter) -> None:
    batch = one_frame(ring, FrameType.STEP, 1, bytes(STEP.size + 64), 3)
    assert well_formed(batch, np.array([0])).tolist() == [False]


@settings(max_examples=200, deadline=None)
@given(kind=st.integers(1, 8), payload=st.binary(max_size=300), records=st.integers(0, 9))
def test_random_payloads_decode_or_raise_frame_error(
    tmp_path_factory: pytest.TempPathFactory, kind: int, payload: bytes, records: int
) -> None:
    ring = new_ring(tmp_path_factory.mktemp("ring"), MIN_CAPACITY)
    batch = one_frame(ring, kind, 1, payload, records)
    try:
        decoded = decode(batch, 0)
    except FrameError:
        decoded = FrameError
    ring.close()
    assert decoded is not None

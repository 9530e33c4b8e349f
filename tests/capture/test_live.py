"""What `inferloop top` computes: rates and percentiles of frames whose content is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from capture.frames import TraceWriter
from capture.live import MAX_REQUESTS, UNKNOWN, LiveEngine, LiveSnapshot
from capture.reader import FrameBatch, Gap, RingReader
from tests.capture.rings import MIB, new_ring, write_finish, write_request, write_step

SECOND = 1_000_000_000
START = 1000 * SECOND


class Tape:
    """Frames with times of our own choice."""

    def __init__(self, directory: Path) -> None:
        self._ring = new_ring(directory, 16 * MIB)
        self._reader = RingReader(self._ring.path)
        self._times: list[int] = []
        self.trace = TraceWriter(self._ring)

    def at(self, seconds: float) -> TraceWriter:
        """The frame written next happened that long after the engine's start."""
        self._times.append(START + int(seconds * SECOND))
        return self.trace

    def batch(self) -> FrameBatch:
        batch = self._reader.read(16 * MIB)
        headers = batch.headers.copy()
        assert len(headers) == len(self._times)
        headers["time_ns"] = self._times
        self._times = []
        return replace(batch, headers=headers)


@pytest.fixture
def tape(tmp_path: Path) -> Tape:
    return Tape(tmp_path)


def engine() -> LiveEngine:
    return LiveEngine(started_ns=START, window_s=10)


def shown(live: LiveEngine, tape: Tape, seconds: float) -> LiveSnapshot:
    now = START + int(seconds * SECOND)
    live.add(tape.batch(), now)
    return live.snapshot(now)


def test_rates_and_percentiles_of_known_records(tape: Tape) -> None:
    for slot in range(4):
        write_request(tape.at(0.1), slot, tenant="ab"[slot % 2])
    for slot in range(4):
        write_step(tape.at(0.2), slot, 1, slot=slot, phase=1, latency_us=10_000 * (slot + 1))
    for number in range(100):
        step = tape.at(1 + number * 0.05)
        write_step(step, 4 + number, 4, latency_us=1000 * (number + 1))
    view = shown(engine(), tape, 8)
    assert view.window_s == 8
    assert view.tokens_per_s == 404 / 8
    assert view.steps_per_s == 104 / 8
    assert (view.itl.count, view.itl.p50_ms) == (400, 50.5)
    assert view.itl.p99_ms == pytest.approx(99.01)
    assert (view.ttft.count, view.ttft.p50_ms) == (4, 25.0)
    assert view.ttft.p99_ms == pytest.approx(39.7)
    assert (view.running, view.waiting, view.kv_used, view.kv_total) == (4, 0, 10, 100)
    first, second = view.tenants
    assert (first.tenant, first.running, first.tokens_per_s) == ("a", 2, 202 / 8)
    assert first.ttft.p50_ms == pytest.approx(20.0)
    assert second.ttft.p99_ms == pytest.approx(39.8)


def test_the_window_slides(tape: Tape) -> None:
    live = engine()
    for number in range(200):
        write_step(tape.at(number * 0.1), number, 1, latency_us=1000 if number < 100 else 3000)
    view = shown(live, tape, 20)
    assert view.window_s == 10
    assert (view.itl.count, view.itl.p50_ms) == (100, 3.0)
    assert view.tokens_per_s == 10
    later = live.snapshot(START + 25 * SECOND)
    assert later.itl.count == 50
    assert later.tokens_per_s == 5
    empty = live.snapshot(START + 60 * SECOND)
    assert (empty.itl.count, empty.itl.p99_ms, empty.tokens_per_s) == (0, None, 0)


def test_an_old_backlog_is_passed_over_but_its_tenants_are_remembered(tape: Tape) -> None:
    write_request(tape.at(0), 7, tenant="acme")
    for number in range(500):
        write_step(tape.at(number * 0.01), number, 1, slot=7)
    write_step(tape.at(99), 500, 1, slot=7)
    view = shown(engine(), tape, 100)
    assert view.itl.count == 1
    assert [(one.tenant, one.running) for one in view.tenants] == [("acme", 1)]


def test_tokens_without_a_known_request_have_no_tenant(tape: Tape) -> None:
    write_step(tape.at(1), 1, 3)
    [tenant] = shown(engine(), tape, 2).tenants
    assert (tenant.tenant, tenant.tokens_per_s) == (UNKNOWN, 1.5)


def test_a_finished_request_keeps_its_tenant_within_its_batch(tape: Tape) -> None:
    write_request(tape.at(0.5), 1, tenant="acme")
    write_step(tape.at(1), 1, 1, slot=1)
    write_finish(tape.at(1), 1, reason="length")
    view = shown(engine(), tape, 2)
    [tenant] = view.tenants
    assert (tenant.tenant, tenant.running, tenant.finished) == ("acme", 0, 1)
    assert tenant.tokens_per_s == 0.5
    assert view.finished == {"length": 1}


def test_prefill_chunks_are_no_tokens_and_hits_have_a_share(tape: Tape) -> None:
    write_step(tape.at(1), 1, 1, phase=2, prefill_tokens=300)
    view = shown(engine(), tape, 2)
    assert view.tokens_per_s == view.itl.count == view.ttft.count == 0
    assert view.prefix_hit_share == 0
    live = engine()
    arrays = {name: np.zeros(1, np.uint32) for name in ("slots", "positions", "token_ids")}
    tape.at(1).step(
        step_id=2, start_ns=0, schedule_us=0, prepare_us=0, forward_us=0, sample_us=0,
        device_us=0, prefill_tokens=30, decode_tokens=0, running=1, waiting=2, kv_used=1,
        kv_total=2, prefix_hit_tokens=10, graph_bucket=-1, phases=np.ones(1, np.uint32),
        latency_us=np.full(1, np.nan), logprobs=np.zeros(1), margins=np.zeros(1),
        kv_blocks=np.zeros(1), **arrays,
    )  # fmt: skip
    view = shown(live, tape, 2)
    assert view.prefix_hit_share == 0.25
    assert view.ttft.count == 0, "a latency that was not measured is none"
    assert view.tokens_per_s == 0.5


def test_a_step_in_parts_counts_once(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, 64 * 1024)
    reader = RingReader(ring.path)
    write_step(TraceWriter(ring), 1, 400)
    batch = reader.read()
    assert len(batch) == 2
    live = LiveEngine(started_ns=int(batch.headers["time_ns"][0]) - SECOND, window_s=10)
    now = int(batch.headers["time_ns"][-1]) + 1
    live.add(batch, now)
    view = live.snapshot(now)
    assert view.steps_per_s * view.window_s == pytest.approx(1)
    assert view.tokens_per_s * view.window_s == pytest.approx(400)


def test_losses_and_skips_are_told_apart_and_stay_in_the_rates(tape: Tape) -> None:
    live = engine()
    write_step(tape.at(1), 1, 100)
    batch = tape.batch()
    before, lost = Gap(0, 5, 50), Gap(9, 2, 60)
    live.add(replace(batch, gaps=(before, lost)), START + SECOND)
    live.skip(Gap(12, 1, 40), START + SECOND)
    view = live.snapshot(START + 2 * SECOND)
    assert (view.lost_frames, view.lost_tokens, view.skipped_tokens) == (2, 60, 40)
    assert view.tokens_per_s == 100
    assert view.sampled_share == 0.5


def test_an_idle_engine_runs_nothing(tape: Tape) -> None:
    write_request(tape.at(1), 0)
    write_step(tape.at(1), 1, 1)
    live = engine()
    view = shown(live, tape, 9)
    assert (view.running, view.step_age_s) == (1, 8), "its step may be a long one"
    write_finish(tape.at(9), 0)
    assert shown(live, tape, 9.1).running == 0


def test_events_preemptions_marks_and_devices(tape: Tape) -> None:
    for number in range(12):
        tape.at(1 + number / 10).event(kind="preempted", request_id=None, slot=number, detail="x")
    tape.at(3).mark("deployed")
    nan = float("nan")
    tape.at(3).gpu(index=1, values=[nan] * 9, unavailable="no driver")
    tape.at(3).memory(index=-1, values=[2.0**30, *[nan] * 5], unavailable="")
    view = shown(engine(), tape, 4)
    assert view.preemptions == 12
    assert [(event.text, event.count) for event in view.events] == [
        ("preempted slot 11: x", 12),
        ("mark: deployed", 1),
    ]
    assert view.events[-1].at_ns == START + 3 * SECOND
    assert view.devices == ["GPU 1: not available: no driver"]
    assert view.memory == ["resident 1,024 MiB"]


def test_many_events_of_one_kind_hide_no_mark(tape: Tape) -> None:
    for number in range(3):
        tape.at(1).mark(f"deploy {number % 2}")
    for number in range(100):
        pause = tape.at(2 + number / 100)
        pause.event(kind="gc_pause", request_id=None, slot=None, detail="", duration_ns=1_000_000)
    for number in range(20):
        tape.at(4 + number / 10).event(
            kind=f"kind {number % 5}", request_id=None, slot=None, detail=""
        )
    events = shown(engine(), tape, 7).events
    assert len(events) == 8
    assert [event.text for event in events[:3]] == [
        "mark: deploy 1",
        "mark: deploy 0",
        "gc_pause (1.00 ms)",
    ]
    assert events[2].count == 100


def test_frames_that_cannot_be_decoded_are_counted(tape: Tape) -> None:
    ring = tape.trace._ring
    tape.at(1)
    ring.append(3, 1, bytes(72 + 32), records=2)
    tape.at(1)
    ring.append(2, 1, b"short")
    tape.at(1)
    ring.append(77, 1, b"?")
    assert shown(engine(), tape, 2).undecodable == 3


def test_memory_stays_bounded_whatever_comes(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.live.MAX_TOKENS", 5000)
    live = engine()
    for number in range(100):
        write_step(tape.at(number * 0.1), number, 100)
    view = shown(live, tape, 10)
    assert live._kept_tokens <= 5000
    assert view.window_s < 6, "shorter than asked, and said so"
    assert view.tokens_per_s == pytest.approx(1000, rel=0.1)
    for slot in range(MAX_REQUESTS + 10):
        live._tenants[slot] = "x"
    write_request(tape.at(10), MAX_REQUESTS + 99)
    size = len(live._tenants)
    live.add(tape.batch(), START + 10 * SECOND)
    assert len(live._tenants) == size

"""Garbage collection pauses reach the trace, from whatever thread, whatever lock it holds."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.gc_watch import MIN_PAUSE_NS, GcWatch, Pause
from tests.engine.recorder import RecordingWriter
from tests.engine.test_core import Start, make, start, wait_until, writer

__all__ = ["start", "writer"]  # fixtures

CYCLES = 60_000


def collect_garbage() -> None:
    """One collection with so many cycles to free that it takes milliseconds."""
    gc.disable()
    for _ in range(CYCLES):
        cycle: list[Any] = []
        cycle.append(cycle)
    gc.collect()
    gc.enable()


@pytest.fixture
def told() -> Iterator[list[Pause]]:
    pauses: list[Pause] = []
    watch = GcWatch(pauses.append)
    watch.start()
    yield pauses
    watch.stop()
    watch.stop()
    assert watch._collection not in gc.callbacks


def test_a_long_collection_is_told_with_its_time(told: list[Pause]) -> None:
    before = time.monotonic_ns()
    collect_garbage()
    after = time.monotonic_ns()
    (pause,) = [pause for pause in told if pause.collected >= CYCLES]
    assert pause.generation == 2
    assert before <= pause.ended_ns - pause.duration_ns < pause.ended_ns <= after
    assert pause.duration_ns >= MIN_PAUSE_NS


def test_a_short_collection_is_not_told(told: list[Pause]) -> None:
    gc.collect(0)
    gc.collect(0)
    assert [pause for pause in told if pause.generation == 0] == []


def test_a_watch_that_starts_inside_a_collection_tells_nothing_wrong() -> None:
    pauses: list[Pause] = []
    GcWatch(pauses.append)._collection("stop", {"generation": 2, "collected": 0})
    assert pauses == []


def test_an_idle_engine_writes_the_pause_at_once(start: Start, writer: RecordingWriter) -> None:
    start()
    collect_garbage()
    wait_until(lambda: bool(writer.events("gc_pause")))
    event = writer.events("gc_pause")[-1]
    found = re.fullmatch(r"generation=2 collected=(\d+) late_us=(\d+)", event["detail"])
    assert found is not None
    assert event["duration_ns"] >= MIN_PAUSE_NS
    assert event["slot"] is event["request_id"] is None


def test_a_pause_within_a_step_is_written_later_and_says_how_much(
    start: Start, writer: RecordingWriter
) -> None:
    engine = start()
    runner: Any = engine._runner
    run, late_s = runner.run, 0.05

    def collecting(batch: Any) -> Any:
        runner.run = run
        collect_garbage()
        time.sleep(late_s)
        return run(batch)

    runner.run = collecting
    list(engine.submit(make("hello", 3)))
    wait_until(lambda: bool(writer.events("gc_pause")))
    details = [event["detail"] for event in writer.events("gc_pause")]
    late_us = max(int(re.findall(r"late_us=(\d+)", detail)[0]) for detail in details)
    assert late_us >= late_s * 1e6


def test_a_collection_while_the_ring_is_locked_does_not_block(start: Start) -> None:
    """The hook may run in the very thread that holds the ring's lock."""
    engine = start()
    lock = threading.Lock()
    tracer: Any = engine._tracer
    event = tracer._writer.event
    done = threading.Event()

    def locked(**fields: Any) -> None:
        with lock:
            event(**fields)

    tracer._writer.event = locked
    with lock:
        collect_garbage()
        done.set()
    assert done.is_set()
    wait_until(lambda: bool(tracer._writer.events("gc_pause")))


def test_nothing_is_watched_once_the_engine_has_ended(start: Start) -> None:
    before = len(gc.callbacks)
    engine = start()
    assert len(gc.callbacks) == before + 1
    engine.stop()
    assert len(gc.callbacks) == before

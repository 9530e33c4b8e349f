"""Garbage collection pauses reach the trace, from whatever thread, whatever lock it holds."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.gc_watch import MIN_PAUSE_NS, GcWatch, Pause
from tests.engine.recorder import RecordingWriter
from tests.engine.test_core import Start, make, start, writer
from tests.waiting import until

__all__ = ["start", "writer"]  # fixtures

CYCLES = 60_000
DETAIL = re.compile(
    r"generation=(?P<generation>\d) collected=(?P<collected>\d+) late_us=(?P<late_us>\d+)"
)


def collect_garbage() -> None:
    """One collection with so many cycles to free that it takes milliseconds."""
    gc.disable()
    for _ in range(CYCLES):
        cycle: list[Any] = []
        cycle.append(cycle)
    gc.collect()
    gc.enable()


def traced(writer: RecordingWriter) -> tuple[dict[str, Any], re.Match[str]]:
    """The event of `collect_garbage` and what its detail says; Python may collect on its own."""

    def look() -> tuple[dict[str, Any], re.Match[str]] | None:
        for event in writer.events("gc_pause"):
            detail = DETAIL.fullmatch(event["detail"])
            assert detail is not None, event
            if int(detail["collected"]) >= CYCLES:
                return event, detail
        return None

    found = until(look, "the pause is traced")
    assert found is not None
    return found


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


@pytest.mark.parametrize(("duration_ns", "told"), [(MIN_PAUSE_NS - 1, 0), (MIN_PAUSE_NS, 1)])
def test_a_short_collection_is_not_told(
    monkeypatch: pytest.MonkeyPatch, duration_ns: int, told: int
) -> None:
    times = iter([1000, 1000 + duration_ns])
    clock = SimpleNamespace(monotonic_ns=lambda: next(times))
    monkeypatch.setattr("engine.gc_watch.time", clock)
    pauses: list[Pause] = []
    watch = GcWatch(pauses.append)
    for phase in ("start", "stop"):
        watch._collection(phase, {"generation": 0, "collected": 1})
    assert len(pauses) == told


def test_a_watch_that_starts_inside_a_collection_tells_nothing_wrong() -> None:
    pauses: list[Pause] = []
    GcWatch(pauses.append)._collection("stop", {"generation": 2, "collected": 0})
    assert pauses == []


def test_an_idle_engine_writes_the_pause_at_once(start: Start, writer: RecordingWriter) -> None:
    start()
    collect_garbage()
    event, detail = traced(writer)
    assert detail["generation"] == "2"
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
    _, detail = traced(writer)
    assert int(detail["late_us"]) >= late_s * 1e6


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
    traced(tracer._writer)


def test_nothing_is_watched_once_the_engine_has_ended(start: Start) -> None:
    before = len(gc.callbacks)
    engine = start()
    assert len(gc.callbacks) == before + 1
    engine.stop()
    assert len(gc.callbacks) == before

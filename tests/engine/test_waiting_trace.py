"""What the trace says of requests that had to wait, went first for their age or were sent late."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

import pytest

from capture.frames import TraceWriter
from engine.admission import QueueLimits
from engine.core import Engine
from engine.handle import LATE_NS
from engine.metrics import EngineMetrics
from engine.request import Request, SamplingParams
from engine.step import Limits
from engine.tracer import StepTracer
from engine.waiting import AGING_NS
from tests.engine.fake_runner import ByteTokenizer, FakeRunner
from tests.engine.live_server import TEXT, body, chunks, live_server
from tests.engine.recorder import RecordingWriter
from tests.engine.test_scheduler import Simulation
from tests.waiting import until


@pytest.fixture
def writer() -> RecordingWriter:
    return RecordingWriter()


@pytest.fixture
def held(writer: RecordingWriter) -> Iterator[tuple[Engine, FakeRunner]]:
    """An engine with a single seat, held in its first step until `release`."""
    runner = FakeRunner()
    runner.hold(after=0)
    engine = Engine(
        runner,
        ByteTokenizer(),
        limits=Limits(max_running=1, token_budget=64),
        queue_limits=QueueLimits(100, 10_000),
        metrics=EngineMetrics("fake"),
        tracer=StepTracer(cast(TraceWriter, writer)),
    )
    engine.start()
    yield engine, runner
    runner.release()
    engine.stop(drain=False)


def request(number: int, **fields: object) -> Request:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    return Request(bytes([number]) * 16, [1, 2, 3], params, **fields)  # type: ignore[arg-type]


def test_a_request_without_a_seat_is_traced_when_it_begins_to_wait(
    held: tuple[Engine, FakeRunner], writer: RecordingWriter
) -> None:
    engine, runner = held
    first = engine.submit(request(1))
    runner.until_held()
    second = engine.submit(request(2, tenant="acme", class_key="acme/chat/-", priority=30))
    runner.release()
    for handle in (first, second):
        list(handle)
    (event,) = writer.events("queued")
    assert (event["request_id"], event["slot"]) == (bytes([2]) * 16, second.request.slot)
    told = dict(part.split("=") for part in event["detail"].split())
    assert int(told.pop("waited_us")) >= 0
    assert told == {
        "running": "1",
        "waiting": "1",
        "priority": "30",
        "adjustment": "0",
        "prompt_tokens": "3",
        "max_tokens": "40",
        "tenant": "acme",
        "class": "acme/chat/-",
    }
    names = [name for name, fields in writer.calls if fields.get("slot") == second.request.slot]
    assert names[:2] == ["event", "request"]


def test_an_admission_before_a_more_important_request_is_known_by_its_step() -> None:
    sim = Simulation(max_running=1)
    old = sim.add(5, 4, priority=0)
    alone = sim.step()
    assert alone is not None
    assert alone.aged == []
    sim.until(lambda: old.output_len >= 4)
    old = sim.add(5, 4, priority=0)
    aged = []
    while old.admission < 0:
        while len(sim.scheduler.waiting) < 4:
            sim.add(5, 4, priority=100)
        step = sim.step()
        assert step is not None
        aged += step.aged
    assert sim.now_ns >= AGING_NS
    assert aged == [old]


def test_the_oldest_is_not_said_to_go_first_for_its_age_when_it_would_anyway() -> None:
    sim = Simulation(max_running=1)
    requests = [sim.add(5, 2) for _ in range(8)]
    sim.now_ns += AGING_NS
    steps = [sim.step() for _ in range(40)]
    assert all(one.output_len >= 2 for one in requests)
    assert not any(step.aged for step in steps if step is not None)


def test_the_latest_chunk_is_traced_and_how_many_were_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.handle.LATE_NS", 1)
    with live_server() as server:
        answer = server.client.post(TEXT, json=body(stream=True, max_tokens=9))
        sent = chunks(answer.text)
        until(lambda: server.writer.of("finish"), "the request's end is traced")
    (event,) = server.writer.events("sent_late")
    match = re.fullmatch(r"position=(\d+) chunks=(\d+)", event["detail"])
    assert match is not None
    assert int(match[2]) == len(sent) - 1, "the last chunk is the answer's end"
    assert 0 <= int(match[1]) < 9
    assert event["duration_ns"] > 0


def test_chunks_in_time_leave_nothing_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.handle.LATE_NS", 10**6 * LATE_NS)
    with live_server() as server:
        server.client.post(TEXT, json=body(stream=True, max_tokens=9))
        until(lambda: server.writer.of("finish"), "the request's end is traced")
    assert server.writer.events("sent_late") == []

"""The causes as a real engine makes them: scheduled, traced, collected and judged end to end.

The runner has no model: it sleeps as long as the work would take and says so in its durations. The
engine's clock moves only when somebody sleeps, so that a busy machine is no cause of its own.
"""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import pytest

from capture.frames import TraceWriter
from capture.lake import open_connection
from capture.ring import RingWriter
from engine.admission import QueueLimits
from engine.batch import StepBatch, StepResult
from engine.core import Engine
from engine.handle import RequestHandle
from engine.metrics import EngineMetrics
from engine.request import Request, SamplingParams
from engine.step import Limits
from engine.tracer import StepTracer
from tests.capture.lakes import commit_rings
from tests.capture.rings import MIB, new_ring
from tests.engine.fake_runner import ByteTokenizer, FakeRunner
from tests.engine.live_server import TEXT, body, live_server
from tests.waiting import until

STEP_S = 0.004
TOKEN_S = 0.0001
PAUSE_S = 0.2
TOKENS = 400
"""Of an answer that fits into no buffer."""


class Clock:
    """Stands in for the module `time`: sleeping is all that takes any."""

    def __init__(self) -> None:
        self._ns = time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        self._ns += round(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self._ns

    def monotonic(self) -> float:
        return self._ns / 1e9

    def time_ns(self) -> int:
        return time.time_ns()


class SleepingRunner(FakeRunner):
    """A step takes STEP_S and TOKEN_S for each prompt token. `forward_late` and `sample_late` map
    a step's number to what happens in it besides."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"num_blocks": 400, "max_model_len": 4000, **options})
        self.clock = Clock()
        self.forward_late: dict[int, Callable[[], object]] = {}
        self.sample_late: dict[int, Callable[[], object]] = {}

    def run(self, batch: StepBatch) -> StepResult:
        number = len(self.steps)
        began_ns = self.clock.monotonic_ns()
        self.clock.sleep(STEP_S + TOKEN_S * (len(batch.token_ids) - len(batch.sampling)))
        self.forward_late.get(number, bool)()
        computed_ns = self.clock.monotonic_ns()
        result = super().run(batch)
        self.sample_late.get(number, bool)()
        sampled_ns = self.clock.monotonic_ns()
        return replace(
            result,
            prepare_us=0.0,
            forward_us=(computed_ns - began_ns) / 1e3,
            sample_us=(sampled_ns - computed_ns) / 1e3,
        )

    def pause(self) -> None:
        self.clock.sleep(PAUSE_S)

    def collect_garbage(self) -> None:
        """One collection that takes many times as long as a step."""

        def take_time(phase: str, _: dict[str, Any]) -> None:
            if phase == "start":
                self.pause()

        gc.callbacks.append(take_time)
        gc.collect()
        gc.callbacks.remove(take_time)


@contextmanager
def engine(home: Path, runner: SleepingRunner, **limits: int) -> Iterator[Engine]:
    """An engine that traces into a ring of `home` by the runner's clock, at work until the block
    ends. Garbage is collected when a test says so."""
    with pytest.MonkeyPatch.context() as patch, uncollected(), traced(home) as writer:
        for module in ("capture.ring", "engine.core", "engine.gc_watch", "engine.tracer"):
            patch.setattr(f"{module}.time", runner.clock)
        limits = {"max_running": 8, "token_budget": 640, **limits}
        running = Engine(
            runner,
            ByteTokenizer(),
            limits=Limits(**limits),
            queue_limits=QueueLimits(100, 100_000),
            metrics=EngineMetrics("fake"),
            tracer=StepTracer(writer),
        )
        running.start()
        try:
            yield running
        finally:
            runner.release()
            running.stop()


@contextmanager
def uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def traced(home: Path) -> Iterator[TraceWriter]:
    ring: RingWriter = new_ring(home / "rings", 8 * MIB)
    writer = TraceWriter(ring)
    writer.engine({"model": "fake"})
    yield writer
    ring.close()


def request(runner: SleepingRunner, prompt: int = 12, tokens: int = 100, **options: Any) -> Request:
    """One that arrives now. Prompts never share a prefix: their first token differs."""
    identity = uuid4().bytes
    prompt_ids = [identity[0], identity[1], *([65] * (prompt - 2))]
    params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
    now_ns = runner.clock.monotonic_ns()
    return Request(identity, prompt_ids, params, arrival_ns=now_ns, **options)


def served(handle: RequestHandle) -> str:
    """Wait for the request's end; its id."""
    for _ in handle:
        pass
    handle.close()
    return handle.request.request_id.hex()


def played(home: Path, prepare: Callable[[Engine, SleepingRunner], None]) -> str:
    """One request of 100 tokens alone, with something prepared for its course."""
    runner = SleepingRunner()
    with engine(home, runner) as running:
        prepare(running, runner)
        return served(running.submit(request(runner)))


def slow_forward(_: Engine, runner: SleepingRunner) -> None:
    runner.forward_late[50] = runner.pause


def slow_sampling(_: Engine, runner: SleepingRunner) -> None:
    runner.sample_late[50] = runner.pause


def garbage(_: Engine, runner: SleepingRunner) -> None:
    runner.sample_late[50] = runner.collect_garbage


def slow_scheduling(running: Engine, runner: SleepingRunner) -> None:
    scheduler: Any = running.scheduler
    schedule = scheduler.schedule

    def late(now_ns: int) -> Any:
        if running._step_id == 50:
            runner.pause()
        return schedule(now_ns)

    scheduler.schedule = late


def slow_delivery(running: Engine, runner: SleepingRunner) -> None:
    """The engine's thread is kept from its next step."""
    commit = running.scheduler.commit

    def late(*arguments: Any) -> None:
        commit(*arguments)
        if running._step_id == 50:
            runner.pause()

    running.scheduler.commit = late  # type: ignore[method-assign]


def long_prompt(home: Path) -> str:
    runner, handles = SleepingRunner(), []
    with engine(home, runner) as running:

        def another() -> None:
            bulk = request(runner, prompt=600, tokens=2, tenant="bulk")
            handles.append(running.submit(bulk))

        runner.forward_late[40] = another
        subject = served(running.submit(request(runner)))
        served(handles[0])
        return subject


def little_memory(home: Path) -> str:
    """Both grow until one block is missing: the one that came last makes room."""
    runner = SleepingRunner(num_blocks=12)
    runner.hold(after=0)
    with engine(home, runner) as running:
        first = running.submit(request(runner, tokens=100))
        subject = running.submit(request(runner, tokens=100))
        runner.release()
        served(first)
        return served(subject)


def one_seat(home: Path) -> str:
    runner = SleepingRunner()
    runner.hold(after=0)
    with engine(home, runner, max_running=1) as running:
        first = running.submit(request(runner, tenant="busy"))
        subject = running.submit(request(runner, tokens=20))
        runner.release()
        served(first)
        return served(subject)


def lost_prefix(home: Path) -> str:
    """Everybody shares a long system prompt, but for one who begins differently."""
    runner = SleepingRunner()
    with engine(home, runner) as running:
        for _ in range(8):
            usual = request(runner, prompt=400, tokens=2)
            usual.tokens[:2] = [1, 1]
            served(running.submit(usual))
        return served(running.submit(request(runner, prompt=400, tokens=20)))


def slow_client(home: Path) -> str:
    """Streams into buffers that are soon full, to somebody who reads when all was computed."""
    with traced(home) as writer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tests.engine.live_server.bound_waits",
            lambda listener: listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096),
        )
        runner = FakeRunner(num_blocks=100, max_model_len=1000)
        with live_server(runner, writer=writer) as server:
            asked = body(max_tokens=TOKENS, stream=True, logprobs=5, ignore_eos=True)
            data = json.dumps(asked)
            host, port = server.url.removeprefix("http://").split(":")
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect((host, int(port)))
                head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
                until(
                    lambda: len(runner.steps) == TOKENS and server.engine.scheduler.idle,
                    "the last token",
                )
                time.sleep(0.2)  # what it does: it does not read
                answer = b""
                while part := client.recv(65536):
                    answer += part
    return answer.partition(b"x-request-id: ")[2][:32].decode()


ANY = -1
"""Position of the token that lost most, wherever."""

SCENARIOS: dict[str, tuple[Callable[[Path], str], int | None, str, str]] = {
    "forward": (lambda home: played(home, slow_forward), 50, "device slow", "forward time 2"),
    "sampling": (lambda home: played(home, slow_sampling), 50, "host slow", "sampling took"),
    "schedule": (lambda home: played(home, slow_scheduling), 50, "host slow", "scheduling took"),
    "delivery": (lambda home: played(home, slow_delivery), 50, "engine idle", "no step ran for"),
    "gc": (lambda home: played(home, garbage), 50, "garbage collection pause", "generation 2"),
    "prefill": (long_prompt, ANY, "shared a step with a prefill", "600 prompt tokens of"),
    "memory": (little_memory, ANY, "preempted", "out of KV blocks"),
    "seat": (one_seat, 0, "queued", "behind 1 running"),
    "prefix": (lost_prefix, 0, "prefix miss", "0 of 400 prompt tokens cached"),
    "client": (slow_client, None, "sending slow", "until the last chunk was serialized"),
}


@pytest.fixture(scope="module")
def ids() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def lake(
    tmp_path_factory: pytest.TempPathFactory, ids: dict[str, str]
) -> Iterator[duckdb.DuckDBPyConnection]:
    home = tmp_path_factory.mktemp("live")
    for name, (play, *_) in SCENARIOS.items():
        ids[name] = play(home)
    with open_connection(commit_rings(home)) as connection:
        yield connection


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_real_engine_gets_the_verdict_for_what_was_done_to_it(
    lake: duckdb.DuckDBPyConnection, ids: dict[str, str], name: str
) -> None:
    _, position, cause, evidence = SCENARIOS[name]
    rows = lake.execute(
        "SELECT position, cause, evidence, latency_ms - coalesce(usual_ms, 0) AS lost_ms "
        "FROM why(?) ORDER BY lost_ms DESC",
        [ids[name]],
    ).fetchall()
    found = [row for row in rows if position in (ANY, row[0])]
    assert found, rows
    assert found[0][1] == cause, rows
    assert evidence in found[0][2]

"""A real HTTP server on a free port over a fake runner, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import uvicorn

from capture.frames import TraceWriter
from engine.admission import QueueLimits
from engine.core import Engine
from engine.metrics import EngineMetrics
from engine.scheduler import Limits
from engine.server import create_app
from engine.tracer import StepTracer
from tests.engine.fake_runner import ByteTokenizer, FakeRunner
from tests.engine.recorder import RecordingWriter


class PlainTemplate:
    """Renders "<role>content" for each message, and refuses when told to."""

    def render(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


@dataclass
class LiveServer:
    """What a test can see of a running server."""

    engine: Engine
    runner: FakeRunner
    writer: RecordingWriter
    client: httpx.Client
    url: str
    uvicorn: uvicorn.Server
    thread: threading.Thread
    records: list[dict[str, Any]] = field(default_factory=list)

    def record(self, count: int = 1) -> dict[str, Any]:
        """The `count`th traffic record, once it is there."""
        deadline = time.monotonic() + 5
        while len(self.records) < count:
            assert time.monotonic() < deadline, "no traffic record came"
            time.sleep(0.002)
        return self.records[count - 1]


@contextmanager
def live_server(runner: FakeRunner | None = None, **options: Any) -> Iterator[LiveServer]:
    """Serve until the block ends; options go to `Engine`."""
    runner = runner or FakeRunner()
    writer = RecordingWriter()
    records: list[dict[str, Any]] = []
    engine = Engine(
        runner,
        ByteTokenizer(),
        limits=options.pop("limits", Limits(max_running=8, token_budget=64)),
        queue_limits=options.pop("queue_limits", QueueLimits(100, 100_000)),
        metrics=EngineMetrics("fake"),
        tracer=StepTracer(cast(TraceWriter, writer)),
        **options,
    )
    app = create_app(
        engine,
        model_name="fake",
        template=PlainTemplate(),
        fingerprint={"weights": "w", "code": "c"},
        on_request_end=records.append,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        yield LiveServer(engine, runner, writer, client, url, server, thread, records)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive(), "the server did not shut down"

"""A real HTTP server on a free port over a fake runner, in a thread."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import uvicorn

from capture.frames import TraceWriter
from engine.admission import QueueLimits
from engine.connections import PatientProtocol, bound_waits
from engine.core import Engine
from engine.metrics import EngineMetrics
from engine.server import create_app
from engine.step import Limits
from engine.tracer import StepTracer
from tests.engine.fake_runner import ByteTokenizer, FakeRunner, expected
from tests.engine.recorder import RecordingWriter
from tests.waiting import PATIENCE_S, until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> dict[str, Any]:
    """A completion request for five greedy tokens after "hello"."""
    return {"model": "fake", "prompt": "hello", "max_tokens": 5, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    """The same as a chat request."""
    return {"model": "fake", "messages": HI, "max_tokens": 5, "temperature": 0, **fields}


def chunks(text: str) -> list[dict[str, Any]]:
    """The data objects of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(prompt: str, count: int = 5) -> str:
    """What the fake model answers."""
    return ByteTokenizer().decode(expected(list(prompt.encode()), count))


class PlainTemplate:
    """Renders "<role>content" for each message."""

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
        until(lambda: len(self.records) >= count, f"{count} traffic records")
        return self.records[count - 1]


@dataclass
class RecordingMirror:
    """Keeps what the server tells its mirror; `kept` names conversations, None: all."""

    records: list[dict[str, Any]]
    kept: frozenset[str] | None = None
    skipped: list[str] = field(default_factory=list)

    def opening_id(self, tenant: str, messages: Iterable[dict[str, Any]]) -> str | None:
        return None

    def keeps(self, conversation_id: str) -> bool:
        return self.kept is None or conversation_id in self.kept

    def offer(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def skip(self, reason: str) -> None:
        self.skipped.append(reason)


@contextmanager
def live_server(runner: Any = None, **options: Any) -> Iterator[LiveServer]:
    """Serve until the block ends; `template` and `mirror` go to the app, other options to
    `Engine`. The model's name is "fake" whatever it is. `writer`: a `TraceWriter` to trace into."""
    runner = runner or FakeRunner()
    writer = options.pop("writer", None) or RecordingWriter()
    records: list[dict[str, Any]] = []
    mirror = options.pop("mirror", None) or RecordingMirror(records)
    template = options.pop("template", PlainTemplate())
    engine = Engine(
        runner,
        options.pop("tokenizer", ByteTokenizer()),
        limits=options.pop("limits", Limits(max_running=8, token_budget=64)),
        queue_limits=options.pop("queue_limits", QueueLimits(100, 100_000)),
        metrics=EngineMetrics("fake"),
        tracer=StepTracer(cast(TraceWriter, writer)),
        **options,
    )
    app = create_app(
        engine,
        model_name="fake",
        template=template,
        fingerprint={"weights": "w", "code": "c"},
        mirror=mirror,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    bound_waits(listener)
    config = uvicorn.Config(app, http=PatientProtocol, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until(lambda: server.started or not thread.is_alive(), "the server has started")
        assert server.started, "the server has ended instead of serving"
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            yield LiveServer(engine, runner, writer, client, url, server, thread, records)
    finally:
        if isinstance(runner, FakeRunner):
            runner.release()
        server.should_exit = True
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the server did not shut down"

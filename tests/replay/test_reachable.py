"""How long a build is waited for: an endpoint that is not there is said at once, a command that
starts and an endpoint whose file grants time get it."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from replay import builds
from replay.builds import BuildSpec, RunningBuild, free_port
from replay.errors import BuildError
from tests.replay.conftest import toy

Toys = Callable[[str], BuildSpec]


def start(spec: BuildSpec, tmp_path: Path) -> RunningBuild:
    async def started() -> RunningBuild:
        async with RunningBuild(spec, log=tmp_path / "build.log") as build:
            return build

    return asyncio.run(started())


@contextmanager
def answering(port: int, status: int) -> Iterator[None]:
    """A server on `port` that lists one model and whose health is `status`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "m"}]}'
            known = {"/v1/models": 200, "/health": status}
            self.send_response(known.get(self.path, 404))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_endpoint_that_refuses_connections_is_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 0.3)
    url = f"http://127.0.0.1:{free_port()}"
    spec = BuildSpec(name="prod", endpoint=f"{url}/v1")
    began = time.monotonic()
    with pytest.raises(BuildError, match=r"not healthy after 0\.3 s \(ConnectError") as caught:
        start(spec, tmp_path)
    assert time.monotonic() - began < spec.health_timeout_s / 2
    for part in (f"build prod at {url} ", "start that server", "correct endpoint", "set health_"):
        assert part in str(caught.value)


def test_an_endpoint_whose_file_says_how_long_may_start_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 0.01)
    refused = threading.Semaphore(0)
    look = builds._health

    async def counted(client: httpx.AsyncClient, limit_s: float) -> builds._Health:
        found = await look(client, limit_s)
        if not found.connected:
            refused.release()
        return found

    monkeypatch.setattr(builds, "_health", counted)
    port = free_port()
    spec = BuildSpec(name="b", endpoint=f"http://127.0.0.1:{port}", health_timeout_s=60)
    found: list[RunningBuild] = []
    waiting = threading.Thread(target=lambda: found.append(start(spec, tmp_path)))
    waiting.start()
    for _ in range(3):
        assert refused.acquire(timeout=30)
    with answering(port, 200):
        waiting.join(timeout=60)
    assert [build.model for build in found] == ["m"]


def test_a_command_that_takes_no_connection_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 0.01)
    assert start(toy(), tmp_path).fingerprint == "toy-plain"


def test_an_endpoint_that_answers_but_is_not_healthy_keeps_the_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 0.01)
    port = free_port()
    spec = BuildSpec.model_construct(
        _fields_set={"name", "endpoint"},
        name="b",
        endpoint=f"http://127.0.0.1:{port}",
        health_timeout_s=0.6,
    )
    with answering(port, 503), pytest.raises(BuildError, match=r"after 0\.6 s \(status 503\); rai"):
        start(spec, tmp_path)


def test_a_key_that_is_refused_is_said_at_once(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = toys("locked")
    assert spec.health_timeout_s > 60
    with pytest.raises(BuildError, match=r"refuses its caller \(status 401\): set api_key_env"):
        start(spec, tmp_path)
    monkeypatch.setenv("TOY_KEY", "wrong")
    with pytest.raises(BuildError, match=r"status 401\): check the API key in TOY_KEY"):
        start(spec.model_copy(update={"api_key_env": "TOY_KEY"}), tmp_path)

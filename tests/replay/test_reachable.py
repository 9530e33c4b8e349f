"""How long a build is waited for: an endpoint that is not there is said at once, a command that
starts and an endpoint whose file grants time get it."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from replay import builds, health
from replay.builds import BuildSpec, RunningBuild
from replay.errors import BuildError
from tests.replay.conftest import toy
from tests.waiting import PATIENCE_S

Toys = Callable[[str], BuildSpec]


def start(spec: BuildSpec, tmp_path: Path) -> RunningBuild:
    async def started() -> RunningBuild:
        async with RunningBuild(spec, log=tmp_path / "build.log") as build:
            return build

    return asyncio.run(started())


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port that is nobody else's; nothing listens there."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def answering(listener: socket.socket, status: int) -> Iterator[None]:
    """A server there that lists one model and whose health is `status`."""

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

    address = listener.getsockname()
    server = http.server.ThreadingHTTPServer(address, Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_endpoint_that_refuses_connections_is_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: socket.socket
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 0.3)
    url = url_of(silent)
    spec = BuildSpec(name="prod", endpoint=f"{url}/v1")
    began = time.monotonic()
    with pytest.raises(BuildError, match=r"not healthy after 0\.3 s \(ConnectError") as caught:
        start(spec, tmp_path)
    assert time.monotonic() - began < spec.health_timeout_s / 2
    for part in (f"build prod at {url} ", "start that server", "correct endpoint", "set health_"):
        assert part in str(caught.value)


def test_an_endpoint_whose_file_says_how_long_may_start_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: socket.socket
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 2 * health.POLL_S)
    refused = threading.Semaphore(0)
    look = health.look

    async def counted(client: httpx.AsyncClient, limit_s: float) -> health.Health | None:
        found = await look(client, limit_s)
        if found is not None and not found.connected:
            refused.release()
        return found

    monkeypatch.setattr(health, "look", counted)
    spec = BuildSpec(name="b", endpoint=url_of(silent), health_timeout_s=PATIENCE_S)
    found: list[RunningBuild] = []
    waiting = threading.Thread(target=lambda: found.append(start(spec, tmp_path)))
    waiting.start()
    for _ in range(5):
        assert refused.acquire(timeout=PATIENCE_S)
    with answering(silent, 200):
        waiting.join(timeout=PATIENCE_S)
    assert [build.model for build in found] == ["m"]


def test_a_command_that_takes_no_connection_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 2 * health.POLL_S)
    assert start(toy(), tmp_path).fingerprint == "toy-plain"


def test_an_endpoint_that_answers_but_is_not_healthy_keeps_the_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: socket.socket
) -> None:
    monkeypatch.setattr(builds, "UNREACHABLE_S", 2 * health.POLL_S)
    spec = BuildSpec.model_construct(
        _fields_set={"name", "endpoint"},
        name="b",
        endpoint=url_of(silent),
        health_timeout_s=0.6,
    )
    with (
        answering(silent, 503),
        pytest.raises(BuildError, match=r"after 0\.6 s \(status 503\); rai"),
    ):
        start(spec, tmp_path)


def test_the_last_look_which_the_end_of_the_time_cuts_off_hides_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([health.Health(503, "status 503", connected=True)])

    async def look(client: httpx.AsyncClient, limit_s: float) -> health.Health | None:
        if (found := next(looks, None)) is None:
            await asyncio.sleep(limit_s)
        return found

    monkeypatch.setattr(health, "look", look)
    spec = BuildSpec(name="b", endpoint="http://127.0.0.1:1", health_timeout_s=0.6)
    with pytest.raises(BuildError, match=r"after 0\.6 s \(status 503\)"):
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

"""The server when things go wrong or end: full queue, lost clients, failed steps, shutdown."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import httpx
import pytest

from capture.traffic import TrafficRecord
from engine.admission import QueueLimits
from engine.handle import RequestHandle
from engine.step import Limits
from tests.engine.fake_runner import FakeRunner
from tests.engine.live_server import (
    TEXT,
    LiveServer,
    body,
    live_server,
)
from tests.waiting import PATIENCE_S, until


def test_full_queue_answers_429_with_retry_after() -> None:
    limits, queue, runner = Limits(1, 64), QueueLimits(1, 1000), FakeRunner()
    runner.hold(after=1)
    with live_server(runner, limits=limits, queue_limits=queue) as server:
        with (
            server.client.stream("POST", TEXT, json=body(max_tokens=200, stream=True)) as running,
            ThreadPoolExecutor(2) as pool,
        ):
            next(running.iter_lines())
            # The seat is taken for good: of two, one finds the queue's only place and waits.
            asked = [pool.submit(ask, server) for _ in range(2)]
            wait(asked, PATIENCE_S, FIRST_COMPLETED)
            runner.release()
            served, refused = sorted(
                (future.result() for future in asked), key=lambda answer: answer.status_code
            )
        assert served.status_code == 200
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        told = until(
            lambda: [r for r in server.records if r["status"] == 429], "the refusal is recorded"
        )
        assert [r["error_type"] for r in told] == ["queue_full"]


def ask(server: LiveServer) -> httpx.Response:
    """A request on a connection of its own."""
    return httpx.post(server.url + TEXT, json=body(), trust_env=False, timeout=PATIENCE_S)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts_before_the_next_step_and_frees_the_blocks(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, noticed, abort = FakeRunner(), threading.Event(), RequestHandle.abort

    def told(handle: RequestHandle) -> None:
        abort(handle)
        noticed.set()

    monkeypatch.setattr(RequestHandle, "abort", told)
    runner.hold(after=3)
    with live_server(runner) as server:
        data = json.dumps(body(max_tokens=400, stream=stream)).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head + data)
        steps = runner.until_held()
        connection.close()
        assert noticed.wait(PATIENCE_S)
        runner.release()
        record = server.record()
        assert len(runner.steps) == steps
        assert server.engine.pool.used == 0
        assert (record["status"], record["error_type"]) == (499, "cancelled")
        assert record["usage"]["completion_tokens"] == steps
        TrafficRecord.model_validate(record)


def test_failed_step_is_a_500_and_the_server_goes_on(server: LiveServer) -> None:
    server.runner.fail_next = 1
    answer = server.client.post(TEXT, json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "step_failed")
    assert server.client.get("/health").status_code == 200
    assert server.client.post(TEXT, json=body()).status_code == 200


def test_failure_in_the_middle_of_a_stream_is_told_in_the_stream() -> None:
    runner = FakeRunner()
    runner.hold(after=3)
    with (
        live_server(runner) as server,
        server.client.stream("POST", TEXT, json=body(max_tokens=300, stream=True)) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        runner.until_held()
        runner.fail_next = 1
        runner.release()
        rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "step_failed"
        assert rest[-1] == "data: [DONE]"


def test_engine_that_has_failed_makes_health_503_and_refuses() -> None:
    with live_server() as server:
        server.runner.fail_next = 100
        for _ in range(3):
            server.client.post(TEXT, json=body())
        health = server.client.get("/health")
        assert health.status_code == 503
        assert "planted failure" in health.json()["reason"]
        answer = server.client.post(TEXT, json=body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")


def test_shutdown_finishes_running_streams() -> None:
    runner = FakeRunner()
    runner.hold(after=3)
    with live_server(runner) as server:
        request = body(max_tokens=60, stream=True, return_token_ids=True)
        with server.client.stream("POST", TEXT, json=request) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.uvicorn.should_exit = True
            (listening,) = server.uvicorn.servers
            until(lambda: not listening.is_serving(), "the shutdown has begun")
            runner.release()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        server.thread.join(PATIENCE_S)
        assert not server.engine.alive


@pytest.mark.parametrize("stream", [True, False])
def test_shutdown_answers_what_does_not_end_in_time(stream: bool) -> None:
    with live_server(FakeRunner(delay_s=0.05)) as server:
        answers: list[httpx.Response] = []
        asker = threading.Thread(
            target=lambda: answers.append(
                server.client.post(TEXT, json=body(max_tokens=400, stream=stream))
            )
        )
        asker.start()
        until(lambda: server.engine.scheduler.decoding, "the request runs")
        server.engine.begin_stop(timeout_s=0.2)
        server.engine.begin_stop(timeout_s=30)  # a later end does not put it off
        server.uvicorn.should_exit = True
        asker.join(PATIENCE_S)
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
    text = answers[0].text
    assert answers[0].status_code == (200 if stream else 503)
    assert "the engine is shutting down" in text
    assert "engine_unavailable" in text
    assert text.endswith("data: [DONE]\n\n") == stream

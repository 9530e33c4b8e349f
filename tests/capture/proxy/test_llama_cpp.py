"""The proxy in front of llama-cpp-python's server, which is not ours. Not built in CI: installing
`llama-cpp-python[server]` compiles for minutes; where it is there, these tests run."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from capture.decode import FinishFrame
from tests.capture.proxy.processes import PATIENT, ProxyProcess
from tests.engine.tiny_model import write_tiny_model
from tests.waiting import until

CHAT = "/v1/chat/completions"
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 12,
    "temperature": 0,
}

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("llama-cpp-python is not installed", allow_module_level=True)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny_model(tmp_path_factory.mktemp("llama") / "tiny.gguf")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "llama_cpp.server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--n_ctx", "512"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: process.poll() is not None or listens(port), "the server listens")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def in_front(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(server, tmp_path_factory.mktemp("proxy")) as process:
        yield process
        assert process.stop() == 0


def streamed(url: str, **headers: str) -> list[dict[str, Any]]:
    """The events of a streamed answer, without what changes with each."""
    body = QUESTION | {"stream": True}
    answer = httpx.post(url + CHAT, json=body, headers=headers, **PATIENT)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) | {"id": "", "created": 0} for line in lines if line[0] == "{"]


def test_stream_is_the_servers_and_is_captured(server: str, in_front: ProxyProcess) -> None:
    events = streamed(in_front.url, **{"X-Conversation": "streamed"})
    assert events == streamed(server)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    record = in_front.record("streamed")
    assert (record["status"], record["output_text"]) == (200, text)
    assert record["ttft_ms"] > 0
    (finish,) = in_front.of_request(record["request_id"], FinishFrame)
    assert finish.reason in ("stop", "length")
    assert finish.output_tokens == len(in_front.rows_of(record["request_id"])) > 0


def test_answer_in_one_piece_has_its_usage(in_front: ProxyProcess) -> None:
    headers = {"X-Conversation": "whole"}
    answer = httpx.post(in_front.url + CHAT, json=QUESTION, headers=headers, **PATIENT).json()
    record = in_front.record("whole")
    assert record["output_text"] == answer["choices"][0]["message"]["content"]
    assert record["tokens_counted_by"] == "usage"
    assert record["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert record.get("ttft_ms") is None


def test_refusal_is_the_servers(server: str, in_front: ProxyProcess) -> None:
    direct, through = (
        httpx.post(url + CHAT, json={"messages": "none"}, **PATIENT)
        for url in (server, in_front.url)
    )
    assert through.status_code == direct.status_code >= 400
    assert through.content == direct.content

"""The proxy in front of our own engine: what it writes down agrees with what the engine wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.decode import FinishFrame
from tests.capture.proxy.processes import PATIENT, ProxyProcess, records_in
from tests.engine.tiny_model import write_tiny_model
from tests.waiting import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A serving engine that mirrors everything: its address and its home."""
    home = tmp_path_factory.mktemp("engine")
    model = write_tiny_model(home / "tiny.gguf")
    command = [
        *(sys.executable, "-m", "cli", "serve", "--threads", "1", "--model", str(model)),
        *("--kv-tokens", "1024", "--port", "0", "--mirror-share", "1"),
    ]
    ours = {"INFERLOOP_HOME": str(home), "INFERLOOP_RING_DIR": str(home / "rings")}
    with subprocess.Popen(
        command, env=os.environ | ours | {"INFERLOOP_RING_MIB": "1"}, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield "http://" + line.rsplit("http://", 1)[1].strip(), home
        finally:
            process.kill()


@pytest.fixture(scope="module")
def in_front(engine: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ProxyProcess(engine[0], tmp_path_factory.mktemp("proxy")) as process:
        yield process
        assert process.stop() == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_both_records_agree(
    engine: tuple[str, Path], in_front: ProxyProcess, path: str, ids: bool, stream: bool
) -> None:
    name = f"{path.count('c')}-{ids}-{stream}"
    text = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    body = GREEDY | text | {"stream": stream, "return_token_ids": ids, "logprobs": ids or None}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if path == COMPLETIONS and ids:
        body["logprobs"] = 1
    headers = {"X-Conversation": name, "X-Tenant": "acme", "X-Route": "demo"}
    answer = httpx.post(in_front.url + path, json=body, headers=headers, **PATIENT)
    assert answer.status_code == 200, answer.text

    seen = in_front.record(name)
    theirs = until(
        lambda: next((r for r in records_in(engine[1]) if r["conversation_id"] == name), None),
        "the engine's own record",
    )
    assert theirs is not None
    same = ["output_text", "finish_reason", "usage", "tenant", "route", "class_key", "model"]
    same += ["endpoint", "stream", "status", "messages", "prompt"]
    same += ["output_token_ids", "logprobs"] if ids else []
    same += ["prompt_token_ids"] if ids and (path == CHAT or not stream) else []
    assert {k: seen.get(k) for k in same} == {k: theirs.get(k) for k in same}
    assert seen["tokens_counted_by"] == "usage"
    (finish,) = in_front.of_request(seen["request_id"], FinishFrame)
    assert (finish.reason, finish.output_tokens) == ("length", 12)
    if stream and ids:
        rows = in_front.rows_of(seen["request_id"])
        assert [row["token_id"] for row in rows] == theirs["output_token_ids"]
        assert seen["ttft_ms"] >= theirs["ttft_ms"]


def test_refusals_agree(engine: tuple[str, Path], in_front: ProxyProcess) -> None:
    for body in ({"model": "other", "messages": []}, {"model": "tiny"}):
        direct = httpx.post(engine[0] + CHAT, json=body, **PATIENT)
        through = httpx.post(in_front.url + CHAT, json=body, **PATIENT)
        assert (through.status_code, through.content) == (direct.status_code, direct.content)
        assert set(through.headers) == set(direct.headers)


def test_pages_of_the_engine_pass(engine: tuple[str, Path], in_front: ProxyProcess) -> None:
    with httpx.Client(base_url=in_front.url, **PATIENT) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert "inferloop:num_requests_running" in http.get("/metrics").text
        assert http.get("/health").status_code == 200

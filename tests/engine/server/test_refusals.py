"""What the server refuses, and how it says so: field, value, limit, way out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import RequestError
from engine.protocol import CompletionBody, parse_body
from engine.server import MAX_BODY_BYTES
from tests.engine.live_server import (
    CHAT,
    HI,
    TEXT,
    LiveServer,
    body,
    chat,
)

BAD_TEXT: list[tuple[str, dict[str, Any], str]] = [
    ("n", {"n": 2}, "n is 2"),
    ("best_of", {"best_of": 3}, "best_of is 3"),
    ("presence_penalty", {"presence_penalty": 0.5}, "0.5"),
    ("logit_bias", {"logit_bias": {"5": 1}}, "object of 1"),
    ("echo", {"echo": True}, "echo is True"),
    ("temperature", {"temperature": -1}, "temperature is -1"),
    ("temperature", {"temperature": 3}, "2"),
    ("temperature", {"temperature": "hot"}, "'hot'"),
    ("top_p", {"top_p": 0}, "top_p is 0"),
    ("max_tokens", {"max_tokens": 0}, "max_tokens is 0"),
    ("max_tokens", {"max_tokens": -5}, "max_tokens is -5"),
    ("max_tokens", {"max_tokens": 1.5}, "1.5"),
    ("max_tokens", {"max_tokens": True}, "True"),
    ("max_tokens", {"max_tokens": 508}, "513 tokens, the context holds 512"),
    ("prompt", {"prompt": ""}, "empty"),
    ("prompt", {"prompt": []}, "empty"),
    ("prompt", {"prompt": ["a", "b"]}, "2 prompts"),
    ("prompt", {"prompt": [1, "a"]}, "list"),
    ("prompt", {"prompt": [1, 999]}, "token id 999"),
    ("prompt", {"prompt": "\ud800"}, "surrogate"),
    ("prompt", {"prompt": "x" * 600}, "600 prompt tokens"),
    ("stop", {"stop": ""}, "empty stop"),
    ("stop", {"stop": ["x"] * 17}, "the limit is 16"),
    ("logprobs", {"logprobs": 21}, "20"),
    ("tempature", {"tempature": 1}, "unknown field 'tempature'"),
    ("stream_options", {"stream_options": {"include_usage": True}}, "stream"),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}, "stream"),
    ("seed", {"seed": 2**64}, "seed"),
    ("top_k", {"top_k": 2**63}, "2147483647"),
    ("stop_token_ids", {"stop_token_ids": [260]}, "token id 260"),
    ("stop_token_ids", {"stop_token_ids": [-1]}, "token id -1"),
    ("prompt", {"prompt": "x" * 100_000}, "100000 bytes"),
    ("?", {"\ud800": 1}, "unknown field '?'"),
    ("y" * 77 + "...", {"y" * 100_000: 1}, "unknown field 'yyy"),
]
BAD_CHAT: list[tuple[str, dict[str, Any], str]] = [
    ("messages", {"messages": []}, "messages"),
    ("messages.0.role", {"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}, "expected text"),
    (
        "messages.0.content",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "image_url",
    ),
    (
        "messages.0.content",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "cache": {}}]}]},
        "unknown field 'cache'",
    ),
    ("messages.0.nick", {"messages": [{**HI[0], "nick": "x"}]}, "unknown field 'messages.0.nick'"),
    ("messages", {"messages": HI * 4097}, "4096"),
    ("messages", {"messages": [{"role": "user", "content": "x" * 600}]}, "prompt tokens"),
    ("messages.0.tool_calls", {"messages": [{**HI[0], "tool_calls": [1]}]}, "tool_calls"),
    ("tools", {"tools": [{"type": "function"}]}, "list of 1"),
    ("response_format", {"response_format": {"type": "json_object"}}, "response_format"),
    ("top_logprobs", {"top_logprobs": 2}, "logprobs"),
    ("max_completion_tokens", {"max_completion_tokens": 9}, "differ"),
]


@pytest.mark.parametrize(
    ("path", "param", "fields", "text"),
    [(TEXT, *case) for case in BAD_TEXT] + [(CHAT, *case) for case in BAD_CHAT],
)
def test_field_that_cannot_be_honoured_is_refused_by_name(
    server: LiveServer, path: str, param: str, fields: dict[str, Any], text: str
) -> None:
    answer = server.client.post(
        path, content=json.dumps((body if path == TEXT else chat)(**fields))
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert text in error["message"]
    assert error["type"] == "invalid_request_error"


def test_body_of_many_unknown_fields_costs_little_more_than_to_read_it(server: LiveServer) -> None:
    data = json.dumps(body(**{f"field{i}": 1 for i in range(200_000)})).encode()
    assert server.client.post(TEXT, content=data).json()["error"]["param"] == "field0"

    def refuse() -> None:
        with pytest.raises(RequestError):
            parse_body(CompletionBody, data)

    assert cpu_s(refuse) < 10 * cpu_s(lambda: json.loads(data))


def cpu_s(work: Callable[[], object]) -> float:
    """This thread's time on a processor for `work`, the best of three."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def test_neutral_values_of_other_fields_are_accepted(server: LiveServer) -> None:
    neutral = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "tools": None, "user": "u1"}
    assert server.client.post(CHAT, json=chat(**neutral)).status_code == 200


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "list of 1"),
        (b'{"model": "\xff"}', "not UTF-8 at byte 11"),
        (b"[" * 100_000, "not JSON"),
        (b'{"model":"fake","prompt":"x","temperature":NaN}', "temperature is nan"),
        (b'{"model":"fake","prompt":"x","temperature":1e999}', "temperature is inf"),
        (b'{"prompt":"x"}', "model is missing"),
    ],
)
def test_body_that_cannot_be_read_is_refused(server: LiveServer, content: bytes, text: str) -> None:
    answer = server.client.post(TEXT, content=content)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_ten_megabyte_body_is_refused_with_the_limit(server: LiveServer) -> None:
    answer = server.client.post(TEXT, json=body(prompt="x" * 10_000_000))
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]


def test_unknown_model_and_path_have_openai_shape(server: LiveServer) -> None:
    answer = server.client.post(TEXT, json=body(model="gpt-9"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for method, path, status in (("GET", "/v1/none", 404), ("GET", TEXT, 405)):
        answer = server.client.request(method, path)
        assert answer.status_code == status
        assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Priority", "101"),
        ("X-Priority", "-1"),
        ("X-Priority", "high"),
        ("X-Tenant", "a/b"),
        ("X-Tenant", "x" * 65),
        ("X-Route", "ro ute"),
        ("X-Conversation", "c" * 129),
    ],
)
def test_header_out_of_range_is_refused_by_name(
    server: LiveServer, header: str, value: str
) -> None:
    answer = server.client.post(TEXT, json=body(), headers={header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header

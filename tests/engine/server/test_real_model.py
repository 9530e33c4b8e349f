"""The whole of it on the real model, asked as OpenAI's clients ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.runner import LoadedModel
from tests.engine.live_server import CHAT, TEXT, LiveServer, chunks, live_server
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm(real_model: Callable[..., LoadedModel]) -> Iterator[LiveServer]:
    loaded = real_model("int8")
    with live_server(loaded.runner, tokenizer=loaded.tokenizer, template=loaded.template) as server:
        yield server


def question(text: str, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": text},
    ]
    return {"model": "fake", "messages": messages, "max_tokens": 24, "temperature": 0, **fields}


def test_chat_stream_equals_the_whole_answer(smollm: LiveServer) -> None:
    request = question("Name three colours. 请用中文。 🙂")
    whole = smollm.client.post(CHAT, json=request).json()
    text = whole["choices"][0]["message"]["content"]
    assert len(text) > 5
    stream = smollm.client.post(CHAT, json={**request, "stream": True})
    assert stream.headers["content-type"] == "text/event-stream"
    parts = [c["choices"][0]["delta"].get("content", "") for c in chunks(stream.text)]
    assert "".join(parts) == text


def test_greedy_answers_do_not_depend_on_company_or_on_the_cache(smollm: LiveServer) -> None:
    requests = [question(f"What is {i} plus {i}?", return_token_ids=True) for i in range(7)]
    alone = [ids(smollm.client.post(CHAT, json=request)) for request in requests]

    def ask(request: dict[str, Any]) -> list[int]:
        return ids(httpx.post(smollm.url + CHAT, json=request, trust_env=False, timeout=PATIENCE_S))

    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(ask, requests)) == alone


def ids(answer: httpx.Response) -> list[int]:
    return list(answer.json()["choices"][0]["token_ids"])


def test_scoring_a_prompt_agrees_with_generating_it(smollm: LiveServer) -> None:
    """prompt_logprobs over prompt plus answer are those of the answer's own tokens."""
    request = {"model": "fake", "prompt": "The capital of France is", "temperature": 0}
    fields = {"max_tokens": 8, "logprobs": 1, "return_token_ids": True}
    choice = smollm.client.post(TEXT, json={**request, **fields}).json()["choices"][0]
    prompt = choice["prompt_token_ids"] + choice["token_ids"]
    score = {**request, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
    scored = smollm.client.post(TEXT, json=score).json()["choices"][0]["prompt_logprobs"]
    tail = scored[len(choice["prompt_token_ids"]) :]
    got = [entry[str(i)]["logprob"] for entry, i in zip(tail, choice["token_ids"], strict=True)]
    assert got == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert [entry[str(i)]["rank"] for entry, i in zip(tail, choice["token_ids"], strict=True)] == [
        1
    ] * 8


def test_prompt_longer_than_the_context_is_refused(smollm: LiveServer) -> None:
    answer = smollm.client.post(CHAT, json=question("word " * 9000))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"

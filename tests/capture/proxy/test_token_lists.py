"""Long prompts of token ids: they pass unchanged, are counted, and never become numbers there."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.decode import RequestFrame
from capture.mirroring.mirror_process import _written_out
from capture.proxy.answer import Answer
from capture.proxy.body import Budget
from capture.proxy.question import read_question
from capture.proxy.token_list import LONG_BYTES, PLACEHOLDER, TokenText, spared
from tests.capture.proxy.nasty import DONE, Conversation, Nasty, chat_event
from tests.capture.proxy.processes import ProxyProcess
from tests.capture.proxy.test_capture import ask, streams

IDS = random.Random(5).choices(range(150_000), k=30_000)
MORE: dict[str, Any] = {"model": "tiny", "max_tokens": 7, "stop_token_ids": [1, 2]}


@given(
    st.sampled_from([(",", ":"), (", ", ": "), (",\n  ", " : ")]),
    st.booleans(),
    st.sampled_from(["first", "last"]),
)
def test_a_long_list_is_read_like_a_short_one(
    separators: tuple[str, str], nested: bool, place: str
) -> None:
    prompt = {"prompt": [IDS] if nested else IDS}
    fields = prompt | MORE if place == "first" else MORE | prompt
    body = json.dumps(fields, separators=separators).encode()
    question = read_question(body, chat=False, cut=False)
    ids = question.prompt_token_ids
    assert isinstance(ids, TokenText), "no number was made of it"
    assert (len(ids), ids.written()) == (len(IDS), IDS)
    assert question.model == "tiny"
    assert question.sampling == {"max_tokens": 7, "stop_token_ids": [1, 2]}
    assert not question.unsupported


@given(st.integers(LONG_BYTES + 60, LONG_BYTES + 5000))
def test_a_body_that_was_cut_in_its_list_keeps_the_whole_numbers(end: int) -> None:
    body = json.dumps({"model": "tiny", "prompt": IDS}).encode()[:end]
    ids = read_question(body, chat=False, cut=True).prompt_token_ids
    assert isinstance(ids, TokenText)
    assert ids.written() == IDS[: len(ids)]
    assert len(body) - 40 < len(json.dumps(IDS[: len(ids)])) + len('{"model": "tiny", "prompt": ')


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [IDS, [1, 2]]},
        {"prompt": [PLACEHOLDER + 1], "other": IDS},
        {"messages": IDS},
    ],
)
def test_only_the_prompt_is_a_prompt(fields: dict[str, Any]) -> None:
    question = read_question(json.dumps(fields).encode(), chat=False, cut=False)
    assert not isinstance(question.prompt_token_ids, TokenText)


def test_a_list_somewhere_else_under_the_name_is_not_the_prompt() -> None:
    fields = {"prompt": "hello", "extra": {"prompt": IDS}}
    question = read_question(json.dumps(fields).encode(), chat=False, cut=False)
    assert (question.prompt, question.prompt_token_ids) == ("hello", None)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "' + rb"\"prompt\":[1,2]" * 9000 + b'"}',
        b'{"prompt":[' * 20_000,
        b'{"prompt": [' + b"1.5, " * 20_000 + b"2]}",
        b'{"prompt": ' + b" " * 70_000 + b"[]}",
        b'{"prompt": [' + b" " * 70_000,
    ],
)
def test_other_long_bodies_stay_as_they_are(body: bytes) -> None:
    rest, ids = spared(body, b"prompt")
    assert (rest, ids) == (body, None) or (ids is not None and ids.written() is None)
    read_question(body, chat=False, cut=True)


def test_digits_that_are_no_list_of_numbers_end_in_no_record() -> None:
    body = b'{"prompt": [' + b"007, " * 20_000 + b"1 2]}"
    ids = read_question(body, chat=False, cut=False).prompt_token_ids
    assert ids is not None
    record = {"prompt_token_ids": ids, "chunks": None}
    assert _written_out(record)["prompt_token_ids"] is None
    assert _written_out({"prompt_token_ids": [1]}) == {"prompt_token_ids": [1]}


def test_an_answer_s_prompt_ids_are_spared_too() -> None:
    answer = Answer(keeps_text=True, limit_bytes=1 << 20, budget=Budget(1 << 20))
    (piece,) = answer.read_event(chat_event("hi", prompt_token_ids=IDS).removeprefix(b"data: "))
    assert piece.tokens == 1
    assert isinstance(answer.prompt_token_ids, TokenText)
    assert answer.prompt_token_ids.written() == IDS
    answer.read_event(chat_event("!").removeprefix(b"data: "))
    assert len(answer.prompt_token_ids) == len(IDS)


def test_it_passes_unchanged_is_counted_and_its_record_is_written(
    proxy: ProxyProcess, upstream: Nasty
) -> None:
    body = json.dumps({"model": "tiny", "prompt": IDS, "stream": True, "max_tokens": 1}).encode()
    bodies = []

    async def script(talk: Conversation) -> None:
        bodies.append(await talk.body())
        await talk.start_stream()
        await talk.events(b'data: {"choices": [{"text": "x", "finish_reason": "stop"}]}\n\n', DONE)
        await talk.end_stream()

    upstream.script = script
    name, status, _ = ask(proxy, "/v1/completions", body)
    assert (status, bodies) == (200, [body])
    record = proxy.record(name)
    assert record["original_bytes"] == len(body)
    assert "prompt_token_ids" not in record, "nobody could tell what personal data they hold"
    (request,) = proxy.of_request(record["request_id"], RequestFrame)
    assert request.prompt_tokens == len(IDS)


def test_ids_of_a_text_that_the_upstream_gives_are_in_the_record(
    proxy: ProxyProcess, upstream: Nasty
) -> None:
    first = chat_event("hi", prompt_token_ids=IDS)
    upstream.script = streams(first, chat_event(finish_reason="stop"), DONE)
    name, _, content = ask(proxy)
    assert content.startswith(first)
    assert proxy.record(name)["prompt_token_ids"] == IDS

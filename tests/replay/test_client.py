"""What is sent, and how streamed answers are read, whatever dialect they come in."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.traffic import TrafficRecord
from replay.client import Abilities, request_body
from replay.pacing import Slot, fidelity, run_schedule
from replay.source import ScheduledRecord, make_records
from replay.stream import Answer, events, failed, parse_answer
from tests.waiting import PATIENCE_S

MS = 1_000_000


def one(**prompt: Any) -> TrafficRecord:
    return make_records([{"prompt": "p"} | prompt], model="m")[0]


def sse(*data: dict[str, Any] | str) -> bytes:
    texts = (item if isinstance(item, str) else json.dumps(item) for item in data)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def chunk(text: str, ids: list[int], **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None} | more
    return {"choices": [choice]}


def final(**more: Any) -> dict[str, Any]:
    choice = {"text": "x", "token_ids": [1], "finish_reason": "stop"} | more
    return {"choices": [choice]}


def test_tokens_of_one_chunk_share_its_time() -> None:
    pieces = [
        (200 * MS, sse(chunk("a", [1]))),
        (250 * MS, sse(chunk("bcde", [2, 3, 4, 5]))),
        (300 * MS, sse(chunk("f", [6], finish_reason="stop"), "[DONE]")),
    ]
    answer = parse_answer(200, 0, pieces)
    assert answer.error is None
    assert answer.ttft_ms == 200
    assert answer.itl_ms == [12.5, 12.5, 12.5, 12.5, 50.0]
    assert sum(answer.itl_ms) / 5 == 20
    assert (answer.text, answer.token_ids) == ("abcdef", [1, 2, 3, 4, 5, 6])
    assert (answer.finish_reason, answer.duration_ms) == ("stop", 300)


def test_inferloops_details_are_taken() -> None:
    logprobs = {"content": [{"logprob": -0.5}]}
    chat = {"choices": [{"delta": {"content": "hi"}, "token_ids": [3], "logprobs": logprobs}]}
    detail = {
        "rendered_prompt": "<user>x",
        "sampling": {"temperature": 0},
        "class_key": "t/r/-",
        "margins": [float("inf")],
    }
    opening = {
        "choices": [{"delta": {"role": "assistant", "content": ""}}],
        "prompt_token_ids": [9],
    }
    stream = sse(opening, chat, {"choices": [], "usage": {}, "inferloop": detail}, "[DONE]")
    answer = parse_answer(200, 0, [(5 * MS, stream)])
    assert (answer.rendered_prompt, answer.class_key) == ("<user>x", "t/r/-")
    assert answer.prompt_token_ids == [9]
    assert (answer.logprobs, answer.margins, answer.itl_ms) == ([-0.5], [None], [])
    assert answer.detailed


def test_margins_come_from_alternatives_in_both_dialects() -> None:
    top = [{"logprob": -0.1}, {"logprob": -2.1}]
    chat = {
        "delta": {"content": "x"},
        "logprobs": {"content": [{"logprob": -0.1, "top_logprobs": top}]},
    }
    lists = {"token_logprobs": [-0.1], "top_logprobs": [{"x": -0.1, "y": -2.1, "z": -7}]}
    for choice in (chat, {"text": "x", "logprobs": lists}):
        answer = parse_answer(200, 0, [(MS, sse({"choices": [choice]}, "[DONE]"))])
        assert answer.margins == [pytest.approx(2.0)]


@given(st.lists(st.integers(1, 40), max_size=30), st.booleans())
def test_events_do_not_depend_on_how_the_network_cuts_them(cuts: list[int], crlf: bool) -> None:
    stream = (
        b": comment\n\n" + sse(chunk("中🙂", [1]), chunk("文", [2])) + b"event: x\n" + sse("[DONE]")
    )
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    pieces, at = [], 0
    for index, size in enumerate([*cuts, len(stream)]):
        pieces.append((index, stream[at : at + size]))
        at += size
    payloads = [data for _, data in events(pieces)]
    assert payloads[-1] == b"[DONE]"
    assert "".join(json.loads(data)["choices"][0]["text"] for data in payloads[:-1]) == "中🙂文"


def test_a_server_that_does_not_stream_is_read_too() -> None:
    body = {"choices": [{"message": {"content": "whole"}, "finish_reason": "stop"}]}
    answer = parse_answer(200, 0, [(MS, json.dumps(body).encode())])
    assert (answer.error, answer.text) == (None, "whole")


@pytest.mark.parametrize(
    ("status", "stream", "error"),
    [
        (500, b'{"error": {"message": "out of\\nmemory"}}', "out of memory"),
        (503, b"<html>busy</html>", "<html>busy</html>"),
        (429, b"", "no message"),
        (200, sse(chunk("a", [1])), "the stream ended before"),
        (200, sse(chunk("a", [1]), {"error": {"message": "engine died"}}), "engine died"),
        (200, b"data: {broken\n\n", "unreadable answer"),
        (200, sse({"choices": [3]}), "unreadable answer"),
        (200, b"", "the stream ended before"),
        (200, b"data: " + b"[" * 100_000 + b"\n\n", "unreadable answer"),
        (500, b"[" * 100_000, "nested too deeply"),
        (500, b'{"error": {"message": "\\u001b[31mred"}}', "\ufffd[31mred"),
        (200, sse(final(text=5)), "content is 5"),
        (200, sse(final(finish_reason={"a": 1})), "finish_reason is"),
        (200, sse(final(token_ids=["a"])), "not token ids"),
        (200, sse(final(token_ids=[-1])), "not token ids"),
        (200, sse(final(token_ids=[True])), "not token ids"),
        (200, sse(final(token_ids=[10**30])), "not token ids"),
        (200, sse(final() | {"prompt_token_ids": "abc"}), "not token ids"),
        (200, sse(final(logprobs={"token_logprobs": [10**400]})), "unreadable answer"),
        (200, sse(final() | {"inferloop": "x"}), "unreadable answer"),
        (200, sse(final() | {"inferloop": {"margins": 5}}), "unreadable answer"),
        (200, sse(final() | {"inferloop": {"class_key": 5}}), "class_key is 5"),
        (200, sse(final() | {"inferloop": {"rendered_prompt": 5}}), "rendered_prompt is 5"),
        (200, sse(final() | {"inferloop": {"sampling": [1]}}), "sampling is"),
        (200, sse(final() | {"inferloop": {"sampling": {"x": math.nan}}}), "unreadable answer"),
    ],
)
def test_failures_become_answers_with_an_error(status: int, stream: bytes, error: str) -> None:
    answer = parse_answer(status, 0, [(MS, stream)] if stream else [])
    assert error in str(answer.error)
    assert answer.ttft_ms is None


def test_only_what_the_client_set_is_sent_again() -> None:
    record = one(temperature=0.0, max_tokens=5, stop=["x"], seed=3, top_k=4)
    record.sampling_set = ["max_tokens"]
    body = request_body(record, "m", Abilities())
    assert {"temperature", "top_p", "stop", "top_k"}.isdisjoint(body)
    assert (body["max_tokens"], body["seed"]) == (5, 3)
    record.sampling_set = None
    body = request_body(record, "m", Abilities())
    assert (body["temperature"], body["stop"], body["top_k"]) == (0.0, ["x"], 4)
    assert body["stream"]
    body = request_body(record, "m", Abilities(False, False, False, False))
    assert {"top_k", "return_token_ids", "logprobs"}.isdisjoint(body)


def test_an_unseeded_request_gets_the_same_seed_in_every_pass() -> None:
    bodies = [request_body(one(temperature=1.0), "m", Abilities()) for _ in range(2)]
    assert bodies[0]["seed"] == bodies[1]["seed"]


def test_requests_are_sent_on_time_however_long_answers_take() -> None:
    records = make_records([{"prompt": str(n)} for n in range(20)], model="m")
    schedule = [ScheduledRecord(record, n * 0.02) for n, record in enumerate(records)]
    slots: list[Slot] = []
    sent: list[TrafficRecord] = []

    async def ask() -> None:
        last_sent = asyncio.Event()

        async def answer_after_the_last_is_sent(record: TrafficRecord) -> Answer:
            sent.append(record)
            if len(sent) == len(records):
                last_sent.set()
            await last_sent.wait()
            return failed(0, "x")

        asked = run_schedule(
            schedule, answer_after_the_last_is_sent, lambda _, slot, __: slots.append(slot), speed=2
        )
        await asyncio.wait_for(asked, PATIENCE_S)

    asyncio.run(ask())
    assert sorted(slot.scheduled_ms for slot in slots) == pytest.approx(
        [n * 10 for n in range(20)], abs=0.01
    )
    found = fidelity(slots)
    assert found.held_back == 0
    assert 0 <= found.p50_ms <= found.p99_ms <= found.max_ms
    assert all(slot.sent_ms >= slot.scheduled_ms for slot in slots), "none too early"


def test_a_turn_is_held_back_until_the_one_before_it_is_answered() -> None:
    turns = [{"prompt": "a", "conversation": "c"}, {"prompt": "b", "conversation": "c"}]
    first, second, other = make_records([*turns, {"prompt": "x"}], model="m")
    slots: dict[str, Slot] = {}
    log: list[str] = []

    async def ask() -> None:
        other_sent = asyncio.Event()

        async def answer(record: TrafficRecord) -> Answer:
            log.append(f"sent {record.prompt}")
            if record is other:
                other_sent.set()
            elif record is first:
                await other_sent.wait()
            log.append(f"answered {record.prompt}")
            return failed(0, "x")

        schedule = [ScheduledRecord(record, 0.0) for record in (first, second, other)]
        asked = run_schedule(
            schedule, answer, lambda record, slot, _: slots.update({record.prompt: slot}), speed=1
        )
        await asyncio.wait_for(asked, PATIENCE_S)

    asyncio.run(ask())
    assert log.index("sent x") < log.index("answered a") < log.index("sent b")
    assert {name: slot.held_back for name, slot in slots.items()} == {
        "a": False, "b": True, "x": False,
    }  # fmt: skip
    assert fidelity(list(slots.values())).held_back == 1

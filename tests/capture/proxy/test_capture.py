"""What the proxy writes down of what passes: traffic lines, frames, counts and times."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from itertools import count, pairwise
from typing import Any, NamedTuple

import httpx
import pytest
import zstandard

from capture.decode import EngineFrame, EventFrame, FinishFrame, RequestFrame
from capture.frames import NONE
from capture.traffic import TrafficRecord
from tests.capture.proxy.nasty import DONE, Conversation, Nasty, chat_event, chunk, usage_event
from tests.capture.proxy.processes import PATIENT, ProxyProcess, raw
from tests.waiting import until

CHAT = "/v1/chat/completions"
QUESTION = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    "stream": True,
}
numbers = count()


class Answered(NamedTuple):
    name: str
    status: int
    content: bytes


def ask(
    proxy: ProxyProcess,
    path: str = CHAT,
    body: Any = None,
    taken: list[bytes] | None = None,
    **headers: str,
) -> Answered:
    """Send a request in a conversation of its own, whose name comes with the raw answer. What has
    come of the answer is in `taken` at once."""
    taken = [] if taken is None else taken
    name = f"conversation-{next(numbers)}"
    content = body if isinstance(body, bytes) else json.dumps(QUESTION if body is None else body)
    headers = {k.replace("_", "-"): v for k, v in headers.items()} | {"X-Conversation": name}
    url = proxy.url + path
    with httpx.stream("POST", url, content=content, headers=headers, **PATIENT) as answer:
        for piece in answer.iter_raw():
            taken.append(piece)
        return Answered(name, answer.status_code, b"".join(taken))


def streams(*events: bytes, pause_s: float = 0.0, headers: str = "X-A: b"):
    """A script that answers with events, each a chunk of its own."""

    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.start_stream(headers)
        await talk.events(*events, pause_s=pause_s)
        await talk.end_stream()

    return script


def paced(*events: bytes, wait_s: float, pause_s: float, taken: list[bytes]):
    """A script that sends an event when the client has `taken` the one before and `pause_s` have
    passed: however busy the machine, the proxy sees them apart."""

    async def script(talk: Conversation) -> None:
        await talk.body()
        await asyncio.sleep(wait_s)
        await talk.start_stream()
        sent = 0
        for event in events:
            await talk.events(event)
            sent += len(event)
            await talk.until(lambda all_sent=sent: len(b"".join(taken)) >= all_sent)
            await asyncio.sleep(pause_s)
        await talk.end_stream()

    return script


def answers(document: Any, status: int = 200):
    """A script that answers with one JSON document."""

    async def script(talk: Conversation) -> None:
        await talk.body()
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        await talk.send(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    return script


PLAIN = [
    chat_event("", choice={"delta": {"role": "assistant", "content": ""}}),
    chat_event("Grüße "),
    chat_event("😀 aus "),
    chat_event("Köln"),
    chat_event(finish_reason="stop"),
    usage_event(7, 3),
    DONE,
]
WHOLE = b"".join(PLAIN)
READABLE = b"".join(
    json.dumps(json.loads(line[6:]), ensure_ascii=False).encode().join([b"data: ", b"\n\n"])
    for line in b"".join(PLAIN[:-1]).split(b"\n\n")
    if line
)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([WHOLE], id="all in one"),
        pytest.param([bytes([b]) for b in READABLE + DONE], id="one byte a chunk"),
        pytest.param([PLAIN[0] + PLAIN[1], PLAIN[2] + PLAIN[3], *PLAIN[4:]], id="two events"),
        pytest.param([e.replace(b"\n\n", b"\r\n\r\n") for e in PLAIN], id="crlf"),
        pytest.param([e.replace(b"\n\n", b"\r\r") for e in PLAIN], id="cr"),
        pytest.param([p for e in PLAIN for p in (b": keep-alive\n\n", e)], id="comments"),
        pytest.param([e.replace(b"data: ", b"data:") for e in PLAIN], id="no space"),
        pytest.param(
            [e.replace(b'"choices"', b'\ndata: "choices"') for e in PLAIN], id="data on two lines"
        ),
        pytest.param([b"event: x\nid: 1\nretry: 5\n" + e for e in PLAIN], id="other fields"),
        pytest.param([b"\xef\xbb\xbf" + WHOLE], id="byte order mark"),
        pytest.param([WHOLE.removesuffix(b"\n\n")], id="no blank line at the end"),
        pytest.param(PLAIN[:-1], id="no [DONE]"),
    ],
)
def test_answers_are_read_however_they_are_cut(
    proxy: ProxyProcess, upstream: Nasty, pieces: list[bytes]
) -> None:
    upstream.script = streams(*pieces)
    name, _, content = ask(proxy)
    assert content == b"".join(pieces)
    record = proxy.record(name)
    assert record["output_text"] == "Grüße 😀 aus Köln"
    assert record["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 0}
    assert (record["finish_reason"], record["status"]) == ("stop", 200)
    assert record["tokens_counted_by"] == "usage"
    assert sum(piece["tokens"] for piece in record["chunks"]) == 3
    assert "error_type" not in record


def test_record_holds_who_asked_what(proxy: ProxyProcess, upstream: Nasty) -> None:
    upstream.script = streams(*PLAIN)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    question = QUESTION | {
        "temperature": 0.2, "max_completion_tokens": 9, "stop": "END", "seed": 5, "top_p": 7,
    }  # fmt: skip
    name, *_ = ask(
        proxy,
        body=question,
        X_Tenant="acme",
        X_Route="support",
        X_Priority="80",
        Authorization="Bearer sk-secret-of-the-client",
        Cookie="session=very-secret",
        traceparent=f"00-{trace_id}-b7ad6b7169203331-01",
    )
    record = proxy.record(name)
    TrafficRecord.model_validate(record)
    assert record["request_id"] == trace_id
    assert (record["tenant"], record["route"], record["priority"]) == ("acme", "support", 80)
    assert record["class_key"].startswith("acme/support/")
    assert record["messages"] == QUESTION["messages"]
    assert record["sampling"]["temperature"] == 0.2
    assert (record["sampling"]["max_tokens"], record["sampling"]["stop"]) == (9, ["END"])
    assert record["sampling"]["top_p"] == 1.0  # the client's 7 is no value for it
    assert sorted(record["sampling_set"]) == ["max_tokens", "seed", "stop", "temperature"]
    everything = json.dumps(proxy.records())
    assert "secret" not in everything
    sent = upstream.seen[-1].head
    assert b"Bearer sk-secret-of-the-client" in sent
    assert sent.count(b"traceparent") == 1
    (frame,) = proxy.of_request(trace_id, RequestFrame)
    assert (frame.tenant, frame.route, frame.priority) == ("acme", "support", 80)
    assert (frame.prompt_tokens, frame.max_tokens) == (None, 9)


def test_no_header_is_added_upstream(proxy: ProxyProcess, upstream: Nasty) -> None:
    raw(proxy.port, b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n"
        b"Connection: close\r\n\r\n{}")  # fmt: skip
    expected = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2"
    assert upstream.seen[-1].head == expected


def with_ids(ids: list[int], text: str) -> bytes:
    return chat_event(text, choice={"token_ids": ids})


@pytest.mark.parametrize("counted", ["token_ids", "usage along", "usage at the end", "chunks"])
def test_latencies_are_per_token_and_not_per_chunk(
    proxy: ProxyProcess, upstream: Nasty, counted: str
) -> None:
    """Chunks of 1, 4 and 1 tokens, 50 ms apart, after 200 ms."""
    sizes = [1, 4, 1]
    events = []
    for index, size in enumerate(sizes):
        usage = {"usage": {"prompt_tokens": 3, "completion_tokens": sum(sizes[: index + 1])}}
        ids = {"choice": {"token_ids": list(range(size)), "delta": {"content": "x" * size}}}
        more = {"token_ids": ids, "usage along": usage}.get(counted, {})
        events.append(chat_event("x" * size, **more))
    events.append(chat_event(finish_reason="length"))
    if counted == "usage at the end":
        events.append(usage_event(3, 6))
    taken: list[bytes] = []
    upstream.script = paced(*events, DONE, wait_s=0.2, pause_s=0.05, taken=taken)
    began = time.monotonic()
    name, *_ = ask(proxy, taken=taken)
    took_ms = (time.monotonic() - began) * 1000

    record = proxy.record(name)
    assert 200 <= record["ttft_ms"] < record["chunks"][1]["at_ms"]
    times = [piece["at_ms"] for piece in record["chunks"]]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert 99 < sum(gaps) < took_ms - record["ttft_ms"]
    (finish,) = proxy.of_request(record["request_id"], FinishFrame)
    (request,) = proxy.of_request(record["request_id"], RequestFrame)
    ttft_ms = (finish.first_token_ns - request.arrival_ns) / 1e6
    assert ttft_ms == pytest.approx(record["ttft_ms"])
    rows = proxy.rows_of(record["request_id"])
    marks = [f.kind for f in proxy.of_request(record["request_id"], EventFrame)]
    if counted == "chunks":
        assert (finish.output_tokens, record["tokens_counted_by"]) == (3, "chunks")
        assert "tokens_per_chunk" in marks
        return
    assert finish.output_tokens == 6
    tpot_ms = (finish.last_token_ns - finish.first_token_ns) / 5 / 1e6
    assert tpot_ms == pytest.approx(sum(gaps) / 5)
    if counted == "usage at the end":
        assert "tokens_per_chunk" in marks
        return
    assert [row["position"] for row in rows] == list(range(6))
    latency_ms = [row["latency_us"] / 1e3 for row in rows]
    assert latency_ms == pytest.approx([ttft_ms, *[gaps[0] / 4] * 4, gaps[1]])
    assert [row["phase"] for row in rows] == [1, 0, 0, 0, 0, 0]
    ids = [row["token_id"] for row in rows]
    assert ids == ([0, 0, 1, 2, 3, 0] if counted == "token_ids" else [NONE] * 6)
    assert "tokens_per_chunk" not in marks


def test_log_probabilities_count_tokens(proxy: ProxyProcess, upstream: Nasty) -> None:
    entries = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    upstream.script = streams(
        chat_event("ab", choice={"logprobs": {"content": entries}}),
        chat_event(finish_reason="stop"),
        DONE,
    )
    record = proxy.record(ask(proxy).name)
    assert record["tokens_counted_by"] == "token_ids"
    assert record["logprobs"] == [-0.5, -1.5]
    assert [r["logprob"] for r in proxy.rows_of(record["request_id"])] == [-0.5, -1.5]


def test_token_ids_of_completions(proxy: ProxyProcess, upstream: Nasty) -> None:
    def event(text: str, ids: list[int], **more: Any) -> bytes:
        choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None} | more
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    upstream.script = streams(
        event("He", [11], prompt_token_ids=[1, 2]), event("llo", [12, 13], finish_reason="stop"),
        DONE,
    )  # fmt: skip
    body = {"model": "tiny", "prompt": "Say", "stream": True}
    record = proxy.record(ask(proxy, "/v1/completions", body).name)
    assert (record["endpoint"], record["prompt"]) == ("/v1/completions", "Say")
    assert (record["output_text"], record["output_token_ids"]) == ("Hello", [11, 12, 13])
    assert record["prompt_token_ids"] == [1, 2]


def test_several_choices_share_a_request(proxy: ProxyProcess, upstream: Nasty) -> None:
    def event(index: int, text: str | None, reason: str | None = None) -> bytes:
        return chat_event(text, choice={"index": index, "finish_reason": reason})

    upstream.script = streams(
        event(0, "a"), event(1, "A"), event(0, "b"), event(1, "B"), event(0, None, "stop"),
        event(1, None, "stop"), usage_event(3, 4), DONE, pause_s=0.02,
    )  # fmt: skip
    record = proxy.record(ask(proxy, body=QUESTION | {"n": 2}).name)
    assert record["output_text"] == "ab"
    rows = proxy.rows_of(record["request_id"])
    assert [row["position"] for row in rows] == [0, 1, 2, 3]
    assert [row["phase"] for row in rows] == [1, 1, 0, 0]
    times = [piece["at_ms"] for piece in record["chunks"]]
    expected = [times[2] - times[0], times[3] - times[1]]
    assert [row["latency_us"] / 1e3 for row in rows][2:] == pytest.approx(expected)


def test_answer_in_one_piece(proxy: ProxyProcess, upstream: Nasty) -> None:
    message = {"role": "assistant", "content": "Hello"}
    upstream.script = answers(
        {
            "model": "tiny",
            "system_fingerprint": "fp_1",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 8},
            },
        }
    )
    record = proxy.record(ask(proxy, body=QUESTION | {"stream": False}).name)
    assert (record["output_text"], record["fingerprint"]) == ("Hello", "fp_1")
    assert record["usage"] == {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 8}
    assert "ttft_ms" not in record  # nobody saw when the first token came
    assert not proxy.rows_of(record["request_id"])
    (finish,) = proxy.of_request(record["request_id"], FinishFrame)
    assert (finish.reason, finish.output_tokens, finish.first_token_ns) == ("stop", 2, 0)


@pytest.mark.parametrize(
    ("script", "status", "error_type", "reason"),
    [
        (answers({"error": {"message": "no", "code": "gone"}}, 404), 404, "gone", "error"),
        (answers({"detail": "no"}, 422), 422, "http_422", "error"),
        (
            streams(chat_event("a"), b'data: {"error": {"message": "m", "type": "oom"}}\n\n', DONE),
            502, "oom", "error",
        ),
        (streams(chat_event("a")), 502, "incomplete", "error"),
        (streams(chat_event("a"), chat_event(finish_reason="content_filter"), DONE),
         200, None, "content_filter"),
        (streams(chat_event("a"), chat_event(finish_reason="tool_calls"), DONE), 200, None, "stop"),
    ],
)  # fmt: skip
def test_ends(
    proxy: ProxyProcess,
    upstream: Nasty,
    script: Any,
    status: int,
    error_type: str | None,
    reason: str,
) -> None:
    upstream.script = script
    record = proxy.record(ask(proxy).name)
    assert (record["status"], record.get("error_type")) == (status, error_type)
    (finish,) = proxy.of_request(record["request_id"], FinishFrame)
    assert finish.reason == reason


def test_upstream_that_dies_is_in_the_record(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.start_stream()
        await talk.events(chat_event("half an "))
        await talk.until(lambda: taken)
        talk.reset()

    taken: list[bytes] = []
    upstream.script = script
    with pytest.raises(httpx.HTTPError):
        ask(proxy, taken=taken)
    record = proxy.record(f"conversation-{next(numbers) - 1}")
    assert (record["status"], record["error_type"]) == (502, "upstream_error")
    assert record["output_text"] == "half an "
    kinds = [f.kind for f in proxy.of_request(record["request_id"], EventFrame)]
    assert "upstream_error" in kinds


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("zstd", zstandard.ZstdCompressor().compress),
    ],
)
def test_coded_bodies_are_read_in_a_copy(
    proxy: ProxyProcess, upstream: Nasty, coding: str, pack: Any
) -> None:
    packed = pack(b"".join(PLAIN))
    upstream.script = streams(
        *(bytes([byte]) for byte in packed), headers=f"Content-Encoding: {coding}"
    )
    question = pack(json.dumps(QUESTION).encode())
    name, _, content = ask(proxy, body=question, content_encoding=coding)
    assert content == packed
    record = proxy.record(name)
    assert record["output_text"] == "Grüße 😀 aus Köln"
    assert record["messages"] == QUESTION["messages"]


def skipped(proxy: ProxyProcess, reason: str) -> float:
    text = httpx.get(proxy.url + "/inferloop/metrics", **PATIENT).text
    start = f'inferloop:proxy_capture_skipped_total{{reason="{reason}"}} '
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return float(lines[0].removeprefix(start)) if lines else 0.0


@pytest.mark.parametrize(
    ("reason", "coding", "content"),
    [("encoding", "br", b"\x0b\x02\x80hello\x03"), ("broken_content", "gzip", b"no gzip at all")],
)
def test_what_cannot_be_decoded_passes_and_is_counted(
    proxy: ProxyProcess, upstream: Nasty, reason: str, coding: str, content: bytes
) -> None:
    before = skipped(proxy, reason)
    upstream.script = streams(content, headers=f"Content-Encoding: {coding}")
    body = json.dumps(QUESTION).encode()
    answer = raw(
        proxy.port,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body,
    )
    assert answer.endswith(chunk(content) + b"0\r\n\r\n")
    until(lambda: skipped(proxy, reason) == before + 1, "it is counted")


@pytest.mark.parametrize(
    ("reason", "path", "body"),
    [
        ("not_json", CHAT, b"{"),
        ("no_messages", CHAT, b'{"messages": "hi"}'),
        ("several_prompts", "/v1/completions", b'{"prompt": ["a", "b"]}'),
    ],
)
def test_requests_without_a_place_in_a_record_are_counted(
    proxy: ProxyProcess, upstream: Nasty, reason: str, path: str, body: bytes
) -> None:
    before = skipped(proxy, reason)
    upstream.script = answers({"error": {"message": "no"}}, 400)
    assert ask(proxy, path, body).status == 400
    until(lambda: skipped(proxy, reason) == before + 1, "it is counted")


def test_other_endpoints_are_not_captured(proxy: ProxyProcess, upstream: Nasty) -> None:
    def captured() -> list[str]:
        proxy.settle()
        requests = [frame for frame in proxy.frames() if isinstance(frame, RequestFrame)]
        return [frame.request_id for frame in requests if frame.tenant != "settle"]

    before = captured()
    upstream.script = answers({"data": []})
    assert ask(proxy, "/v1/embeddings").content == b'{"data": []}'
    assert captured() == before


def test_event_of_a_megabyte(proxy: ProxyProcess, upstream: Nasty) -> None:
    text = "long " * 210_000
    upstream.script = streams(chat_event(text), chat_event(finish_reason="stop"), DONE)
    name, _, content = ask(proxy)
    assert len(content) > 1 << 20
    record = proxy.record(name)
    assert record["truncated"]
    assert record["output_text"].startswith("long long")


def test_personal_data_is_redacted(proxy: ProxyProcess, upstream: Nasty) -> None:
    upstream.script = streams(
        chat_event("Write to jane.doe@"), chat_event("example.com"),
        chat_event(finish_reason="stop"), DONE,
    )  # fmt: skip
    question = QUESTION | {"messages": [{"role": "user", "content": "I am joe@example.com"}]}
    record = proxy.record(ask(proxy, body=question).name)
    assert "example.com" not in json.dumps(record)
    assert record["redactions"]


def test_token_ids_without_their_text_are_not_kept(proxy: ProxyProcess, upstream: Nasty) -> None:
    """Reasoning and tool calls are in the ids, but in no text that redaction reads."""
    upstream.script = streams(
        chat_event(choice={"delta": {"reasoning_content": "joe@"}, "token_ids": [1, 2]}),
        chat_event("Hi", choice={"token_ids": [3], "delta": {"content": "Hi"}}),
        chat_event(finish_reason="stop"), DONE,
    )  # fmt: skip
    record = proxy.record(ask(proxy).name)
    assert record["output_text"] == "Hi"
    assert "output_token_ids" not in record
    body = {"model": "tiny", "prompt": [5, 6, 7], "stream": True}
    record = proxy.record(ask(proxy, "/v1/completions", body).name)
    assert "prompt_token_ids" not in record


def test_turns_of_an_unnamed_chat_are_one_conversation(
    proxy: ProxyProcess, upstream: Nasty
) -> None:
    upstream.script = streams(*PLAIN)
    turns = [{"role": "user", "content": "a chat nobody named"}]
    for _ in range(2):
        httpx.post(proxy.url + CHAT, json=QUESTION | {"messages": turns}, **PATIENT)
        turns += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]

    def found() -> list[str]:
        records = [record for record in proxy.records() if "nobody named" in str(record)]
        return [record["conversation_id"] for record in records]

    until(lambda: len(found()) == 2, "both records")
    assert len(set(found())) == 1


def test_failures_count_in_durations_only(proxy: ProxyProcess, upstream: Nasty) -> None:
    def counts() -> dict[str, float]:
        text = httpx.get(proxy.url + "/inferloop/metrics", **PATIENT).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
        return {name.removeprefix("inferloop:proxy_"): float(value) for name, value in lines}

    proxy.settle()
    before = counts()
    upstream.script = streams(chat_event("a"), chat_event("b"))  # and no end
    record = proxy.record(ask(proxy).name)
    assert record["error_type"] == "incomplete"
    after = counts()
    duration = 'request_duration_seconds_count{endpoint="chat"}'
    assert after[duration] == before[duration] + 1
    for name in ("time_to_first_token", "inter_token_latency", "request_time_per_output_token"):
        assert after[f"{name}_seconds_count"] == before[f"{name}_seconds_count"]


def test_trace_says_what_it_is_of(proxy: ProxyProcess, upstream: Nasty) -> None:
    upstream.script = streams(*PLAIN)
    proxy.record(ask(proxy).name)
    (engine,) = [frame for frame in proxy.frames() if isinstance(frame, EngineFrame)]
    assert (engine.info["kind"], engine.info["upstream"]) == ("proxy", upstream.url)
    assert engine.info["model"] == "tiny"

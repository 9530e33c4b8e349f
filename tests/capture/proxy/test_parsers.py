"""The capture's parsers on their own: any cut, any nonsense, bounded memory."""

from __future__ import annotations

import gzip
import json
import math
import tracemalloc
import zlib
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from capture.proxy.address import ProxyError, parse_upstream
from capture.proxy.answer import Answer
from capture.proxy.body import Body, Budget
from capture.proxy.caller import RequestIds, read_caller
from capture.proxy.content import BrokenContentError, UnknownCodingError, decoder_for
from capture.proxy.question import read_question
from capture.proxy.sse import EventStream

LINES = st.lists(
    st.sampled_from(
        [b"data: a", b"data:b", b"data: ", b"data", b": ping", b"event: x", b"", b"", b"id: 5",
         "data: ü😀".encode(), b"data:  two spaces", b"nonsense"]
    ),
    max_size=30,
)  # fmt: skip


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def events_of(pieces: list[bytes], limit: int = 1 << 20) -> list[bytes]:
    stream = EventStream(limit)
    return [event for piece in pieces for event in stream.feed(piece)] + stream.end()


@given(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 1000)))
def test_events_do_not_depend_on_the_cut(lines: list[bytes], end: bytes, places: list[int]) -> None:
    data = end.join(lines)
    expected = []
    current: list[bytes] = []
    for line in [*lines, b""]:
        name, _, value = line.partition(b":")
        if not line:
            expected += [b"\n".join(current)] if current else []
            current = []
        elif name == b"data":
            current.append(value.removeprefix(b" "))
    assert events_of(cut(data, places)) == expected
    assert events_of([bytes([byte]) for byte in data]) == expected


def test_event_over_the_limit_is_left_out_and_counted() -> None:
    stream = EventStream(100)
    tracemalloc.start()
    found = stream.feed(b"data: before\n\ndata: ")
    for _ in range(200):
        found += stream.feed(b"x" * 100_000)
    found += stream.feed(b"\ndata: more\n\ndata: after\n\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [b"before", b"after"]
    assert stream.oversized == 1
    assert peak < 2 << 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "message", "content", "text", "index", "usage", "error", "model",
             "finish_reason", "token_ids", "logprobs", "token_logprobs", "completion_tokens",
             "prompt_tokens", "prompt_tokens_details", "messages", "prompt", "n", "stop", "top_p",
             "temperature", "max_tokens", "role", "code", "logprob", "seed", "top_k"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip


@given(JSON, st.integers(0, 200))
def test_no_document_is_too_odd(document: Any, end: int) -> None:
    data = json.dumps(document).encode()
    for chat in (True, False):
        question = read_question(data, chat=chat, cut=False)
        assert all(value is not None for value in question.sampling.values())
        assert len(question.template) in (1, 8)
        read_question(data[:end], chat=chat, cut=True)
    answer = Answer(keeps_text=True, limit_bytes=1000, budget=Budget(5000))
    for piece in answer.read_event(data):
        assert piece.tokens > 0
        assert len(piece.token_ids) in (0, piece.tokens)
        assert len(piece.logprobs) in (0, piece.tokens)
    answer.read_document(data)
    answer.read_document(data[:end], cut=True)
    assert answer.output_tokens >= 0


def test_cut_request_is_read_as_far_as_it_goes() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 100}]}).encode()
    question = read_question(body[:90], chat=True, cut=True)
    assert question.messages is not None
    assert question.messages[0]["content"].startswith("xxx")


def test_request_that_there_was_no_room_for_is_no_broken_one() -> None:
    body = Body([], Budget(10), 1000)
    body.keep(b"x" * 20)
    assert read_question(body.take(), chat=True, cut=body.cut).unsupported == "overflow"


@pytest.mark.parametrize("ids", [[1, -1], [1, 2.0], [1, True], [1, 1 << 63], [1, [2]], [1, "2"]])
def test_prompt_that_is_no_list_of_token_ids(ids: list[Any]) -> None:
    assert read_question(json.dumps({"prompt": ids}).encode(), chat=False, cut=False).unsupported


def test_usage_of_the_last_event_is_no_running_count() -> None:
    """A server that puts all usage into the event with the finish reason."""
    answer = Answer(keeps_text=True, limit_bytes=1000, budget=Budget(5000))
    for text in ("a", "b"):
        answer.read_event(json.dumps({"choices": [{"delta": {"content": text}}]}).encode())
    last = {
        "choices": [{"delta": {}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 9},
    }
    assert answer.read_event(json.dumps(last).encode()) == []
    assert (answer.tokens, answer.output_tokens) == (2, 9)


@pytest.mark.parametrize("lie", [[1 << 30], [3, 1 << 30], [5, 2, 1 << 30], [-1, 1 << 40, 1 << 30]])
def test_running_usage_that_lies_is_not_traced_token_by_token(lie: list[int]) -> None:
    """A row for each token that a usage claims would hold everything up for minutes."""
    answer = Answer(keeps_text=True, limit_bytes=1000, budget=Budget(5000))
    for count in lie:
        event = {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": count}}
        answer.read_event(json.dumps(event).encode())
    assert answer.tokens < 10
    assert answer.output_tokens == 1 << 30


@pytest.mark.parametrize("value", [None, "x", 10**400, float("inf")])
def test_log_probability_that_is_no_number(value: Any) -> None:
    answer = Answer(keeps_text=True, limit_bytes=1000, budget=Budget(5000))
    choice = {"text": "a", "logprobs": {"token_logprobs": [value]}}
    (piece,) = answer.read_event(json.dumps({"choices": [choice]}).encode())
    assert math.isnan(piece.logprobs[0])


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(("gzip", gzip.compress(bytes(64 << 20))), id="gzip"),
        pytest.param(("deflate", zlib.compress(bytes(64 << 20))), id="deflate"),
        pytest.param(("zstd", zstandard.ZstdCompressor().compress(bytes(64 << 20))), id="zstd"),
    ],
)
def test_compression_bomb_takes_bounded_memory(bomb: tuple[str, bytes]) -> None:
    coding, data = bomb
    body = Body([(b"Content-Encoding", coding.encode())], Budget(10 << 20), 1 << 20)
    tracemalloc.start()
    body.keep(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert body.cut
    assert len(body.take()) == 1 << 20
    assert peak < 24 << 20


@given(st.binary(min_size=1, max_size=300), st.sampled_from(["gzip", "deflate", "zstd"]))
def test_broken_content_is_an_error_of_ours(data: bytes, coding: str) -> None:
    with suppress(BrokenContentError):
        b"".join(decoder_for(coding).decode(data))


def test_unknown_coding_is_named() -> None:
    with pytest.raises(UnknownCodingError, match="'br'"):
        decoder_for("br")


def test_copies_share_a_budget() -> None:
    budget = Budget(100)
    first, second = Body([], budget, 80), Body([], budget, 80)
    first.keep(b"x" * 80)
    second.keep(b"y" * 50)
    assert (first.cut, second.cut) == (False, True)
    first.take()
    third = Body([], budget, 80)
    third.keep(b"z" * 50)
    assert not third.cut


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"X-Tenant", b"no spaces allowed"),
        (b"X-Priority", b"-4"),
        (b"X-Route", b"\xff\xfe"),
        (b"X-Conversation", b"x" * 200),
        (b"traceparent", b"00-00000000000000000000000000000000-b7ad6b7169203331-01"),
    ],
)
def test_header_that_is_not_valid_counts_as_not_sent(name: bytes, value: bytes) -> None:
    caller = read_caller([(name, value)], default_route="chat", client=None, ids=RequestIds())
    assert (caller.tenant, caller.route, caller.priority) == ("default", "chat", 50)
    assert caller.conversation is None


def test_trace_id_is_used_once() -> None:
    ids = RequestIds()
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    first, second = (
        read_caller([(b"traceparent", trace)], default_route="chat", client=None, ids=ids)
        for _ in range(2)
    )
    assert first.request_id == "0af7651916cd43dd8448eb211c80319c"
    assert second.request_id != first.request_id


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "give http://HOST:PORT"),
        ("ftp://host", "give http://HOST:PORT"),
        ("http://host:99999", "no URL"),
        ("http://two..dots", "no URL"),
        ("http://host name", "give http://HOST:PORT"),
        ("http://host:0", "port 0"),
        ("http://host:8000/v1", "has a path"),
        ("https://user:word@host", "credentials come from the clients"),
    ],
)
def test_upstream_that_makes_no_sense(url: str, message: str) -> None:
    with pytest.raises(ProxyError, match=message):
        parse_upstream(url)


def test_upstream_addresses() -> None:
    plain, tls = parse_upstream("http://[::1]:8001/"), parse_upstream("https://example.org")
    assert (plain.host, plain.port, plain.authority, plain.tls) == (
        "::1",
        8001,
        b"[::1]:8001",
        None,
    )
    assert (tls.host, tls.port, tls.authority) == ("example.org", 443, b"example.org")
    assert tls.tls is not None

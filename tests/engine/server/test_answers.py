"""The HTTP server over real sockets: answers in OpenAI's shapes, and what it records."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from capture.traffic import TrafficRecord
from tests.engine.fake_runner import EOS, expected
from tests.engine.live_server import (
    CHAT,
    HI,
    TEXT,
    LiveServer,
    RecordingMirror,
    body,
    chat,
    chunks,
    live_server,
    text_of,
)
from tests.waiting import until


def test_completion_has_openai_shape(server: LiveServer) -> None:
    answer = server.client.post(TEXT, json=body()).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": text_of("hello"),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["total_tokens"] == 10
    assert (
        answer["system_fingerprint"] == server.client.get("/inferloop/build").json()["fingerprint"]
    )


def test_prompt_may_be_token_ids(server: LiveServer) -> None:
    for prompt in (list(b"hello"), [list(b"hello")], ["hello"]):
        answer = server.client.post(TEXT, json=body(prompt=prompt)).json()
        assert answer["choices"][0]["text"] == text_of("hello")


def test_chat_has_openai_shape(server: LiveServer) -> None:
    answer = server.client.post(CHAT, json=chat()).json()
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": text_of("<user>hi<assistant>"),
        "refusal": None,
    }


def test_content_parts_are_joined(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    answer = server.client.post(CHAT, json=chat(messages=[{"role": "user", "content": parts}]))
    assert answer.json()["choices"][0]["message"]["content"] == text_of("<user>hi<assistant>")


@pytest.mark.parametrize(("path", "make"), [(TEXT, body), (CHAT, chat)])
def test_stream_equals_the_whole_answer(server: LiveServer, path: str, make: Any) -> None:
    server.runner.script = list("naïve 🙂 END x".encode())
    fields = {"max_tokens": 30, "stop": ["END"]}
    whole = server.client.post(path, json=make(**fields)).json()["choices"][0]
    server.runner.script = list("naïve 🙂 END x".encode())
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    parts = chunks(server.client.post(path, json=make(**fields, **options)).text)
    *pieces, usage = parts
    if path == CHAT:
        assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(p["choices"][0]["delta"].get("content", "") for p in pieces)
        assert text == whole["message"]["content"] == "naïve 🙂 "
    else:
        text = "".join(p["choices"][0]["text"] for p in pieces)
        assert text == whole["text"] == "naïve 🙂 "
    assert "\ufffd" not in text
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "END")
    assert [p["choices"][0]["finish_reason"] for p in pieces[-2:]] == [None, "stop"]
    ids = [i for p in pieces for i in p["choices"][0].get("token_ids", [])]
    assert bytes(ids) == "naïve 🙂 END".encode()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ids)


def test_logprobs_in_both_shapes(server: LiveServer) -> None:
    choice = server.client.post(TEXT, json=body(logprobs=2)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(5))
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])

    choice = server.client.post(CHAT, json=chat(logprobs=True, top_logprobs=3)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 5


def test_token_of_half_a_character_is_named_by_its_bytes(server: LiveServer) -> None:
    server.runner.script = [0xC3, 0xA9, EOS]
    choice = server.client.post(TEXT, json=body(logprobs=0)).json()["choices"][0]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", ""]


def test_prompt_logprobs_and_token_ids_as_vllm_names_them(server: LiveServer) -> None:
    fields = {"prompt_logprobs": 1, "return_token_ids": True}
    choice = server.client.post(TEXT, json=body(**fields)).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(b"hello")
    assert choice["token_ids"] == expected(list(b"hello"), 5)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [set(entry) for entry in rest] == [{str(byte)} for byte in b"ello"]
    assert rest[0]["101"] == {"logprob": -0.5, "rank": 1, "decoded_token": "e"}

    answer = server.client.post(CHAT, json=chat(**fields)).json()
    assert answer["prompt_token_ids"] == list(b"<user>hi<assistant>")
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert "prompt_token_ids" not in answer["choices"][0]


def test_a_stream_gives_the_prompts_ids_once_at_its_beginning(server: LiveServer) -> None:
    fields = {"stream": True, "return_token_ids": True}
    streamed = chunks(server.client.post(TEXT, json=body(**fields)).text)
    found = [chunk["choices"][0].get("prompt_token_ids") for chunk in streamed]
    assert found == [list(b"hello"), *[None] * (len(found) - 1)]
    plain = chunks(server.client.post(TEXT, json=body(stream=True)).text)
    assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in plain)

    streamed = chunks(server.client.post(CHAT, json=chat(**fields)).text)
    found = [chunk.get("prompt_token_ids") for chunk in streamed]
    assert found == [list(b"<user>hi<assistant>"), *[None] * (len(found) - 1)]


def test_unseeded_sampling_reports_the_seed_that_reproduces_it(server: LiveServer) -> None:
    headers = {"X-Inferloop-Detail": "1"}
    first = server.client.post(TEXT, json=body(temperature=1), headers=headers).json()
    seed = first["inferloop"]["sampling"]["seed"]
    again = server.client.post(TEXT, json=body(temperature=1, seed=seed)).json()
    assert again["choices"] == first["choices"]


def test_detail_says_what_was_resolved(server: LiveServer) -> None:
    messages = [{"role": "system", "content": "be brief"}, *HI]
    headers = {"X-Inferloop-Detail": "1", "X-Tenant": "acme", "X-Priority": "70"}
    answer = server.client.post(CHAT, json=chat(messages=messages, top_k=-1), headers=headers)
    detail = answer.json()["inferloop"]
    assert detail["request_id"] == answer.headers["x-request-id"]
    assert detail["rendered_prompt"] == "<system>be brief<user>hi<assistant>"
    assert detail["class_key"].startswith("acme/chat/")
    assert len(detail["class_key"].rpartition("/")[2]) == 8
    assert detail["priority"] == 70
    assert detail["sampling"]["top_k"] == 0
    assert detail["margins"] == [0.25] * 5
    timings = detail["timings"]
    assert 0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["duration_ms"]

    stream = server.client.post(CHAT, json=chat(stream=True), headers=headers).text
    with_detail = [chunk for chunk in chunks(stream) if "inferloop" in chunk]
    assert with_detail == [chunks(stream)[-1]]


def test_traceparent_gives_the_request_its_id(server: LiveServer) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-00"}
    answer = server.client.post(TEXT, json=body(), headers=headers)
    assert answer.headers["x-request-id"] == trace
    version, trace_out, span_out, flags = answer.headers["traceparent"].split("-")
    assert (version, trace_out, flags) == ("00", trace, "00")
    assert span_out != "b7ad6b7169203331"
    again = server.client.post(TEXT, json=body(), headers=headers)
    assert again.headers["x-request-id"] != trace
    assert again.headers["traceparent"].split("-")[1] == trace


@pytest.mark.parametrize("bad", ["garbage", f"00-{'0' * 32}-b7ad6b7169203331-01", "ff-" + "1" * 32])
def test_traceparent_that_is_not_valid_is_ignored(server: LiveServer, bad: str) -> None:
    answer = server.client.post(TEXT, json=body(), headers={"traceparent": bad})
    assert answer.status_code == 200
    assert len(answer.headers["x-request-id"]) == 32


def test_every_request_leaves_a_valid_traffic_record(server: LiveServer) -> None:
    headers = {"X-Conversation": "c1", "X-Tenant": "acme", "Authorization": "Bearer secret"}
    server.client.post(CHAT, json=chat(logprobs=True), headers=headers)
    server.record(1)
    server.client.post(TEXT, json=body(stream=True))
    server.record(2)
    server.client.post(TEXT, content=b"{")
    server.client.post(TEXT, json=body(max_tokens=508))
    server.record(3)
    good, streamed, refused = [TrafficRecord.model_validate(record) for record in server.records]
    assert good.conversation_id == "c1"
    assert good.output_token_ids == expected(list(b"<user>hi<assistant>"), 5)
    assert good.sampling_set == ["max_tokens", "temperature"]
    assert good.usage is not None
    assert good.usage.completion_tokens == 5
    assert "secret" not in good.model_dump_json()
    assert sum(chunk.tokens for chunk in streamed.chunks) == 5
    assert streamed.chunks == sorted(streamed.chunks, key=lambda chunk: chunk.at_ms)
    assert (refused.status, refused.error_type) == (400, "context_length_exceeded")


def test_only_mirrored_conversations_are_recorded_and_with_alternatives() -> None:
    mirror = RecordingMirror([], kept=frozenset({"kept"}))
    with live_server(mirror=mirror) as server:
        for conversation in ("kept", "other"):
            answer = server.client.post(
                TEXT, json=body(logprobs=1), headers={"X-Conversation": conversation}
            )
            top = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
            assert [len(position) for position in top] == [1] * 5
        until(lambda: mirror.records and mirror.skipped, "both requests are accounted for")
    (kept,) = mirror.records
    assert [len(item["token_ids"]) for item in kept["top"]] == [5] * 5
    assert mirror.skipped == ["not_sampled"]


def test_finish_times_reach_the_trace_in_order(server: LiveServer) -> None:
    answer = server.client.post(TEXT, json=body(stream=True))
    request_id = bytes.fromhex(answer.headers["x-request-id"])
    (slot,) = [r["slot"] for r in server.writer.of("request") if r["request_id"] == request_id]
    (finish,) = until(
        lambda: [f for f in server.writer.of("finish") if f["slot"] == slot], "the finish frame"
    )
    names = ("admitted", "first_token", "last_token", "detokenized", "serialized", "flushed")
    times = [finish[f"{name}_ns"] for name in names]
    assert times == sorted(times)
    assert times[0] > 0


def test_metrics_have_vllms_and_opentelemetrys_names(server: LiveServer) -> None:
    server.client.post(TEXT, json=body())
    server.record()
    text = server.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens",
        "generation_tokens", "prompt_tokens_cached", "request_success", "iteration_tokens_total",
        "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_params_max_tokens", "admission_rejections",
        "cache_config_info",
    ):  # fmt: skip
        assert f"inferloop:{name}" in families, name
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert f"gen_ai_server_{name}_seconds" in families
    itl = families["inferloop:inter_token_latency_seconds"].samples
    counts = [s.value for s in itl if s.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == next(s.value for s in itl if s.name.endswith("_count")) > 0


def test_models_build_and_schema(server: LiveServer) -> None:
    models = server.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("fake", 512)]
    assert server.client.get("/v1/models/fake").status_code == 200
    build = server.client.get("/inferloop/build").json()
    assert build["components"] == {"weights": "w", "code": "c"}
    assert len(build["fingerprint"]) == 32


def test_every_reference_of_the_schema_resolves(server: LiveServer) -> None:
    document = server.client.get("/openapi.json").json()
    references = set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)))
    assert any(reference.endswith("Message") for reference in references)
    for reference in references:
        found = document
        for key in reference.split("/"):
            found = found[key.replace("~1", "/")]

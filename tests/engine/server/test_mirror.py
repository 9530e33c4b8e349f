"""The traffic mirror behind the real server: every request accounted for, no personal data kept."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.mirror import Mirror
from capture.mirroring.sampling import is_sampled, opening_id
from capture.mirroring.traffic_files import numbered_lines, traffic_files
from capture.traffic import TrafficRecord
from engine.protocol import ChatBody, parse_body
from tests.engine.live_server import CHAT, TEXT, LiveServer, body, chat, live_server
from tests.waiting import PATIENCE_S, until

KEY = b"a key of the tests"
ADDRESS, CARD = "jane.doe@example.com", "4111 1111 1111 1111"
PERSONAL = f"I am {ADDRESS} and my card is {CARD}. "


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for f in traffic_files(directory) for _, line in numbered_lines(f)]


def ask(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Chats and completions in turn."""
    if number % 2:
        return TEXT, body(prompt=PERSONAL + str(number), **fields)
    return CHAT, chat(messages=[{"role": "user", "content": PERSONAL + str(number)}], **fields)


async def send_all(url: str) -> list[int]:
    """980 requests: 10 that are refused, 10 too long, the others are answered."""
    room = asyncio.Semaphore(16)

    async def one(http: httpx.AsyncClient, number: int) -> int:
        path, fields = ask(number, stream=number % 3 == 0)
        if number < 10:
            fields["stop_token_ids" if number % 2 else "stop"] = PERSONAL if number % 2 else [1]
        elif number < 20:
            path, fields = ask(0)
            fields["messages"][0]["content"] = PERSONAL + "filler " * ((2 << 20) // 7) + PERSONAL
        async with room:
            return (await http.post(path, json=fields)).status_code

    one_use = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE_S, trust_env=False, limits=one_use
    ) as http:
        return await asyncio.gather(*(one(http, number) for number in range(980)))


def cancel(server: LiveServer, number: int) -> None:
    path, fields = ask(number, stream=True, ignore_eos=True)
    fields["max_tokens"] = 300
    with server.client.stream("POST", path, json=fields) as answer:
        next(answer.iter_bytes())


def break_off(url: str) -> None:
    """A client that goes before its body is complete."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
        connection.sendall(head.encode() + PERSONAL.encode())


def test_a_thousand_requests_are_accounted_for_without_personal_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    with live_server(mirror=mirror) as server:
        statuses = asyncio.run(send_all(server.url))
        server.runner.delay_s = 0.05  # 15 s for 300 tokens: nobody is that late to cancel
        for number in range(10):
            cancel(server, number)
        for number in range(9):
            data = b'{"prompt": "' + PERSONAL.encode() if number else b"\xff"
            headers = {"X-Priority": ADDRESS} if number == 8 else {}
            assert server.client.post(TEXT, content=data, headers=headers).status_code == 400
        break_off(server.url)
        until(lambda: mirror.counters.offered >= 1000, "all are offered")
        until(lambda: not mirror.counters.queued, "all are written")
        metrics = server.client.get("/metrics").text
        trace = repr(server.writer.calls)
    mirror.close(PATIENCE_S)
    counters, written = mirror.counters, lines(tmp_path)
    assert (statuses.count(200), statuses.count(400)) == (960, 20)
    assert counters.offered == 1000 == counters.written + sum(counters.skipped.values())
    assert counters.skipped == {"unreadable": 19, "client_gone": 1}
    assert len(written) == counters.written == 980
    records = [TrafficRecord.model_validate(line) for line in written]
    assert sum(record.error_type == "cancelled" for record in records) == 10
    assert sum(record.truncated for record in records) == 10
    assert counters.redactions["email"] >= 980
    for place in (json.dumps(written), caplog.text, metrics, trace):
        for secret in (ADDRESS, CARD, "jane", "4111 ", "1111 1", "1111111"):
            assert secret not in place


def test_a_prompt_of_token_ids_is_kept_unless_its_text_holds_personal_data(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    with live_server(mirror=mirror) as server:
        for text in ("plain words", PERSONAL):
            server.client.post(TEXT, json=body(prompt=list(text.encode())))
    mirror.close(PATIENCE_S)
    plain, personal = lines(tmp_path)
    assert plain["prompt_token_ids"] == list(b"plain words")
    assert plain["rendered_prompt"] == "plain words"
    assert "prompt_token_ids" not in personal
    assert ADDRESS not in json.dumps(personal)


def test_turns_without_a_name_for_their_conversation_get_the_same(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "It is Monday."}]
    with live_server(mirror=mirror) as server:
        for turn in range(3):
            messages[0]["content"] = f"It is {turn} o'clock."
            messages.append({"role": "user", "content": f"question {turn}"})
            answer = server.client.post(CHAT, json=chat(messages=messages)).json()
            messages.append(answer["choices"][0]["message"] | {"refusal": None})
            messages[-1].pop("refusal")
        server.client.post(CHAT, json=chat(), headers={"X-Conversation": "named"})
        server.client.post(TEXT, json=body())
    mirror.close(PATIENCE_S)
    ids = [line["conversation_id"] for line in lines(tmp_path)]
    assert ids[0] == ids[1] == ids[2] == opening_id(KEY, "default", messages)
    assert ids[3] == "named"
    assert ids[4] == lines(tmp_path)[4]["request_id"]


TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@given(
    system=st.none() | TEXTS,
    texts=st.lists(TEXTS, min_size=3, max_size=9),
    parts=st.booleans(),
    share=st.floats(0.05, 0.95),
)
def test_all_turns_of_a_conversation_are_in_or_out_together(
    system: str | None, texts: list[str], parts: bool, share: float
) -> None:
    """In the server, which joins parts of a message, and in the proxy, which reads it raw."""
    messages: list[dict[str, Any]] = (
        [] if system is None else [{"role": "system", "content": system}]
    )
    fates = set()
    for number, text in enumerate(texts):
        role = "assistant" if number % 2 else "user"
        content = [{"type": "text", "text": text}] if parts else text
        messages.append({"role": role, "content": content})
        if role == "user":
            data = json.dumps(chat(messages=messages)).encode()
            read = parse_body(ChatBody, data)
            for seen in (messages, [m.model_dump() for m in read.messages]):
                name = opening_id(KEY, "t", seen)
                assert name is not None
                fates.add((name, is_sampled(name, share, KEY)))
    assert len(fates) == 1
    assert fates != {(opening_id(KEY, "other", messages), True)}

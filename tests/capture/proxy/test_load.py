"""Slow sides slow the other side, memory stays bounded, and many streams do not mix."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time

import httpx
import pytest

from tests.capture.proxy.nasty import DONE, Conversation, Nasty, chat_event, chunk
from tests.capture.proxy.processes import PATIENT, ProxyProcess
from tests.waiting import PATIENCE_S, until

MIB = 1 << 20
LARGE = 100 * MIB
KERNEL = 60 * MIB
"""More than the sockets' buffers take, less than the whole."""


def connect(proxy: ProxyProcess) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", proxy.port))
    return connection


def settled(read: object, for_s: float = 0.4) -> int:
    """What `read` returns once it has stopped changing."""
    value, since = read(), time.monotonic()  # type: ignore[operator]
    while time.monotonic() - since < for_s:
        time.sleep(0.02)
        if (now := read()) != value:  # type: ignore[operator]
            value, since = now, time.monotonic()
    return value


def test_fifty_streams_at_once_stay_apart(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        name = json.loads(await talk.body())["messages"][0]["content"]
        await talk.start_stream()
        for index in range(40):
            await talk.events(chat_event(f"{name}.{index} "), pause_s=0.005)
        await talk.events(chat_event(finish_reason="stop"), DONE)
        await talk.end_stream()

    upstream.script = script

    async def ask(http: httpx.AsyncClient, name: str) -> str:
        body = {"messages": [{"role": "user", "content": name}], "stream": True}
        text = ""
        async with http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"X-Conversation": name}
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    text += event["choices"][0]["delta"].get("content", "")
        return text

    async def ask_all(names: list[str]) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=proxy.url, limits=limits, **PATIENT) as http:
            return await asyncio.gather(*(ask(http, name) for name in names))

    names = [f"stream{index}" for index in range(50)]
    texts = asyncio.run(ask_all(names))
    expected = ["".join(f"{name}.{index} " for index in range(40)) for name in names]
    assert texts == expected
    until(lambda: {r["conversation_id"] for r in proxy.records()} >= set(names), "all records")
    records = {record["conversation_id"]: record for record in proxy.records()}
    assert [records[name]["output_text"] for name in names] == expected
    positions = [row["position"] for row in proxy.rows_of(records[names[7]]["request_id"])]
    assert positions == list(range(40))


@pytest.mark.parametrize("path", ["/download", "/v1/chat/completions"])
def test_slow_client_slows_the_upstream(proxy: ProxyProcess, upstream: Nasty, path: str) -> None:
    sent = [0]

    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.start_stream()
        piece = chunk(chat_event("x" * 50_000))
        while sent[0] < LARGE:
            await talk.send(piece)
            sent[0] += len(piece)
        await talk.end_stream()

    proxy.settle()
    upstream.script = script
    before = proxy.rss_mib()
    body = b'{"messages": [], "stream": true}'
    with connect(proxy) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        stuck_at = settled(lambda: sent[0])
        assert stuck_at < KERNEL
        assert proxy.rss_mib() - before < 30
        received = 0
        while received < LARGE:
            received += len(connection.recv(1 << 20))
    assert proxy.rss_mib() - before < 60  # the capture's copies and the kernel's pieces


def test_slow_upstream_slows_the_upload(proxy: ProxyProcess, upstream: Nasty) -> None:
    gate: list[bool] = []

    async def script(talk: Conversation) -> None:
        while not gate:
            await asyncio.sleep(0.01)
        body = await talk.body()
        answer = b"%d" % len(body)
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)

    proxy.settle()
    upstream.script = script
    before = proxy.rss_mib()
    with connect(proxy) as connection:
        connection.sendall(
            f"POST /upload HTTP/1.1\r\nHost: h\r\nContent-Length: {LARGE}\r\n\r\n".encode()
        )
        connection.setblocking(False)
        sent, piece, since = 0, b"x" * 65536, time.monotonic()
        while time.monotonic() - since < 0.4:
            try:
                sent += connection.send(piece)
                since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < KERNEL
        assert proxy.rss_mib() - before < 30
        gate.append(True)
        connection.setblocking(True)
        while sent < LARGE:
            sent += connection.send(piece[: LARGE - sent])
        answer = b""
        while not answer.endswith(b"%d" % LARGE):
            answer += (piece := connection.recv(65536))
            assert piece, f"closed after {answer!r}"
    assert proxy.rss_mib() - before < 40


def test_answer_without_an_end_takes_no_memory(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.start_stream()
        event = chunk(b": nothing but a comment" + b"." * 10_000 + b"\n")
        while True:
            await talk.send(event)

    upstream.script = script
    body = json.dumps({"messages": [], "stream": True}).encode()
    with connect(proxy) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
            % len(body) + body
        )  # fmt: skip
        received, before = 0, 0.0
        while received < 60 * MIB:
            received += len(connection.recv(1 << 20))
            before = before or proxy.rss_mib()
        assert proxy.rss_mib() - before < 20


def test_many_long_prompts_at_once_are_all_captured(proxy: ProxyProcess, upstream: Nasty) -> None:
    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.start_stream()
        await talk.events(chat_event("a"), chat_event(finish_reason="stop"), DONE)
        await talk.end_stream()

    upstream.script = script
    body = json.dumps({"prompt": [123456] * 500_000, "stream": True})

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=proxy.url, **PATIENT) as http:
            await asyncio.gather(*(http.post("/v1/completions", content=body) for _ in range(8)))

    def skipped() -> list[str]:
        metrics = httpx.get(proxy.url + "/inferloop/metrics", **PATIENT).text
        return re.findall(r"capture_skipped_total.*", metrics)

    proxy.settle()
    before = skipped()
    asyncio.run(ask_all())
    proxy.settle()
    assert skipped() == before

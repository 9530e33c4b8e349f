"""A server made by hand: it does on the wire exactly what a test says, at the test's pace.

`Nasty` runs in a thread; `script` is called for each connection with what its head was.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import PATIENCE_S


@dataclass
class Conversation:
    """One request on its connection. `head` are its raw bytes up to the blank line."""

    head: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.head.split(b" ")[1].decode()

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name.lower().encode():
                return value.strip().decode("latin-1")
        return None

    async def body(self) -> bytes:
        """The request's body, whichever way it is framed."""
        if self.header("transfer-encoding"):
            parts = []
            while True:
                size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
                parts.append(await self.reader.readexactly(size))
                await self.reader.readexactly(2)
                if not size:
                    return b"".join(parts)
        return await self.reader.readexactly(int(self.header("content-length") or 0))

    async def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        """Each piece in a TCP segment of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(pause_s)

    async def start_stream(self, *headers: str) -> None:
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", *headers]
        lines += ["Transfer-Encoding: chunked"]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def events(self, *events: bytes, pause_s: float = 0.0) -> None:
        """Each event as a chunk of its own."""
        for event in events:
            await self.send(chunk(event), pause_s=pause_s)

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """End the connection with a RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> bool:
        """Whether the peer ends the connection, and says no more before."""
        try:
            return await asyncio.wait_for(self.reader.read(1), PATIENCE_S) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    async def until(self, condition: Callable[[], object]) -> None:
        """Go on when something else has happened."""
        while not condition():
            await asyncio.sleep(0.001)


Script = Callable[[Conversation], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chat_event(text: str | None = None, **more: Any) -> bytes:
    """An event of a streamed chat answer."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": more.pop("finish_reason", None)}
    choice |= more.pop("choice", {})
    return b"data: " + json.dumps({"model": "tiny", "choices": [choice], **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage_event(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


class Nasty:
    """The server. Set `script` before a request; `seen` collects the requests' heads."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.script: Script = answer_hello
        self.seen: list[Conversation] = []
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20, ssl=self._tls)
        server = self._loop.run_until_complete(starting)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                talk = Conversation(head[:-4], reader, writer)
                self.seen.append(talk)
                await self.script(talk)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


async def answer_hello(talk: Conversation) -> None:
    await talk.body()
    body = b'{"data": [{"id": "tiny"}]}' if talk.path == "/v1/models" else b"hello"
    await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

"""What the capture proxy adds: latency of each streamed chunk and of the first byte, throughput.

`python -m benchmarks.bench_proxy`: a raw server stamps every chunk with the clock that the client
reads, so a chunk's latency is exact. In each round the same load runs direct, through the proxy
without and with capture, and through a minimal proxy of aiohttp as a peer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from benchmarks.report import report

PATH = "/v1/chat/completions"
STAMP = re.compile(rb'"stamp":(\d+)')
END = b"0\r\n\r\n"
QUESTION = (
    b'{"model":"bench","stream":true,"messages":[{"role":"user","content":"'
    + b"a question of some length " * 20
    + b'"}]}'
)


@dataclass(frozen=True)
class Load:
    """`interval_ms` between the chunks of a stream; 0: as fast as they are taken."""

    streams: int
    chunks: int
    interval_ms: float


@dataclass
class Sample:
    """What a load's client saw, in ns."""

    latencies: list[int] = field(default_factory=list)
    first_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0


def event(stamp_ns: int) -> bytes:
    """A chunk as vLLM sends it, with the time of its making."""
    data = (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
        b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
        b'"finish_reason":null,"token_ids":[1234]}],"stamp":%d}\n\n' % stamp_ns
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


# the server


async def serve(port: int) -> None:
    """Answers every request with the stream that its X-Load header asks for."""
    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"(?i)content-length: *(\d+)", head)
            await reader.readexactly(int(found[1]) if found else 0)
            load = re.search(rb"(?i)x-load: *(\d+),([\d.]+)", head)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            if load is not None:
                await send_stream(writer, int(load[1]), float(load[2]) / 1000)
            writer.write(END)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def send_stream(writer: asyncio.StreamWriter, chunks: int, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    for index in range(chunks):
        if interval_s:
            await asyncio.sleep(start + index * interval_s - loop.time())
        writer.write(event(time.monotonic_ns()))
        if not interval_s:
            await writer.drain()


# the peer


async def peer(port: int, upstream: str) -> None:
    """A streaming proxy as one writes it with aiohttp; captures nothing."""
    import aiohttp
    from aiohttp import web

    session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.request(
            request.method, upstream + request.path_qs, headers=request.headers, data=body
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = "text/event-stream"
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


# the client


class Stream(asyncio.Protocol):
    """One request; notes when what came."""

    def __init__(self, load: Load, sample: Sample, done: asyncio.Future[None]) -> None:
        self._load, self._sample, self._done = load, sample, done
        self._sent_ns = self._first_ns = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"X-Load: {self._load.chunks},{self._load.interval_ms}\r\n"
            f"Content-Length: {len(QUESTION)}\r\n\r\n"
        )
        self._sent_ns = time.monotonic_ns()
        self._transport.write(head.encode() + QUESTION)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if not self._first_ns:
            self._first_ns = now_ns
            self._sample.first_bytes.append(now_ns - self._sent_ns)
        data = self._tail + data
        latencies = self._sample.latencies
        end = 0
        for found in STAMP.finditer(data):
            latencies.append(now_ns - int(found[1]))
            end = found.end()
        self._tail = data[max(end, len(data) - 256) :]
        if data.endswith(END):
            self._transport.close()
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the answer was cut off"))


async def measure(port: int, load: Load) -> Sample:
    """Run a load's streams, their starts spread over one interval."""
    loop = asyncio.get_running_loop()
    sample = Sample()
    ends: list[asyncio.Future[None]] = []
    start = time.monotonic()
    for index in range(load.streams):
        done = loop.create_future()
        ends.append(done)
        await loop.create_connection(lambda d=done: Stream(load, sample, d), "127.0.0.1", port)
        planned = start + (index + 1) * load.interval_ms / 1000 / load.streams
        await asyncio.sleep(max(0.0, planned - time.monotonic()))
    await asyncio.gather(*ends)
    sample.seconds = time.monotonic() - start
    return sample


# the processes


@contextmanager
def started(command: list[str], port: int, **environment: str) -> Iterator[int]:
    """A process that listens on `port`."""
    process = subprocess.Popen(
        [sys.executable, *command], env=os.environ | environment, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while not is_listening(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} does not listen on port {port}")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def is_listening(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_all(stack: ExitStack, home: Path, ports: Iterator[int]) -> dict[str, int]:
    """Server and proxies; the port of each path to the server."""

    def start(*command: str, **environment: str) -> int:
        port = next(ports)
        arguments = [part.replace("PORT", str(port)) for part in command]
        return stack.enter_context(started(arguments, port, **environment))

    here = ("-m", "benchmarks.bench_proxy")
    direct = start(*here, "--serve", "PORT")
    upstream = f"http://127.0.0.1:{direct}"
    proxy = ("-m", "cli", "proxy", "--upstream", upstream, "--port", "PORT")
    place = {"INFERLOOP_HOME": str(home), "INFERLOOP_RING_DIR": str(home / "rings")}
    return {
        "direct": direct,
        "proxy, capture off": start(*proxy, "--mirror", "0", "--no-trace", **place),
        "proxy, capture on": start(*proxy, "--mirror", "1", **place),
        "aiohttp peer": start(*here, "--peer", "PORT", "--upstream", upstream),
    }


def row(
    name: str, paced: list[Sample], fast: list[Sample], direct: dict[str, Any]
) -> dict[str, Any]:
    """One path's figures; `direct` is the row of the direct path, empty for itself."""
    latency_ms = np.concatenate([sample.latencies for sample in paced]) / 1e6
    first_ms = np.concatenate([sample.first_bytes for sample in paced]) / 1e6
    rates = [len(sample.latencies) / sample.seconds for sample in fast]
    figures: dict[str, Any] = {"path": name}
    for text, values in (("chunk", latency_ms), ("ttfb", first_ms)):
        for share in (50, 99):
            figures[f"{text}_p{share}_ms"] = round(float(np.percentile(values, share)), 3)
    added = {
        f"added_{key}": round(figures[key] - direct.get(key, figures[key]), 3)
        for key in ("chunk_p50_ms", "chunk_p99_ms", "ttfb_p50_ms")
    }
    return figures | added | {"max_chunks_per_s": round(float(np.median(rates)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--fast-chunks", type=int, default=2000, help="a stream's, unpaced")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-port", type=int, default=18700)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(serve(options.serve))
    elif options.peer is not None:
        uvloop.run(peer(options.peer, options.upstream))
    else:
        run(options)


def run(options: argparse.Namespace) -> None:
    paced_load = Load(options.streams, options.chunks, options.interval_ms)
    fast_load = Load(options.streams, options.fast_chunks, 0.0)
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        ports = start_all(stack, Path(home), itertools.count(options.first_port))
        paced: dict[str, list[Sample]] = {name: [] for name in ports}
        fast: dict[str, list[Sample]] = {name: [] for name in ports}
        for port in ports.values():  # what runs for the first time is not measured
            uvloop.run(measure(port, Load(4, 10, 1.0)))
        for _ in range(options.rounds):
            for name, port in ports.items():
                paced[name].append(uvloop.run(measure(port, paced_load)))
                fast[name].append(uvloop.run(measure(port, fast_load)))
    direct = row("direct", paced["direct"], fast["direct"], {})
    rows = [row(name, paced[name], fast[name], direct) for name in ports]
    title = f"{options.streams} streams, a chunk every {options.interval_ms:g} ms"
    details = vars(options) | {"budget_added_p50_ms": 1.0, "budget_added_p99_ms": 3.0}
    kept = ("streams", "chunks", "interval_ms", "fast_chunks", "rounds", "budget_added_p50_ms",
            "budget_added_p99_ms")  # fmt: skip
    report("bench_proxy", rows, title=title, details={key: details[key] for key in kept})


if __name__ == "__main__":
    main()

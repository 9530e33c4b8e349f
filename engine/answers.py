"""Sends answers: whole or as server-sent events, watching for a client that has gone.

ASGI level, because only here is it known when the last byte was handed to the socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import QueueFull, RequestAborted, RequestError, RequestFailed
from engine.exchange import Accepted, Exchange
from engine.handle import RequestHandle
from engine.output import TokenEvent
from engine.replies import encode, error_body, usage_of

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"


class Answer(Response):
    """Runs a submitted request to its end and sends what it yields. A client that disconnects
    aborts it before the engine's next step."""

    def __init__(self, exchange: Exchange, accepted: Accepted) -> None:
        super().__init__()
        self._exchange = exchange
        self._accepted = accepted
        self._output = accepted.handle.output
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        watcher = asyncio.create_task(_abort_on_disconnect(receive, self._accepted.handle))
        try:
            if self._accepted.body.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        except RequestAborted as error:
            exchange.fail(error)
        except RequestError as error:
            exchange.fail(error)
            await self._send_error(send, error)
        except (OSError, asyncio.CancelledError):
            exchange.fail(RequestAborted("the connection was lost"))
            raise
        except Exception:
            exchange.fail(RequestFailed("the server failed on this request"))
            raise
        finally:
            watcher.cancel()
            exchange.finish()

    async def _whole(self, send: Send) -> None:
        exchange, accepted, output = self._exchange, self._accepted, self._output
        async for _ in accepted.handle:
            pass
        answer = accepted.shape.whole(
            output.text,
            output.events,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt=None if accepted.body.prompt_logprobs is None else output.prompt,
            usage=self._usage(),
        )
        if exchange.caller.detail:
            answer["inferloop"] = exchange.detail(accepted)
        data = encode(answer)
        exchange.serialized_ns = time.monotonic_ns()
        await _send_json(send, 200, data, headers_of(exchange))
        exchange.flushed_ns = time.monotonic_ns()
        exchange.sent(len(output.events))

    async def _stream(self, send: Send) -> None:
        """Send a chunk whenever there is text to show; tokens whose text is still undecided go
        with the next one. The status is sent with the first, so that an early failure has one."""
        shape, handle = self._accepted.shape, self._accepted.handle
        pending: list[TokenEvent] = []
        position = -1
        async for event in handle:
            position += 1
            if not self._started:
                await self._start(send, shape.opening())
            pending.append(event)
            text = "".join(item.text for item in pending)
            if text and event.finish_reason is None:
                chunk = shape.chunk(text, pending, finish_reason=None, stop_reason=None)
                await self._event(send, chunk, len(pending))
                handle.sent(event, position)
                pending = []
        await self._last(send, pending)

    async def _last(self, send: Send, pending: list[TokenEvent]) -> None:
        """The rest of the text with the reason of the end, then what was asked to follow it."""
        exchange, accepted, output = self._exchange, self._accepted, self._output
        chunks = [
            accepted.shape.chunk(
                "".join(item.text for item in pending),
                pending,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
        ]
        if accepted.body.include_usage:
            chunks.append(accepted.shape.usage_chunk(self._usage()))
        if exchange.caller.detail:
            chunks[-1]["inferloop"] = exchange.detail(accepted)
        data = b"".join(_sse(chunk) for chunk in chunks) + DONE
        exchange.serialized_ns = time.monotonic_ns()
        await _send_body(send, data, more=False)
        exchange.flushed_ns = time.monotonic_ns()
        exchange.sent(len(pending))

    def _usage(self) -> dict[str, Any]:
        request = self._accepted.handle.request
        return usage_of(request.prompt_len, request.output_len, max(0, request.cached_tokens))

    async def _start(self, send: Send, opening: list[dict[str, Any]]) -> None:
        self._started = True
        headers = {**headers_of(self._exchange), "cache-control": "no-cache"}
        await _send_head(send, 200, EVENT_STREAM, headers)
        if opening:
            await _send_body(send, b"".join(_sse(chunk) for chunk in opening), more=True)

    async def _event(self, send: Send, chunk: dict[str, Any], tokens: int) -> None:
        await _send_body(send, _sse(chunk), more=True)
        self._exchange.sent(tokens)

    async def _send_error(self, send: Send, error: RequestError) -> None:
        if self._started:
            await _send_body(send, _sse(error_body(error)) + DONE, more=False)
        else:
            headers = headers_of(self._exchange)
            await _send_json(send, error.status, encode(error_body(error)), headers)


class Refusal(Response):
    """An error in OpenAI's shape; ends the exchange if there is one."""

    def __init__(self, error: RequestError, exchange: Exchange | None = None) -> None:
        headers = {} if exchange is None else headers_of(exchange)
        if isinstance(error, QueueFull):
            headers["Retry-After"] = str(error.retry_after_s)
        super().__init__(encode(error_body(error)), error.status, headers, JSON)
        self._exchange = exchange
        if exchange is not None:
            exchange.fail(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._exchange is not None:
                self._exchange.finish()


def headers_of(exchange: Exchange) -> dict[str, str]:
    """Headers that tell the client which request this was."""
    return {
        "x-request-id": exchange.caller.request_id,
        "traceparent": exchange.caller.traceparent,
    }


async def _abort_on_disconnect(receive: Receive, handle: RequestHandle) -> None:
    """The body has been read: the next message is that the client has gone."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            handle.abort()
            return


def _sse(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


async def _send_json(send: Send, status: int, data: bytes, headers: Mapping[str, str]) -> None:
    await _send_head(send, status, JSON, {**headers, "content-length": str(len(data))})
    await _send_body(send, data, more=False)


async def _send_head(send: Send, status: int, kind: str, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    pairs.append((b"content-type", kind.encode()))
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _send_body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})

"""How an answer leaves the engine's thread: a handle that asyncio or a plain thread iterates.

The engine only appends to it and never waits for a reader. Not for the request's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from engine.errors import RequestAborted, RequestError
from engine.output import Output, TokenEvent
from engine.request import Request

LATE_NS = 50_000_000
"""A chunk is late when it is handed to the socket so long after its last token was drawn."""


class RequestHandle:
    """A submitted request. Iterate it (`async for` in the event loop that submitted it, `for` in a
    plain thread) for its `TokenEvent`s; a request that failed or was aborted raises its
    `RequestError` at the end. Call `close` once the answer has been passed on."""

    def __init__(
        self,
        request: Request,
        output: Output,
        *,
        loop: asyncio.AbstractEventLoop | None,
        abort: Callable[[RequestHandle], None],
        closed: Callable[[RequestHandle], None],
    ) -> None:
        self.request = request
        self.output = output
        self.error: RequestError | None = None
        self.serialized_ns = 0
        self.flushed_ns = 0
        self.late_chunks = 0
        self.most_late_ns = 0
        self.most_late_position = 0
        self._loop = loop
        self._abort = abort
        self._closed: Callable[[RequestHandle], None] | None = closed
        self._events: deque[TokenEvent] = deque()
        self._ended = False
        self._ready: asyncio.Event | threading.Event
        self._ready = threading.Event() if loop is None else asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the engine has done its part (there may still be events to read)."""
        return self._ended

    @property
    def end_reason(self) -> str:
        """How the request ended, in one word: stop, length, abort or error."""
        if isinstance(self.error, RequestAborted):
            return "abort"
        return self.output.finish_reason or "error"

    def abort(self) -> None:
        """Give the request up: the engine drops it before its next step. Harmless once ended."""
        if not self._ended:
            self._abort(self)

    def sent(self, event: TokenEvent, position: int) -> None:
        """A chunk was handed to the socket that ended with `event`, the output's token `position`.
        Keeps how many were late, and by how much and where the one that was most."""
        late_ns = time.monotonic_ns() - event.at_ns
        if late_ns >= LATE_NS:
            self.late_chunks += 1
            if late_ns > self.most_late_ns:
                self.most_late_ns, self.most_late_position = late_ns, position

    def close(self, *, serialized_ns: int = 0, flushed_ns: int = 0) -> None:
        """Say when the answer was serialized and handed to the socket (monotonic ns; 0: never).
        Aborts a request that is still running. Later calls do nothing."""
        closed, self._closed = self._closed, None
        if closed is None:
            return
        self.serialized_ns, self.flushed_ns = serialized_ns, flushed_ns
        self.abort()
        closed(self)

    def __iter__(self) -> Iterator[TokenEvent]:
        if not isinstance(self._ready, threading.Event):
            raise TypeError("this request was submitted in an event loop: use `async for`")
        while True:
            self._ready.wait()
            self._ready.clear()
            ended = self._ended
            while self._events:
                yield self._events.popleft()
            if ended:
                break
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        if not isinstance(self._ready, asyncio.Event):
            raise TypeError("this request was submitted outside an event loop: use `for`")
        while True:
            await self._ready.wait()
            self._ready.clear()
            ended = self._ended
            while self._events:
                yield self._events.popleft()
            if ended:
                break
        if self.error is not None:
            raise self.error

    def push(self, event: TokenEvent) -> None:
        """Engine: add an event; readers learn of it by the next `notify`."""
        self._events.append(event)

    def end(self, error: RequestError | None) -> None:
        """Engine: nothing follows."""
        self.error = error
        self._ended = True


def notify(handles: Iterable[RequestHandle]) -> None:
    """Wake the readers of `handles`: one call into each event loop, however many there are."""
    loops: dict[asyncio.AbstractEventLoop, list[RequestHandle]] = {}
    for handle in handles:
        if handle._loop is None:
            handle._ready.set()
        else:
            loops.setdefault(handle._loop, []).append(handle)
    for loop, woken in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
            loop.call_soon_threadsafe(_set, woken)


def _set(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle._ready.set()

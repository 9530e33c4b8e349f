"""Bounds the requests that wait for the engine, and says when another try is worth it.

Counts a request from the moment it is accepted until it is first admitted to the batch or ends.
Not for the order of service: that is `engine.waiting`.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass

from engine.errors import EngineError, QueueFull, RequestError
from engine.request import Request

MAX_RETRY_AFTER_S = 60
SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the waiting queue: requests, and the prompt tokens they bring."""

    requests: int
    prompt_tokens: int

    def __post_init__(self) -> None:
        if self.requests < 1 or self.prompt_tokens < 1:
            raise EngineError(
                f"a queue of {self.requests} requests and {self.prompt_tokens} prompt tokens "
                "would refuse everything: both must be at least 1"
            )


def check_tokens(request: Request, vocab_size: int) -> None:
    """Raises `RequestError` for an empty prompt and for ids that the model does not have, in the
    prompt or as stop tokens."""
    if not request.tokens:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    for param, ids in (
        ("prompt", request.tokens),
        ("stop_token_ids", request.params.stop_token_ids),
    ):
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"token id {token} is not within 0..{vocab_size - 1}", param=param
                )


class Admission:
    """Counts what waits. Thread-safe."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: dict[int, int] = {}
        self._tokens = 0
        self._interval_s = 0.0
        self._last_end_s = 0.0

    def enter(self, request: Request) -> None:
        """Count a request in. Raises `QueueFull`. One that is alone is never refused."""
        limits = self._limits
        with self._lock:
            waiting, tokens = len(self._waiting), self._tokens + request.prompt_len
            if waiting >= limits.requests:
                what = f"{waiting} requests are waiting, the limit is {limits.requests}"
            elif waiting and tokens > limits.prompt_tokens:
                what = (
                    f"{tokens} prompt tokens would be waiting, the limit is {limits.prompt_tokens}"
                )
            else:
                self._waiting[request.slot] = request.prompt_len
                self._tokens = tokens
                return
            retry_after_s = self._retry_after_s()
        raise QueueFull(f"{what}: try again in {retry_after_s} s", retry_after_s=retry_after_s)

    def leave(self, request: Request) -> None:
        """Count a request out; later calls for the same request do nothing."""
        with self._lock:
            self._tokens -= self._waiting.pop(request.slot, 0)

    def ended(self) -> None:
        """Note that the engine is done with a request: the rate of service."""
        now = time.monotonic()
        if self._last_end_s:
            self._interval_s += SMOOTHING * (now - self._last_end_s - self._interval_s)
        self._last_end_s = now

    def _retry_after_s(self) -> int:
        """Time in which half the queue will have been served at the present rate."""
        seconds = len(self._waiting) / 2 * self._interval_s
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(seconds)))

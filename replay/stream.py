"""Turns a streamed OpenAI answer, its pieces and their times, into tokens with timings.

Pure functions. Times are `time.monotonic_ns()` at which the client received a piece; inter-token
latency is per token: a chunk of k tokens counts as k equal steps since the token before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from replay.diff import LARGEST_ID

LARGEST_MARGIN = 1e4
"""Log-probability margins beyond it mean that the runner-up was impossible."""

UNREADABLE = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError,
)  # fmt: skip
"""What reading JSON of an unexpected form raises."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request. `error` is None for a complete answer.

    Optional parts are None when the server does not give them. `itl_ms` has one entry per token
    after the first. `detailed`: the server is an inferloop engine.
    """

    status: int
    error: str | None
    duration_ms: float
    ttft_ms: float | None = None
    itl_ms: list[float] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    margins: list[float | None] | None = None
    finish_reason: str | None = None
    rendered_prompt: str | None = None
    sampling: dict[str, Any] | None = None
    class_key: str | None = None
    detailed: bool = False


@dataclass(slots=True)
class _Parts:
    """An answer while its events are read."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    margins: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None
    detail: dict[str, Any] | None = None
    error: str | None = None
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """(time in ns, tokens) of each chunk that carried any."""


def failed(status: int, error: str, *, duration_ms: float = 0.0) -> Answer:
    """An answer that did not come."""
    return Answer(status=status, error=error, duration_ms=duration_ms)


def parse_answer(status: int, sent_ns: int, pieces: Sequence[tuple[int, bytes]]) -> Answer:
    """Read a response: server-sent events, or one JSON document if the server did not stream."""
    ended_ns = pieces[-1][0] if pieces else sent_ns
    duration_ms = (ended_ns - sent_ns) / 1e6
    if status >= 400:
        body = b"".join(piece for _, piece in pieces)
        return failed(status, error_message(body), duration_ms=duration_ms)
    parts = _Parts()
    try:
        done = _read_events(parts, pieces)
        if parts.error is None and not done and parts.finish_reason is None:
            parts.error = "the stream ended before the answer was complete"
        return _assemble(parts, status, sent_ns, duration_ms)
    except UNREADABLE as error:
        reason = f"unreadable answer: {type(error).__name__}: {one_line(str(error))}"
        return failed(status, reason, duration_ms=duration_ms)


def events(pieces: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The `data:` payloads of a server-sent event stream, each with the time it was complete."""
    found: list[tuple[int, bytes]] = []
    pending = b""
    data: list[bytes] = []
    for at, piece in [*pieces, (pieces[-1][0] if pieces else 0, b"\n\n")]:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].lstrip(b" "))
            elif not line and data:
                found.append((at, b"\n".join(data)))
                data = []
    return found


def _read_events(parts: _Parts, pieces: Sequence[tuple[int, bytes]]) -> bool:
    """Fill `parts`; returns whether the stream said that it is complete."""
    found = events(pieces)
    if not found and pieces:
        body = b"".join(piece for _, piece in pieces)
        _read_event(parts, pieces[-1][0], json.loads(body))
        return True
    for at, data in found:
        if data == b"[DONE]":
            return True
        _read_event(parts, at, json.loads(data))
    return False


def _read_event(parts: _Parts, at_ns: int, event: dict[str, Any]) -> None:
    if event.get("error"):
        parts.error = error_message(json.dumps(event).encode())
        return
    if event.get("inferloop") is not None:
        parts.detail = event["inferloop"]
    if event.get("prompt_token_ids") is not None:
        parts.prompt_token_ids = _token_ids(event["prompt_token_ids"])
    for choice in event.get("choices") or ():
        tokens = _read_choice(parts, choice)
        if tokens:
            parts.arrivals.append((at_ns, tokens))


def _read_choice(parts: _Parts, choice: dict[str, Any]) -> int:
    """Add a choice's content; returns how many tokens it carried."""
    content = choice.get("delta") or choice.get("message") or choice
    text = content.get("content") or choice.get("text") or ""
    parts.text.append(_text("content", text) or "")
    if choice.get("finish_reason") is not None:
        parts.finish_reason = _text("finish_reason", choice["finish_reason"])
    if choice.get("prompt_token_ids") is not None:
        parts.prompt_token_ids = _token_ids(choice["prompt_token_ids"])
    counted = _read_logprobs(parts, choice.get("logprobs"))
    if choice.get("token_ids") is not None:
        token_ids = _token_ids(choice["token_ids"])
        parts.token_ids = (parts.token_ids or []) + token_ids
        return len(token_ids)
    return counted if counted is not None else int(bool(text))


def _read_logprobs(parts: _Parts, logprobs: dict[str, Any] | None) -> int | None:
    """Chat's list of entries or completions' parallel lists; None when there are none."""
    if not logprobs:
        return None
    if logprobs.get("content") is not None:
        chosen = [entry.get("logprob") for entry in logprobs["content"]]
        top = [
            [other["logprob"] for other in entry.get("top_logprobs") or ()]
            for entry in logprobs["content"]
        ]
    elif logprobs.get("token_logprobs") is not None:
        chosen = logprobs["token_logprobs"]
        top = [list((others or {}).values()) for others in logprobs.get("top_logprobs") or ()]
    else:
        return None
    parts.logprobs = (parts.logprobs or []) + [finite(value) for value in chosen]
    parts.margins += [_margin(others) for others in top]
    return len(chosen)


def _margin(logprobs: list[float]) -> float | None:
    if len(logprobs) < 2:
        return None
    first, second = sorted(logprobs, reverse=True)[:2]
    return finite(first - second)


def _assemble(parts: _Parts, status: int, sent_ns: int, duration_ms: float) -> Answer:
    detail = parts.detail or {}
    ttft_ms, itl_ms = _latencies(parts.arrivals, sent_ns)
    margins = parts.margins if any(value is not None for value in parts.margins) else None
    if detail.get("margins") is not None:
        margins = [finite(value) for value in detail["margins"]]
    succeeded = parts.error is None
    return Answer(
        status=status,
        error=parts.error,
        duration_ms=duration_ms,
        ttft_ms=ttft_ms if succeeded else None,
        itl_ms=itl_ms if succeeded else None,
        text="".join(parts.text),
        token_ids=parts.token_ids,
        prompt_token_ids=parts.prompt_token_ids,
        logprobs=parts.logprobs,
        margins=margins,
        finish_reason=parts.finish_reason,
        rendered_prompt=_text("rendered_prompt", detail.get("rendered_prompt")),
        sampling=_parameters(detail.get("sampling")),
        class_key=_text("class_key", detail.get("class_key")),
        detailed=parts.detail is not None,
    )


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.40}, not a text")
    return value


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item <= LARGEST_ID for item in value
    ):
        raise TypeError(f"{value!r:.40} are not token ids")
    return value


def _parameters(value: Any) -> dict[str, Any] | None:
    """Sampling parameters, free of numbers that JSON (and so a database) cannot hold."""
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"sampling is {value!r:.40}, not an object")
    json.dumps(value, allow_nan=False)
    return value


def _latencies(
    arrivals: list[tuple[int, int]], sent_ns: int
) -> tuple[float | None, list[float] | None]:
    """TTFT and per-token ITL in milliseconds; tokens that came with the first one took 0."""
    if not arrivals:
        return None, None
    first_ns, first_tokens = arrivals[0]
    itl = [0.0] * (first_tokens - 1)
    before_ns = first_ns
    for at_ns, tokens in arrivals[1:]:
        itl += [round((at_ns - before_ns) / 1e6 / tokens, 3)] * tokens
        before_ns = at_ns
    return (first_ns - sent_ns) / 1e6, itl


def finite(value: float | None) -> float | None:
    """`value`, or None for what JSON and databases cannot hold (NaN, infinities)."""
    if value is None or not math.isfinite(value):
        return None
    return min(value, LARGEST_MARGIN) if value > 0 else value


def error_message(body: bytes) -> str:
    """The message of an OpenAI-style error body, else the body itself; one line."""
    try:
        error = json.loads(body)
        while isinstance(error, dict) and ("error" in error or "message" in error):
            error = error["message"] if "message" in error else error["error"]
        message = error if isinstance(error, str) else json.dumps(error)
    except ValueError:
        message = body.decode("utf-8", "replace")
    except RecursionError:
        message = "an error nested too deeply to be read"
    return one_line(message)[:500] or "no message"


def one_line(text: str) -> str:
    """A server's words on one line, without what could drive the terminal they are printed on."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))

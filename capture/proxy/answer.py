"""What an upstream answered: text, tokens and their count, out of events or one JSON document.

Understands OpenAI's shapes and what vLLM, SGLang, llama.cpp and our engine add to them. Tolerant
of everything else. Not for times (`capture.proxy.observation`).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import pydantic_core

from capture.proxy.body import Budget
from capture.proxy.token_list import PLACEHOLDER, TokenText, spared

Counted = Literal["usage", "token_ids", "chunks"]

TEXTS = frozenset({"content", "text"})
"""Where an event carries the answer's text."""

GENERATED = TEXTS | {
    "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call",
}  # fmt: skip
"""Where it carries anything that the model wrote."""

NO_TOKEN = 0xFFFFFFFF
LARGEST_COUNT = 1 << 31
OBJECT_BYTES = 32
"""What a number in a list takes."""

LARGEST_PIECE = 4096
"""Tokens that a usage can say to be in one event: one that jumps further does not run along."""


class Piece(NamedTuple):
    """What one event brought for one choice: `tokens` new ones; the lists are as long, or empty
    where ids or log-probabilities are not known."""

    choice: int
    tokens: int
    token_ids: list[int]
    logprobs: list[float]


class Answer:
    """An answer as far as it came.

    `text`, `token_ids` and `logprobs` are those of choice 0, kept only with `keeps_text`, up to
    `limit_bytes` and as far as `budget` allows (`truncated`: there was more). `has_other_text`:
    the tokens also hold what is not in `text`, such as reasoning or tool calls. `tokens` are those
    counted piece by piece.
    """

    def __init__(self, *, keeps_text: bool, limit_bytes: int, budget: Budget) -> None:
        self.has_other_text = False
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_token_ids: list[int] | TokenText | None = None
        self.usage: dict[str, int] | None = None
        self.model = ""
        self.fingerprint: str | None = None
        self.finish_reason: str | None = None
        self.error_type: str | None = None
        self.done = self.truncated = False
        self.tokens = self.unreadable = 0
        self.keeps_text, self._limit_bytes = keeps_text, limit_bytes
        self._budget, self._held_bytes = budget, 0
        self._every_token_has_id = True
        self._usage_runs: bool | None = None
        self._spared: TokenText | None = None

    @property
    def counted_by(self) -> Counted:
        """Where `output_tokens` comes from."""
        if self.usage is not None:
            return "usage"
        return "token_ids" if self._every_token_has_id else "chunks"

    @property
    def output_tokens(self) -> int:
        return self.tokens if self.usage is None else self.usage["completion_tokens"]

    def read_event(self, data: bytes) -> list[Piece]:
        """Take an event of the stream in; what it brought, per choice."""
        if data.strip() == b"[DONE]":
            self.done = True
            return []
        return self._read(data, "delta", cut=False)

    def read_document(self, body: bytes, *, cut: bool = False) -> None:
        """Take an answer in that came in one piece; `cut`: its end is missing."""
        self._read(body, "message", cut=cut)
        self.done, self.truncated = not cut, self.truncated or cut

    def release(self) -> None:
        """What is kept counts no longer against the budget."""
        self._budget.give_back(self._held_bytes)
        self._held_bytes = 0

    def _read(self, data: bytes, inner: str, *, cut: bool) -> list[Piece]:
        data, self._spared = spared(data, b"prompt_token_ids")
        try:
            event = pydantic_core.from_json(
                data, allow_partial="trailing-strings" if cut else False
            )
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.unreadable += 1
            return []
        if event.get("error"):
            self.error_type = _error_type(event["error"])
        self._read_common(event)
        pieces = (self._read_choice(choice, inner) for choice in _dicts(event.get("choices")))
        return [piece for piece in pieces if piece is not None]

    def _read_common(self, event: dict[str, Any]) -> None:
        model, fingerprint = event.get("model"), event.get("system_fingerprint")
        if isinstance(model, str) and model:
            self.model = model
        if isinstance(fingerprint, str):
            self.fingerprint = fingerprint
        self._read_prompt(event)
        self._new_usage = _usage(event.get("usage"))
        self.usage = self._new_usage or self.usage

    def _read_prompt(self, place: dict[str, Any]) -> None:
        ids = place.get("prompt_token_ids")
        if self._spared is not None and ids == [PLACEHOLDER]:
            self.prompt_token_ids = self._spared
        elif ids:
            self.prompt_token_ids = _integers(ids) or self.prompt_token_ids

    def _read_choice(self, choice: dict[str, Any], inner: str) -> Piece | None:
        place = choice.get("index")
        index = place if isinstance(place, int) else 0
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and (index == 0 or self.finish_reason is None):
            self.finish_reason = reason
        part = choice.get(inner)
        delta = part if isinstance(part, dict) else choice
        written = [name for name, value in delta.items() if value and name in GENERATED]
        ids, logprobs = _integers(choice.get("token_ids")), _logprobs(choice.get("logprobs"))
        self._read_prompt(choice)
        tokens = self._count(ids, logprobs, bool(written), finished=isinstance(reason, str))
        if index == 0 and self.keeps_text:
            self.has_other_text |= not TEXTS.issuperset(written)
            self._keep(_text(delta), ids or [], logprobs)
        if not tokens:
            return None
        self.tokens += tokens
        ids = ids if ids is not None and len(ids) == tokens else []
        return Piece(index, tokens, ids, logprobs if len(logprobs) == tokens else [])

    def _count(
        self,
        ids: list[int] | None,
        logprobs: list[float],
        has_content: bool,
        *,
        finished: bool,
    ) -> int:
        """Tokens in a choice's part of an event: by ids, by log-probabilities, by a usage that
        runs along (vLLM's continuous_usage_stats), else one for any content."""
        if ids is not None:
            return len(ids)
        if logprobs:
            return len(logprobs)
        if has_content and self._usage_runs is None:
            self._usage_runs = self._new_usage is not None and not finished
        if self._usage_runs and self._new_usage is not None:
            new = self._new_usage["completion_tokens"] - self.tokens
            if new <= LARGEST_PIECE:
                return max(0, new)
            self._usage_runs = False
        self._every_token_has_id &= not has_content
        return int(has_content)

    def _keep(self, text: str, ids: list[int], logprobs: list[float]) -> None:
        size = len(text) + OBJECT_BYTES * (len(ids) + len(logprobs))
        fits = self._held_bytes + size <= self._limit_bytes
        if self.truncated or not fits or not self._budget.take(size):
            self.truncated = True
            return
        self._held_bytes += size
        if text:
            self.text.append(text)
        self.token_ids += ids
        self.logprobs += logprobs


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(delta: dict[str, Any]) -> str:
    text = delta.get("content")
    text = text if isinstance(text, str) else delta.get("text")
    return text if isinstance(text, str) else ""


def _integers(value: object) -> list[int] | None:
    """A list of token ids; None for anything else."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return None
    return value if not value or (min(value) >= 0 and max(value) < NO_TOKEN) else None


def _logprobs(value: object) -> list[float]:
    """The chosen tokens' log-probabilities of a chat's or a completion's choice."""
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("content"), list):
        found: Any = [item.get("logprob") for item in _dicts(value["content"])]
    else:
        found = value.get("token_logprobs")
    if not isinstance(found, list):
        return []
    return [_logprob(value) for value in found]


def _logprob(value: object) -> float:
    if isinstance(value, (int, float)) and abs(value) < LARGEST_COUNT:
        return float(value)
    return math.nan


def _usage(value: object) -> dict[str, int] | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    counts = {
        "prompt_tokens": value.get("prompt_tokens"),
        "completion_tokens": value.get("completion_tokens", 0),
        "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else 0,
    }
    counts = {name: 0 if count is None else count for name, count in counts.items()}
    fits = all(type(count) is int and 0 <= count < LARGEST_COUNT for count in counts.values())
    return counts if fits else None


def _error_type(error: object) -> str:
    """A short name of an error object; its message may hold what the client wrote."""
    if isinstance(error, dict):
        for name in ("code", "type"):
            if isinstance(error.get(name), (str, int)):
                return str(error[name])[:64]
    return "error"

"""The shapes of answers: OpenAI's completions and chat completions, whole and in chunks.

Log-probabilities are natural logarithms of the raw distribution (temperature 1, not truncated).
Extensions as vLLM names them: token_ids, prompt_token_ids, prompt_logprobs, stop_reason.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from engine.errors import RequestError
from engine.output import Alternative, TokenEvent
from engine.protocol import ChatBody, CompletionBody

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenText(Protocol):
    """What the shapes need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Shape(ABC):
    """How one request's answer looks. `events` are always those that a piece of answer covers."""

    object = ""
    chunk_object = ""
    prefix = ""

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        fingerprint: str,
        tokenizer: TokenText,
        prompt_ids: list[int],
        return_token_ids: bool,
        alternatives: int | None,
    ) -> None:
        """`alternatives`: how many to show at each position; None: no log-probabilities."""
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time())}
        self._model = {"model": model, "system_fingerprint": fingerprint}
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._return_token_ids = return_token_ids
        self._alternatives = alternatives

    def whole(
        self,
        text: str,
        events: Sequence[TokenEvent],
        *,
        finish_reason: str | None,
        stop_reason: str | int | None,
        prompt: Sequence[Sequence[Alternative]] | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        """The answer in one piece. `prompt`: log-probabilities of the prompt, if asked for."""
        choice = self._choice(text, events, whole=True)
        choice |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
        answer = {**self._head, "object": self.object, **self._model}
        prompt_fields: dict[str, Any] = {}
        if self._return_token_ids:
            prompt_fields["prompt_token_ids"] = self._prompt_ids
        if prompt is not None:
            prompt_fields["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return self._place(answer, choice, prompt_fields) | {"usage": usage}

    def chunk(
        self,
        text: str,
        events: Sequence[TokenEvent],
        *,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """A piece of a stream."""
        choice = self._choice(text, events, whole=False) | {"finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._chunk([choice])

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before the first piece of text."""
        return []

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the token counts."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, **self._model, "choices": choices}

    def _choice(self, text: str, events: Sequence[TokenEvent], *, whole: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, **self._text(text, whole=whole), "logprobs": None}
        if self._alternatives is not None and events:
            choice["logprobs"] = self._logprobs(events)
        if self._return_token_ids:
            choice["token_ids"] = [event.token_id for event in events]
        return choice

    def _top(self, event: TokenEvent) -> list[tuple[int, float]]:
        """The alternatives that were asked for; the engine may have recorded more."""
        return [(item.token_id, item.logprob) for item in event.top[: self._alternatives or 0]]

    @abstractmethod
    def _text(self, text: str, *, whole: bool) -> dict[str, Any]:
        """The part of a choice that holds `text`."""

    @abstractmethod
    def _logprobs(self, events: Sequence[TokenEvent]) -> dict[str, Any]:
        """Log-probabilities of the events in the endpoint's shape."""

    @abstractmethod
    def _place(
        self, answer: dict[str, Any], choice: dict[str, Any], prompt: dict[str, Any]
    ) -> dict[str, Any]:
        """Put the prompt's fields where the endpoint has them."""

    def _prompt_logprobs(self, prompt: Sequence[Sequence[Alternative]]) -> list[Any]:
        entries: list[Any] = [None]
        for position in prompt:
            entry: dict[str, Any] = {}
            for item in position:
                token = self._tokenizer.token_bytes(item.token_id).decode("utf-8", "replace")
                shown = {"logprob": number(item.logprob), "rank": item.rank, "decoded_token": token}
                entry.setdefault(str(item.token_id), shown)
            entries.append(entry)
        return entries


class CompletionShape(Shape):
    """/v1/completions."""

    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._offset = 0
        self._prompt_is_due = self._return_token_ids  # in the first chunk of a stream

    def _choice(self, text: str, events: Sequence[TokenEvent], *, whole: bool) -> dict[str, Any]:
        choice = super()._choice(text, events, whole=whole)
        if self._prompt_is_due and not whole:
            self._prompt_is_due = False
            choice["prompt_token_ids"] = self._prompt_ids
        return choice

    def _text(self, text: str, *, whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _place(
        self, answer: dict[str, Any], choice: dict[str, Any], prompt: dict[str, Any]
    ) -> dict[str, Any]:
        return answer | {"choices": [choice | prompt]}

    def _logprobs(self, events: Sequence[TokenEvent]) -> dict[str, Any]:
        tokens, offsets = [], []
        for event in events:
            tokens.append(self._name(event.token_id))
            offsets.append(self._offset)
            self._offset += len(event.text)
        return {
            "tokens": tokens,
            "token_logprobs": [number(event.logprob) for event in events],
            "top_logprobs": [
                {
                    self._name(i): number(p)
                    for i, p in [*self._top(event), (event.token_id, event.logprob)]
                }
                for event in events
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        """A token as text, or as OpenAI writes one that is not whole characters."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatShape(Shape):
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk([choice])
        if self._return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        return [chunk]

    def _text(self, text: str, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def _place(
        self, answer: dict[str, Any], choice: dict[str, Any], prompt: dict[str, Any]
    ) -> dict[str, Any]:
        return answer | {"choices": [choice]} | prompt

    def _logprobs(self, events: Sequence[TokenEvent]) -> dict[str, Any]:
        content = []
        for event in events:
            entry = self._entry(event.token_id, event.logprob)
            entry["top_logprobs"] = [self._entry(*item) for item in self._top(event)]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        token = data.decode("utf-8", "replace")
        return {"token": token, "logprob": number(logprob), "bytes": list(data)}


def shape_of(body: CompletionBody | ChatBody, **fields: Any) -> Shape:
    """The shape that answers `body`."""
    kind = ChatShape if isinstance(body, ChatBody) else CompletionShape
    return kind(
        return_token_ids=bool(body.return_token_ids),
        alternatives=body.alternatives,
        **fields,
    )


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def number(value: float) -> float | None:
    """A log-probability or margin as JSON can hold it: None for NaN."""
    if math.isnan(value):
        return None
    return max(LEAST_LOGPROB, min(-LEAST_LOGPROB, value))


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

"""The answer of one request as it grows: text, log-probabilities, and when it is complete."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from engine.batch import TopLogprobs
from engine.detokenizer import Detokenizer
from engine.request import Request
from engine.stop import StopMatcher


class TokenizerLike(Protocol):
    """What the engine needs of a tokenizer."""

    vocab_size: int
    eos_ids: frozenset[int]
    control_tokens: tuple[str, ...]
    longest_token: int

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Alternative(NamedTuple):
    """One of the likeliest tokens at a position; `rank` 1 is the likeliest, `logprob` in nats
    under the raw distribution."""

    token_id: int
    logprob: float
    rank: int


class TokenEvent(NamedTuple):
    """A token and the text that became certain with it (the token's own text may come later: a
    character may be unfinished, or a stop string undecided). `finish_reason` "stop" or "length"
    marks the last event."""

    text: str
    token_id: int
    logprob: float
    margin: float
    top: tuple[Alternative, ...]
    finish_reason: str | None
    at_ns: int


class Output:
    """Accumulates one request's answer."""

    def __init__(self, request: Request, tokenizer: TokenizerLike) -> None:
        self._request = request
        self._eos = frozenset() if request.params.ignore_eos else tokenizer.eos_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(request.params.stop)
        self.events: list[TokenEvent] = []
        self.prompt: list[tuple[Alternative, ...]] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    def add(
        self, token_id: int, logprob: float, margin: float, top: TopLogprobs | None, at_ns: int
    ) -> TokenEvent:
        """Take the token just drawn, which the request already holds; decides whether it is the
        last. A stop string or stop token is not part of the text."""
        text = self._text(token_id)
        event = TokenEvent(
            text, token_id, logprob, margin, alternatives(top, 0), self.finish_reason, at_ns
        )
        self.events.append(event)
        return event

    def add_prompt(self, start: int, top: TopLogprobs) -> None:
        """Take the log-probabilities of prompt tokens start+1, start+2, ... The token itself comes
        first, then the alternatives. A recomputation starts over."""
        if start == 0:
            self.prompt.clear()
        targets = self._request.tokens[start + 1 :]
        for i, (logprob, rank) in enumerate(
            zip(top.chosen.tolist(), top.rank.tolist(), strict=True)
        ):
            chosen = Alternative(targets[i], logprob, rank)
            self.prompt.append((chosen, *alternatives(top, i)))

    def _text(self, token_id: int) -> str:
        if token_id in self._eos:
            return self._end("stop", None)
        if token_id in self._request.params.stop_token_ids:
            return self._end("stop", token_id)
        text = self._stop.feed(self._detokenizer.feed(token_id))
        if self._stop.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stop.matched
        elif self._request.output_len >= self._request.params.max_tokens:
            text += self._end("length", None)
        return text

    def _end(self, reason: str, stop_reason: int | None) -> str:
        """Release what is held back; it may complete a stop string itself."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        text = self._stop.feed(self._detokenizer.finish())
        if self._stop.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stop.matched
            return text
        return text + self._stop.finish()


def alternatives(top: TopLogprobs | None, position: int) -> tuple[Alternative, ...]:
    """The alternatives at one position of a runner's result, likely first."""
    if top is None or top.ids.shape[1] == 0:
        return ()
    ids = top.ids[position].tolist()
    logprobs = np.asarray(top.logprobs[position], np.float64).tolist()
    return tuple(
        Alternative(token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1)
    )

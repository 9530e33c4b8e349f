"""Turns tokens into text as they come, never splitting a character.

Tokens carry bytes, and a character's bytes may be spread over several tokens: what is not yet
decidable is held back. Not for stop strings: that is `engine.stop`.
"""

from __future__ import annotations

import codecs
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """Where a token's bytes come from (a tokenizer)."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Incremental decoding of one answer. The pieces returned by `feed` and `finish`, joined,
    equal the decoding of all tokens at once, with U+FFFD for what is not UTF-8."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = _Utf8("replace")

    def feed(self, token_id: int) -> str:
        """Text that is certain now that `token_id` has come; "" inside a character."""
        return self._decoder.decode(self._tokens.token_bytes(token_id))

    def finish(self) -> str:
        """What was held back: U+FFFD if the answer ends inside a character, else ""."""
        return self._decoder.decode(b"", final=True)

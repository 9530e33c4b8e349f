"""Long lists of token ids in bodies, kept as text.

Making numbers of half a million of them would take the event loop for a tenth of a second, in which
no stream of the proxy moves. Not for short lists: those are parsed with the rest.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import numpy as np
import pydantic_core

LONG_BYTES = 64 * 1024
"""Shorter lists are not worth it."""

PLACES_TRIED = 8
"""Of lists under the name that are looked at: a client may write the name as often as it likes."""

PLACEHOLDER = secrets.randbits(62)
"""What stands in the rest of the body for a list's ids: no client can know it."""

_LIST_BYTES = b"0123456789, \t\r\n"
_LIST_BEGINS = re.compile(rb"\s*:\s*\[\s*(?:\[\s*)?")


@dataclass(frozen=True, slots=True)
class TokenText:
    """Token ids as they stood in the body, without brackets; its length is their number."""

    text: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def written(self) -> list[int] | None:
        """The ids as numbers; None when the text is no list of them."""
        try:
            ids: list[int] = pydantic_core.from_json(b"[%b]" % self.text)
        except ValueError:
            return None
        return ids if ids and max(ids) < 1 << 63 else None


def spared(body: bytes, name: bytes) -> tuple[bytes, TokenText | None]:
    """A JSON `body` with `[PLACEHOLDER]` in place of the first long list of numbers under `name`,
    and that list; both as they were where there is none. A body that was cut may end in it."""
    at = -1
    for _ in range(PLACES_TRIED if len(body) >= LONG_BYTES else 0):
        at = body.find(b'"%b"' % name, at + 1)
        if at < 0:
            break
        begins = _LIST_BEGINS.match(body, at + len(name) + 2)
        if begins is None:
            continue
        start, end = begins.end(), body.find(b"]", begins.end())
        text = body[start:end] if end >= 0 else body[start : body.rfind(b",")]
        if len(text) < LONG_BYTES or text.translate(None, _LIST_BYTES):
            continue
        commas = int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(",")))
        rest = body[end:] if end >= 0 else b"]"
        return body[:start] + b"%d" % PLACEHOLDER + rest, TokenText(text, commas + 1)
    return body, None

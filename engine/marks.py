"""Marks that operators set in the trace ("deploy 7"): who may, how long, how often.

The server has no accounts, so a mark is taken from this machine alone unless its owner says
otherwise, and never from a web page. Not for writing it: that is the trace's.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import RequestError

MAX_MARK_BYTES = 4096
BURST = 10
PER_S = 1.0
JOINER = "\u200d"  # what makes one emoji of several


class MarkRefused(RequestError):
    """The mark is not taken; the message says why."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: str


class Marks:
    """Takes marks: `write` puts one into the trace, None when nothing is traced. `from_anywhere`
    takes them from other machines, too."""

    def __init__(self, write: Callable[[str], None] | None, *, from_anywhere: bool) -> None:
        self._write = write
        self._from_anywhere = from_anywhere
        self._tokens = float(BURST)
        self._refilled_s = time.monotonic()

    def take(self, body: bytes, *, client: str | None, content_type: str) -> str:
        """Write the mark that a request asks for, and return it. Raises `MarkRefused`."""
        if not (self._from_anywhere or _is_local(client)):
            raise _refused(
                403,
                f"marks are taken from this machine only, not from {client}: run `inferloop mark` "
                "there, or serve with --marks-from-anywhere",
            )
        if content_type.partition(";")[0].strip().lower() != "application/json":
            # what a browser asks permission for: no page can set marks behind its reader's back
            raise _refused(415, f"the body's type is {content_type[:80]!r}: send application/json")
        text = _text(body)
        if self._write is None:
            raise _refused(409, "this server does not trace (--no-trace): there is no place for it")
        self._admit()
        self._write(text)
        return text

    def _admit(self) -> None:
        now_s = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now_s - self._refilled_s) * PER_S)
        self._refilled_s = now_s
        if self._tokens < 1:
            raise _refused(429, f"more than {BURST} marks at once, then {PER_S:g} a second: wait")
        self._tokens -= 1


def _text(body: bytes) -> str:
    try:
        text = _Body.model_validate_json(body).text.strip()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise _refused(400, f'{where}: {first["msg"]}; send {{"text": "deploy 7"}}') from error
    if not (text and text.replace(JOINER, "").isprintable()):
        raise _refused(400, f"text is {text[:80]!r}: give printable characters, on one line")
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_MARK_BYTES:
        raise _refused(400, f"text has {size} bytes, the limit is {MAX_MARK_BYTES}: shorten it")
    return text


def _is_local(client: str | None) -> bool:
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _refused(status: int, message: str) -> MarkRefused:
    error = MarkRefused(message)
    error.status = status
    return error

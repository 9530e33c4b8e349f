"""Server-sent events out of a stream that arrives in any pieces.

As the HTML standard reads them (three kinds of line ends, comments, data over several lines), with
one addition: an event without its blank line at the stream's end counts, as some servers leave it
out. Not for what the events mean.
"""

from __future__ import annotations

import codecs
import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_ONE_EVENT = re.compile(rb"data: ([^\r\n]+)\n\n")
"""What nearly every piece is."""


class EventStream:
    """Feed it bytes, get the data of each event. An event of more than `limit_bytes` is left out
    and counted in `oversized`."""

    def __init__(self, limit_bytes: int) -> None:
        self.oversized = 0
        self._limit = limit_bytes
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._line_bytes = self._event_bytes = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes."""
        if not self._event_bytes and not self._at_start and not self._after_cr:
            whole = _ONE_EVENT.fullmatch(piece)
            if whole is not None and len(piece) <= self._limit:
                return [whole[1]]
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        *lines, rest = _LINE_END.split(piece)
        found: list[bytes] = []
        for line in lines:
            self._add(line)
            self._end_line(found)
        self._add(rest)
        return found

    def end(self) -> list[bytes]:
        """The event that the end of the stream completes, if any."""
        found: list[bytes] = []
        self._end_line(found)
        self._dispatch(found)
        return found

    def _add(self, part: bytes) -> None:
        self._line_bytes += len(part)
        self._event_bytes += len(part)
        if part and self._event_bytes <= self._limit:
            self._line.append(part)

    def _end_line(self, found: list[bytes]) -> None:
        line = b"".join(self._line)
        self._line.clear()
        is_blank, self._line_bytes = self._line_bytes == 0, 0
        if self._at_start:
            line = line.removeprefix(codecs.BOM_UTF8)
            self._at_start = False
        if is_blank:
            self._dispatch(found)
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _dispatch(self, found: list[bytes]) -> None:
        if self._event_bytes > self._limit:
            self.oversized += 1
        elif self._data:
            found.append(b"\n".join(self._data))
        self._data.clear()
        self._event_bytes = 0

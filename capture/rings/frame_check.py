"""Whether the bytes at a place are a whole frame that belongs there: magic, position, checksum.

Not for following a ring: that is `capture.reader`.
"""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from capture.ring import FRAME_HEADER, FRAME_HEADER_BYTES, FRAME_MAGIC, PADDING


class FoundFrame(NamedTuple):
    """The header fields of a frame that checked out."""

    sequence: int
    position: int
    tokens_before: int
    length: int
    tokens: int
    kind: int


def check_frame(buffer: bytes | memoryview, at: int, position: int) -> FoundFrame | None:
    """The frame at offset `at` if it is whole and says that it belongs at `position`."""
    fields = FRAME_HEADER.unpack_from(buffer, at)
    checksum, sequence, own, _, before, length, _, tokens, kind, _, magic, _ = fields
    if own != position or magic != FRAME_MAGIC or length < FRAME_HEADER_BYTES:
        return None
    covered = FRAME_HEADER_BYTES if kind == PADDING else length
    if at + covered > len(buffer):
        return None
    view = memoryview(buffer)[at + 8 : at + covered]
    if xxh3_64_intdigest(view, sequence) != checksum:
        return None
    return FoundFrame(sequence, position, before, length, tokens, kind)

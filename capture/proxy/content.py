"""Decodes a copy of a body's content coding, piece by piece, for the capture.

The wire keeps the coded bytes. Gzip, deflate and zstd; others raise UnknownCodingError.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

from capture.errors import CaptureError

ZSTD_SLICE = 256
"""Input bytes decoded at a time: zstandard cannot bound its output, and 128 KiB fit into 4."""


class UnknownCodingError(CaptureError):
    """A content coding that cannot be decoded here."""


class BrokenContentError(CaptureError):
    """Content that is not what its coding promises."""


class Decoder(Protocol):
    def decode(self, piece: bytes) -> Iterator[bytes]:
        """The text of `piece`, in parts of bounded size. Raises BrokenContentError."""
        ...


def decoder_for(coding: str) -> Decoder:
    """The decoder of a Content-Encoding header. Raises UnknownCodingError naming it."""
    name = coding.strip().lower()
    if name in ("", "identity"):
        return _Identity()
    if name in ("gzip", "x-gzip"):
        return _Inflate(zlib.MAX_WBITS | 32)
    if name == "deflate":
        return _Deflate()
    if name == "zstd":
        return _Zstd()
    raise UnknownCodingError(f"cannot decode {name[:40]!r}")


class _Identity:
    def decode(self, piece: bytes) -> Iterator[bytes]:
        yield piece


class _Inflate:
    PART = 1 << 20

    def __init__(self, window: int) -> None:
        self._stream = zlib.decompressobj(window)

    def decode(self, piece: bytes) -> Iterator[bytes]:
        stream = self._stream
        try:
            part = b"" if stream.eof else stream.decompress(piece, self.PART)
            while part:
                yield part
                rest = stream.unconsumed_tail
                is_last = stream.eof or (not rest and len(part) < self.PART)
                part = b"" if is_last else stream.decompress(rest, self.PART)
        except zlib.error as error:
            raise BrokenContentError(f"broken compressed content: {error}") from error


class _Deflate:
    """zlib's format, as the standard says, or raw, as many servers send."""

    def __init__(self) -> None:
        self._inflate: _Inflate | None = None

    def decode(self, piece: bytes) -> Iterator[bytes]:
        if self._inflate is None:
            if not piece:
                return
            is_zlib = piece[0] & 0x0F == 8 and piece[0] >> 4 <= 7
            self._inflate = _Inflate(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)
        yield from self._inflate.decode(piece)


class _Zstd:
    def __init__(self) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._stream = zstandard.ZstdDecompressor().decompressobj()

    def decode(self, piece: bytes) -> Iterator[bytes]:
        try:
            for start in range(0, len(piece), ZSTD_SLICE):
                if self._stream.eof:
                    return
                yield self._stream.decompress(piece[start : start + ZSTD_SLICE])
        except self._error as error:
            raise BrokenContentError(f"broken compressed content: {error}") from error

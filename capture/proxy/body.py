"""A bounded copy of a body, its content coding taken off.

Not for meaning: `capture.proxy.question` and `capture.proxy.answer` read it.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.proxy.content import Decoder, decoder_for
from capture.proxy.messages import Headers, values_of


class Budget:
    """Bytes that all copies together may hold."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes

    def take(self, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        self._left += size


class Body:
    """`wire_bytes` counts what passed; `cut` says that not all of it was kept; `is_plain`: there is
    no coding to take off. Raises UnknownCodingError when the coding of `headers` is one that cannot
    be decoded."""

    def __init__(self, headers: Headers, budget: Budget, limit_bytes: int) -> None:
        coding = b",".join(values_of(headers, b"content-encoding"))
        self._decoder: Decoder = decoder_for(coding.decode("latin-1"))
        self.is_plain = coding.strip().lower() in (b"", b"identity")
        self._budget, self._limit = budget, limit_bytes
        self._kept = bytearray()
        self.wire_bytes = 0
        self.cut = False

    def decode(self, piece: bytes) -> Iterator[bytes]:
        """The decoded parts of a piece, without keeping them. Raises BrokenContentError."""
        self.wire_bytes += len(piece)
        return self._decoder.decode(piece)

    def keep(self, piece: bytes) -> None:
        """Decode and keep a piece, as long as there is room. Raises BrokenContentError."""
        if self.cut:
            self.wire_bytes += len(piece)
            return
        for part in self.decode(piece):
            part = part[: max(0, self._limit - len(self._kept))] if self._over(part) else part
            if not part or not self._budget.take(len(part)):
                self.cut = True
                return
            self._kept += part

    def take(self) -> bytes:
        """All that was kept, which is not kept any longer."""
        data = bytes(self._kept)
        self._budget.give_back(len(data))
        self._kept = bytearray()
        return data

    def _over(self, part: bytes) -> bool:
        over = len(self._kept) + len(part) > self._limit
        self.cut |= over
        return over

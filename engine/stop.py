"""Finds stop strings in text that comes in pieces.

The answer ends before the stop string that is complete first, read character by character; so the
result does not depend on where the pieces end, and a stream equals the answer given at once.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches one answer for `stops` (non-empty strings). `matched` is the one found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown: all but what could yet become a stop string. Once `matched` is
        set, it is the text before the stop string that had not been shown, and nothing follows."""
        if not self._stops:
            return text
        buffer = self._held + text
        found = self._first(buffer)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return buffer[:start]
        keep = self._undecided(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The text held back, when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str) -> tuple[int, str] | None:
        """Start and text of the stop string that ends first; of two ending together the longer."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else best[1:]

    def _undecided(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest

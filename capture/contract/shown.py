"""What a foreign file holds, as a terminal or a report may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` without what would steer a terminal or cannot be encoded."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)

"""Two answers cut into spans that are the same or differ, ready to be highlighted.

Units are those of `replay.units`. Control and bidirectional characters are made visible, so that
an answer can neither drive a terminal nor reorder the page it is shown on.
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple

from replay.diff import text_ops
from replay.units import split_units

BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Span(NamedTuple):
    """A run of text and whether the other answer has something else there. A blank between two
    changed words counts as changed, so that a changed phrase is one span."""

    text: str
    changed: bool


def compare(left: str, right: str) -> tuple[list[Span], list[Span]]:
    """Spans of both texts; joined they are `visible(left)` and `visible(right)`."""
    left_units, right_units = split_units(visible(left)), split_units(visible(right))
    left_spans: list[Span] = []
    right_spans: list[Span] = []
    for op in text_ops(left_units, right_units):
        changed = op.tag != "equal"
        _append(left_spans, left_units[op.left_start : op.left_end], changed)
        _append(right_spans, right_units[op.right_start : op.right_end], changed)
    return _joined(left_spans), _joined(right_spans)


def visible(text: str) -> str:
    """`text` with control characters as control pictures and bidi controls as their code."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in "\n\t":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if character in BIDI or unicodedata.category(character) in ("Cc", "Cs"):
        return f"\u27e8U+{code:04X}\u27e9"
    return character


def _joined(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for index, span in enumerate(spans):
        between = 0 < index < len(spans) - 1 and not span.changed
        changed = span.changed or (between and span.text.strip(" ") == "")
        if joined and joined[-1].changed == changed:
            joined[-1] = Span(joined[-1].text + span.text, changed)
        else:
            joined.append(Span(span.text, changed))
    return joined


def _append(spans: list[Span], units: list[str], changed: bool) -> None:
    if units:
        spans.append(Span("".join(units), changed))

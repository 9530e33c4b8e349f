"""Two answers cut into spans that are the same or differ, ready to be highlighted.

Words in scripts with spaces, single characters in scripts without; a combining mark or an emoji's
joiner never stands alone. Control and bidirectional characters are made visible, so that an answer
can neither drive a terminal nor reorder the page it is shown on.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein

UNIT = re.compile(
    r"""
    (?: \s                                                        # one blank
      | [\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]  # one CJK character
      | (?:(?![\u2e80-\u9fff])[^\W_])+                            # a word
      | .                                                         # anything else
    )
    (?: [\u0300-\u036f\u20d0-\u20ff\ufe00-\ufe0f\U0001f3fb-\U0001f3ff] | \u200d. )*
    """,
    re.VERBOSE | re.DOTALL,
)
BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Span(NamedTuple):
    """A run of text and whether the other answer has something else there. A blank between two
    changed words counts as changed, so that a changed phrase is one span."""

    text: str
    changed: bool


def compare(left: str, right: str) -> tuple[list[Span], list[Span]]:
    """Spans of both texts; joined they are `visible(left)` and `visible(right)`."""
    left_units, right_units = UNIT.findall(visible(left)), UNIT.findall(visible(right))
    numbers: dict[str, int] = {}
    left_ids, right_ids = (
        [numbers.setdefault(unit, len(numbers)) for unit in units]
        for units in (left_units, right_units)
    )
    left_spans: list[Span] = []
    right_spans: list[Span] = []
    for code in Levenshtein.opcodes(left_ids, right_ids):
        changed = code.tag != "equal"
        _append(left_spans, left_units[code.src_start : code.src_end], changed)
        _append(right_spans, right_units[code.dest_start : code.dest_end], changed)
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

"""Splits text into the units that a text diff compares: words, or characters where there are none.

Joining the units gives the text back. Chinese, Japanese, Thai and other scripts written without
spaces are compared by character, with combining marks and emoji sequences kept whole.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

MARKS = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u0e31\u0e34-\u0e3a"
    "\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u17b4-\u17d3\u1ab0-\u1aff"
    "\u1dc0-\u1dff\u200d\u20d0-\u20ff\u3099\u309a\ufe00-\ufe0f\ufe20-\ufe2f"
    "\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
)
"""Characters that belong to the one before them."""

SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u303f\u3040-\u30ff\u3100-\u312f"
    "\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef"
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
"""Scripts without spaces between words, and the punctuation and full-width forms used with them."""

INDIC = "\u0900-\u0dff"
"""Words here hold vowel signs that do not count as letters."""

_UNIT = re.compile(
    rf"[{SPACELESS}][{MARKS}]*"
    r"|[\U0001f1e6-\U0001f1ff]{2}"
    rf"|(?:[^\W_{SPACELESS}]|[{INDIC}])(?:[^\W_{SPACELESS}]|[{INDIC}{MARKS}])*"
    r"|[^\S\n]+"
    rf"|[\s\S][{MARKS}]*(?:(?<=\u200d)[^\s\w][{MARKS}]*)*"
)
_ASCII_UNIT = re.compile(r"[A-Za-z0-9]+|[^\S\n]+|[\s\S]")
_ZERO_WIDTH = re.compile("[\u200b\u200c\u2060\ufeff\u00ad]")


def split_units(text: str) -> list[str]:
    """The units of `text`, in order; `"".join` of them is `text`."""
    return (_ASCII_UNIT if text.isascii() else _UNIT).findall(text)


def numbered(*texts: Sequence[str]) -> list[list[int]]:
    """The same small non-negative number for equal units of all `texts`.

    rapidfuzz compares hashes, so it gets numbers that cannot be mistaken for one another.
    """
    known: dict[str, int] = {}
    return [[known.setdefault(unit, len(known)) for unit in text] for text in texts]


def normalised(text: str) -> str:
    """`text` without differences that a reader does not see: composition of characters, width,
    zero-width characters, white space at line ends and around the text."""
    text = _ZERO_WIDTH.sub("", unicodedata.normalize("NFKC", text))
    return "\n".join(line.rstrip() for line in text.strip().splitlines())

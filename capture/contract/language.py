"""The language of a prompt, for comparing the mix of languages; short or odd texts are unknown."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

SHORTEST = 20
CERTAIN = 0.8
LONGEST = 1000
UNKNOWN = "unknown"


def language_of(text: str) -> str:
    """ISO 639-1 code, or unknown: fewer than 20 letters, or less than 80 % certain."""
    part = text[:LONGEST]
    if sum(map(str.isalpha, part)) < SHORTEST and part.isascii():
        return UNKNOWN
    code, certainty = _identifier().classify(part)
    return str(code) if certainty >= CERTAIN else UNKNOWN


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

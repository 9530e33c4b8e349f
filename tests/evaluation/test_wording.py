"""Highlighting loses no character and shows what cannot be seen."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from evaluation.wording import compare, visible


@given(st.text(max_size=60), st.text(max_size=60))
def test_spans_join_to_the_visible_texts(left: str, right: str) -> None:
    left_spans, right_spans = compare(left, right)
    assert "".join(span.text for span in left_spans) == visible(left)
    assert "".join(span.text for span in right_spans) == visible(right)
    for before, after in itertools.pairwise(left_spans):
        assert before.changed != after.changed


def changed(left: str, right: str) -> tuple[list[str], list[str]]:
    spans = compare(left, right)
    return tuple([span.text for span in side if span.changed] for side in spans)


def test_words_and_characters_are_the_units() -> None:
    assert changed("the cat sat", "the dog sat") == (["cat"], ["dog"])
    assert changed("北京是首都。", "南京是首都。") == (["北"], ["南"])
    assert changed("same", "same") == ([], [])
    assert changed("it was a big red one", "it was the old blue one") == (
        ["a big red"],
        ["the old blue"],
    )


def test_a_joined_emoji_and_an_accent_stay_whole() -> None:
    assert changed("x 👩\u200d🚀 y", "x 👩\u200d🔬 y") == (["👩\u200d🚀"], ["👩\u200d🔬"])
    assert changed("cafe\u0301!", "cafe!") == (["cafe\u0301"], ["cafe"])


def test_invisible_characters_are_shown() -> None:
    assert visible("a\x1b[31m\r\n\tb\x7f") == "a\u241b[31m\u240d\n\tb\u2421"
    assert visible("safe\u202eevil") == "safe\u27e8U+202E\u27e9evil"
    assert visible("\ud800") == "\u27e8U+D800\u27e9"

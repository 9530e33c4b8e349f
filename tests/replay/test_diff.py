"""The diff: stages in order, exact forks, and steps that rebuild one side from the other."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.diff import Op, compare, first_difference, repetition, text_ops, token_ops
from replay.units import normalised, numbered, split_units

MIXED = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("ab \n\t，。中文字日本ไดี한é\u0301\u200d\ufe0f👨👩🏽🇩🇪हि,."),
    ),
    max_size=60,
)
IDS = st.lists(st.integers(0, 40), max_size=80)


@dataclass(frozen=True)
class Side:
    """An answer."""

    error: str | None = None
    rendered_prompt: str | None = "ask"
    prompt_token_ids: list[int] | None = None
    resolved_sampling: dict[str, Any] | None = None
    output_text: str | None = "one two three"
    output_token_ids: list[int] | None = None
    margins: list[float | None] | None = None
    finish_reason: str | None = "stop"


BASE = Side(
    prompt_token_ids=[1, 2],
    resolved_sampling={"temperature": 0.0, "stop": []},
    output_token_ids=[5, 6, 7],
    margins=[1.0, 0.25, 2.0],
)


def apply(ops: list[Op], left: list[Any], right: list[Any]) -> list[Any]:
    """Rebuild the right side: equal parts from the left, the rest from the right."""
    built: list[Any] = []
    for op in ops:
        if op.tag == "equal":
            built += left[op.left_start : op.left_end]
        else:
            built += right[op.right_start : op.right_end]
    return built


@given(IDS, IDS)
def test_token_steps_rebuild_the_right_side(left: list[int], right: list[int]) -> None:
    ops = token_ops(left, right)
    assert apply(ops, left, right) == right
    assert [op.left_end for op in ops[:-1]] == [op.left_start for op in ops[1:]]


@given(MIXED, MIXED)
def test_text_steps_rebuild_the_right_side(left: str, right: str) -> None:
    units = split_units(left), split_units(right)
    assert "".join(apply(text_ops(*units), *units)) == right


@given(MIXED)
def test_units_join_to_the_text(text: str) -> None:
    assert "".join(split_units(text)) == text


@given(MIXED, st.sampled_from("aé中ก👍"))
def test_a_mark_stays_with_its_letter(before: str, letter: str) -> None:
    assert split_units(before + letter + "\u0301")[-1].endswith(letter + "\u0301")


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("Hello, world", ["Hello", ",", " ", "world"]),
        ("今天很好，AI", ["今", "天", "很", "好", "，", "AI"]),
        ("👨‍👩‍👧 👍🏽🇩🇪🇫🇷", ["👨‍👩‍👧", " ", "👍🏽", "🇩🇪", "🇫🇷"]),
        ("e\u0301t हिन्दी", ["e\u0301t", " ", "हिन्दी"]),
        ("ดี", ["ดี"]),
        ("a\n\n b", ["a", "\n", "\n", " ", "b"]),
    ],
)
def test_units_are_what_a_reader_compares(text: str, units: list[str]) -> None:
    assert split_units(text) == units


@given(IDS, IDS)
def test_first_difference_is_the_first(left: list[int], right: list[int]) -> None:
    at = first_difference(left, right)
    if at is None:
        assert left == right
    else:
        assert left[:at] == right[:at]
        assert left[at : at + 1] != right[at : at + 1]


@given(IDS, st.lists(st.integers(0, 40), min_size=65, max_size=200))
def test_first_difference_of_long_lists(tail: list[int], head: list[int]) -> None:
    assert first_difference([*head, *tail, 41], [*head, *tail, 42]) == len(head) + len(tail)
    assert first_difference(head, [*head, 1]) == len(head)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "same"),
        ({"error": "ConnectError"}, "error"),
        ({"rendered_prompt": "asks", "prompt_token_ids": [1, 9]}, "prompt"),
        ({"prompt_token_ids": [1, 1, 2]}, "prompt_ids"),
        ({"resolved_sampling": {"temperature": 0.7, "stop": []}}, "sampling"),
        ({"resolved_sampling": {"temperature": 0.0, "stop": ["x"]}}, "stop"),
        ({"output_token_ids": [5, 8, 7], "output_text": "one too three"}, "output"),
        ({"output_text": "one two thr\ufffd"}, "text"),
        ({"finish_reason": "length"}, "finish"),
        ({"rendered_prompt": None, "prompt_token_ids": None}, "same"),
    ],
)
def test_the_first_stage_names_the_difference(change: dict[str, Any], kind: str) -> None:
    found = compare(BASE, replace(BASE, **change))
    assert found.kind == kind
    assert (kind == "same") == (not found.stages)


def test_the_fork_has_the_old_margin_and_distances() -> None:
    right = replace(BASE, output_token_ids=[5, 8, 9, 7], output_text="one too many three")
    found = compare(BASE, right)
    assert (found.first_divergent, found.margin) == (1, 0.25)
    assert found.token_distance == 2
    assert found.text_distance == 3
    assert found.detail["fork"] == [6, 8]
    assert found.detail["lengths"] == [3, 4]


def test_an_early_end_is_a_fork_at_the_shorter_length() -> None:
    found = compare(BASE, replace(BASE, output_token_ids=[5, 6], output_text="one two "))
    assert (found.kind, found.first_divergent, found.margin) == ("output", 2, 2.0)
    assert found.detail["fork"] == [7, None]


def test_later_stages_are_listed_after_the_first() -> None:
    right = replace(BASE, rendered_prompt="other", output_text="x", output_token_ids=[9])
    assert compare(BASE, right).stages == ["prompt", "output"]


def test_without_token_ids_the_text_is_compared() -> None:
    left, right = replace(BASE, output_token_ids=None), replace(BASE, output_text="one two four")
    found = compare(left, right)
    assert (found.kind, found.first_divergent, found.token_distance) == ("output", 4, None)
    assert found.text_distance == 1


def test_equal_failures_are_no_difference() -> None:
    left = Side(error="the prompt is too long")
    assert compare(left, left).kind == "same"
    assert compare(left, BASE).detail["error"] == ["the prompt is too long", None]


@pytest.mark.parametrize("bad", [[-1], [2**61]])
def test_ids_that_rapidfuzz_would_confuse_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        token_ops(bad, [0])


def test_differences_that_nobody_sees_are_marked() -> None:
    composed = "café  is ﬁne\n"
    hidden = unicodedata.normalize("NFD", "café") + "\u200b  is fine \n\n"
    assert normalised(composed) == normalised(hidden)
    found = compare(replace(BASE, output_text=composed), replace(BASE, output_text=hidden))
    assert found.kind == "text"
    assert found.detail["equal_when_normalised"]


def test_repetition_counts_grams_seen_before() -> None:
    assert repetition(list(range(50))) == 0
    assert repetition([7] * 53) == pytest.approx(0.98)
    assert repetition([1, 2]) == 0
    assert numbered(["a", "b"], ["b", "c"]) == [[0, 1], [1, 2]]

"""Compares two answers to the same request, cheapest stage first.

The prompt side comes first (rendered prompt, prompt tokens, sampling parameters, stop set): when
it differs, whatever follows in the output is explained by it. Then the output: tokens, text,
finish reason. Pure functions on plain data; `replay.run` stores what they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from os.path import commonprefix
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from rapidfuzz.distance import Levenshtein

from replay.units import normalised, numbered, split_units

Kind = Literal[
    "same", "error", "prompt", "prompt_ids", "sampling", "stop", "output", "text", "finish"
]
NGRAM = 4
GRAM_FACTORS = np.array(
    [1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64
)
"""Odd 64-bit factors whose weighted sum (modulo 2^64) names an n-gram."""
STOP_FIELDS = ("stop", "stop_token_ids")
LARGEST_ID = 2**61 - 2
"""rapidfuzz compares tokens by hash, and Python hashes larger integers to smaller ones."""


class Comparable(Protocol):
    """What is compared; `replay.models.ReplayedRequest` has all of it."""

    @property
    def error(self) -> str | None: ...
    @property
    def rendered_prompt(self) -> str | None: ...
    @property
    def prompt_token_ids(self) -> list[int] | None: ...
    @property
    def resolved_sampling(self) -> dict[str, Any] | None: ...
    @property
    def output_text(self) -> str | None: ...
    @property
    def output_token_ids(self) -> list[int] | None: ...
    @property
    def margins(self) -> Sequence[float | None] | None: ...
    @property
    def finish_reason(self) -> str | None: ...


class Op(NamedTuple):
    """One step from left to right: `tag` is equal, replace, insert or delete; half-open ranges."""

    tag: str
    left_start: int
    left_end: int
    right_start: int
    right_end: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two answers differ in; see `replay.models.Diff` for the fields.

    `stages` lists every stage that differs, `kind` being the first. `detail` holds what each
    stage found, with [left, right] pairs.
    """

    kind: Kind
    stages: list[Kind]
    first_divergent: int | None = None
    margin: float | None = None
    token_distance: int | None = None
    text_distance: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


def compare(left: Comparable, right: Comparable) -> Comparison:
    """Compare two answers. Parts that either side lacks are not compared.

    `first_divergent` counts output tokens, or text units when a side has no token ids. `margin`
    is the left side's there. Raises ValueError for negative token ids.
    """
    if left.error is not None or right.error is not None:
        return _compare_failed(left, right)
    detail: dict[str, Any] = {}
    stages = _prompt_stages(left, right, detail)
    result = _compare_output(left, right, detail)
    if result.first_divergent is not None:
        stages.append("output")
    elif (left.output_text or "") != (right.output_text or ""):
        stages.append("text")
    if left.finish_reason != right.finish_reason:
        stages.append("finish")
        detail["finish_reason"] = [left.finish_reason, right.finish_reason]
    if "output" in stages or "text" in stages:
        _describe_outputs(left, right, detail)
    return Comparison(
        kind=stages[0] if stages else "same",
        stages=stages,
        first_divergent=result.first_divergent,
        margin=result.margin,
        token_distance=result.token_distance,
        text_distance=result.text_distance,
        detail=detail,
    )


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """Index of the first element in which two sequences differ, an end included; None if equal."""
    if left == right:
        return None
    shared = min(len(left), len(right))
    if shared > 64 and isinstance(left[0], int):
        unequal = np.flatnonzero(np.asarray(left[:shared]) != np.asarray(right[:shared]))
        return int(unequal[0]) if unequal.size else shared
    pairs = zip(left[:shared], right[:shared], strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), shared)


def token_ops(left: Sequence[int], right: Sequence[int]) -> list[Op]:
    """Steps that turn `left` into `right`; token ids must not be negative (ValueError)."""
    _check_ids(left)
    _check_ids(right)
    return [Op(*op) for op in Levenshtein.opcodes(left, right)]


def text_ops(left: Sequence[str], right: Sequence[str]) -> list[Op]:
    """Steps that turn the units `left` into `right` (see `split_units`)."""
    return [Op(*op) for op in Levenshtein.opcodes(*numbered(left, right))]


def repetition(tokens: Sequence[int]) -> float:
    """Share of the 4-grams that occurred before: 0 for text that never repeats itself."""
    count = len(tokens) - NGRAM + 1
    if count <= 0:
        return 0.0
    ids = np.asarray(tokens, dtype=np.uint64)
    grams = sum(
        (ids[start : start + count] * factor for start, factor in enumerate(GRAM_FACTORS)),
        start=np.zeros(count, dtype=np.uint64),
    )
    return round(1 - len(np.unique(grams)) / count, 4)


class _Divergence(NamedTuple):
    first_divergent: int | None
    margin: float | None = None
    token_distance: int | None = None
    text_distance: int | None = None


def _compare_failed(left: Comparable, right: Comparable) -> Comparison:
    detail = {"error": [left.error, right.error]}
    if left.error == right.error:
        return Comparison(kind="same", stages=[], detail=detail)
    return Comparison(kind="error", stages=["error"], detail=detail)


def _prompt_stages(left: Comparable, right: Comparable, detail: dict[str, Any]) -> list[Kind]:
    stages: list[Kind] = []
    if _differ(left.rendered_prompt, right.rendered_prompt):
        stages.append("prompt")
        detail["prompt"] = _around_difference(str(left.rendered_prompt), str(right.rendered_prompt))
    if _differ(left.prompt_token_ids, right.prompt_token_ids):
        stages.append("prompt_ids")
        ids = (left.prompt_token_ids or [], right.prompt_token_ids or [])
        at = first_difference(*ids)
        detail["prompt_ids"] = {"first_difference": at, "lengths": [len(side) for side in ids]}
    sampling = _changed_parameters(left.resolved_sampling, right.resolved_sampling)
    stop = {name: sampling.pop(name) for name in STOP_FIELDS if name in sampling}
    if sampling:
        stages.append("sampling")
        detail["sampling"] = sampling
    if stop:
        stages.append("stop")
        detail["stop"] = stop
    return stages


def _changed_parameters(
    left: dict[str, Any] | None, right: dict[str, Any] | None
) -> dict[str, list[Any]]:
    """[left, right] values of each sampling parameter that differs."""
    if left is None or right is None:
        return {}
    return {
        name: [left.get(name), right.get(name)]
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def _compare_output(left: Comparable, right: Comparable, detail: dict[str, Any]) -> _Divergence:
    texts = (left.output_text or "", right.output_text or "")
    distance = _text_distance(*texts)
    if left.output_token_ids is None or right.output_token_ids is None:
        at = None if distance == 0 else first_difference(*map(split_units, texts))
        return _Divergence(at, text_distance=distance)
    ids = (left.output_token_ids, right.output_token_ids)
    at = first_difference(*ids)
    if at is None:
        return _Divergence(None, token_distance=0, text_distance=distance)
    for side in ids:
        _check_ids(side)
    detail["fork"] = [side[at] if at < len(side) else None for side in ids]
    margins = left.margins or ()
    margin = margins[at] if at < len(margins) else None
    # What comes before the fork is equal: the distance is that of the rests.
    tokens = Levenshtein.distance(ids[0][at:], ids[1][at:])
    return _Divergence(at, margin, tokens, distance)


def _text_distance(left: str, right: str) -> int:
    if left == right:
        return 0
    # Units before the last space that both share are equal: they need no splitting.
    shared = len(commonprefix((left, right)))  # noqa: RUF071 - by character is what is meant
    start = max(0, left.rfind(" ", 0, shared))
    units = numbered(split_units(left[start:]), split_units(right[start:]))
    return Levenshtein.distance(*units)


def _describe_outputs(left: Comparable, right: Comparable, detail: dict[str, Any]) -> None:
    texts = [left.output_text or "", right.output_text or ""]
    tokens = [left.output_token_ids, right.output_token_ids]
    if tokens[0] is None or tokens[1] is None:
        tokens = list(numbered(*map(split_units, texts)))
    known = [side or [] for side in tokens]
    detail["lengths"] = [len(side) for side in known]
    detail["repetition"] = [repetition(side) for side in known]
    detail["invalid_utf8"] = [text.count("\ufffd") for text in texts]
    detail["equal_when_normalised"] = normalised(texts[0]) == normalised(texts[1])


def _differ(left: Any, right: Any) -> bool:
    """Whether both sides are known and differ."""
    return left is not None and right is not None and left != right


def _around_difference(left: str, right: str, width: int = 40) -> dict[str, Any]:
    at = next(index for index, pair in enumerate(zip_longest(left, right)) if pair[0] != pair[1])
    start = max(0, at - width)
    return {"first_difference": at, "around": [s[start : at + width] for s in (left, right)]}


def _check_ids(ids: Sequence[int]) -> None:
    if len(ids) and not (min(ids) >= 0 and max(ids) <= LARGEST_ID):
        raise ValueError(f"token ids must be 0 to {LARGEST_ID}, not {min(ids)} to {max(ids)}")

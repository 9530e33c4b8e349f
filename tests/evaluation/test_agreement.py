"""Krippendorff's alpha equals the published worked example."""

from __future__ import annotations

import pytest

from evaluation.agreement import krippendorff_alpha

# Krippendorff (2011), section C: four observers, twelve units, some values missing.
OBSERVERS = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
]
UNITS = [[value for value in unit if value is not None] for unit in zip(*OBSERVERS, strict=True)]


@pytest.mark.parametrize(
    ("metric", "alpha"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)]
)
def test_alpha_of_the_published_example(metric, alpha: float) -> None:
    assert krippendorff_alpha(UNITS, metric) == pytest.approx(alpha, abs=5e-4)


def test_alpha_is_one_for_full_agreement_and_undefined_without_variation() -> None:
    assert krippendorff_alpha([[-1, -1], [1, 1], [0, 0, 0]]) == 1
    assert krippendorff_alpha([[0, 0], [0, 0]]) is None
    assert krippendorff_alpha([[1], [-1]]) is None
    assert krippendorff_alpha([]) is None


def test_alpha_is_negative_for_systematic_disagreement() -> None:
    alpha = krippendorff_alpha([[-1, 1]] * 10)
    assert alpha is not None
    assert alpha < 0

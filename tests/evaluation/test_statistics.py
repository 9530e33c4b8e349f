"""Intervals cover as published, agree with SciPy, and the gate's rules of thumb hold."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from evaluation.statistics import (
    beta_mixture,
    bounded_mean,
    clopper_pearson,
    exact_lower,
    exact_upper,
    successes_free_needed,
    wilson,
)

COUNTS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(COUNTS, st.sampled_from([0.8, 0.95, 0.99]))
def test_exact_and_wilson_agree_with_scipy(counts: tuple[int, int], confidence: float) -> None:
    c, n = counts
    test = binomtest(c, n)
    exact = test.proportion_ci(confidence, "exact")
    score = test.proportion_ci(confidence, "wilson")
    assert clopper_pearson(c, n, confidence) == pytest.approx((exact.low, exact.high), abs=1e-9)
    assert wilson(c, n, confidence) == pytest.approx((score.low, score.high), abs=1e-9)
    upper = binomtest(c, n, alternative="less").proportion_ci(confidence, "exact").high
    lower = binomtest(c, n, alternative="greater").proportion_ci(confidence, "exact").low
    assert exact_upper(c, n, confidence) == pytest.approx(upper, abs=1e-9)
    assert exact_lower(c, n, confidence) == pytest.approx(lower, abs=1e-9)


@pytest.mark.parametrize(
    ("p", "n", "exact", "score"), [(0.95, 30, 0.98, 0.94), (0.02, 100, 0.985, 0.95)]
)
def test_coverage_matches_the_published_figures(
    p: float, n: int, exact: float, score: float
) -> None:
    def coverage(interval) -> float:
        inside = [
            c for c in range(n + 1) if interval(c, n, 0.95)[0] <= p <= interval(c, n, 0.95)[1]
        ]
        return float(binom.pmf(inside, n, p).sum())

    assert coverage(clopper_pearson) == pytest.approx(exact, abs=0.01)
    assert coverage(wilson) == pytest.approx(score, abs=0.01)


@pytest.mark.parametrize(("bound", "needed"), [(0.05, 59), (0.02, 149), (0.01, 299), (0.005, 598)])
def test_harm_free_labels_needed_for_an_exact_bound(bound: float, needed: int) -> None:
    def upper(c: int, n: int) -> float:
        return exact_upper(c, n, 0.95)

    assert successes_free_needed(0, 0, bound, upper) == needed
    assert successes_free_needed(0, needed - 1, bound, upper) == 1
    assert successes_free_needed(0, needed, bound, upper) == 0
    assert exact_upper(0, needed, 0.95) == pytest.approx(1 - 0.05 ** (1 / needed))


def test_a_bound_out_of_reach_is_said_to_be_so() -> None:
    assert successes_free_needed(0, 0, 0.0, lambda c, n: exact_upper(c, n, 0.95)) is None


def test_beta_mixture_matches_the_reference_value() -> None:
    assert beta_mixture(90, 100, 0.95) == pytest.approx((0.7725, 0.971), abs=5e-4)
    assert clopper_pearson(90, 100, 0.95) == pytest.approx((0.824, 0.951), abs=5e-4)


@given(COUNTS)
def test_beta_mixture_is_a_mirror_image_and_contains_the_share(counts: tuple[int, int]) -> None:
    c, n = counts
    interval = beta_mixture(c, n, 0.95)
    mirrored = beta_mixture(n - c, n, 0.95)
    assert interval.lower <= c / n <= interval.upper
    assert interval == pytest.approx((1 - mirrored.upper, 1 - mirrored.lower), abs=1e-9)


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5])
def test_beta_mixture_covers_while_peeking_after_every_label(p: float) -> None:
    """The interval is crossed at any of 400 looks in at most 5 % of sequences, plus 3 sigma.

    Peeking at exact intervals instead is wrong far more often: that is why both exist.
    """
    rng = np.random.default_rng(7)
    counts = np.cumsum(rng.random((400, 400)) < p, axis=1)
    looks = {
        (int(c), n): (beta_mixture(int(c), n, 0.95), clopper_pearson(int(c), n, 0.95))
        for n in range(1, 401, 4)
        for c in np.unique(counts[:, n - 1])
    }
    missed = np.zeros((2, 400), dtype=bool)
    for row in range(400):
        for n in range(1, 401, 4):
            for kind, interval in enumerate(looks[int(counts[row, n - 1]), n]):
                missed[kind, row] |= not interval.lower <= p <= interval.upper
    allowed = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert missed[0].mean() <= allowed
    if p == 0.5:
        assert missed[1].mean() > allowed


@pytest.mark.parametrize("weights", [(0.5, 0.4, 0.1), (0.05, 0.9, 0.05), (0.1, 0.2, 0.7)])
def test_bounded_mean_covers_at_every_look(weights: tuple[float, float, float]) -> None:
    """`bounded_mean` never re-admits a mean, so its last interval tells of all looks."""
    rng = np.random.default_rng(11)
    scores = np.array([0.0, 0.5, 1.0])
    mean = float(scores @ weights)
    missed = 0
    for _ in range(300):
        lower, upper = bounded_mean(rng.choice(scores, 120, p=weights), 0.95)
        missed += not lower <= mean <= upper
    assert missed / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_bounded_mean_narrows_and_never_widens() -> None:
    values = np.random.default_rng(3).choice([0.0, 0.5], 200)
    widths = [np.diff(bounded_mean(values[:n], 0.95))[0] for n in (0, 10, 50, 200)]
    assert widths[0] == 1
    assert all(after <= before for before, after in itertools.pairwise(widths))
    assert widths[-1] < 0.15


def test_ten_harmful_verdicts_are_enough_to_say_worse_than_even() -> None:
    assert bounded_mean([0.0] * 10, 0.95).upper < 0.5
    assert bounded_mean([0.5] * 200, 0.95).upper > 0.5


@pytest.mark.parametrize("interval", [clopper_pearson, wilson, beta_mixture])
def test_no_labels_say_nothing_and_nonsense_is_refused(interval) -> None:
    assert interval(0, 0, 0.95) == (0.0, 1.0)
    with pytest.raises(ValueError, match="is not a share"):
        interval(3, 2, 0.95)
    with pytest.raises(ValueError, match="confidence"):
        interval(1, 2, 1.0)


def test_bounded_mean_refuses_values_outside_its_range() -> None:
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        bounded_mean([0.5, -1.0], 0.95)

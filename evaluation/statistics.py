"""Intervals for shares and means of few labels, fixed-sample and anytime-valid.

Fixed-sample intervals (`clopper_pearson`, `wilson`) are right when one looks once. The
confidence sequences (`beta_mixture`, `bounded_mean`) hold at every sample size at the same time,
so one may look after each label and stop. Not for comparing latencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaln, ndtri, xlog1py, xlogy
from scipy.stats import beta

MIXTURE_SHAPE = 0.5
"""Both parameters of the beta mixture: Jeffreys' prior, the one that costs least over all p."""
BET_FRACTION = 0.75
"""Largest share of its capital that `bounded_mean` bets (c in the paper, which uses 1/2 or 3/4)."""
MEAN_GRID = 2001
"""Candidate means that `bounded_mean` tests; its limits are rounded outwards to this grid."""


class Interval(NamedTuple):
    """Limits of a share or mean, both within 0..1."""

    lower: float
    upper: float


def clopper_pearson(successes: int, n: int, confidence: float) -> Interval:
    """Exact two-sided interval of a share: covers with at least `confidence` for every p.

    Limits are beta quantiles. Source: Clopper and Pearson, Biometrika 26 (1934); in this form
    Brown, Cai and DasGupta, Statistical Science 16 (2001), section 4.2.1. n = 0 gives (0, 1).
    """
    _counts(successes, n)
    tail = _tail((1 - confidence) / 2)
    return Interval(_exact_lower(successes, n, tail), _exact_upper(successes, n, tail))


def exact_upper(successes: int, n: int, confidence: float) -> float:
    """One-sided upper Clopper-Pearson bound: with 0 of n it is 1 - (1 - confidence)^(1/n)."""
    _counts(successes, n)
    return _exact_upper(successes, n, _tail(1 - confidence))


def exact_lower(successes: int, n: int, confidence: float) -> float:
    """One-sided lower Clopper-Pearson bound."""
    _counts(successes, n)
    return _exact_lower(successes, n, _tail(1 - confidence))


def wilson(successes: int, n: int, confidence: float) -> Interval:
    """Score interval of a share, for display: right on average over p, not for every p.

    Source: Wilson, JASA 22 (1927); Brown, Cai and DasGupta (2001), equation 4. n = 0 gives (0, 1).
    """
    _counts(successes, n)
    if n == 0:
        return Interval(0.0, 1.0)
    z = float(ndtri(1 - _tail((1 - confidence) / 2)))
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    lower = 0.0 if successes == 0 else max(0.0, centre - half)
    upper = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(lower, upper)


def beta_mixture(successes: int, n: int, confidence: float) -> Interval:
    """Anytime-valid interval of a share: all sample sizes together covered with `confidence`.

    Holds every p with B(a + c, a + n - c) / B(a, a) / (p^c (1 - p)^(n - c)) < 1 / alpha: the
    mixture likelihood ratio is a martingale under p and Ville's inequality bounds it. Source:
    Robbins, Annals of Mathematical Statistics 41 (1970), with a beta mixture. n = 0 gives (0, 1).
    """
    _counts(successes, n)
    if n == 0:
        return Interval(0.0, 1.0)
    threshold = -math.log(_tail(1 - confidence))
    a = MIXTURE_SHAPE
    mixture = float(betaln(a + successes, a + n - successes) - betaln(a, a))

    def excess(p: float) -> float:
        return float(mixture - xlogy(successes, p) - xlog1py(n - successes, -p) - threshold)

    peak = successes / n
    return Interval(
        0.0 if successes == 0 else _root(excess, 0.0, peak),
        1.0 if successes == n else _root(excess, peak, 1.0),
    )


def bounded_mean(values: Sequence[float] | NDArray[np.float64], confidence: float) -> Interval:
    """Anytime-valid interval of the mean of values in 0..1, in the order they were observed.

    Hedged capital process with predictable plug-in bets; the interval holds every mean against
    which no betting strategy has multiplied its capital by 1 / alpha at any time so far. Source:
    Waudby-Smith and Ramdas, JRSS B 86 (2024), equations 24 to 26 and theorem 3. No values: (0, 1).
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not np.all((x >= 0) & (x <= 1)):
        raise ValueError("bounded_mean needs a flat sequence of numbers within 0..1")
    if x.size == 0:
        return Interval(0.0, 1.0)
    alpha = _tail(1 - confidence)
    grid = np.linspace(0.0, 1.0, MEAN_GRID)
    surprised = np.zeros(grid.size, dtype=bool)
    log_up = np.zeros(grid.size)
    log_down = np.zeros(grid.size)
    with np.errstate(divide="ignore"):
        largest_up = BET_FRACTION / grid
        largest_down = BET_FRACTION / (1 - grid)
    for value, bet in zip(x, _predictable_bets(x, alpha), strict=True):
        log_up += np.log1p(np.minimum(bet, largest_up) * (value - grid))
        log_down += np.log1p(-np.minimum(bet, largest_down) * (value - grid))
        surprised |= np.maximum(log_up, log_down) >= math.log(2 / alpha)
    kept = np.flatnonzero(~surprised)
    if kept.size == 0:
        centre = float(np.clip(x.mean(), 0, 1))
        return Interval(centre, centre)
    return Interval(float(grid[max(kept[0] - 1, 0)]), float(grid[min(kept[-1] + 1, grid.size - 1)]))


def successes_free_needed(
    successes: int, n: int, bound: float, upper: Callable[[int, int], float]
) -> int | None:
    """How many more observations without a success bring `upper(successes, n)` to `bound`.

    0 when it is there already; None when more than a million would be needed.
    """
    limit = 1_000_000
    if upper(successes, n) <= bound:
        return 0
    if upper(successes, n + limit) > bound:
        return None
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if upper(successes, n + middle) <= bound:
            high = middle
        else:
            low = middle
    return high


def _predictable_bets(x: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Bet sizes, each from the values before it (equation 26), truncated by the caller."""
    t = np.arange(1, x.size + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    before = np.concatenate(([0.25], variance[:-1]))
    squared: NDArray[np.float64] = 2 * math.log(2 / alpha) / (before * t * np.log1p(t))
    return np.sqrt(squared)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where `function` changes sign in (low, high); its value at 0 or 1 may be infinite."""
    tiny = 1e-15
    return float(brentq(function, max(low, tiny), min(high, 1 - tiny), xtol=1e-12))


def _exact_lower(successes: int, n: int, tail: float) -> float:
    return 0.0 if successes == 0 else float(beta.ppf(tail, successes, n - successes + 1))


def _exact_upper(successes: int, n: int, tail: float) -> float:
    return 1.0 if successes == n else float(beta.ppf(1 - tail, successes + 1, n - successes))


def _counts(successes: int, n: int) -> None:
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is not a share")


def _tail(tail: float) -> float:
    if not 0 < tail < 1:
        raise ValueError("confidence must lie strictly between 0 and 1")
    return tail

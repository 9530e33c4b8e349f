"""The figures of a run: intervals that cover, and verdicts that respect the noise floor."""

from __future__ import annotations

import numpy as np
import pytest

from replay.models import ReplayedRequest
from replay.summary import latency_changes, median_interval

Rows = dict[str, dict[str, ReplayedRequest]]


def arms(old_a: np.ndarray, new: np.ndarray, old_b: np.ndarray) -> Rows:
    """Rows whose TTFT are the given milliseconds."""
    return {
        arm: {
            str(index): ReplayedRequest(
                error=None, ttft_ms=float(value), duration_ms=float(value), itl_ms=[1.0, 3.0]
            )
            for index, value in enumerate(values)
        }
        for arm, values in (("old_a", old_a), ("new", new), ("old_b", old_b))
    }


def verdict(old_a: np.ndarray, new: np.ndarray, old_b: np.ndarray) -> str:
    changes = latency_changes(arms(old_a, new, old_b))
    return next(change.verdict for change in changes if change.metric == "ttft_ms")


def test_intervals_of_the_median_cover_it_as_often_as_promised() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        found = median_interval(random.exponential(size=25))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= np.log(2) <= found.high
    assert 0.945 < covered / 2000 < 0.985


@pytest.mark.parametrize(("count", "expected"), [(5, None), (6, (0.0, 5.0)), (20, (5.0, 14.0))])
def test_interval_ends_are_the_tabulated_order_statistics(
    count: int, expected: tuple[float, float] | None
) -> None:
    found = median_interval(np.arange(count, dtype=float))
    assert (None if found.low is None else (found.low, found.high)) == expected


def test_a_verdict_needs_a_change_beyond_what_the_old_passes_show() -> None:
    base = np.linspace(90, 110, 40)
    wobble = np.where(np.arange(40) % 2, 0.5, -0.5)
    assert verdict(base, base + 20, base + wobble) == "slower"
    assert verdict(base, base - 20, base + wobble) == "faster"
    assert verdict(base, base + 0.1, base + wobble) == "no change shown"
    # The second OLD pass was faster by 5: a NEW that is slower by 3 proves nothing.
    assert verdict(base, base + 3, base - 5 + wobble) == "no change shown"
    assert verdict(base[:4], base[:4] + 20, base[:4]) == "too few requests"


def test_requests_that_one_arm_failed_are_left_out() -> None:
    base = np.arange(10.0)
    rows = arms(base, base, base)
    rows["new"]["3"].error = "failed"
    del rows["old_b"]["4"]
    changes = {change.metric: change for change in latency_changes(rows)}
    assert changes["ttft_ms"].pairs == 8
    assert changes["tpot_ms"].old == 2.0
    assert changes["itl_p99_ms"].new == pytest.approx(2.98)

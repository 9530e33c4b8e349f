"""The figures of a run: noise floor, change rate and the paired latency comparison.

Statistics are distribution-free: latencies are neither normal nor independent of the request, so
requests are paired across arms and medians get exact intervals from order statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import binom

from replay.diff import Comparison
from replay.models import ReplayedRequest
from replay.passes import Pass

CONFIDENCE = 0.95
METRICS = ("ttft_ms", "tpot_ms", "itl_p99_ms", "duration_ms")


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with an exact confidence interval; `low` and `high` are None for fewer than 6."""

    median: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class LatencyChange:
    """One metric over requests that all arms answered; milliseconds.

    `old` is the median over both OLD passes. `change` is NEW minus the request's mean over the
    OLD passes, `noise` old_b minus old_a. `verdict`: slower or faster when the whole interval of
    the change is farther from zero than the interval of the noise reaches on either side (which
    OLD pass was the slower one is chance), else "no change shown".
    """

    metric: str
    pairs: int
    old: float
    new: float
    change: Interval
    noise: Interval
    verdict: str


def median_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Median and its interval between order statistics, coverage at least 95 % for any
    distribution (David and Nagaraja, Order Statistics, 7.1)."""
    ordered = np.sort(np.asarray(values, dtype=float))
    count = len(ordered)
    rank = int(binom.ppf((1 - CONFIDENCE) / 2, count, 0.5))
    if binom.cdf(rank - 1, count, 0.5) > (1 - CONFIDENCE) / 2:
        rank -= 1
    median = float(np.median(ordered))
    if rank < 1:
        return Interval(median, None, None)
    return Interval(median, float(ordered[rank - 1]), float(ordered[count - rank]))


def latency_changes(
    arms: Mapping[str, Mapping[str, ReplayedRequest]],
) -> list[LatencyChange]:
    """Compare arms old_a, old_b and new, each a mapping from request id to its row."""
    shared = [
        request_id
        for request_id in arms["old_a"]
        if all(_answered(arms[arm].get(request_id)) for arm in ("old_a", "old_b", "new"))
    ]
    found = []
    for metric in METRICS:
        columns = np.array(
            [
                [_metric(arms[arm][request_id], metric) for arm in ("old_a", "old_b", "new")]
                for request_id in shared
            ],
            dtype=float,
        ).reshape(-1, 3)
        columns = columns[~np.isnan(columns).any(axis=1)]
        if len(columns):
            found.append(_latency_change(metric, columns))
    return found


def pair_summary(comparisons: Mapping[str, Comparison], noisy: frozenset[str]) -> dict[str, Any]:
    """Counts over one pair of arms. `beyond_noise`: changed, and not among the `noisy` ids."""
    changed = {key: found for key, found in comparisons.items() if found.kind != "same"}
    forks = [
        found.first_divergent for found in changed.values() if found.first_divergent is not None
    ]
    margins = [found.margin for found in changed.values() if found.margin is not None]
    total = len(comparisons)
    return {
        "requests": total,
        "differing": len(changed),
        "share": len(changed) / total if total else 0.0,
        "beyond_noise": len(changed.keys() - noisy),
        "kinds": dict(Counter(found.kind for found in changed.values())),
        "first_divergent_median": float(np.median(forks)) if forks else None,
        "margin_median": float(np.median(margins)) if margins else None,
    }


def pass_summary(done: Pass) -> dict[str, Any]:
    """An arm's figures."""
    return {
        "fingerprint": done.fingerprint,
        "requests": done.requests,
        "failures": done.failures,
        "abilities": done.abilities,
        "output_tokens": done.output_tokens,
        "duration_s": round(done.duration_s, 3),
        "lateness": {key: round(value, 3) for key, value in asdict(done.fidelity).items()},
    }


def latency_summary(changes: Sequence[LatencyChange]) -> list[dict[str, Any]]:
    """For the run's JSON summary."""
    return [asdict(change) for change in changes]


def _answered(row: ReplayedRequest | None) -> bool:
    return row is not None and row.error is None


def _metric(row: ReplayedRequest, metric: str) -> float:
    """NaN when the request has no such value: one token has no TPOT."""
    if metric in ("ttft_ms", "duration_ms"):
        value = getattr(row, metric)
        return float("nan") if value is None else float(value)
    if not row.itl_ms:
        return float("nan")
    if metric == "tpot_ms":
        return float(np.mean(row.itl_ms))
    return float(np.percentile(row.itl_ms, 99))


def _latency_change(metric: str, columns: np.ndarray) -> LatencyChange:
    old = columns[:, :2].mean(axis=1)
    change = median_interval(columns[:, 2] - old)
    noise = median_interval(columns[:, 1] - columns[:, 0])
    return LatencyChange(
        metric=metric,
        pairs=len(columns),
        old=float(np.median(columns[:, :2])),
        new=float(np.median(columns[:, 2])),
        change=change,
        noise=noise,
        verdict=_verdict(change, noise),
    )


def _verdict(change: Interval, noise: Interval) -> str:
    if change.low is None or change.high is None or noise.low is None or noise.high is None:
        return "too few requests"
    reach = max(abs(noise.low), abs(noise.high))
    if change.low > reach:
        return "slower"
    if change.high < -reach:
        return "faster"
    return "no change shown"

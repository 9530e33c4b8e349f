"""How far several experts agree beyond chance: Krippendorff's alpha.

Written here (thirty lines of NumPy) rather than taken from a package; checked against the
published worked example.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Metric = Literal["nominal", "ordinal", "interval"]


def krippendorff_alpha(
    units: Iterable[Sequence[float]], metric: Metric = "ordinal"
) -> float | None:
    """Alpha over units, each the values that its raters gave (missing ones left out).

    1 is perfect agreement, 0 is chance. None when no two values can be compared or all values are
    equal (then alpha is not defined). Units with fewer than two values are ignored. Source:
    Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), section C.
    """
    pairable = [list(unit) for unit in units if len(unit) >= 2]
    if not pairable:
        return None
    values, inverse = np.unique(np.concatenate(pairable), return_inverse=True)
    if values.size < 2:
        return None
    coincidences = np.zeros((values.size, values.size))
    start = 0
    for unit in pairable:
        counts = np.bincount(inverse[start : start + len(unit)], minlength=values.size)
        start += len(unit)
        coincidences += (np.outer(counts, counts) - np.diag(counts)) / (len(unit) - 1)
    totals = coincidences.sum(axis=1)
    distance = _squared_distance(values, totals, metric)
    expected = float((np.outer(totals, totals) * distance).sum()) / float(totals.sum() - 1)
    return 1 - float((coincidences * distance).sum()) / expected


def _squared_distance(
    values: NDArray[np.float64], totals: NDArray[np.float64], metric: Metric
) -> NDArray[np.float64]:
    if metric == "nominal":
        return 1.0 - np.eye(values.size)
    if metric == "interval":
        return np.subtract.outer(values, values) ** 2
    ranks = np.cumsum(totals) - totals / 2
    return np.subtract.outer(ranks, ranks) ** 2

"""A Prometheus histogram that takes a whole step's values in one call, with exemplars.

Not for values that come one by one: the library's own histogram does those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

EXEMPLAR_S = 1.0
"""An exemplar stays for so long at least: scrapes are rarer, and each one costs the step."""


class ArrayHistogram(Collector):
    """Fixed `buckets` (upper bounds, ascending) and `labels`. One thread observes, any collects."""

    def __init__(
        self, name: str, text: str, buckets: tuple[float, ...], labels: dict[str, str]
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = np.array(buckets)
        self._counts = np.zeros(len(buckets) + 1, np.int64)
        self._sum = 0.0
        self._exemplars: list[Exemplar | None] = [None] * len(self._counts)
        self._due_s = [0.0] * len(self._counts)

    def observe(
        self, values: np.ndarray, labels_of: Callable[[int], dict[str, str]] | None = None
    ) -> None:
        """Count `values`, a one-dimensional array in the metric's unit. The largest becomes its
        bucket's exemplar, if that one is old, with the labels that `labels_of` gives for its
        index."""
        places = np.searchsorted(self._bounds, values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum())
        if labels_of is not None and len(values):
            largest = int(values.argmax())
            place, now_s = places[largest], time.monotonic()
            if now_s >= self._due_s[place]:
                self._due_s[place] = now_s + EXEMPLAR_S
                self._exemplars[place] = Exemplar(
                    labels_of(largest), float(values[largest]), time.time()
                )

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The family in Prometheus' cumulative form."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = np.cumsum(self._counts).tolist()
        buckets = [
            (bound, count) if exemplar is None else (bound, count, exemplar)
            for bound, count, exemplar in zip(bounds, counts, self._exemplars, strict=True)
        ]
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        yield family

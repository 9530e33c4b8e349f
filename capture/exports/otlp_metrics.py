"""The GenAI server histograms over exported requests, as OpenTelemetry metrics.

Cumulative from the start of this exporter on, per engine; times are the records' own. Failed
requests count in duration with their error type and nowhere else. People's percentiles come from
SQL over the records, not from these buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)

from capture.exports import genai
from capture.exports.otlp_spans import SCOPE, SUCCESS, Row, operation_of, resource_of


class _Instrument(NamedTuple):
    name: str
    description: str
    bounds: tuple[float, ...]


INSTRUMENTS = (
    _Instrument(
        genai.REQUEST_DURATION,
        "Time from arrival to the last byte handed to the socket.",
        genai.REQUEST_DURATION_BUCKETS,
    ),
    _Instrument(
        genai.TIME_TO_FIRST_TOKEN,
        "Time from arrival to the first token, successful requests only.",
        genai.TIME_TO_FIRST_TOKEN_BUCKETS,
    ),
    _Instrument(
        genai.TIME_PER_OUTPUT_TOKEN,
        "Time per token after the first, successful requests only.",
        genai.TIME_PER_OUTPUT_TOKEN_BUCKETS,
    ),
)


@dataclass
class _Series:
    """One histogram: counts per bucket, the last one without upper bound."""

    start_us: int
    counts: list[int]
    bounds: tuple[float, ...]
    total: float = 0.0
    least: float = float("inf")
    most: float = float("-inf")
    end_us: int = 0

    def add(self, value: float, at_us: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)
        self.end_us = max(self.end_us, at_us)

    def point(self, attributes: dict[str, Any]) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=self.start_us * 1000,
            time_unix_nano=self.end_us * 1000,
            count=sum(self.counts),
            sum=self.total,
            bucket_counts=list(self.counts),
            explicit_bounds=self.bounds,
            min=self.least,
            max=self.most,
        )


class Histograms:
    """All series of this exporter; few: per engine, operation and error type."""

    def __init__(self) -> None:
        self._resources: dict[str, Any] = {}
        self._series: dict[tuple[str, str, tuple[tuple[str, Any], ...]], _Series] = {}

    def with_rows(self, rows: list[Row]) -> Histograms:
        """These histograms and the requests `rows`; this one stays as it is."""
        other = deepcopy(self)
        for row in rows:
            other.add(row)
        return other

    def add(self, row: Row) -> None:
        """Count a finished request; times in us since 1970."""
        self._resources.setdefault(row["engine_id"], resource_of(row))
        attributes = {
            genai.OPERATION_NAME: operation_of(row),
            genai.PROVIDER_NAME: genai.PROVIDER,
            genai.REQUEST_MODEL: row["model"] or "unknown",
            genai.RESPONSE_MODEL: row["model"] or "unknown",
            genai.SERVER_ADDRESS: row["host"] or "unknown",
        }
        end_us = row["flushed_us"] or row["finished_us"]
        success = row["reason"] in SUCCESS
        error = {} if success else {genai.ERROR_TYPE: row["reason"]}
        self._add(0, row, {**attributes, **error}, end_us - row["arrived_us"])
        if not success or row["first_token_us"] is None:
            return
        self._add(1, row, attributes, row["first_token_us"] - row["arrived_us"])
        tokens = row["output_tokens"] or 0
        if tokens > 1 and row["last_token_us"] is not None:
            spent_us = row["last_token_us"] - row["first_token_us"]
            self._add(2, row, attributes, spent_us / (tokens - 1))

    def data(self) -> MetricsData:
        """All series as they stand."""
        by_engine: dict[str, list[Metric]] = {engine: [] for engine in self._resources}
        for instrument in INSTRUMENTS:
            for engine, metrics in by_engine.items():
                points = [
                    series.point(dict(attributes))
                    for (owner, name, attributes), series in self._series.items()
                    if owner == engine and name == instrument.name
                ]
                if points:
                    data = Histogram(points, AggregationTemporality.CUMULATIVE)
                    metrics.append(
                        Metric(instrument.name, instrument.description, genai.SECONDS, data)
                    )
        return MetricsData(
            [
                ResourceMetrics(self._resources[engine], [ScopeMetrics(SCOPE, metrics, "")], "")
                for engine, metrics in by_engine.items()
            ]
        )

    def _add(self, number: int, row: Row, attributes: dict[str, Any], value_us: float) -> None:
        instrument = INSTRUMENTS[number]
        key = (row["engine_id"], instrument.name, tuple(attributes.items()))
        series = self._series.get(key)
        if series is None:
            counts = [0] * (len(instrument.bounds) + 1)
            series = _Series(row["arrived_us"], counts, instrument.bounds)
            self._series[key] = series
        series.add(max(value_us, 0) / 1e6, row["finished_us"])

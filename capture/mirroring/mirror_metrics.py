"""The mirror's counters for Prometheus. Not for serving them: the registry's owner does that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from capture.mirror import MirrorCounters

TOTALS = (
    ("records_offered", "offered", "Requests that the mirror was told of."),
    ("records_written", "written", "Traffic records written."),
    ("records_truncated", "truncated", "Traffic records written with content cut."),
    ("records_dropped", "dropped", "Traffic records written without content: redaction failed."),
    ("written_bytes", "bytes", "Bytes of traffic written, before compression."),
    ("files_deleted", "files_deleted", "Finished traffic files deleted to keep the bound."),
)
BY_KIND = (
    ("records_skipped", "skipped", "reason", "Requests without a traffic record, by why."),
    ("redactions", "redactions", "kind", "Placeholders set and fields left out, by kind."),
)


class Counting(Protocol):
    """A mirror, whichever process does its work."""

    @property
    def counters(self) -> MirrorCounters: ...


class MirrorCollector(Collector):
    """Read when scraped; offered = written + sum(skipped) + queued. `prefix` ends in the mirror's
    name, as in `inferloop:mirror`; `labels` are those of all metrics of the process."""

    def __init__(self, mirror: Counting, prefix: str, labels: Mapping[str, str]) -> None:
        self._mirror, self._prefix = mirror, prefix
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        counters = self._mirror.counters
        for name, attribute, text in TOTALS:
            total = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=self._names)
            total.add_metric(self._values, getattr(counters, attribute))
            yield total
        for name, attribute, label, text in BY_KIND:
            family = CounterMetricFamily(
                f"{self._prefix}_{name}", text, labels=[*self._names, label]
            )
            for kind, count in getattr(counters, attribute).items():
                family.add_metric([*self._values, kind], count)
            yield family
        queued = GaugeMetricFamily(
            f"{self._prefix}_records_queued", "Records waiting to be written.", labels=self._names
        )
        queued.add_metric(self._values, counters.queued)
        yield queued

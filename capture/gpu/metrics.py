"""Device and memory telemetry for Prometheus, read when scraped.

A figure that is not available is absent, never 0; `inferloop:gpu_info` carries the reason. Not for
the engine's own metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from capture.gpu.monitor import GpuSample, GpuView
from capture.gpu.nvml import THROTTLE_REASONS
from capture.gpu.telemetry import MemorySample, Telemetry

_GPU = (
    ("busy_ratio", "utilization_pct", 0.01, "Share of time in which any kernel ran."),
    ("sm_ratio", "sm_pct", 0.01, "Share of multiprocessors that were busy."),
    ("occupancy_ratio", "occupancy_pct", 0.01, "Share of warps that were active."),
    ("tensor_ratio", "tensor_pct", 0.01, "Share of time in tensor instructions."),
    ("memory_bandwidth_ratio", "memory_bandwidth_pct", 0.01, "Share of the memory bandwidth."),
    ("memory_used_bytes", "memory_used_bytes", 1, "Memory in use by all processes."),
    ("memory_total_bytes", "memory_total_bytes", 1, "Memory of the device."),
    ("power_watts", "power_w", 1, "Power, from energy differences."),
    ("temperature_celsius", "temperature_c", 1, "Temperature."),
    ("sm_clock_hertz", "sm_clock_mhz", 1e6, "Clock of the multiprocessors."),
    ("memory_clock_hertz", "memory_clock_mhz", 1e6, "Clock of the memory."),
)
_MEMORY = (
    ("memory_rss_bytes", "Resident memory of the process."),
    ("allocator_reserved_bytes", "Device memory that the allocator holds."),
    ("allocator_allocated_bytes", "Of these in use by tensors."),
    ("allocator_peak_allocated_bytes", "In use at most so far."),
    ("allocator_largest_free_bytes", "Largest free block among the reserved."),
    ("allocator_fragmentation_ratio", "1 - largest free / (reserved - allocated)."),
)


class TelemetryCollector(Collector):
    """Register it where the engine's metrics are; `labels` are those they carry."""

    def __init__(self, telemetry: Telemetry, labels: Mapping[str, str]) -> None:
        self._telemetry = telemetry
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        """All families that have a figure now."""
        view = self._telemetry.gpus
        if view.started:
            yield self._info(view)
        if view.devices:
            yield from self._figures(view.devices)
            yield self._throttled(view.devices)
        yield from self._calls(view)
        memory = self._telemetry.memory
        if memory is not None:
            yield from self._memory(memory)

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is shows when it is scraped."""
        return iter(())

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"inferloop:{name}", text, labels=[*self._labels, *labels])

    def _add(self, family: GaugeMetricFamily, value: float, *labels: str) -> None:
        family.add_metric([*self._labels.values(), *labels], value)

    def _info(self, view: GpuView) -> Metric:
        family = self._gauge(
            "gpu_info",
            "The devices watched; available 0: none is, and why.",
            "device", "uuid", "name", "index", "mig", "available", "reason",
        )  # fmt: skip
        for sample in view.devices:
            identity = (sample.uuid, sample.name, str(sample.index), str(int(sample.mig)))
            self._add(family, 1, str(sample.ordinal), *identity, "1", view.unavailable)
        if not view.devices:
            self._add(family, 1, "", "", "", "", "", "0", view.unavailable or "starting")
        return family

    def _figures(self, devices: tuple[GpuSample, ...]) -> Iterator[Metric]:
        for name, figure, unit, text in _GPU:
            family = self._gauge(f"gpu_{name}", text, "device")
            for sample in devices:
                if figure in sample.values:
                    self._add(family, sample.values[figure] * unit, str(sample.ordinal))
            if family.samples:
                yield family
        age = self._gauge("gpu_sample_age_seconds", "Age of the figures.", "device")
        for sample in devices:
            self._add(age, sample.age_s(), str(sample.ordinal))
        yield age

    def _throttled(self, devices: tuple[GpuSample, ...]) -> Metric:
        family = self._gauge("gpu_throttled", "1 while clocks are slowed down.", "device", "reason")
        for sample in devices:
            if "throttled" in sample.reasons:
                continue
            for reason in THROTTLE_REASONS.values():
                self._add(family, float(reason in sample.throttled), str(sample.ordinal), reason)
        return family

    def _calls(self, view: GpuView) -> Iterator[Metric]:
        if not view.calls:
            return
        labels = [*self._labels, "call"]
        name = "inferloop:nvml_call_duration_seconds"
        summary = SummaryMetricFamily(name, "Time in NVML, by call.", labels=labels)
        longest = self._gauge("nvml_call_longest_seconds", "Longest call of NVML so far.", "call")
        for call, (count, total_s, longest_s) in view.calls.items():
            summary.add_metric([*self._labels.values(), call], count, total_s)
            self._add(longest, longest_s, call)
        yield summary
        yield longest

    def _memory(self, memory: MemorySample) -> Iterator[Metric]:
        device = "" if memory.index < 0 else str(memory.index)
        figures = [*zip(_MEMORY, memory.values, strict=True)]
        walk = ("allocator_walk_seconds", "Time that the last walk over the allocator took.")
        for (name, text), value in (*figures, (walk, memory.walk_s)):
            if not math.isnan(value):
                family = self._gauge(name, text, "device")
                self._add(family, value, device)
                yield family

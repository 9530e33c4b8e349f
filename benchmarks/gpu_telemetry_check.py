"""Checks GPU telemetry and the allocator view on real hardware: idle, compute, copies, pieces.

    python -m benchmarks.gpu_telemetry_check

Needs one NVIDIA device, PyTorch with CUDA and nvidia-ml-py; takes about a minute. Prints what was
read in each phase and what is implausible; exit code 1 when something is, 2 without a device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.report import report
from capture.gpu.monitor import FRAME_FIGURES, GpuMonitor, GpuSample, GpuView
from capture.gpu.nvml import Calls, Nvml, UnavailableError

FIGURES = ("utilization_pct", "sm_pct", "occupancy_pct", "tensor_pct", "memory_bandwidth_pct",
           "power_w", "temperature_c", "sm_clock_mhz", "memory_clock_mhz")  # fmt: skip
SETTLE_S = 6.0
"""Power is the mean over 5 s: a phase's first seconds still hold the one before it."""


class Watch:
    """Collects what the monitor says, and beside it what the power sensor says at the moment."""

    def __init__(self, monitor: GpuMonitor) -> None:
        import pynvml

        self._monitor = monitor
        self._nvml = Nvml(pynvml, Calls())
        self._nvml.call("nvmlInit")
        self._pynvml = pynvml
        uuid = self._first_device().uuid
        self._handle = self._nvml.call("nvmlDeviceGetHandleByUUID", uuid)

    def _first_device(self) -> GpuSample:
        deadline = time.monotonic() + 60
        while not self._monitor.view().devices:
            if time.monotonic() > deadline:
                raise UnavailableError(self._monitor.view().unavailable or "no answer in 60 s")
            time.sleep(0.1)
        return self._monitor.view().devices[0]

    def collect(self, seconds: float) -> tuple[list[GpuSample], list[float]]:
        """The samples of that long after a phase has settled, and the sensor's watts."""
        time.sleep(SETTLE_S)
        samples: dict[float, GpuSample] = {}
        instant: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for sample in self._monitor.view().devices[:1]:
                samples[sample.taken_s] = sample
            fields = [self._pynvml.NVML_FI_DEV_POWER_INSTANT]
            value = self._nvml.call("nvmlDeviceGetFieldValues", self._handle, fields)[0]
            if value.nvmlReturn == 0:
                instant.append(value.value.uiVal / 1000)
            time.sleep(0.1)
        return list(samples.values())[1:], instant


@contextmanager
def load(work: Callable[[], None]) -> Iterator[None]:
    """Repeat `work` on the device, a few calls ahead, while the block runs."""
    import torch

    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            for _ in range(8):
                work()
            torch.cuda.synchronize()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def phases() -> Iterator[tuple[str, Callable[[], None] | None]]:
    """Name and work of each phase."""
    import torch

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(left)
    source = torch.empty(2 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    def copy() -> None:
        target.copy_(source)

    yield "idle", None
    yield "matmul bf16", multiply
    yield "copy", copy


def summary(name: str, samples: list[GpuSample], instant: list[float]) -> dict[str, Any]:
    """A row: the medians of a phase; None where there was no figure."""
    row: dict[str, Any] = {"phase": name, "samples": len(samples)}
    for figure in FIGURES:
        values = [sample.values[figure] for sample in samples if figure in sample.values]
        row[figure] = round(statistics.median(values), 1) if values else None
    row["instant_w"] = round(statistics.mean(instant), 1) if instant else None
    row["throttled"] = ",".join(sorted({r for sample in samples for r in sample.throttled})) or "-"
    return row


def in_pieces(blocks: int) -> dict[str, Any]:
    """The allocator in `blocks` blocks of which every second is free, seen by the probe and by
    PyTorch; and whether the largest free block takes a tensor of its size."""
    import torch

    from engine.memory import MemoryProbe

    torch.cuda.empty_cache()
    kept = [torch.empty(2 << 20, device="cuda", dtype=torch.uint8) for _ in range(blocks)]
    kept = kept[::2]
    probe = MemoryProbe()
    sample = probe.read()
    _, reserved, allocated, peak, largest, fragmentation = sample.values
    began = time.perf_counter()
    probe.read()
    stats_s = time.perf_counter() - began
    facts = {
        "blocks": blocks,
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "peak_bytes": peak,
        "largest_free_bytes": largest,
        "fragmentation": fragmentation,
        "walk_ms": sample.walk_s * 1e3,
        "statistics_us": stats_s * 1e6,
        "torch_reserved_bytes": torch.cuda.memory_reserved(),
        "torch_allocated_bytes": torch.cuda.memory_allocated(),
        "torch_peak_bytes": torch.cuda.max_memory_allocated(),
    }
    fitting = torch.empty(int(largest), device="cuda", dtype=torch.uint8)
    facts["reserved_after_largest"] = torch.cuda.memory_reserved()
    del kept, fitting
    return facts


def implausible(rows: list[dict[str, Any]], facts: list[dict[str, Any]]) -> list[str]:
    """What cannot be, or is not what the phase should show."""
    found = []
    for row in rows:
        for figure in FIGURES[:5]:
            if row[figure] is not None and not 0 <= row[figure] <= 100:
                found.append(f"{row['phase']}: {figure} is {row[figure]}")
        if row["power_w"] is None or not 30 <= row["power_w"] <= 1200:
            found.append(f"{row['phase']}: power is {row['power_w']} W")
        elif row["instant_w"] and abs(row["power_w"] / row["instant_w"] - 1) > 0.2:
            found.append(f"{row['phase']}: {row['power_w']} W by energy, {row['instant_w']} W now")
    idle, matmul, copy = rows
    expectations = (
        (idle["utilization_pct"] is not None and idle["utilization_pct"] < 5, "idle is not idle"),
        (matmul["utilization_pct"] is not None and matmul["utilization_pct"] > 90, "matmul idles"),
        ((matmul["sm_pct"] or 100) > 80, "matmul leaves multiprocessors free"),
        ((matmul["tensor_pct"] or 100) > 30, "matmul uses no tensor cores"),
        ((copy["memory_bandwidth_pct"] or 100) > 50, "copies do not load the memory"),
        ((matmul["power_w"] or 0) > (idle["power_w"] or 0), "a load takes no power"),
    )
    found += [text for holds, text in expectations if not holds]
    for fact in facts:
        for name in ("reserved", "allocated", "peak"):
            if fact[f"{name}_bytes"] != fact[f"torch_{name}_bytes"]:
                found.append(f"{fact['blocks']} blocks: {name} differs from PyTorch's")
        free = fact["reserved_bytes"] - fact["allocated_bytes"]
        if abs(fact["fragmentation"] - (1 - fact["largest_free_bytes"] / free)) > 0.01:
            found.append(f"{fact['blocks']} blocks: the free pieces do not add up to what is free")
        if fact["reserved_after_largest"] != fact["reserved_bytes"]:
            found.append(f"{fact['blocks']} blocks: the largest free block did not fit its size")
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(monitor: GpuMonitor, seconds: float) -> tuple[list[dict[str, Any]], float]:
    """A row for each phase, and the share of a processor that the telemetry's process took."""
    watch = Watch(monitor)
    rows = []
    assert monitor.pid is not None
    began_s, began_cpu_s = time.monotonic(), cpu_seconds(monitor.pid)
    for name, work in phases():
        with nullcontext() if work is None else load(work):
            rows.append(summary(name, *watch.collect(seconds)))
    used_s = cpu_seconds(monitor.pid) - began_cpu_s
    return rows, used_s / (time.monotonic() - began_s)


def details_of(view: GpuView, cpu_share: float, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """What else belongs to the rows."""
    import torch

    device = view.devices[0]
    return {
        "device": f"{device.name}, index {device.index}, MIG {device.mig}",
        "torch": torch.__version__,
        "uuid_is_torchs": str(torch.cuda.get_device_properties(0).uuid) in device.uuid,
        "telemetry_cpu_share": cpu_share,
        "not_available": {
            name: device.reasons[name] for name in FRAME_FIGURES if name in device.reasons
        },
        "nvml_calls": {
            name: {"calls": count, "mean_ms": total / count * 1e3, "longest_ms": longest * 1e3}
            for name, (count, total, longest) in view.calls.items()
        },
        "allocator": facts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="measured in each phase")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing to check", file=sys.stderr)
        return 2
    monitor = GpuMonitor(os.environ.get("CUDA_VISIBLE_DEVICES"))
    monitor.start()
    try:
        rows, cpu_share = measure(monitor, options.seconds)
        view = monitor.view()
    except UnavailableError as error:
        print(f"NVML gives nothing: {error}", file=sys.stderr)
        return 2
    finally:
        monitor.close()
    facts = [in_pieces(blocks) for blocks in (100, 1_000, 10_000)]
    problems = implausible(rows, facts)
    details = {**details_of(view, cpu_share, facts), "implausible": problems}
    report("gpu_telemetry_check", rows, title="GPU telemetry, medians", details=details)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

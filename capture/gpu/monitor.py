"""Follows the process that talks to NVML and keeps the last good figures of each device.

Nothing here waits for NVML: readers take a view, which says how old its figures are. Not for
writing them anywhere: that is `capture.gpu.telemetry`.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

SLOW_CALL_S = 2.0
"""A call that takes longer is named in the view: the figures age because of it."""

HANG_S = 60.0
"""A process whose call takes longer is killed and started anew."""

FORGET_S = 60.0
"""Figures older than this are no longer shown."""

RESTART_S = (10.0, 30.0, 60.0, 300.0)
"""Waits between starts of a process that keeps ending; the last one repeats."""

FRAME_FIGURES = (
    "utilization_pct",
    "sm_pct",
    "memory_bandwidth_pct",
    "memory_used_bytes",
    "power_w",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
)
"""The figures of a GPU frame, in its order; the age follows them."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A device's last figures. What is missing in `values` has its reason in `reasons`; `taken_s`
    is `time.monotonic()` at their reading."""

    ordinal: int
    index: int
    uuid: str
    name: str
    mig: bool
    values: Mapping[str, float]
    reasons: Mapping[str, str]
    throttled: tuple[str, ...]
    taken_s: float

    def frame_values(self, now_s: float) -> list[float]:
        """The nine doubles of a GPU frame; NaN where not available."""
        figures = [self.values.get(figure, math.nan) for figure in FRAME_FIGURES]
        return [*figures, (now_s - self.taken_s) * 1000]

    def age_s(self) -> float:
        """Seconds since the reading."""
        return time.monotonic() - self.taken_s

    def unavailable(self) -> str:
        """Why figures of the frame are missing or poorer, "" when none is: those with the same
        reason together."""
        figures: dict[str, list[str]] = {}
        for figure in (*FRAME_FIGURES, "throttled"):
            if figure in self.reasons:
                figures.setdefault(self.reasons[figure], []).append(figure)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in figures.items())


@dataclass(frozen=True, slots=True)
class GpuView:
    """What is known now. Without devices `unavailable` says why; with devices it is "" or why their
    figures age. `calls`: number, seconds in all and longest of NVML's calls, by name."""

    devices: tuple[GpuSample, ...] = ()
    unavailable: str = ""
    calls: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)
    started: bool = False


class GpuMonitor:
    """Owns the process. `devices` is a list as CUDA_VISIBLE_DEVICES has; None: all of them."""

    def __init__(self, devices: str | None, *, period_s: float = 1.0) -> None:
        # -P: not what lies in the working directory under the same name
        self._command = [sys.executable, "-P", "-m", "capture.gpu.process", str(period_s)]
        self._command += [] if devices is None else [devices]
        self._period_s = period_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._report: dict[str, Any] = {}
        self._heard_s = math.inf
        self._ended = ""
        self._starts = 0
        self._thread = threading.Thread(target=self._main, name="gpu-monitor", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the process, the last one that was started; None before the first."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the process and wait for it, at most two seconds: one that hangs in the driver may
        not be killable."""
        with self._lock:
            self._stop.set()
            if self._process is not None:
                self._process.kill()
        self._thread.join(2.0)

    def view(self) -> GpuView:
        """The last good figures, and what is wrong now."""
        report, now_s = self._report, time.monotonic()
        devices = tuple(
            GpuSample(**{**device, "throttled": tuple(device["throttled"])})
            for device in report.get("devices", ())
            if now_s - device["taken_s"] <= FORGET_S
        )
        calls = {name: tuple(numbers) for name, numbers in report.get("calls", {}).items()}
        return GpuView(devices, self._trouble(report, now_s), calls, bool(report or self._ended))

    def _trouble(self, report: dict[str, Any], now_s: float) -> str:
        if self._ended:
            return self._ended
        pending = report.get("pending")
        if pending is not None and now_s - pending[1] > SLOW_CALL_S:
            return f"{pending[0]} has not answered for more than {SLOW_CALL_S:g} s"
        if now_s - self._heard_s > SLOW_CALL_S + self._period_s:
            return "the process for NVML is there, but silent"
        return ""

    def _main(self) -> None:
        while not self._stop.is_set():
            final = self._follow()
            if self._stop.is_set():
                return
            log.log(logging.INFO if final else logging.WARNING, "GPU telemetry: %s", self._ended)
            if final:
                return
            self._stop.wait(RESTART_S[min(self._starts, len(RESTART_S)) - 1])

    def _follow(self) -> bool:
        """Run one process to its end; whether there is no use in another. `_ended` says why."""
        with self._lock:
            if self._stop.is_set():
                return True
            self._starts += 1
            try:
                process = self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            except OSError as error:
                self._ended = f"the process for NVML cannot be started: {error}"
                return False
        with process:
            reason = self._read(process)
            process.kill()
            status = process.wait()
        self._ended = reason or f"the process for NVML ended with status {status}"
        return bool(self._report.get("final"))

    def _read(self, process: subprocess.Popen[str]) -> str:
        """Take reports until the process ends or hangs; why, as far as is known."""
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):  # it was killed while it wrote
                break
            report = json.loads(line)
            now_s = self._heard_s = time.monotonic()
            if not report["devices"]:  # until it has read them: what its predecessor knew
                report["devices"] = self._report.get("devices", [])
            else:
                self._ended, self._starts = "", 1
            self._report = report
            if report["failure"]:
                return str(report["failure"])
            pending = report["pending"]
            if pending is not None and now_s - pending[1] > HANG_S:
                return f"{pending[0]} has not answered for {HANG_S:.0f} s; NVML is started anew"
        return ""

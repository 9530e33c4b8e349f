"""Telemetry as a whole: a real process over a stand-in of NVML, a real ring, real frames."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from capture.decode import EventFrame, GpuFrame, MemoryFrame, decode
from capture.frames import TraceWriter
from capture.gpu import monitor
from capture.gpu.metrics import TelemetryCollector
from capture.gpu.monitor import GpuMonitor, GpuSample
from capture.gpu.telemetry import CALM_S, Telemetry, ThrottleWatch
from capture.reader import RingReader
from capture.ring import RingWriter
from tests.capture.gpu.nvml_world import NvmlWorld
from tests.waiting import PATIENCE_S, until

PERIOD_S = 0.05
FOR_EVER_S = 600.0
"""Longer than any test: what waits for it has failed."""


class Memory(NamedTuple):
    index: int = -1
    values: tuple[float, ...] = (123.0, *[math.nan] * 5)
    unavailable: str = "no CUDA device"
    walk_s: float = math.nan


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlWorld:
    return NvmlWorld(tmp_path, monkeypatch)


class Traced:
    """Telemetry writing into a ring, and what is in the ring."""

    def __init__(self, ring: RingWriter, path: Path, devices: str | None) -> None:
        self.monitor = GpuMonitor(devices, period_s=PERIOD_S)
        self.telemetry = Telemetry(TraceWriter(ring), self.monitor, Memory, period_s=PERIOD_S)
        self.frames: list[Any] = []
        self._reader = RingReader(path)

    def of(self, kind: type) -> list[Any]:
        while batch := self._reader.read():
            self.frames += [decode(batch, index) for index in range(len(batch))]
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def events(self) -> list[tuple[str, str]]:
        return [(event.kind, event.detail) for event in self.of(EventFrame)]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (self.telemetry.gpus, self.frames[-3:])
            time.sleep(0.02)

    def gpu(self, condition: Callable[[GpuFrame], object]) -> GpuFrame:
        """The first GPU frame that is as wanted, once it is there."""
        self.wait(lambda: any(condition(frame) for frame in self.of(GpuFrame)))
        return next(frame for frame in self.of(GpuFrame) if condition(frame))

    def event(self, kind: str, text: str) -> None:
        """Wait for an event of this kind with this in its detail."""
        self.wait(lambda: any(k == kind and text in detail for k, detail in self.events()))


@pytest.fixture
def traced(
    tmp_path: Path, world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Traced]]:
    """Starts telemetry. Nothing counts as slow or hanging unless a test says after how long: on a
    busy machine everything is at times."""
    for limit in ("SLOW_CALL_S", "HANG_S", "FORGET_S"):
        monkeypatch.setattr(monitor, limit, FOR_EVER_S)
    started: list[tuple[Traced, RingWriter]] = []

    def start(devices: str | None = None) -> Traced:
        path = tmp_path / "engine.ring"
        ring = RingWriter.create(path, capacity_bytes=1 << 20, engine_id=uuid4())
        traced = Traced(ring, path, devices)
        started.append((traced, ring))
        traced.telemetry.start()
        return traced

    yield start
    for traced, ring in started:
        traced.telemetry.close()
        ring.close()


def test_figures_reach_the_ring(traced: Callable[..., Traced], world: NvmlWorld) -> None:
    world.device(utilization=37, temperature=61)
    began = time.monotonic()
    trace = traced()
    frame = trace.gpu(lambda frame: not math.isnan(frame.sm_pct))  # from the second round on
    assert (frame.device, frame.utilization_pct, frame.temperature_c) == (0, 37, 61)
    assert frame.sm_pct == 0.0
    assert 0 <= frame.age_ms < (time.monotonic() - began) * 1000
    assert trace.events() == [("gpu_attached", "device 0: Stand-in H200, GPU-aaaa, index 0")]
    assert trace.of(MemoryFrame)[0].rss_bytes == 123.0
    assert trace.of(MemoryFrame)[0].unavailable == "no CUDA device"


def test_every_figure_is_there_or_the_frame_says_why_not(
    traced: Callable[..., Traced], world: NvmlWorld
) -> None:
    for function in ("TotalEnergyConsumption", "FieldValues"):
        world.fail(f"nvmlDeviceGet{function}", 4)
    frame = traced().gpu(lambda frame: not math.isnan(frame.sm_pct))
    assert math.isnan(frame.power_w)
    assert frame.unavailable == "power_w: Insufficient Permissions"


def test_a_call_that_hangs_ages_the_figures_and_delays_nobody(
    traced: Callable[..., Traced], world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.device(utilization=37)
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    world.hang("nvmlDeviceGetTemperature", FOR_EVER_S)
    monkeypatch.setattr(monitor, "SLOW_CALL_S", 0.3)
    why = "nvmlDeviceGetTemperature has not answered for more than 0.3 s"
    frame = trace.gpu(lambda frame: frame.unavailable.startswith(why))
    assert frame.utilization_pct == 37, "the last good value stays"
    assert frame.age_ms > 300
    assert trace.events()[-1][0] == "gpu_unavailable"
    memory = len(trace.of(MemoryFrame))
    trace.wait(lambda: len(trace.of(MemoryFrame)) > memory + 3)
    trace.gpu(lambda later: later.age_ms > frame.age_ms)
    began = time.monotonic()
    trace.telemetry.close()
    assert time.monotonic() - began < FOR_EVER_S / 10, "closing does not wait for the call"


def test_a_process_that_hangs_for_long_is_killed_and_started_anew(
    traced: Callable[..., Traced], world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.hang("nvmlInit", FOR_EVER_S)
    trace = traced()
    monkeypatch.setattr(monitor, "HANG_S", 0.5)
    monkeypatch.setattr(monitor, "RESTART_S", (0.1,))
    trace.wait(lambda: trace.monitor.pid)
    first = trace.monitor.pid
    trace.event("gpu_unavailable", "nvmlInit has not answered")
    trace.wait(lambda: trace.monitor.pid != first)
    world.hang("nvmlInit", 0.0)
    trace.event("gpu_available", "figures of 1 device again")


def test_a_killed_process_is_replaced(
    traced: Callable[..., Traced], world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = traced()
    monkeypatch.setattr(monitor, "RESTART_S", (0.1,))
    trace.wait(lambda: trace.of(GpuFrame))
    first = trace.monitor.pid
    assert first is not None
    world.hang("nvmlInit", FOR_EVER_S)  # the next one gives no figures until it is seen
    os.kill(first, signal.SIGKILL)
    trace.event("gpu_unavailable", "ended with status -9")
    trace.wait(lambda: trace.monitor.pid != first)
    second = trace.monitor.pid
    assert second is not None
    world.hang("nvmlInit", 0.0)
    os.kill(second, signal.SIGKILL)
    trace.event("gpu_available", "figures of 1 device again")


def test_a_process_that_is_stopped_ages_the_figures_and_can_be_closed(
    traced: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    pid = trace.monitor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(monitor, "SLOW_CALL_S", 0.3)
    # its last report may be of a moment in which a call was under way
    said = ("the process for NVML is there, but silent", "has not answered for more than 0.3 s")
    silent = trace.gpu(lambda frame: any(text in frame.unavailable for text in said))
    assert silent.age_ms > 300
    os.kill(pid, signal.SIGCONT)
    trace.wait(lambda: trace.of(GpuFrame)[-1].age_ms < silent.age_ms)
    os.kill(pid, signal.SIGSTOP)
    trace.telemetry.close()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the stopped process")


def test_a_lost_device_is_said_and_its_old_figures_go(
    traced: Callable[..., Traced], world: NvmlWorld
) -> None:
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    for function in ("UtilizationRates", "MemoryInfo", "Temperature", "ClockInfo", "FieldValues",
                     "TotalEnergyConsumption", "CurrentClocksEventReasons", "PowerUsage",
                     "CurrentClocksThrottleReasons"):  # fmt: skip
        world.fail(f"nvmlDeviceGet{function}", 15)
    world.fail("nvmlGpmSampleGet", 15)
    frame = trace.gpu(  # a round that was under way while they failed one by one shows some figures
        lambda frame: all(math.isnan(getattr(frame, name)) for name in monitor.FRAME_FIGURES)
    )
    assert "GPU is lost" in frame.unavailable
    trace.event("gpu_unavailable", "no device answers: GPU is lost")


@pytest.mark.parametrize(
    ("code", "text"),
    [(12, "no NVML library on this machine"), (9, "Driver Not Loaded"), (4, "Insufficient Perm")],
)
def test_without_devices_one_frame_and_one_event_say_why(
    traced: Callable[..., Traced], world: NvmlWorld, code: int, text: str
) -> None:
    world.fail("nvmlInit", code)
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    trace.wait(lambda: len(trace.of(MemoryFrame)) > 10)
    (frame,) = trace.of(GpuFrame)
    assert frame.device == 0
    assert text in frame.unavailable
    assert all(math.isnan(getattr(frame, name)) for name in (*monitor.FRAME_FIGURES, "age_ms"))
    ((kind, detail),) = trace.events()
    assert kind == "gpu_unavailable"
    assert text in detail


def test_an_answer_nobody_understands_is_said_in_the_trace(
    traced: Callable[..., Traced], world: NvmlWorld
) -> None:
    world.device(used="nonsense")
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    ((kind, detail),) = trace.events()
    assert kind == "gpu_unavailable"
    assert detail.startswith("NVML answered what is not understood (ValueError: ")


def test_what_the_drivers_library_prints_is_no_report(
    traced: Callable[..., Traced], world: NvmlWorld
) -> None:
    world.device(prints='{"NVRM": "hello"}\n{')
    trace = traced()
    first = trace.gpu(lambda frame: frame.age_ms >= 0)
    trace.gpu(lambda frame: frame.time_ns - frame.age_ms * 1e6 > first.time_ns)  # a later reading
    assert trace.telemetry.gpus.unavailable == ""


def test_nothing_of_the_working_directory_is_run(
    traced: Callable[..., Traced],
    world: NvmlWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    assert trace.telemetry.gpus.unavailable == ""


def test_this_machine_is_told_what_it_has(tmp_path: Path) -> None:
    """The real nvidia-ml-py in the real process: devices, or the reason why there are none."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-m", "capture.gpu.process", "0.1"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        reports = map(json.loads, process.stdout)
        report = next(report for report in reports if report["devices"] or report["failure"])
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert errors == ""
    if "no NVML library" in report["failure"]:
        assert report["final"], "there is no use in asking again"


def test_the_process_ends_with_its_parent(world: NvmlWorld) -> None:
    world.hang("nvmlInit", 600.0)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "capture.gpu.process", "0.05"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert any(b"nvmlInit" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole group
        assert process.stdout.readline()
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def sample(throttled: tuple[str, ...], taken_s: float) -> GpuSample:
    return GpuSample(0, 0, "GPU-aaaa", "x", False, {}, {}, throttled, taken_s)


def test_slowdowns_begin_once_and_end_with_their_duration() -> None:
    watch = ThrottleWatch()
    assert watch.update(sample((), 0.0)) == []
    ((kind, detail, duration),) = watch.update(sample(("sw_power_cap",), 1.0))
    assert (kind, detail, duration) == ("gpu_throttled", "device 0: sw_power_cap", None)
    assert watch.update(sample((), 2.0)) == [], "a power cap comes and goes"
    assert watch.update(sample(("sw_power_cap",), 3.0)) == []
    (change,) = watch.update(sample(("sw_power_cap", "hw_thermal_slowdown"), 4.0))
    assert change.detail == "device 0: hw_thermal_slowdown"
    assert watch.update(sample(("hw_thermal_slowdown",), 4.0 + CALM_S)) == []
    (change,) = watch.update(sample(("hw_thermal_slowdown",), 4.1 + CALM_S))
    assert change.kind == "gpu_throttle_ended"
    assert change.detail == "device 0: sw_power_cap"
    assert change.duration_ns == 3_000_000_000


def samples_of(telemetry: Telemetry) -> dict[str, list[tuple[dict[str, str], float]]]:
    collector = TelemetryCollector(telemetry, {"model_name": "m", "engine": "0"})
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in collector.collect():
        for item in family.samples:
            found.setdefault(item.name, []).append((dict(item.labels), item.value))
    return found


def test_metrics_show_figures_in_base_units_and_nothing_for_what_is_missing(
    traced: Callable[..., Traced], world: NvmlWorld
) -> None:
    world.device(utilization=50, gpm=False, reasons=0x40, sm_clock=1980)
    for function in ("TotalEnergyConsumption", "FieldValues"):
        world.fail(f"nvmlDeviceGet{function}", 4)
    trace = traced()
    trace.wait(lambda: trace.telemetry.gpus.devices and trace.telemetry.memory)
    metrics = samples_of(trace.telemetry)
    (labels, value) = metrics["inferloop:gpu_busy_ratio"][0]
    assert labels == {"model_name": "m", "engine": "0", "device": "0"}
    assert value == 0.5
    assert metrics["inferloop:gpu_sm_clock_hertz"][0][1] == 1.98e9
    assert "inferloop:gpu_sm_ratio" not in metrics
    assert "inferloop:gpu_power_watts" not in metrics
    throttled = {labels["reason"]: value for labels, value in metrics["inferloop:gpu_throttled"]}
    assert throttled["hw_thermal_slowdown"] == 1
    assert throttled["sw_power_cap"] == 0
    (labels, value) = metrics["inferloop:gpu_info"][0]
    assert (labels["available"], labels["uuid"], value) == ("1", "GPU-aaaa", 1)
    assert metrics["inferloop:memory_rss_bytes"][0][1] == 123
    assert "inferloop:allocator_reserved_bytes" not in metrics
    assert metrics["inferloop:nvml_call_duration_seconds_count"]


def test_metrics_without_a_device_are_the_reason_alone(
    traced: Callable[..., Traced], world: NvmlWorld
) -> None:
    world.fail("nvmlInit", 12)
    trace = traced()
    trace.wait(lambda: trace.telemetry.gpus.unavailable)
    metrics = samples_of(trace.telemetry)
    ((labels, value),) = metrics["inferloop:gpu_info"]
    assert labels["available"] == "0"
    assert "no NVML library" in labels["reason"]
    assert value == 1
    assert not [name for name in metrics if "gpu_" in name and name != "inferloop:gpu_info"]

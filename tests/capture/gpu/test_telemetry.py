"""Telemetry as a whole: a real process over a stand-in of NVML, a real ring, real frames."""

from __future__ import annotations

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

PERIOD_S = 0.05


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

    def wait(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.telemetry.gpus, self.frames[-3:])
            time.sleep(0.02)


@pytest.fixture
def traced(tmp_path: Path, world: NvmlWorld) -> Iterator[Callable[..., Traced]]:
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


def test_figures_reach_the_ring_once_a_period(
    traced: Callable[..., Traced], world: NvmlWorld
) -> None:
    world.device(utilization=37, temperature=61)
    trace = traced()
    trace.wait(lambda: len(trace.of(GpuFrame)) >= 5)
    frame = trace.of(GpuFrame)[-1]
    assert (frame.index, frame.utilization_pct, frame.temperature_c) == (0, 37, 61)
    assert frame.sm_pct == 0.0
    assert math.isnan(frame.power_w)
    assert frame.unavailable == "power_w: the first figure comes after 5 s"
    assert 0 <= frame.age_ms < 1000
    assert trace.events() == [("gpu_attached", "device 0: Stand-in H200, GPU-aaaa, index 0")]
    assert trace.of(MemoryFrame)[0].rss_bytes == 123.0
    assert trace.of(MemoryFrame)[0].unavailable == "no CUDA device"


def test_a_call_that_hangs_ages_the_figures_and_delays_nobody(
    traced: Callable[..., Traced], world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "SLOW_CALL_S", 0.3)
    world.device(utilization=37)
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    world.hang("nvmlDeviceGetTemperature", 10.0)
    trace.wait(lambda: trace.of(GpuFrame)[-1].age_ms > 800)
    began = time.monotonic()
    frame = trace.of(GpuFrame)[-1]
    assert frame.utilization_pct == 37, "the last good value stays"
    assert frame.unavailable.startswith("nvmlDeviceGetTemperature has not answered for")
    assert trace.events()[-1][0] == "gpu_unavailable"
    memory = len(trace.of(MemoryFrame))
    trace.wait(lambda: len(trace.of(MemoryFrame)) > memory + 3, seconds=2)
    trace.telemetry.close()
    assert time.monotonic() - began < 3, "closing does not wait for the call"


def test_a_process_that_hangs_for_long_is_killed_and_started_anew(
    traced: Callable[..., Traced], world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "HANG_S", 0.5)
    monkeypatch.setattr(monitor, "RESTART_S", (0.1,))
    world.hang("nvmlInit", 600.0)
    trace = traced()
    trace.wait(lambda: "nvmlInit has not answered" in trace.telemetry.gpus.unavailable)
    first = trace.monitor.pid
    trace.wait(lambda: trace.monitor.pid != first)
    world.hang("nvmlInit", 0.0)
    trace.wait(lambda: trace.of(GpuFrame) and trace.telemetry.gpus.unavailable == "")
    trace.wait(lambda: ("gpu_available", "figures of 1 device again") in trace.events())


def test_a_killed_process_is_replaced(
    traced: Callable[..., Traced], world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "RESTART_S", (0.1,))
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    pid = trace.monitor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    trace.wait(lambda: trace.monitor.pid != pid)
    trace.wait(lambda: not trace.telemetry.gpus.unavailable)
    assert any("ended with status -9" in detail for _, detail in trace.events())


def test_a_process_that_is_stopped_ages_the_figures_and_can_be_closed(
    traced: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "SLOW_CALL_S", 0.3)
    trace = traced()
    trace.wait(lambda: trace.of(GpuFrame))
    assert trace.monitor.pid is not None
    os.kill(trace.monitor.pid, signal.SIGSTOP)
    trace.wait(lambda: trace.of(GpuFrame)[-1].age_ms > 500)
    assert "silent" in trace.of(GpuFrame)[-1].unavailable
    os.kill(trace.monitor.pid, signal.SIGCONT)
    trace.wait(lambda: trace.of(GpuFrame)[-1].age_ms < 300)
    os.kill(trace.monitor.pid, signal.SIGSTOP)
    began = time.monotonic()
    trace.telemetry.close()
    assert time.monotonic() - began < 3


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
    trace.wait(  # a round that was under way while the functions failed one by one shows some figures
        lambda: all(
            math.isnan(getattr(trace.of(GpuFrame)[-1], name)) for name in monitor.FRAME_FIGURES
        )
    )
    assert "GPU is lost" in trace.of(GpuFrame)[-1].unavailable
    trace.wait(lambda: ("gpu_unavailable", "no device answers: GPU is lost") in trace.events())


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
    assert frame.index == 0
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
    world.device(prints="NVRM: hello")
    trace = traced()
    trace.wait(lambda: len(trace.of(GpuFrame)) >= 3)
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
    """The real nvidia-ml-py in the real process: without a library there is one reason, at once."""
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-P", "-m", "capture.gpu.process", "0.1"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stderr == ""
    if "Library Not Found" in result.stdout:
        assert '"final": true' in result.stdout
    assert time.monotonic() - began < 30


def test_the_process_ends_with_its_parent(world: NvmlWorld) -> None:
    world.hang("nvmlInit", 600.0)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "capture.gpu.process", "0.05"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert b"nvmlInit" in process.stdout.readline()
        process.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole group
        assert process.stdout.readline()
        process.stdin.close()
        assert process.wait(5) == 0


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

"""What is said of a device, figure by figure: a value, or why there is none; never a false 0."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from capture.gpu import nvml as product
from capture.gpu.nvml import (
    Calls,
    Device,
    EnergyMeter,
    MissingError,
    Nvml,
    UnavailableError,
    attach,
)
from tests.capture.gpu.nvml_world import NvmlWorld

GPM = ("sm_pct", "occupancy_pct", "tensor_pct", "memory_bandwidth_pct")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlWorld:
    return NvmlWorld(tmp_path, monkeypatch)


def only(world: NvmlWorld, visible: str | None = None) -> Device:
    (device,) = attach(Nvml(world.module, Calls()), visible)
    return device


def test_idle_device_shows_zeros_as_figures(world: NvmlWorld) -> None:
    device = only(world)
    device.read()
    reading = device.read()
    assert [reading.values[figure] for figure in ("utilization_pct", *GPM)] == [0.0] * 5
    assert reading.values["memory_used_bytes"] == 1000
    assert reading.values["temperature_c"] == 40
    assert (reading.values["sm_clock_mhz"], reading.values["memory_clock_mhz"]) == (345, 3201)
    assert reading.throttled == []
    assert reading.reasons == {"power_w": "the first figure comes after 5 s"}


def test_gpm_figures_come_with_the_second_sample(world: NvmlWorld) -> None:
    world.device(gpm_values={"2": 62.5, "3": 31.0, "5": 48.0, "10": 100.4})
    device = only(world)
    first = device.read()
    assert first.reasons["sm_pct"] == "the first figure comes with the second sample"
    second = device.read()
    assert [second.values[figure] for figure in GPM] == [62.5, 31.0, 48.0, 100.0]


def test_a_lost_sample_starts_gpm_anew(world: NvmlWorld) -> None:
    device = only(world)
    device.read()
    world.fail("nvmlGpmSampleGet", 15)
    assert device.read().reasons["sm_pct"] == "GPU is lost"
    world.fail("nvmlGpmSampleGet", 0)
    assert "second sample" in device.read().reasons["sm_pct"]
    assert device.read().values["sm_pct"] == 0.0


def test_without_gpm_the_utilisation_is_left_and_the_rest_says_why(world: NvmlWorld) -> None:
    world.device(gpm=False, utilization=83)
    reading = only(world).read()
    assert reading.values["utilization_pct"] == 83
    for figure in GPM:
        assert figure not in reading.values
        assert reading.reasons[figure] == "needs GPM counters, which Hopper and later have"


def test_mig_instance_has_its_memory_and_gpm_and_no_whole_board_figures(world: NvmlWorld) -> None:
    world.device(mig=True, gpm_values={"2": 10.0, "3": 5.0, "5": 0.0, "10": 20.0})
    device = only(world)
    assert device.identity.mig
    assert device.identity.uuid == "MIG-GPU-aaaa"
    device.read()
    reading = device.read()
    assert reading.values["memory_used_bytes"] == 1000
    assert reading.values["sm_pct"] == 10.0
    assert reading.reasons["utilization_pct"] == "not available on a MIG instance"
    assert reading.reasons["power_w"] == "shared by all MIG instances of the device"
    assert not {"utilization_pct", "power_w"} & reading.values.keys()


def test_nonsense_is_not_shown_as_a_figure(world: NvmlWorld) -> None:
    world.device(utilization=4294967295, gpm_values={"2": -1.0, "10": 7e9, "5": 50.0})
    device = only(world)
    device.read()
    reading = device.read()
    assert "utilization_pct" not in reading.values
    assert reading.values["tensor_pct"] == 50.0
    for figure in ("utilization_pct", "sm_pct", "memory_bandwidth_pct", "occupancy_pct"):
        assert reading.reasons[figure] == "NVML gave no valid figure"


def test_power_is_the_energy_over_the_time_between() -> None:
    meter = EnergyMeter()
    assert meter.due(100.0)
    meter.add(100.0, 5_000_000)
    assert meter.watts is None
    assert not meter.due(104.9)
    assert meter.due(105.0)
    meter.add(105.0, 6_750_000)
    assert meter.watts == pytest.approx(350.0)


@pytest.mark.parametrize("after", [0, 4_999_999])
def test_an_energy_counter_that_went_back_gives_no_figure_for_that_period(after: int) -> None:
    meter = EnergyMeter()
    meter.add(0.0, 5_000_000)
    meter.add(5.0, after)
    assert meter.watts is None
    meter.add(10.0, after + 500_000)
    assert meter.watts == pytest.approx(100.0)


def test_power_without_an_energy_counter_is_marked_as_a_moment(world: NvmlWorld) -> None:
    world.fail("nvmlDeviceGetTotalEnergyConsumption", 3)
    reading = only(world).read()
    assert reading.values["power_w"] == 90.0
    assert reading.reasons["power_w"] == "the sensor's moment, no energy counter: Not Supported"
    world.device(power_instant_error=3)
    assert only(world).read().values["power_w"] == 91.0  # of nvmlDeviceGetPowerUsage
    world.fail("nvmlDeviceGetPowerUsage", 4)
    reading = only(world).read()
    assert "power_w" not in reading.values
    assert reading.reasons["power_w"] == "Insufficient Permissions"


def test_one_missing_permission_costs_one_figure(world: NvmlWorld) -> None:
    world.fail("nvmlDeviceGetClockInfo", 4)
    reading = only(world).read()
    assert reading.reasons["sm_clock_mhz"] == "Insufficient Permissions"
    assert reading.values["temperature_c"] == 40


def test_throttling_names_its_reasons_and_idle_is_none(world: NvmlWorld) -> None:
    device = only(world)
    world.device(reasons=0x1 | 0x2 | 0x4 | 0x40)
    assert device.read().throttled == ["sw_power_cap", "hw_thermal_slowdown"]
    world.device(reasons=0x1)
    assert device.read().throttled == []


def test_throttling_of_older_drivers_is_read_by_its_older_name(world: NvmlWorld) -> None:
    device = only(world)
    world.device(reasons=0x8)
    world.fail("nvmlDeviceGetCurrentClocksEventReasons", 13)
    reading = device.read()
    assert reading.throttled == ["hw_slowdown"]
    assert "throttled" not in reading.reasons
    world.fail("nvmlDeviceGetCurrentClocksThrottleReasons", 3)
    assert device.read().reasons["throttled"] == "Not Supported"


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]),
        ("2,0", ["GPU-cccc", "GPU-aaaa"]),
        ("GPU-b", ["GPU-bbbb"]),
        ("MIG-GPU-cccc", ["MIG-GPU-cccc"]),
        ("1,-1,0", ["GPU-bbbb"]),
        ("2,7,0", ["GPU-cccc"]),
        ("0,GPU-x,1", ["GPU-aaaa"]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    world: NvmlWorld, visible: str | None, uuids: list[str]
) -> None:
    world.device(1)
    world.device(2)
    devices = attach(Nvml(world.module, Calls()), visible)
    assert [device.identity.uuid for device in devices] == uuids
    assert [device.identity.ordinal for device in devices] == list(range(len(uuids)))


@pytest.mark.parametrize(
    ("visible", "text"),
    [("", "no device is visible"), ("-1", "no device is visible"), ("7", "this machine has 1"),
     ("GPU-x", "no device 'GPU-x'"), ("9" * 5000, "this machine has 1"), ("MIG-x", "Not Found")],
)  # fmt: skip
def test_no_device_says_why(world: NvmlWorld, visible: str, text: str) -> None:
    with pytest.raises(UnavailableError, match=text):
        only(world, visible)


def test_a_machine_without_devices_says_so(world: NvmlWorld) -> None:
    world.state["devices"] = []
    world.save()
    with pytest.raises(UnavailableError, match="no NVIDIA device on this machine"):
        only(world)


def test_calls_are_timed_by_name(world: NvmlWorld) -> None:
    calls = Calls()
    (device,) = attach(Nvml(world.module, calls), None)
    world.hang("nvmlDeviceGetTemperature", 0.05)
    device.read()
    count, total, longest = calls.durations["nvmlDeviceGetTemperature"]
    assert count == 1
    assert total == longest >= 0.05
    assert calls.pending is None


def test_the_real_package_has_every_name_that_is_used() -> None:
    import pynvml

    source = inspect.getsource(product)
    functions = set(re.findall(r'"(nvml[A-Z]\w+[a-z])"', source)) - {"nvmlDeviceGetCurrentClocks"}
    attributes = set(re.findall(r"module\.(\w+)", source)) | set(product.GPM_FIGURES.values())
    assert {"nvmlDeviceGetCount", "nvmlGpmMetricsGet"} <= functions
    assert [name for name in functions | attributes if not hasattr(pynvml, name)] == []


def test_a_machine_without_the_library_is_told_apart_from_a_failure(world: NvmlWorld) -> None:
    world.fail("nvmlInit", 12)
    with pytest.raises(MissingError, match="no NVML library on this machine"):
        Nvml(world.module, Calls()).call("nvmlInit")
    world.fail("nvmlInit", 9)
    with pytest.raises(UnavailableError, match="Driver Not Loaded") as caught:
        Nvml(world.module, Calls()).call("nvmlInit")
    assert not isinstance(caught.value, MissingError)

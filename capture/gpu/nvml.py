"""NVIDIA devices through NVML: every figure, or the reason why it is not available; never a 0.

Calls may hang for half a minute and the library may take its process down, so this runs in a
process of its own (`capture.gpu.process`). Not for deciding when to read, nor for what is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

ENERGY_PERIOD_S = 5.0
"""Power is the difference of an energy counter over this long: one read takes 2 to 17 ms."""

THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's clock event reasons that mean slower clocks than asked for; idle and an operator's
own clock settings do not count."""

GPM_FIGURES = {
    "sm_pct": "NVML_GPM_METRIC_SM_UTIL",
    "occupancy_pct": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_pct": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "memory_bandwidth_pct": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class UnavailableError(Exception):
    """A figure, or all of NVML, is not available; the text says why."""


class MissingError(UnavailableError):
    """There is no NVML here and there will be none while the machine runs: do not ask again."""


class Calls:
    """How long NVML's calls took, by name, and which one is in progress."""

    def __init__(self) -> None:
        self.pending: tuple[str, float] | None = None
        self.durations: dict[str, tuple[int, float, float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block as a call of `name`."""
        began = time.monotonic()
        self.pending = (name, began)
        try:
            yield
        finally:
            took = time.monotonic() - began
            count, total, longest = self.durations.get(name, (0, 0.0, 0.0))
            self.durations[name] = (count + 1, total + took, max(longest, took))
            self.pending = None


class Nvml:
    """The module `pynvml` with every call timed and its errors as `UnavailableError`."""

    def __init__(self, module: ModuleType, calls: Calls) -> None:
        self.module = module
        self._calls = calls

    def call(self, name: str, *arguments: Any) -> Any:
        """What NVML's function of that name answers."""
        function = getattr(self.module, name, None)
        if function is None:
            raise UnavailableError(f"this nvidia-ml-py has no {name}")
        with self._calls.timed(name):
            try:
                return function(*arguments)
            except self.module.NVMLError_LibraryNotFound as error:
                raise MissingError(f"no NVML library on this machine ({error})") from error
            except self.module.NVMLError as error:
                raise UnavailableError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Identity:
    """Which device this is. `ordinal` is its number among the visible ones, as CUDA counts;
    `index` is the host's, as nvidia-smi counts."""

    ordinal: int
    index: int
    uuid: str
    name: str
    mig: bool


@dataclass(slots=True)
class Reading:
    """One round over a device. A figure is in `values`, or else `reasons` says why not; a figure
    in both is measured in a poorer way, and the reason says how."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    throttled: list[str] = field(default_factory=list)
    taken_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class EnergyMeter:
    """Power from a counter of energy, over periods of `ENERGY_PERIOD_S` or more."""

    def __init__(self) -> None:
        self.watts: float | None = None
        self._last: tuple[float, int] | None = None

    def due(self, now_s: float) -> bool:
        return self._last is None or now_s - self._last[0] >= ENERGY_PERIOD_S

    def add(self, now_s: float, energy_mj: int) -> None:
        """Take a reading in millijoules. A counter that went back (driver reloaded, counter
        wrapped) starts a new period and gives no figure."""
        self.watts = None
        if self._last is not None and energy_mj >= self._last[1]:
            self.watts = (energy_mj - self._last[1]) / 1000 / (now_s - self._last[0])
        self._last = (now_s, energy_mj)


class GpmSampler:
    """Shares of time from the counters of Hopper and later, between one round and the next."""

    def __init__(self, nvml: Nvml, take: Callable[[Any], Any]) -> None:
        """`take` fills a sample of the device. Raises `UnavailableError`."""
        self._nvml = nvml
        self._take = take
        self._samples = [nvml.call("nvmlGpmSampleAlloc") for _ in range(2)]
        self._taken = 0
        self._previous_s = 0.0

    def read(self) -> dict[str, float]:
        """Percentages since the last call. Raises `UnavailableError`, at the first call too."""
        self._samples.reverse()
        try:
            self._take(self._samples[1])
        except UnavailableError:
            self._taken = 0
            raise
        self._taken += 1
        if self._taken < 2:
            raise UnavailableError("the first figure comes with the second sample")
        return self._between(*self._samples)

    def _between(self, older: Any, newer: Any) -> dict[str, float]:
        module = self._nvml.module
        request = module.c_nvmlGpmMetricsGet_t()
        request.version = module.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_FIGURES)
        request.sample1, request.sample2 = older, newer
        for place, constant in enumerate(GPM_FIGURES.values()):
            request.metrics[place].metricId = getattr(module, constant)
        answer = self._nvml.call("nvmlGpmMetricsGet", request)
        metrics = [answer.metrics[place] for place in range(len(GPM_FIGURES))]
        return {
            figure: min(float(metric.value), 100.0)
            for figure, metric in zip(GPM_FIGURES, metrics, strict=True)
            if metric.nvmlReturn == 0 and _is_share(metric.value)
        }


def _is_share(value: float) -> bool:
    """Whether it can be a percentage: counters overshoot a little, drivers may answer nonsense."""
    return 0 <= value <= 105  # false for NaN, too


class Device:
    """One device, or one MIG instance of it, and how to read each of its figures."""

    def __init__(self, nvml: Nvml, handle: Any, ordinal: int) -> None:
        """`handle` is of a device or of a MIG instance. Raises `UnavailableError`."""
        self._nvml = nvml
        self._handle, self._board, mig = _placed(nvml, handle)
        self.identity = Identity(
            ordinal=ordinal,
            index=int(nvml.call("nvmlDeviceGetIndex", self._board)),
            uuid=_text(nvml.call("nvmlDeviceGetUUID", self._handle)),
            name=_text(nvml.call("nvmlDeviceGetName", self._handle)),
            mig=mig,
        )
        self._meter = EnergyMeter()
        self._gpm: GpmSampler | str
        try:
            self._gpm = self._make_gpm()
        except UnavailableError as error:
            self._gpm = str(error)

    def read(self) -> Reading:
        """Every figure, as far as NVML gives it."""
        reading = Reading()
        for figures, read in (
            (("utilization_pct",), self._utilization),
            (tuple(GPM_FIGURES), self._gpm_figures),
            (("memory_used_bytes", "memory_total_bytes"), self._memory),
            (("temperature_c",), self._temperature),
            (("sm_clock_mhz",), self._sm_clock),
            (("memory_clock_mhz",), self._memory_clock),
        ):
            try:
                values = read()
                reasons = dict.fromkeys(set(figures) - values.keys(), "NVML gave no valid figure")
            except UnavailableError as error:
                values, reasons = {}, dict.fromkeys(figures, str(error))
            reading.values |= values
            reading.reasons |= reasons
        self._read_power(reading)
        self._read_throttling(reading)
        reading.taken_s = time.monotonic()
        return reading

    def _make_gpm(self) -> GpmSampler:
        nvml = self._nvml
        if not nvml.call("nvmlGpmQueryDeviceSupport", self._board).isSupportedDevice:
            raise UnavailableError("needs GPM counters, which Hopper and later have")
        if not self.identity.mig:
            return GpmSampler(
                nvml, lambda sample: nvml.call("nvmlGpmSampleGet", self._board, sample)
            )
        instance = nvml.call("nvmlDeviceGetGpuInstanceId", self._handle)
        return GpmSampler(
            nvml, lambda sample: nvml.call("nvmlGpmMigSampleGet", self._board, instance, sample)
        )

    def _utilization(self) -> dict[str, float]:
        if self.identity.mig:
            raise UnavailableError("not available on a MIG instance")
        rates = self._nvml.call("nvmlDeviceGetUtilizationRates", self._handle)
        return {"utilization_pct": float(rates.gpu)} if _is_share(rates.gpu) else {}

    def _gpm_figures(self) -> dict[str, float]:
        if isinstance(self._gpm, str):
            raise UnavailableError(self._gpm)
        return self._gpm.read()

    def _memory(self) -> dict[str, float]:
        version = self._nvml.module.nvmlMemory_v2  # what nvidia-smi shows: without the driver's own
        info = self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle, version)
        return {"memory_used_bytes": float(info.used), "memory_total_bytes": float(info.total)}

    def _temperature(self) -> dict[str, float]:
        sensor = self._nvml.module.NVML_TEMPERATURE_GPU
        value = self._nvml.call("nvmlDeviceGetTemperature", self._board, sensor)
        return {"temperature_c": float(value)}

    def _sm_clock(self) -> dict[str, float]:
        clock = self._nvml.module.NVML_CLOCK_SM
        return {
            "sm_clock_mhz": float(self._nvml.call("nvmlDeviceGetClockInfo", self._board, clock))
        }

    def _memory_clock(self) -> dict[str, float]:
        clock = self._nvml.module.NVML_CLOCK_MEM
        value = self._nvml.call("nvmlDeviceGetClockInfo", self._board, clock)
        return {"memory_clock_mhz": float(value)}

    def _read_power(self, reading: Reading) -> None:
        """Energy differences where there is a counter, else the sensor's moment, marked as such."""
        if self.identity.mig:
            reading.reasons["power_w"] = "shared by all MIG instances of the device"
            return
        now_s = time.monotonic()
        try:
            if self._meter.due(now_s):
                energy = self._nvml.call("nvmlDeviceGetTotalEnergyConsumption", self._board)
                self._meter.add(time.monotonic(), int(energy))
        except UnavailableError as error:
            self._read_instant_power(reading, str(error))
            return
        if self._meter.watts is None:
            reading.reasons["power_w"] = f"the first figure comes after {ENERGY_PERIOD_S:.0f} s"
        else:
            reading.values["power_w"] = self._meter.watts

    def _read_instant_power(self, reading: Reading, why: str) -> None:
        try:
            reading.values["power_w"] = self._instant_power()
            reading.reasons["power_w"] = f"the sensor's moment, no energy counter: {why}"
        except UnavailableError as error:
            reading.reasons["power_w"] = str(error)

    def _instant_power(self) -> float:
        module = self._nvml.module
        fields = [module.NVML_FI_DEV_POWER_INSTANT]
        answer = self._nvml.call("nvmlDeviceGetFieldValues", self._board, fields)[0]
        if answer.nvmlReturn == 0:
            return float(answer.value.uiVal) / 1000
        return float(self._nvml.call("nvmlDeviceGetPowerUsage", self._board)) / 1000

    def _read_throttling(self, reading: Reading) -> None:
        names = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        for name in names:  # the second is what drivers before 535 call it
            try:
                bits = int(self._nvml.call(name, self._board))
            except UnavailableError as error:
                reading.reasons["throttled"] = str(error)
                continue
            reading.reasons.pop("throttled", None)
            reading.throttled = [text for bit, text in THROTTLE_REASONS.items() if bits & bit]
            return


def attach(nvml: Nvml, visible: str | None) -> list[Device]:
    """The devices named by `visible` as CUDA_VISIBLE_DEVICES names them (indices, UUIDs or their
    beginnings), up to the first that is not here; None: all. Raises `UnavailableError` when there
    is none."""
    count = int(nvml.call("nvmlDeviceGetCount"))
    if visible is None:
        handles = [nvml.call("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    else:
        handles = _visible(nvml, visible, count)
    if not handles:
        raise UnavailableError(
            "no NVIDIA device on this machine"
            if visible is None
            else f"no device is visible: CUDA_VISIBLE_DEVICES or gpu_devices is {visible[:200]!r}"
        )
    return [Device(nvml, handle, ordinal) for ordinal, handle in enumerate(handles)]


def _visible(nvml: Nvml, visible: str, count: int) -> list[Any]:
    """CUDA uses the devices before the first that it does not find, so that one ends the list."""
    handles: list[Any] = []
    for name in _named(visible):
        try:
            handles.append(_find(nvml, name, count))
        except UnavailableError:
            if not handles:
                raise
            break
    return handles


def _named(visible: str) -> list[str]:
    """The entries up to one that CUDA takes as the end of the list."""
    names: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        names.append(name)
    return names


def _find(nvml: Nvml, name: str, count: int) -> Any:
    if name.isdecimal():
        if len(name) > 9 or int(name) >= count:
            raise UnavailableError(f"there is no device {name[:20]}: this machine has {count}")
        return nvml.call("nvmlDeviceGetHandleByIndex", int(name))
    if name.startswith("MIG-"):
        return nvml.call("nvmlDeviceGetHandleByUUID", name)
    for index in range(count):
        handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
        if _text(nvml.call("nvmlDeviceGetUUID", handle)).startswith(name):
            return handle
    raise UnavailableError(f"there is no device {name[:80]!r} among this machine's {count}")


def _placed(nvml: Nvml, handle: Any) -> tuple[Any, Any, bool]:
    """The handle to ask for memory, the board's handle, and whether the first is a MIG instance. Of
    a board in MIG mode CUDA uses the first instance."""
    if _or_false(nvml, "nvmlDeviceIsMigDeviceHandle", handle):
        return handle, nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle), True
    if _or_false(nvml, "nvmlDeviceGetMigMode", handle):
        return nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, 0), handle, True
    return handle, handle, False


def _or_false(nvml: Nvml, name: str, handle: Any) -> bool:
    """The answer as a truth; boards and drivers that know no MIG answer with an error."""
    try:
        answer = nvml.call(name, handle)
    except UnavailableError:
        return False
    current = answer[0] if isinstance(answer, list) else getattr(answer, "value", answer)
    return bool(current)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

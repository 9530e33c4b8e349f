"""Stands in for nvidia-ml-py where there is no device: the functions the product calls, no more.

What they answer is read from the JSON file $NVML_STAND_IN at every call, so that a test can change
it while another process uses the module:

    devices: list of {uuid, name, and what is below in DEVICE}
    errors:  {function: NVML error code}
    sleeps:  {function: seconds}
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEVICE = {
    "name": "Stand-in H200",
    "utilization": 0,
    "used": 1000,
    "total": 4000,
    "temperature": 40,
    "sm_clock": 345,
    "memory_clock": 3201,
    "reasons": 0,
    "energy_mj": 0,
    "power_mw": 90_000,
    "power_instant_error": 0,
    "gpm": True,
    "gpm_values": {"2": 0.0, "3": 0.0, "5": 0.0, "10": 0.0},
    "mig": False,
    "prints": "",
}

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
NVML_FI_DEV_POWER_INSTANT = 186
NVML_GPM_METRICS_GET_VERSION = 1
NVML_GPM_METRIC_SM_UTIL = 2
NVML_GPM_METRIC_SM_OCCUPANCY = 3
NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
NVML_GPM_METRIC_DRAM_BW_UTIL = 10
nvmlMemory_v2 = 0x02000028


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(_TEXTS.get(value, f"code {value}"))


class NVMLError_LibraryNotFound(NVMLError):
    pass


_TEXTS = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
}


class Handle(SimpleNamespace):
    """A device, or the MIG instance 0 of one."""


class c_nvmlGpmMetricsGet_t(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0) for _ in range(333)])


def _state(function: str) -> dict[str, Any]:
    state = json.loads(Path(os.environ["NVML_STAND_IN"]).read_text())
    time.sleep(state.get("sleeps", {}).get(function, 0))
    code = state.get("errors", {}).get(function, 0)
    if code:
        raise (NVMLError_LibraryNotFound if code == 12 else NVMLError)(code)
    return state


def _device(function: str, handle: Handle) -> dict[str, Any]:
    return {**DEVICE, **_state(function)["devices"][handle.index]}


def nvmlInit() -> None:
    _state("nvmlInit")


def nvmlDeviceGetCount() -> int:
    return len(_state("nvmlDeviceGetCount")["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> Handle:
    _state("nvmlDeviceGetHandleByIndex")
    return Handle(index=index, instance=False)


def nvmlDeviceGetHandleByUUID(uuid: str) -> Handle:
    devices = _state("nvmlDeviceGetHandleByUUID")["devices"]
    names = [f"MIG-{device['uuid']}" for device in devices]
    if uuid not in names:
        raise NVMLError(6)
    return Handle(index=names.index(uuid), instance=True)


def nvmlDeviceIsMigDeviceHandle(handle: Handle) -> Any:
    return SimpleNamespace(value=int(handle.instance))


def nvmlDeviceGetMigMode(handle: Handle) -> list[int]:
    device = _device("nvmlDeviceGetMigMode", handle)
    return [int(device["mig"])] * 2


def nvmlDeviceGetMigDeviceHandleByIndex(handle: Handle, index: int) -> Handle:
    assert index == 0
    return Handle(index=handle.index, instance=True)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: Handle) -> Handle:
    return Handle(index=handle.index, instance=False)


def nvmlDeviceGetGpuInstanceId(handle: Handle) -> int:
    assert handle.instance
    return 7


def nvmlDeviceGetIndex(handle: Handle) -> int:
    assert not handle.instance
    return handle.index


def nvmlDeviceGetUUID(handle: Handle) -> str:
    uuid = _device("nvmlDeviceGetUUID", handle)["uuid"]
    return f"MIG-{uuid}" if handle.instance else uuid


def nvmlDeviceGetName(handle: Handle) -> str:
    return _device("nvmlDeviceGetName", handle)["name"]


def nvmlDeviceGetUtilizationRates(handle: Handle) -> Any:
    device = _device("nvmlDeviceGetUtilizationRates", handle)
    if device["mig"]:
        raise NVMLError(3)
    return SimpleNamespace(gpu=device["utilization"], memory=0)


def nvmlDeviceGetMemoryInfo(handle: Handle, version: int) -> Any:
    assert version == nvmlMemory_v2
    device = _device("nvmlDeviceGetMemoryInfo", handle)
    return SimpleNamespace(used=device["used"], total=device["total"])


def nvmlDeviceGetTemperature(handle: Handle, sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    device = _device("nvmlDeviceGetTemperature", handle)
    if device["prints"]:
        print(device["prints"], flush=True)
    return device["temperature"]


def nvmlDeviceGetClockInfo(handle: Handle, clock: int) -> int:
    device = _device("nvmlDeviceGetClockInfo", handle)
    return device["sm_clock" if clock == NVML_CLOCK_SM else "memory_clock"]


def nvmlDeviceGetCurrentClocksEventReasons(handle: Handle) -> int:
    return _device("nvmlDeviceGetCurrentClocksEventReasons", handle)["reasons"]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: Handle) -> int:
    return _device("nvmlDeviceGetCurrentClocksThrottleReasons", handle)["reasons"]


def nvmlDeviceGetTotalEnergyConsumption(handle: Handle) -> int:
    return _device("nvmlDeviceGetTotalEnergyConsumption", handle)["energy_mj"]


def nvmlDeviceGetFieldValues(handle: Handle, fields: list[int]) -> list[Any]:
    assert fields == [NVML_FI_DEV_POWER_INSTANT]
    device = _device("nvmlDeviceGetFieldValues", handle)
    value = SimpleNamespace(uiVal=device["power_mw"])
    return [SimpleNamespace(nvmlReturn=device["power_instant_error"], value=value)]


def nvmlDeviceGetPowerUsage(handle: Handle) -> int:
    return _device("nvmlDeviceGetPowerUsage", handle)["power_mw"] + 1000


def nvmlGpmQueryDeviceSupport(handle: Handle) -> Any:
    return SimpleNamespace(
        isSupportedDevice=int(_device("nvmlGpmQueryDeviceSupport", handle)["gpm"])
    )


def nvmlGpmSampleAlloc() -> Any:
    return SimpleNamespace(handle=None)


def nvmlGpmSampleGet(handle: Handle, sample: Any) -> Any:
    if _device("nvmlGpmSampleGet", handle)["mig"]:
        raise NVMLError(3)
    sample.handle = handle
    return sample


def nvmlGpmMigSampleGet(handle: Handle, instance: int, sample: Any) -> Any:
    assert instance == 7
    _device("nvmlGpmMigSampleGet", handle)
    sample.handle = handle
    return sample


def nvmlGpmMetricsGet(request: Any) -> Any:
    device = _device("nvmlGpmMetricsGet", request.sample2.handle)
    assert request.sample1.handle is not None
    for metric in request.metrics[: request.numMetrics]:
        metric.value = device["gpm_values"].get(str(metric.metricId), 0.0)
        metric.nvmlReturn = 0 if str(metric.metricId) in device["gpm_values"] else 3
    return request

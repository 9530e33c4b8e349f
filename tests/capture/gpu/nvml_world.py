"""A machine with NVIDIA devices, as far as `pynvml` can tell: controls the stand-in module."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STAND_IN = Path(__file__).parent / "nvml_stand_in"


class NvmlWorld:
    """The stand-in's state. `module` is it for this process; processes started by it import it as
    `pynvml`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = directory / "nvml.json"
        self.state: dict[str, Any] = {"devices": [{"uuid": "GPU-aaaa"}], "errors": {}, "sleeps": {}}
        self.save()
        monkeypatch.setenv("NVML_STAND_IN", str(self._file))
        paths = [str(STAND_IN), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.module = _load()

    def save(self) -> None:
        """Let the module see `state`, whole: another process may be reading it."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.state))
        part.rename(self._file)

    def device(self, number: int = 0, **fields: Any) -> None:
        """Change what a device answers; add it when it is the next one."""
        devices = self.state["devices"]
        if number == len(devices):
            devices.append({"uuid": f"GPU-{'abcdef'[number] * 4}"})
        devices[number].update(fields)
        self.save()

    def fail(self, function: str, code: int) -> None:
        """Let a function fail with an NVML error code; 0: no more."""
        self.state["errors"][function] = code
        self.save()

    def hang(self, function: str, seconds: float) -> None:
        self.state["sleeps"][function] = seconds
        self.save()


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pynvml_stand_in", STAND_IN / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

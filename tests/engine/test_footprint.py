"""A KV cache that does not fit is refused from shapes alone; what is predicted is what is held."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import compiled_runner, torch_runner
from engine.errors import EngineError
from engine.footprint import (
    RESERVE_BYTES,
    Available,
    Footprint,
    available_memory,
    check_memory,
    shown,
)
from engine.gguf import load_gguf
from engine.llama import LlamaConfig
from engine.runner import load_model
from engine.weights import KINDS, weight_bytes

GIB = 1 << 30
FORMATS = ("int8", "int4", "fp32")


def arrays(value: Any) -> list[np.ndarray]:
    """All arrays in nested tuples."""
    if isinstance(value, np.ndarray):
        return [value]
    return [found for part in value for found in arrays(part)] if isinstance(value, tuple) else []


@pytest.mark.parametrize("weights", FORMATS)
def test_the_compiled_runner_holds_what_was_predicted(tiny_path: Path, weights: str) -> None:
    config = LlamaConfig.from_gguf(load_gguf(tiny_path))
    found = compiled_runner.footprint(config, weights, 512, 2)
    runner = load_model(tiny_path, weights=weights, kv_tokens=1024, threads=2).runner
    held = runner._weights
    kept = held.packed.nbytes + held.scales.nbytes + held.norms.nbytes + held.rotary.nbytes
    assert weight_bytes(config, KINDS[weights], 512) == found.weights == kept
    assert sum(part.nbytes for part in arrays(runner._cache)) == 1024 * found.kv_token
    working = sum(part.nbytes for part in [*arrays(runner._buffers), runner._logits])
    assert working <= found.working <= 1.5 * working


@pytest.mark.parametrize("weights", FORMATS)
def test_the_torch_runner_holds_the_cache_that_was_predicted(tiny_path: Path, weights: str) -> None:
    config = LlamaConfig.from_gguf(load_gguf(tiny_path))
    found = torch_runner.footprint(config, weights, 512, 1)
    model = load_model(tiny_path, weights=weights, kernels="torch", kv_tokens=1024, threads=1)
    cache = model.runner._cache
    assert cache.keys.nbytes + cache.values.nbytes == 1024 * found.kv_token


def test_a_cache_that_fits_is_taken_and_one_token_block_more_is_not() -> None:
    found = Footprint(weights=GIB, working=GIB, kv_token=1 << 20, packing=2 * GIB)
    room = Available(4 * GIB + RESERVE_BYTES, "this machine")
    check_memory(found, 2048, 16, room)
    with pytest.raises(EngineError) as caught:
        check_memory(found, 2064, 16, room)
    text = str(caught.value)
    assert text.startswith("--kv-tokens 2064 does not fit")
    for part in ("2.016 GiB", "the weights 1 GiB", "this machine has 4.25 GiB", "--kv-tokens 2048"):
        assert part in text


@pytest.mark.parametrize(
    "found",
    [
        Footprint(weights=5 * GIB, working=0, kv_token=1, packing=0),
        Footprint(weights=2 * GIB, working=0, kv_token=1, packing=3 * GIB),
        Footprint(weights=4 * GIB - 8, working=0, kv_token=1, packing=0),
    ],
)
def test_where_no_cache_would_fit_the_model_is_what_is_too_large(found: Footprint) -> None:
    with pytest.raises(EngineError, match=r"the model does not fit.*--weights int4"):
        check_memory(found, 16, 16, Available(4 * GIB + RESERVE_BYTES, "this machine"))


def test_unknown_memory_refuses_nothing() -> None:
    check_memory(Footprint(GIB, GIB, GIB), 1 << 40, 16, Available(math.inf, "this machine"))


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_pool_beyond_the_memory_is_refused_before_anything_is_loaded(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    def load(*_: object) -> object:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(compiled_runner, "load_compiled_runner", load)
    monkeypatch.setattr(torch_runner, "load_torch_runner", load)
    monkeypatch.setattr(
        "engine.runner.available_memory", lambda: Available(GIB, "the cgroup /sys/fs/cgroup")
    )
    with pytest.raises(EngineError, match=r"--kv-tokens 16777216 .* the cgroup /sys/fs/cgroup has"):
        load_model(tiny_path, kernels=kernels, kv_tokens=1 << 24, threads=1)


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Files of /proc and /sys/fs/cgroup as the kernel shows them; the two folders."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable:    8388608 kB\n"


def test_the_machines_memory_is_what_is_available_of_it(tmp_path: Path) -> None:
    proc, cgroups = tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert available_memory(proc, cgroups) == Available(8 * GIB, "this machine")
    assert available_memory(tmp_path / "none", cgroups).bytes == math.inf


def test_a_cgroup_above_may_be_the_one_that_is_full(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/app.slice/serve.scope\n",
        "cgroup/app.slice/serve.scope/memory.max": "max\n",
        "cgroup/app.slice/serve.scope/memory.current": f"{GIB}\n",
        "cgroup/app.slice/memory.max": f"{4 * GIB}\n",
        "cgroup/app.slice/memory.current": f"{3 * GIB}\n",
        "cgroup/app.slice/memory.stat": f"anon 5\nfile 9\ninactive_file {GIB}\nactive_file 4096\n",
    }
    found = available_memory(*tree(tmp_path, files))
    assert found.bytes == 2 * GIB + 4096, "page cache can be taken back"
    assert found.where == f"the cgroup {tmp_path / 'cgroup' / 'app.slice'}"


def test_a_container_of_the_first_cgroups_knows_its_limit_at_the_root(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/1a\n4:memory:/docker/1a\n0::/\n",
        "cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {GIB // 2}\n",
    }
    assert available_memory(*tree(tmp_path, files)).bytes == 1.5 * GIB


def test_sizes_are_shown_with_a_unit() -> None:
    assert [shown(size) for size in (-5, 0, 1023, 1536, 3 * GIB, 10**15)] == [
        "0 bytes", "0 bytes", "1023 bytes", "1.5 KiB", "3 GiB", "909.5 TiB",
    ]  # fmt: skip

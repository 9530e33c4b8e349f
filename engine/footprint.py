"""Will a model and its KV cache fit? Answered from shapes alone, before anything is allocated.

A pool larger than the memory would not fail at the start: its pages are taken as they fill, and
the kernel kills the server in the middle of its work. Not for what is in use: `engine.memory`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from engine.errors import EngineError

RESERVE_BYTES = 256 << 20
"""Left for all that has no shape: compiled kernels, the tokenizer, requests in flight."""

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class Footprint(NamedTuple):
    """Bytes that a runner will hold: weights, working memory, and KV cache per token; and bytes
    that it holds beside the weights only while it packs them."""

    weights: int
    working: int
    kv_token: int
    packing: int = 0

    def total(self, kv_tokens: int) -> int:
        """The most that is held at once with a cache of so many tokens."""
        return self.weights + max(self.working + kv_tokens * self.kv_token, self.packing)


class Available(NamedTuple):
    """Bytes that can still be taken (infinite: not known), and who says so."""

    bytes: float
    where: str


def check_memory(needed: Footprint, kv_tokens: int, block_size: int, available: Available) -> None:
    """Raise EngineError, with the way out, when model and cache do not fit into `available`.

    kv_tokens: those of the cache, whole blocks of block_size.
    """
    free = available.bytes - RESERVE_BYTES
    if needed.total(kv_tokens) <= free:
        return
    there = (
        f"{available.where} has {shown(available.bytes)} available, "
        f"of which {shown(RESERVE_BYTES)} stay free"
    )
    fitting = int(free - needed.weights - needed.working) // needed.kv_token
    fitting -= fitting % block_size
    if fitting < block_size or needed.weights + needed.packing > free:
        raise EngineError(
            f"the model does not fit: its weights take {shown(needed.weights)} "
            f"({shown(needed.weights + needed.packing)} while they are packed), {there}; "
            "choose --weights int4 or a smaller model"
        )
    raise EngineError(
        f"--kv-tokens {kv_tokens} does not fit: such a KV cache takes "
        f"{shown(kv_tokens * needed.kv_token)} and the weights {shown(needed.weights)}, {there}; "
        f"give at most --kv-tokens {fitting}"
    )


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Available:
    """What this process may still take: the least of what the machine and its cgroups have.

    Memory that the kernel can take back (page cache) counts as available. `proc` and `cgroups` are
    where the kernel shows processes and cgroups.
    """
    limits = [Available(_machine_available(proc), "this machine")]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = "memory.max", "memory.current", ("inactive_file", "active_file")
            limits += _cgroup_limits(cgroups, path, *names)
        elif "memory" in controllers.split(","):
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )
            limits += _cgroup_limits(cgroups / "memory", path, *names)
    return min(limits, key=lambda limit: limit.bytes)


def shown(size: float) -> str:
    """Bytes for people."""
    size = max(size, 0)
    unit = min(int(math.log2(max(size, 1))) // 10, len(UNITS) - 1)
    return f"{size / 1024**unit:.4g} {UNITS[unit]}"


def _machine_available(proc: Path) -> float:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return float(int(line.split()[1]) << 10)
    return math.inf


def _cgroup_limits(
    root: Path, path: str, limit: str, usage: str, reclaimable: tuple[str, ...]
) -> list[Available]:
    """Of the cgroup at `path` and all above it: any may be the one that is full. In a container
    `path` may be the host's name for it; its own limit then stands at the root."""
    inner = root / path.lstrip("/")
    found = []
    for directory in (inner, *inner.parents):
        if directory.is_relative_to(root):
            most, used = _number(directory / limit), _number(directory / usage)
            if most is not None and used is not None:
                stats = dict(line.split() for line in _lines(directory / "memory.stat"))
                cache = sum(int(stats.get(name, 0)) for name in reclaimable)
                found.append(Available(most - used + cache, f"the cgroup {directory}"))
    return found


def _number(path: Path) -> int | None:
    """The number in a cgroup's file; None without one ("max" is none either)."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

"""Compilation settings shared by all CPU kernels: a disk cache keyed by the kernels' own source.

Numba's cache notices a change of the file a function stands in, not of the files it calls into,
so an upgrade could keep running old kernels. Here the sources' digest is part of the directory's
name. Numba adds the CPU's features to the key by itself.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import llvmlite.binding
import numba

CONTRACT = {"contract"}
"""Fused multiply-add allowed, order of additions kept."""

REASSOCIATE = {"contract", "reassoc", "nsz"}
"""Sums may be split over vector lanes: still one fixed order for a given length."""


def _cache_directory() -> Path:
    digest = hashlib.blake2s(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "inferloop" / f"kernels-{digest.hexdigest()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        usable = os.access(directory, os.W_OK)
    except OSError:
        usable = False
    return directory if usable else Path(tempfile.mkdtemp(prefix="inferloop-kernels-"))


numba.config.CACHE_DIR = str(_cache_directory())


def has_vnni() -> bool:
    """Whether this CPU multiplies bytes in 512-bit vectors (AVX512-VNNI)."""
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("avx512vnni")) and bool(features.get("avx512f"))


def _compile(fastmath, **options):
    # The numpy error model: a division by zero gives infinity instead of a test and a branch,
    # which would keep every loop with a division from being vectorised.
    return numba.njit(nogil=True, error_model="numpy", fastmath=fastmath, **options)


def kernel(function):
    """Compile an entry point: no GIL, cached on disk, fused multiply-add."""
    return _compile(CONTRACT, cache=True)(function)


def part(function):
    """A helper that kernels call; compiled into them, order of additions kept."""
    return _compile(CONTRACT)(function)


def reduction(function):
    """A helper whose sums may be vectorised (see REASSOCIATE)."""
    return _compile(REASSOCIATE)(function)

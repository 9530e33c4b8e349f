"""What identifies a build: everything that can change an answer, named part by part.

Two servers with the same fingerprint answer alike; two that differ say in which part.
"""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import engine
import kernels

LIBRARIES = ("jinja2", "llvmlite", "numba", "numpy", "tokenizers", "torch")


def digest_of(components: dict[str, Any]) -> str:
    """Hex digest of a build: BLAKE2s-128 over its components as canonical JSON."""
    text = json.dumps(components, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


def components_of(
    *,
    weights: dict[str, Any],
    tokenizer: str,
    template: str,
    configuration: dict[str, Any],
) -> dict[str, Any]:
    """The parts of this process's build: those given, plus code, libraries and device."""
    return {
        "weights": weights,
        "tokenizer": tokenizer,
        "template": template,
        "code": _code_digest(),
        "configuration": configuration,
        "libraries": {name: _version(name) for name in LIBRARIES},
        "device": {"kind": "cpu", "model": _processor(), "machine": platform.machine()},
    }


def _code_digest() -> str:
    """Digest over the source files of the engine and its kernels."""
    state = hashlib.blake2s(digest_size=16)
    for package in (engine, kernels):
        for directory in package.__path__:
            for file in sorted(Path(directory).glob("*.py")):
                state.update(f"{package.__name__}/{file.name}\0".encode())
                state.update(file.read_bytes())
    return state.hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")

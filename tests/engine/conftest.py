"""Models shared by the engine's tests: each is loaded once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.gguf import GGUFFile, find_default_model, load_gguf
from engine.runner import LoadedModel, load_model
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def real_path() -> Path:
    """The SmolLM2 file of the installed model package."""
    try:
        return find_default_model()
    except ModelFileError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def real_file(real_path: Path) -> GGUFFile:
    return load_gguf(real_path)


@pytest.fixture(scope="session")
def real_model(real_path: Path) -> Callable[..., LoadedModel]:
    """real_model(weights, block_size=16): SmolLM2, loaded once per combination."""
    loaded: dict[tuple[str, int], LoadedModel] = {}

    def load(weights: str, block_size: int = 16) -> LoadedModel:
        key = (weights, block_size)
        if key not in loaded:
            loaded[key] = load_model(
                real_path, weights=weights, block_size=block_size, kv_tokens=4096
            )
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer model's file (see tests.engine.tiny_model)."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path) -> LoadedModel:
    """The tiny model in INT8, KV cache of 64 blocks of 16 tokens, one thread."""
    return load_model(tiny_path, weights="int8", block_size=16, kv_tokens=1024, threads=1)

"""Loads a model file and chooses the runner for it.

`compiled` is the fast decoder of `kernels.cpu_step`; `torch` is the same decoder in PyTorch, which
the compiled one is checked against.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.batch import Runner
from engine.chat_template import ChatTemplate
from engine.errors import EngineError
from engine.footprint import available_memory, check_memory
from engine.gguf import GGUFFile, load_gguf
from engine.llama import LlamaConfig
from engine.tokenizer import Tokenizer
from engine.weights import WeightFormat

Kernels = Literal["compiled", "torch"]

BLOCK_MULTIPLE = 16
"""The compiled kernels read whole vectors of so many positions."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve; `info` describes it for the trace and the build fingerprint."""

    runner: Runner
    tokenizer: Tokenizer
    template: ChatTemplate
    info: dict[str, Any]


def load_model(
    path: Path,
    *,
    weights: WeightFormat = "int8",
    kernels: Kernels = "compiled",
    block_size: int = 16,
    kv_tokens: int = 16384,
    max_model_len: int | None = None,
    threads: int | None = None,
) -> LoadedModel:
    """Load a GGUF file for the CPU.

    kv_tokens: capacity of the KV cache, rounded down to blocks; max_model_len: longest sequence,
    default the model's context or the cache, whichever is smaller; threads: default all cores
    this process may use. Raises ModelFileError for the file, EngineError for the sizes, also when
    model and cache are predicted not to fit into the memory that is available.
    """
    file = load_gguf(path)
    config = LlamaConfig.from_gguf(file)
    num_blocks, max_len = _sizes(config, block_size, kv_tokens, max_model_len)
    cores = len(os.sched_getaffinity(0))
    threads = cores if threads is None else threads
    if not 1 <= threads <= cores:
        raise EngineError(f"{threads} threads: this process may use 1 to {cores} (--threads)")
    if kernels == "compiled":
        from engine.compiled_runner import footprint
        from engine.compiled_runner import load_compiled_runner as load_runner
    else:
        from engine.torch_runner import footprint
        from engine.torch_runner import load_torch_runner as load_runner
    predicted = footprint(config, weights, max_len, threads)
    check_memory(predicted, num_blocks * block_size, block_size, available_memory())
    runner = load_runner(file, config, weights, block_size, num_blocks, max_len, threads)
    info = {
        **_describe(file, config),
        "weights": weights,
        "kernels": {"device": "cpu", "variant": kernels, "matmul": runner.matmul},
        "threads": threads,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": max_len,
    }
    return LoadedModel(runner, Tokenizer(file), ChatTemplate.from_gguf(file), info)


def _sizes(
    config: LlamaConfig, block_size: int, kv_tokens: int, max_model_len: int | None
) -> tuple[int, int]:
    """(blocks of the cache, longest sequence), checked."""
    if block_size < 1 or block_size % BLOCK_MULTIPLE:
        raise EngineError(f"block size {block_size} is not a multiple of {BLOCK_MULTIPLE}")
    num_blocks = kv_tokens // block_size
    if num_blocks < 1:
        raise EngineError(f"a KV cache of {kv_tokens} tokens holds no block of {block_size}")
    if max_model_len is None:
        return num_blocks, min(config.context, num_blocks * block_size)
    if not 1 <= max_model_len <= config.context:
        raise EngineError(
            f"max model length {max_model_len} is outside 1..{config.context}, the model's context"
        )
    if max_model_len > num_blocks * block_size:
        raise EngineError(
            f"max model length {max_model_len} exceeds the KV cache of {num_blocks * block_size}"
            " tokens; raise --kv-tokens or lower --max-model-len"
        )
    return num_blocks, max_model_len


def _describe(file: GGUFFile, config: LlamaConfig) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        counts[tensor.format.name] = counts.get(tensor.format.name, 0) + 1
    return {
        "name": file.path.stem,
        "title": file.metadata.get("general.name", file.path.stem),
        "architecture": file.metadata["general.architecture"],
        "file": file.path.name,
        "sha256": file.sha256(),
        "quantization": counts,
        "parameters": sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        "context": config.context,
        "vocab_size": config.vocab_size,
    }

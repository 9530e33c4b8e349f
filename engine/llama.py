"""What a Llama model is: its dimensions, read and checked from a GGUF file's metadata.

Not for weights (`engine.weights`) nor for the arithmetic (`kernels.cpu_step`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.errors import ModelFileError
from engine.gguf import GGUFFile

ARCHITECTURE = "llama"
DIM_MULTIPLE = 32
HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Dimensions of one model; `context` is the longest sequence it was trained for."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    context: int
    rope_base: float
    norm_epsilon: float

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> LlamaConfig:
        """Read the dimensions; raises ModelFileError for what this engine cannot run."""
        architecture = file.require("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelFileError(
                f"{file.path}: architecture {architecture!r} is not supported (supported:"
                f" {ARCHITECTURE!r}); choose another model with --model"
            )
        heads = int(file.require("llama.attention.head_count"))
        dim = int(file.require("llama.embedding_length"))
        get = file.metadata.get
        if heads < 1:
            raise ModelFileError(f"{file.path}: head count is {heads}")
        config = cls(
            layers=int(file.require("llama.block_count")),
            dim=dim,
            heads=heads,
            kv_heads=int(get("llama.attention.head_count_kv", heads)),
            head_dim=int(get("llama.attention.key_length", dim // heads)),
            ffn=int(file.require("llama.feed_forward_length")),
            vocab_size=len(file.require("tokenizer.ggml.tokens")),
            context=int(file.require("llama.context_length")),
            rope_base=float(get("llama.rope.freq_base", 10000.0)),
            norm_epsilon=float(file.require("llama.attention.layer_norm_rms_epsilon")),
        )
        _check(file, config)
        return config

    def rotary_table(self, positions: int, factors: np.ndarray | None) -> np.ndarray:
        """Cosines and sines, float32 [positions, 2, head_dim / 2], from float64 angles.

        `factors` (Llama 3's long context) divide the frequencies, float32 [head_dim / 2].
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies = self.rope_base**-exponents
        if factors is not None:
            frequencies = frequencies / factors
        angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _check(file: GGUFFile, config: LlamaConfig) -> None:
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelFileError(f"{file.path}: rope scaling {scaling!r} is not supported")
    rotated = file.metadata.get("llama.rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise ModelFileError(
            f"{file.path}: rotates {rotated} of {config.head_dim} dimensions of a head; only all"
            " is supported"
        )
    if file.metadata.get("llama.expert_count", 0):
        raise ModelFileError(f"{file.path}: mixtures of experts are not supported")
    if config.kv_heads < 1 or config.heads % config.kv_heads:
        raise ModelFileError(
            f"{file.path}: {config.heads} heads cannot share {config.kv_heads} KV heads"
        )
    if config.head_dim < 1 or config.head_dim % HEAD_DIM_MULTIPLE:
        raise ModelFileError(
            f"{file.path}: head dimension {config.head_dim} is not a multiple of"
            f" {HEAD_DIM_MULTIPLE}"
        )
    for name, value in (("embedding", config.dim), ("feed-forward", config.ffn)):
        if value < 1 or value % DIM_MULTIPLE:
            raise ModelFileError(
                f"{file.path}: {name} length {value} is not a multiple of {DIM_MULTIPLE}"
            )

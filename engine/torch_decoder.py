"""The Llama decoder written plainly in PyTorch: the readable twin of `kernels.cpu_step`.

Activations are float32; weights float32, INT8 or INT4. Knows nothing of steps or requests: which
tokens there are and where their keys and values lie comes as tensors. Not for sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.gguf import GGUFFile
from engine.gguf import Tensor as StoredTensor
from engine.llama import LlamaConfig
from engine.weights import WeightFormat, head_tensor, layer_matrices
from engine.weights import int4_groups as int4_groups
from kernels.cpu_step import DOWN, GATE_UP, OUTPUT, QKV
from kernels.torch_ops import (
    linear_int4,
    linear_int8,
    pack_int4,
    paged_attention,
    quantize_rows,
    rms_norm,
    rotate,
    swiglu,
)

Linear = Callable[[torch.Tensor], torch.Tensor]
"""float32 [n, inputs] -> float32 [n, outputs]."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; queries, keys and values are one product, gate and up too."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Group:
    """R rows of a step with T tokens each, tokens start .. start + R * T - 1."""

    start: int
    slots: torch.Tensor
    """int64 [R, S]: see `kernels.torch_ops.paged_attention`."""
    hidden: torch.Tensor
    """bool [R, T, S]: likewise."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """n tokens: embeddings float32 [n, dim], positions and cache slots int64 [n], and the groups
    that their attention is computed in."""

    embeddings: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values, float32 [layers, slots, kv heads, head dim]: block b of size s is slots
    b * s .. b * s + s - 1."""

    keys: torch.Tensor
    values: torch.Tensor


class TorchDecoder:
    """A model's weights and its forward pass."""

    def __init__(
        self, file: GGUFFile, config: LlamaConfig, weights: WeightFormat, positions: int
    ) -> None:
        """Read the weights, and prepare rotary tables for `positions` positions.

        As with the compiled decoder, the head of an INT4 model is INT8. Raises ModelFileError
        when a tensor is missing or has another shape than the metadata say.
        """
        self._config = config
        self._layers = [_read_layer(file, config, weights, i) for i in range(config.layers)]
        self._final_norm = _read_norm(file, config, "output_norm")
        self._head = _linear([head_tensor(file, config)], "fp32" if weights == "fp32" else "int8")
        factors = None
        if "rope_freqs.weight" in file.tensors:
            factors = file.tensor("rope_freqs.weight", (config.head_dim // 2,)).dequantize()
        table = torch.from_numpy(config.rotary_table(positions, factors))
        self._turns = torch.complex(table[:, 0], table[:, 1])

    def forward(self, inputs: Inputs, cache: Cache) -> torch.Tensor:
        """All layers over n tokens; fills the cache. float32 [n, dim] before the final norm."""
        turns = self._turns[inputs.positions, None]
        x = inputs.embeddings
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            normed = rms_norm(x, layer.attention_norm, self._config.norm_epsilon)
            mixed = self._attend(layer.qkv(normed), turns, inputs, keys, values)
            x = x + layer.output(mixed)
            normed = rms_norm(x, layer.ffn_norm, self._config.norm_epsilon)
            x = x + layer.down(swiglu(layer.gate_up(normed)))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: [n, dim] -> float32 [n, vocabulary]."""
        return self._head(rms_norm(hidden, self._final_norm, self._config.norm_epsilon))

    def _attend(
        self,
        qkv: torch.Tensor,
        turns: torch.Tensor,
        inputs: Inputs,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one layer: qkv [n, (heads + 2 kv heads) * head dim], turns complex
        [n, 1, head dim / 2], keys and values [slots, kv heads, head dim] of the layer's cache.
        Returns [n, heads * head dim]."""
        heads, kv_heads, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        parts = qkv.unflatten(1, (-1, dim))
        rotated = rotate(parts[:, : heads + kv_heads], turns)
        keys[inputs.slots] = rotated[:, heads:]
        values[inputs.slots] = parts[:, heads + kv_heads :]
        queries = rotated[:, :heads] * dim**-0.5
        outcomes = []
        for group in inputs.groups:
            rows, tokens = group.hidden.shape[:2]
            taken = queries[group.start : group.start + rows * tokens]
            outcome = paged_attention(
                taken.unflatten(0, (rows, tokens)), keys, values, group.slots, group.hidden
            )
            outcomes.append(outcome.flatten(0, 1))
        return torch.cat(outcomes).flatten(1)


def _read_layer(file: GGUFFile, config: LlamaConfig, weights: WeightFormat, index: int) -> Layer:
    matrices = {
        which: _linear([file.tensor(name, shape) for name, shape in parts], weights)
        for which, parts in layer_matrices(config, index).items()
    }
    return Layer(
        attention_norm=_read_norm(file, config, f"blk.{index}.attn_norm"),
        qkv=matrices[QKV],
        output=matrices[OUTPUT],
        ffn_norm=_read_norm(file, config, f"blk.{index}.ffn_norm"),
        gate_up=matrices[GATE_UP],
        down=matrices[DOWN],
    )


def _read_norm(file: GGUFFile, config: LlamaConfig, name: str) -> torch.Tensor:
    return torch.tensor(file.tensor(f"{name}.weight", (config.dim,)).dequantize())


def _linear(tensors: list[StoredTensor], weights: WeightFormat) -> Linear:
    """The product with the tensors' rows as one matrix, stored in the format `weights`."""
    if weights == "int4":
        groups = zip(*(int4_groups(tensor) for tensor in tensors), strict=True)
        packed, parameters = pack_int4(*(torch.from_numpy(np.concatenate(g)) for g in groups))
        return lambda x: linear_int4(x, packed, parameters)
    matrix = torch.from_numpy(np.concatenate([tensor.dequantize() for tensor in tensors]))
    if weights == "fp32":
        return lambda x: functional.linear(x, matrix)
    quants, scale = quantize_rows(matrix)
    return lambda x: linear_int8(x, quants, scale.flatten())

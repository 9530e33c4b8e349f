"""Packs a GGUF file's tensors for the kernels: float32, INT8 or INT4.

INT4 keeps the file's Q4_1 numbers exactly; INT8 and float32 start from the dequantized values.
Queries and keys stay in GGUF's row order, which makes rotary pairs adjacent: the kernels rotate
adjacent pairs, and scores do not depend on the order within a head. Not for reading files.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from engine.gguf import GGUFFile, Tensor, split_q4_1
from engine.llama import LlamaConfig
from kernels.cpu_math import FLOAT32, INT4, INT8
from kernels.cpu_matmul import (
    pack_f32,
    pack_int4,
    pack_int8,
    padded_columns,
    panel_bytes,
    quantize_int4,
    quantize_int8,
)
from kernels.cpu_memory import LINE, aligned_zeros
from kernels.cpu_step import DOWN, GATE_UP, HEAD, OUTPUT, QKV, Weights

WeightFormat = Literal["int8", "int4", "fp32"]
KINDS: dict[WeightFormat, int] = {"fp32": FLOAT32, "int8": INT8, "int4": INT4}


def layer_matrices(config: LlamaConfig, layer: int) -> dict[int, list[tuple[str, tuple[int, int]]]]:
    """Tensors (name, shape) that make up each of a layer's fused matrices, in row order."""
    prefix, dim = f"blk.{layer}", config.dim
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        QKV: [
            (f"{prefix}.attn_q.weight", (q, dim)),
            (f"{prefix}.attn_k.weight", (kv, dim)),
            (f"{prefix}.attn_v.weight", (kv, dim)),
        ],
        OUTPUT: [(f"{prefix}.attn_output.weight", (dim, q))],
        GATE_UP: [
            (f"{prefix}.ffn_gate.weight", (config.ffn, dim)),
            (f"{prefix}.ffn_up.weight", (config.ffn, dim)),
        ],
        DOWN: [(f"{prefix}.ffn_down.weight", (dim, config.ffn))],
    }


def head_tensor(file: GGUFFile, config: LlamaConfig) -> Tensor:
    """The output head; the embedding when the file ties the two."""
    name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    return file.tensor(name, (config.vocab_size, config.dim))


def pack_weights(
    file: GGUFFile, config: LlamaConfig, weights: WeightFormat, positions: int
) -> Weights:
    """All weights in the kernels' layout, with rotary tables for `positions` positions.

    The output head of INT4 models is INT8: it decides the argmax, and GGUF files keep it at 8 bits
    too. Raises ModelFileError when a tensor is missing or has another shape than the metadata say.
    """
    kind = KINDS[weights]
    packer = _Packer(_packed_bytes(config, kind))
    linears = np.zeros((config.layers + 1, 4, 4), np.int64)
    norms = np.zeros((2 * config.layers + 1, config.dim), np.float32)
    for layer in range(config.layers):
        for which, parts in layer_matrices(config, layer).items():
            tensors = [file.tensor(name, shape) for name, shape in parts]
            linears[layer, which] = packer.add(tensors, kind)
        for i, name in enumerate(("attn_norm", "ffn_norm")):
            tensor = file.tensor(f"blk.{layer}.{name}.weight", (config.dim,))
            norms[2 * layer + i] = tensor.dequantize()
    norms[-1] = file.tensor("output_norm.weight", (config.dim,)).dequantize()
    head_kind = head_format(kind)
    linears[-1, HEAD] = packer.add([head_tensor(file, config)], head_kind)
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = file.tensor("rope_freqs.weight", (config.head_dim // 2,)).dequantize()
    return Weights(
        kind=kind,
        head_kind=head_kind,
        packed=packer.packed,
        scales=np.concatenate(packer.scales),
        linears=linears,
        norms=norms,
        epsilon=np.float32(config.norm_epsilon),
        rotary=config.rotary_table(positions, factors),
    )


def head_format(kind: int) -> int:
    """Format of the output head of a model whose layers have format `kind`."""
    return FLOAT32 if kind == FLOAT32 else INT8


def weight_bytes(config: LlamaConfig, kind: int, positions: int) -> int:
    """Bytes of the arrays that `pack_weights` returns, but for its index of them."""
    scales = 1
    if kind == INT8:
        fused = layer_matrices(config, 0).values()
        scales += config.layers * sum(padded_columns(sum(n for _, (n, _) in p)) for p in fused)
    if head_format(kind) == INT8:
        scales += padded_columns(config.vocab_size)
    norms = (2 * config.layers + 1) * config.dim
    return _packed_bytes(config, kind) + 4 * (scales + norms + positions * config.head_dim)


def packing_bytes(config: LlamaConfig) -> int:
    """Bytes that `pack_weights` takes for a while: the largest matrix three times in float32, as
    read, as one piece and quantized."""
    parts = [*layer_matrices(config, 0).values(), [("", (config.vocab_size, config.dim))]]
    return 3 * 4 * max(sum(n * k for _, (n, k) in part) for part in parts)


def _packed_bytes(config: LlamaConfig, kind: int) -> int:
    """Bytes of all matrices, each starting on a cache line."""

    def size(n: int, k: int, kind: int) -> int:
        return _aligned(padded_columns(n) // 16 * panel_bytes(kind, k))

    parts = layer_matrices(config, 0).values()
    layer = sum(size(sum(shape[0] for _, shape in p), p[0][1][1], kind) for p in parts)
    head = size(config.vocab_size, config.dim, head_format(kind))
    return config.layers * layer + head


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE


class _Packer:
    """Appends packed matrices to one array; `scales` collects INT8 column scales."""

    def __init__(self, size: int) -> None:
        self.packed = aligned_zeros((size,), np.uint8)
        self.scales = [np.zeros(1, np.float32)]
        self._used = 0
        self._scales_used = 1

    def add(self, tensors: list[Tensor], kind: int) -> tuple[int, int, int, int]:
        """Pack the tensors' rows as one matrix; returns its entry of Weights.linears."""
        n, k = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
        scale_at = 0
        if kind == FLOAT32:
            data = pack_f32(np.concatenate([t.dequantize() for t in tensors]))
        elif kind == INT8:
            quants, scale = quantize_int8(np.concatenate([t.dequantize() for t in tensors]))
            data = pack_int8(quants)
            scale_at = self._scales_used
            self.scales.append(np.pad(scale, (0, padded_columns(n) - n)))
            self._scales_used += padded_columns(n)
        else:
            groups = zip(*(int4_groups(t) for t in tensors), strict=True)
            data = pack_int4(*(np.concatenate(part) for part in groups))
        at = self._used
        self.packed[at : at + data.size] = data
        self._used = _aligned(at + data.size)
        return at, scale_at, padded_columns(n), k


def int4_groups(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """quants uint8 [N, K/32, 32], scale and minimum float32 [N, K/32]."""
    if tensor.format.name == "Q4_1":
        blocks = tensor.data.reshape(tensor.shape[0], -1, tensor.format.block_bytes)
        return split_q4_1(blocks)
    return quantize_int4(tensor.dequantize())

"""Runs steps on the CPU through the compiled decoder of `kernels.cpu_step`.

Owns the weights, the KV cache and the working memory, all allocated once.
"""

from __future__ import annotations

import logging
import math
import time

import numpy as np

from engine.batch import RowSampling, StepBatch
from engine.footprint import Footprint
from engine.gguf import GGUFFile, Tensor
from engine.llama import LlamaConfig
from engine.step_runner import HEAD_ROWS, MAX_TOKENS, StepRunner
from engine.weights import KINDS, WeightFormat, pack_weights, packing_bytes, weight_bytes
from kernels.cpu_attention import MAX_QUERIES
from kernels.cpu_ir import LANES
from kernels.cpu_jit import has_vnni
from kernels.cpu_math import FLOAT32
from kernels.cpu_matmul import allocate_activations, padded_columns
from kernels.cpu_memory import aligned_zeros
from kernels.cpu_step import (
    Buffers,
    Cache,
    Shape,
    Tokens,
    Weights,
    run_head,
    run_layers,
    tokens_per_tile,
)
from kernels.cpu_threads import Team

log = logging.getLogger(__name__)


def load_compiled_runner(
    file: GGUFFile,
    config: LlamaConfig,
    weights: WeightFormat,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    threads: int,
) -> CompiledRunner:
    """A runner for the file's weights, its kernels compiled; the sizes are taken as checked.

    Raises ModelFileError for a file whose tensors do not fit the metadata.
    """
    runner = CompiledRunner(
        config,
        pack_weights(file, config, weights, max_model_len),
        file.tensor("token_embd.weight", (config.vocab_size, config.dim)),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        threads=threads,
    )
    began = time.monotonic()
    runner.warm_up()
    log.info("kernels ready after %.1f s", time.monotonic() - began)
    return runner


def footprint(
    config: LlamaConfig, weights: WeightFormat, max_model_len: int, threads: int
) -> Footprint:
    """What `load_compiled_runner` will allocate."""
    kind = KINDS[weights]
    tile = tokens_per_tile(config.heads, config.kv_heads)
    floats = sum(map(math.prod, _buffer_shapes(config, max_model_len, threads, tile).values()))
    floats += HEAD_ROWS * padded_columns(config.vocab_size)
    floats += (MAX_TOKENS + 1) * _widest(config)  # activations: float32 ones, unless smaller
    numbers = 2 * config.layers * config.kv_heads * config.head_dim
    return Footprint(
        weights=weight_bytes(config, kind, max_model_len),
        working=4 * floats,
        kv_token=numbers * np.dtype(_cache_number(kind)).itemsize,
        packing=packing_bytes(config),
    )


class CompiledRunner(StepRunner[Tokens]):
    """`engine.batch.Runner` on the CPU, compiled. `matmul`: what multiplies matrices."""

    matmul = "avx512-vnni" if has_vnni() else "portable"

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        embedding: Tensor,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        threads: int,
    ) -> None:
        super().__init__(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
        )
        self._weights = weights
        self._embedding = embedding
        self._shape = Shape(
            config.heads, config.kv_heads, config.head_dim, config.ffn, config.vocab_size
        )
        pool = (config.layers, num_blocks, config.kv_heads)
        number = _cache_number(weights.kind)
        self._cache = Cache(
            keys=aligned_zeros((*pool, config.head_dim, block_size), number),
            values=aligned_zeros((*pool, block_size, config.head_dim), number),
        )
        self._tile = tokens_per_tile(config.heads, config.kv_heads)
        self._buffers = _allocate(config, weights.kind, max_model_len, threads, self._tile)
        self._hidden = self._buffers.hidden
        self._logits = aligned_zeros((HEAD_ROWS, padded_columns(config.vocab_size)), np.float32)
        self._best = np.zeros(HEAD_ROWS, np.int64)
        self._stats = np.zeros((HEAD_ROWS, 3), np.float64)
        self._team = Team(threads, queues=config.layers)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from the disk cache, before the first request.

        Runs token 0 at position 0 through block 0, which nobody uses yet.
        """
        one = np.zeros(1, np.int32)
        self.run(
            StepBatch(
                token_ids=one.astype(np.int64),
                positions=one,
                query_start=np.array([0, 1], np.int32),
                context_lens=one + 1,
                block_tables=one.reshape(1, 1),
                slot_mapping=one.astype(np.int64),
                sampling=[RowSampling(1.0, 1.0, 0, 0, 0, 1)],
                prompt_logprobs=[None],
            )
        )

    def close(self) -> None:
        """End the helper threads."""
        self._team.close()

    def _prepare(self, batch: StepBatch, first: int, last: int) -> Tokens:
        """The tokens cut into tiles within rows; their embeddings go to the hidden states."""
        starts, counts, rows = [], [], []
        for row in range(batch.query_start.size - 1):
            begin = max(int(batch.query_start[row]), first)
            end = min(int(batch.query_start[row + 1]), last)
            for start in range(begin, end, self._tile):
                starts.append(start - first)
                counts.append(min(self._tile, end - start))
                rows.append(row)
        self._hidden[: last - first] = self._embedding.rows(batch.token_ids[first:last])
        return Tokens(
            count=last - first,
            positions=np.ascontiguousarray(batch.positions[first:last], np.int32),
            slots=np.ascontiguousarray(batch.slot_mapping[first:last], np.int64),
            tile_start=np.array(starts, np.int32),
            tile_tokens=np.array(counts, np.int32),
            tile_row=np.array(rows, np.int32),
            block_tables=np.ascontiguousarray(batch.block_tables, np.int32),
        )

    def _forward(self, inputs: Tokens) -> np.ndarray:
        self._team.run(run_layers, self._weights, self._shape, self._cache, inputs, self._buffers)
        return self._hidden[: inputs.count]

    def _head(self, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = hidden.shape[0]
        self._team.run(
            run_head, self._weights, self._shape, hidden, n, self._buffers, self._logits,
            self._best, self._stats,
        )  # fmt: skip
        return self._logits[:n, : self.vocab_size], self._best[:n], self._stats[:n]


def _cache_number(kind: int) -> type[np.generic]:
    """float16 bits beside quantized weights, which lose far more than it does."""
    return np.float32 if kind == FLOAT32 else np.uint16


def _widest(config: LlamaConfig) -> int:
    return max(config.dim, config.ffn, config.heads * config.head_dim)


def _allocate(config: LlamaConfig, kind: int, positions: int, threads: int, tile: int) -> Buffers:
    """Working memory for steps of MAX_TOKENS tokens."""
    shapes = _buffer_shapes(config, positions, threads, tile)
    return Buffers(
        x=allocate_activations(kind, MAX_TOKENS, _widest(config)),
        **{name: aligned_zeros(shape, np.float32) for name, shape in shapes.items()},
    )


def _buffer_shapes(
    config: LlamaConfig, positions: int, threads: int, tile: int
) -> dict[str, tuple[int, ...]]:
    """Of the float32 arrays in Buffers."""
    q = config.heads * config.head_dim
    qkv = padded_columns(q + 2 * config.kv_heads * config.head_dim)
    vectors = max(MAX_QUERIES, tile * (config.heads // config.kv_heads))
    reach = -(-positions // LANES) * LANES
    return {
        "hidden": (MAX_TOKENS, config.dim),
        "qkv": (MAX_TOKENS, qkv),
        "attention": (MAX_TOKENS, q),
        "gate_up": (MAX_TOKENS, padded_columns(2 * config.ffn)),
        "row": (threads, _widest(config)),
        "queries": (threads, vectors, config.head_dim),
        "weights": (threads, vectors, reach),
        "outputs": (threads, vectors, config.head_dim),
    }

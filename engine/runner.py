"""Runs steps on the CPU: embeds, drives the compiled decoder, samples.

Owns the weights, the KV cache and the working memory, all allocated once. Knows nothing of
requests: block tables and slots come with each step.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.batch import RowSampling, Runner, StepBatch, StepResult, TopLogprobs
from engine.chat_template import ChatTemplate
from engine.errors import EngineError, RunnerError
from engine.gguf import GGUFFile, Tensor, load_gguf
from engine.llama import LlamaConfig
from engine.sampler import alternatives, draw
from engine.tokenizer import Tokenizer
from engine.weights import WeightFormat, pack_weights
from kernels.cpu_attention import MAX_QUERIES
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

MAX_TOKENS = 512
"""Tokens that go through the layers at once; larger steps are cut, which changes no result."""

HEAD_ROWS = 64
"""Rows of logits held at once: bounds the memory of prompt log-probabilities."""

BLOCK_MULTIPLE = 16


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
    block_size: int = 16,
    kv_tokens: int = 16384,
    max_model_len: int | None = None,
    threads: int | None = None,
) -> LoadedModel:
    """Load a GGUF file for the CPU.

    kv_tokens: capacity of the KV cache, rounded down to blocks; max_model_len: longest sequence,
    default the model's context or the cache, whichever is smaller; threads: default all cores
    this process may use. Raises ModelFileError for the file, EngineError for the sizes.
    """
    file = load_gguf(path)
    config = LlamaConfig.from_gguf(file)
    num_blocks, max_len = _sizes(config, block_size, kv_tokens, max_model_len)
    cores = len(os.sched_getaffinity(0))
    threads = cores if threads is None else threads
    if not 1 <= threads <= cores:
        raise EngineError(f"{threads} threads: this process may use 1 to {cores} (--threads)")
    runner = CpuRunner(
        config,
        pack_weights(file, config, weights, max_len),
        file.tensor("token_embd.weight", (config.vocab_size, config.dim)),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_len,
        threads=threads,
    )
    began = time.monotonic()
    runner.warm_up()
    log.info("kernels ready after %.1f s", time.monotonic() - began)
    info = {
        **_describe(file, config),
        "weights": weights,
        "kernels": {"device": "cpu", "matmul": "avx512-vnni" if has_vnni() else "portable"},
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


class CpuRunner:
    """`engine.batch.Runner` on the CPU. One step at a time, from one thread."""

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
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = config.vocab_size
        self._weights = weights
        self._embedding = embedding
        self._shape = Shape(
            config.heads, config.kv_heads, config.head_dim, config.ffn, config.vocab_size
        )
        pool = (config.layers, num_blocks, config.kv_heads)
        # float16 bits beside quantized weights, which lose far more than it does.
        number = np.float32 if weights.kind == FLOAT32 else np.uint16
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

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step; raises RunnerError for a step that does not fit this runner."""
        began = time.perf_counter_ns()
        self._check(batch)
        outcome = _Outcome(batch, self._hidden.shape[1])
        prepare = time.perf_counter_ns() - began
        forward = 0
        for first in range(0, batch.token_ids.size, MAX_TOKENS):
            last = min(first + MAX_TOKENS, batch.token_ids.size)
            mark = time.perf_counter_ns()
            tokens = self._tokens(batch, first, last)
            self._hidden[: tokens.count] = self._embedding.rows(batch.token_ids[first:last])
            prepare += time.perf_counter_ns() - mark
            mark = time.perf_counter_ns()
            self._team.run(
                run_layers, self._weights, self._shape, self._cache, tokens, self._buffers
            )
            forward += time.perf_counter_ns() - mark
            outcome.collect(self._hidden, first, last)
            self._prompt_logprobs(outcome, first, last)
        mark = time.perf_counter_ns()
        self._sample(outcome)
        sample = time.perf_counter_ns() - mark
        return outcome.result(prepare / 1e3, forward / 1e3, sample / 1e3)

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

    def _check(self, batch: StepBatch) -> None:
        """Refuse what the kernels would turn into a write outside the cache."""
        slots, positions = batch.slot_mapping, batch.positions
        if not positions.size:
            raise RunnerError("a step needs at least one token")
        if positions.min() < 0 or positions.max() >= self.max_model_len:
            raise RunnerError(
                f"position {positions.max()} is outside the {self.max_model_len} of this runner"
            )
        if slots.min() < 0 or slots.max() >= self.num_blocks * self.block_size:
            raise RunnerError(f"slot {slots.max()} is outside the KV cache")
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= self.vocab_size:
            raise RunnerError(f"token id outside the vocabulary of {self.vocab_size}")
        blocks = -(-batch.context_lens // self.block_size)
        used = np.arange(batch.block_tables.shape[1]) < blocks[:, None]
        tables = batch.block_tables[used]
        if tables.size != blocks.sum() or tables.min() < 0 or tables.max() >= self.num_blocks:
            raise RunnerError("a block table does not cover its row's context")
        if np.any(positions[batch.query_start[1:] - 1] + 1 != batch.context_lens):
            raise RunnerError("a row's positions do not end where its context ends")

    def _tokens(self, batch: StepBatch, first: int, last: int) -> Tokens:
        """Tokens first..last-1 of the step, cut into tiles within rows."""
        starts, counts, rows = [], [], []
        for row in range(batch.query_start.size - 1):
            begin = max(int(batch.query_start[row]), first)
            end = min(int(batch.query_start[row + 1]), last)
            for start in range(begin, end, self._tile):
                starts.append(start - first)
                counts.append(min(self._tile, end - start))
                rows.append(row)
        return Tokens(
            count=last - first,
            positions=np.ascontiguousarray(batch.positions[first:last], np.int32),
            slots=np.ascontiguousarray(batch.slot_mapping[first:last], np.int64),
            tile_start=np.array(starts, np.int32),
            tile_tokens=np.array(counts, np.int32),
            tile_row=np.array(rows, np.int32),
            block_tables=np.ascontiguousarray(batch.block_tables, np.int32),
        )

    def _head(self, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits [n, V], argmax [n] and (largest, second, log of the sum) [n, 3] of n hidden
        rows, n <= HEAD_ROWS; valid until the next call."""
        n = hidden.shape[0]
        self._team.run(
            run_head, self._weights, self._shape, hidden, n, self._buffers, self._logits,
            self._best, self._stats,
        )  # fmt: skip
        return self._logits[:n, : self.vocab_size], self._best[:n], self._stats[:n]

    def _sample(self, outcome: _Outcome) -> None:
        """Draw a token for every row that wants one."""
        rows = outcome.sampled
        for start in range(0, len(rows), HEAD_ROWS):
            part = rows[start : start + HEAD_ROWS]
            logits, best, stats = self._head(outcome.hidden[start : start + len(part)])
            for i, row in enumerate(part):
                outcome.draw(row, logits[i], int(best[i]), stats[i])

    def _prompt_logprobs(self, outcome: _Outcome, first: int, last: int) -> None:
        """Log-probabilities of prompt tokens predicted by tokens first..last-1 of the step."""
        batch = outcome.batch
        for row, k in enumerate(batch.prompt_logprobs):
            if k is None:
                continue
            targets = batch.prompt_targets[row]
            base = int(batch.query_start[row])
            end = min(last, base + targets.size)
            for start in range(max(first, base), end, HEAD_ROWS):
                stop = min(start + HEAD_ROWS, end)
                logits, _, stats = self._head(self._hidden[start - first : stop - first].copy())
                wanted = targets[start - base : stop - base]
                outcome.parts[row].append(alternatives(logits, stats[:, 2], wanted, k))


class _Outcome:
    """A step's results while they come together."""

    def __init__(self, batch: StepBatch, dim: int) -> None:
        rows = batch.query_start.size - 1
        self.batch = batch
        self.sampled = [row for row in range(rows) if batch.sampling[row] is not None]
        self.hidden = np.zeros((len(self.sampled), dim), np.float32)
        self.parts: list[list[TopLogprobs]] = [[] for _ in range(rows)]
        self._ids = np.full(rows, -1, np.int64)
        self._logprobs = np.full(rows, np.nan, np.float32)
        self._margins = np.full(rows, np.nan, np.float32)
        self._top: list[TopLogprobs | None] = [None] * rows

    def collect(self, hidden: np.ndarray, first: int, last: int) -> None:
        """Keep the last hidden state of sampled rows that end in tokens first..last-1."""
        for i, row in enumerate(self.sampled):
            end = int(self.batch.query_start[row + 1]) - 1
            if first <= end < last:
                self.hidden[i] = hidden[end - first]

    def draw(self, row: int, logits: np.ndarray, best: int, stats: np.ndarray) -> None:
        """Draw the row's token; `stats`: largest, second largest, log of the sum of exp."""
        sampling = self.batch.sampling[row]
        token = draw(logits, best, sampling)
        self._ids[row] = token
        self._logprobs[row] = logits[token] - stats[2]
        self._margins[row] = stats[0] - stats[1]
        if sampling.top_logprobs:
            self._top[row] = alternatives(
                logits[None], stats[2:], np.array([token]), sampling.top_logprobs
            )

    def result(self, prepare_us: float, forward_us: float, sample_us: float) -> StepResult:
        return StepResult(
            token_ids=self._ids,
            logprobs=self._logprobs,
            margins=self._margins,
            top=self._top,
            prompt=[_joined(self.batch, row, parts) for row, parts in enumerate(self.parts)],
            prepare_us=prepare_us,
            forward_us=forward_us,
            sample_us=sample_us,
        )


def _joined(batch: StepBatch, row: int, parts: list[TopLogprobs]) -> TopLogprobs | None:
    """The row's prompt log-probabilities in one piece; None when it asked for none."""
    k = batch.prompt_logprobs[row]
    if k is None:
        return None
    if not parts:
        return TopLogprobs(
            np.zeros((0, k), np.int64), np.zeros((0, k), np.float32), np.zeros(0, np.float32),
            np.zeros(0, np.int64),
        )  # fmt: skip
    return TopLogprobs(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("ids", "logprobs", "chosen", "rank")
        )
    )


def _allocate(config: LlamaConfig, kind: int, positions: int, threads: int, tile: int) -> Buffers:
    """Working memory for steps of MAX_TOKENS tokens."""
    q = config.heads * config.head_dim
    qkv = padded_columns(q + 2 * config.kv_heads * config.head_dim)
    widest = max(config.dim, config.ffn, q)
    vectors = max(MAX_QUERIES, tile * (config.heads // config.kv_heads))
    reach = -(-positions // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
    return Buffers(
        hidden=aligned_zeros((MAX_TOKENS, config.dim), np.float32),
        qkv=aligned_zeros((MAX_TOKENS, qkv), np.float32),
        attention=aligned_zeros((MAX_TOKENS, q), np.float32),
        gate_up=aligned_zeros((MAX_TOKENS, padded_columns(2 * config.ffn)), np.float32),
        x=allocate_activations(kind, MAX_TOKENS, widest),
        row=aligned_zeros((threads, widest), np.float32),
        queries=aligned_zeros((threads, vectors, config.head_dim), np.float32),
        weights=aligned_zeros((threads, vectors, reach), np.float32),
        outputs=aligned_zeros((threads, vectors, config.head_dim), np.float32),
    )

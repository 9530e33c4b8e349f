"""Runs steps through PyTorch: the portable path, and the reference of the compiled decoder.

Owns the decoder and the KV cache. With INT8 and INT4 weights a request's results do not depend
on what shares the step, on chunk boundaries or on prefix hits (tested with MKL; see
`kernels.torch_ops.paged_attention` for what that rests on). With float32 weights the last bits
do: the BLAS orders the additions of a product by its number of rows.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import StepBatch
from engine.footprint import Footprint
from engine.gguf import GGUFFile, Tensor
from engine.llama import LlamaConfig
from engine.step_runner import StepRunner
from engine.torch_decoder import Cache, Group, Inputs, TorchDecoder
from engine.weights import KINDS, WeightFormat, packing_bytes, weight_bytes
from kernels.torch_ops import SEGMENT

QUERIES = 128
"""Tokens of one request whose attention is computed at once: bounds the memory of scores."""

GATHERED = 8192
"""Positions of several rows whose keys and values are gathered at once: bounds their memory."""


def load_torch_runner(
    file: GGUFFile,
    config: LlamaConfig,
    weights: WeightFormat,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    threads: int,
) -> TorchRunner:
    """A runner for the file's weights; the sizes are taken as checked.

    Sets PyTorch's threads for the whole process. Raises ModelFileError for a file whose tensors
    do not fit the metadata.
    """
    torch.set_num_threads(threads)
    return TorchRunner(
        config,
        TorchDecoder(file, config, weights, max_model_len),
        file.tensor("token_embd.weight", (config.vocab_size, config.dim)),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
    )


def footprint(
    config: LlamaConfig, weights: WeightFormat, max_model_len: int, threads: int
) -> Footprint:
    """What `load_torch_runner` will allocate: weights like the compiled ones, a float32 cache.
    Working memory comes and goes with each step."""
    return Footprint(
        weights=weight_bytes(config, KINDS[weights], max_model_len),
        working=0,
        kv_token=2 * 4 * config.layers * config.kv_heads * config.head_dim,
        packing=packing_bytes(config),
    )


class TorchRunner(StepRunner[Inputs]):
    """`engine.batch.Runner` in PyTorch, on the CPU. `matmul`: what multiplies matrices."""

    matmul = f"torch {torch.__version__}"

    def __init__(
        self,
        config: LlamaConfig,
        decoder: TorchDecoder,
        embedding: Tensor,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
    ) -> None:
        super().__init__(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
        )
        self._decoder = decoder
        self._embedding = embedding
        shape = (config.layers, num_blocks * block_size, config.kv_heads, config.head_dim)
        self._cache = Cache(torch.zeros(shape), torch.zeros(shape))

    def _prepare(self, batch: StepBatch, first: int, last: int) -> Inputs:
        return Inputs(
            embeddings=torch.from_numpy(self._embedding.rows(batch.token_ids[first:last])),
            positions=torch.from_numpy(batch.positions[first:last].astype(np.int64)),
            slots=torch.from_numpy(batch.slot_mapping[first:last].astype(np.int64)),
            groups=_groups(batch, first, last, self.block_size),
        )

    @torch.inference_mode()
    def _forward(self, inputs: Inputs) -> np.ndarray:
        return self._decoder.forward(inputs, self._cache).numpy()

    @torch.inference_mode()
    def _head(self, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logits = self._decoder.logits(torch.from_numpy(hidden)).numpy()
        top = np.partition(logits, -2, axis=1)[:, :-3:-1].astype(np.float64)
        # Row by row: the order of a row's additions must not depend on how many rows there are.
        sums = [np.exp(row - row.max()).sum(dtype=np.float64) for row in logits]
        return logits, logits.argmax(axis=1), np.column_stack([top, top[:, 0] + np.log(sums)])


def _groups(batch: StepBatch, first: int, last: int, block_size: int) -> list[Group]:
    """Tokens first..last-1 of the step as groups: neighbouring rows with equally many tokens
    share one as far as GATHERED allows, long chunks are cut after QUERIES tokens."""
    groups: list[Group] = []
    spans: list[tuple[int, int, int]] = []
    tokens = reach = 0
    for row, begin, end in _spans(batch, first, last):
        context = int(batch.positions[end - 1]) + 1
        reach = max(reach, context)
        if spans and (end - begin != tokens or reach * (len(spans) + 1) > GATHERED):
            groups.append(_group(batch, spans, first, block_size))
            spans, reach = [], context
        tokens = end - begin
        spans.append((row, begin, end))
    return [*groups, _group(batch, spans, first, block_size)]


def _spans(batch: StepBatch, first: int, last: int) -> list[tuple[int, int, int]]:
    """(row, begin, end) of runs of at most QUERIES tokens of one row, in order."""
    spans = []
    for row in range(batch.query_start.size - 1):
        begin = max(int(batch.query_start[row]), first)
        end = min(int(batch.query_start[row + 1]), last)
        spans += [(row, at, min(at + QUERIES, end)) for at in range(begin, end, QUERIES)]
    return spans


def _group(
    batch: StepBatch, spans: list[tuple[int, int, int]], first: int, block_size: int
) -> Group:
    """Spans of equal length, neighbours in the step."""
    start, end = spans[0][1], spans[-1][2]
    positions = batch.positions[start:end].reshape(len(spans), -1)
    contexts = positions[:, -1:] + 1
    reach = -(-int(contexts.max()) // SEGMENT) * SEGMENT
    # A row's own last position stands for those past its context, never another request's data.
    seen = np.minimum(np.arange(reach), contexts - 1)
    tables = batch.block_tables[[row for row, _, _ in spans]].astype(np.int64)
    blocks = np.take_along_axis(tables, seen // block_size, axis=1)
    return Group(
        start=start - first,
        slots=torch.from_numpy(blocks * block_size + seen % block_size),
        hidden=torch.from_numpy(np.arange(reach) > positions[:, :, None]),
    )

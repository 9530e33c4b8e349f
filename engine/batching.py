"""Lays a scheduled step out as the arrays that the runner takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.batch import RowSampling, StepBatch
from engine.request import Request
from engine.step import Step


class BatchBuilder:
    """Builds `StepBatch`es. It mirrors the block tables of all seats in one int32 array and copies
    only what a table has gained since the last step."""

    def __init__(self, *, max_running: int, block_size: int, max_tokens: int) -> None:
        """`max_tokens`: longest sequence."""
        self._block_size = block_size
        width = -(-max_tokens // block_size)
        self._tables = np.full((max_running, width), -1, np.int32)
        self._owner = [-1] * max_running
        self._filled = [0] * max_running

    def build(self, step: Step) -> StepBatch:
        """Arrays as `StepBatch` describes them, decode rows first."""
        requests = step.requests
        lengths = [1] * len(step.decodes) + [chunk.length for chunk in step.chunks]
        starts = [r.computed for r in step.decodes] + [chunk.start for chunk in step.chunks]
        ids = [request.tokens[-1] for request in step.decodes]
        for chunk in step.chunks:
            ids += chunk.request.tokens[chunk.start : chunk.start + chunk.length]
        counts = np.array(lengths, np.int64)
        begin = np.array(starts, np.int64)
        query_start = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        row_of = np.repeat(np.arange(len(lengths)), counts)
        positions = np.arange(len(ids)) - query_start[row_of] + begin[row_of]
        tables = self._block_tables(requests)
        blocks = tables[row_of, positions // self._block_size].astype(np.int64)
        return StepBatch(
            token_ids=np.array(ids, np.int64),
            positions=positions.astype(np.int32),
            query_start=query_start.astype(np.int32),
            context_lens=(begin + counts).astype(np.int32),
            block_tables=tables,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            sampling=self._sampling(step),
            **self._prompt_logprobs(step),
        )

    def _block_tables(self, requests: list[Request]) -> np.ndarray:
        width = 1
        for request in requests:
            row, table = request.row, request.block_table
            if self._owner[row] != request.admission:
                self._owner[row] = request.admission
                self._filled[row] = 0
                self._tables[row] = -1
            filled = self._filled[row]
            if filled < len(table):
                self._tables[row, filled : len(table)] = table[filled:]
                self._filled[row] = len(table)
            width = max(width, len(table))
        return self._tables[[request.row for request in requests], :width]

    def _sampling(self, step: Step) -> list[RowSampling | None]:
        rows: list[RowSampling | None] = [self._row(request) for request in step.decodes]
        rows += [self._row(chunk.request) if chunk.last else None for chunk in step.chunks]
        return rows

    def _row(self, request: Request) -> RowSampling:
        params = request.params
        return RowSampling(
            params.temperature,
            params.top_p,
            params.top_k,
            params.seed,
            len(request.tokens),
            max(params.logprobs or 0, request.record_top),
        )

    def _prompt_logprobs(self, step: Step) -> dict[str, list[Any]]:
        wanted: list[int | None] = [None] * step.rows
        targets: list[np.ndarray | None] = [None] * step.rows
        for row, chunk in enumerate(step.chunks, start=len(step.decodes)):
            request = chunk.request
            if request.params.prompt_logprobs is None or request.output_len:
                continue
            following = request.tokens[chunk.start + 1 : chunk.start + chunk.length + 1]
            wanted[row] = request.params.prompt_logprobs
            targets[row] = np.array(following, np.int64)
        return {"prompt_logprobs": wanted, "prompt_targets": targets}

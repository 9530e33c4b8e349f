"""Lays a scheduled step out as the arrays that the runner takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.batch import RowSampling, StepBatch
from engine.request import Request
from engine.seats import Seats
from engine.step import Step


def build_batch(step: Step, seats: Seats, rows: np.ndarray, block_size: int) -> StepBatch:
    """Arrays as `StepBatch` describes them, decode rows first; `rows` is `Seats.update(step)`."""
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
    tables = seats.tables[rows, : int(seats.blocks[rows].max())]
    blocks = tables[row_of, positions // block_size].astype(np.int64)
    return StepBatch(
        token_ids=np.array(ids, np.int64),
        positions=positions.astype(np.int32),
        query_start=query_start.astype(np.int32),
        context_lens=(begin + counts).astype(np.int32),
        block_tables=tables,
        slot_mapping=blocks * block_size + positions % block_size,
        sampling=_sampling(step),
        **_prompt_logprobs(step),
    )


def _sampling(step: Step) -> list[RowSampling | None]:
    rows: list[RowSampling | None] = [_row(request) for request in step.decodes]
    rows += [_row(chunk.request) if chunk.last else None for chunk in step.chunks]
    return rows


def _row(request: Request) -> RowSampling:
    params = request.params
    return RowSampling(
        params.temperature,
        params.top_p,
        params.top_k,
        params.seed,
        len(request.tokens),
        max(params.logprobs or 0, request.record_top),
    )


def _prompt_logprobs(step: Step) -> dict[str, list[Any]]:
    """Which rows want their prompt's log-probabilities, and of which tokens. A prompt that is
    recomputed after preemption has had them already."""
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

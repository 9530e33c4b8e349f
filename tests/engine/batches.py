"""Builds the steps that drive a runner directly, without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.batch import RowSampling, Runner, StepBatch, StepResult


def greedy(top_logprobs: int = 0) -> RowSampling:
    return RowSampling(0.0, 1.0, 0, 0, 0, top_logprobs)


@dataclass
class Row:
    """One request's share of a step: `ids` at positions start.., in the KV `blocks`."""

    ids: list[int]
    start: int
    blocks: list[int]
    sampling: RowSampling | None = field(default_factory=greedy)
    prompt_logprobs: int | None = None
    targets: list[int] | None = None


def make_step(rows: list[Row], block_size: int) -> StepBatch:
    """The step that computes all rows' tokens."""
    width = max(len(row.blocks) for row in rows)
    tables = np.full((len(rows), width), -1, np.int32)
    tokens, positions, slots, starts = [], [], [], [0]
    for i, row in enumerate(rows):
        place = np.arange(row.start, row.start + len(row.ids))
        tables[i, : len(row.blocks)] = row.blocks
        tokens += row.ids
        positions += place.tolist()
        slots += (
            np.array(row.blocks)[place // block_size] * block_size + place % block_size
        ).tolist()
        starts.append(len(tokens))
    return StepBatch(
        token_ids=np.array(tokens, np.int64),
        positions=np.array(positions, np.int32),
        query_start=np.array(starts, np.int32),
        context_lens=np.array([row.start + len(row.ids) for row in rows], np.int32),
        block_tables=tables,
        slot_mapping=np.array(slots, np.int64),
        sampling=[row.sampling for row in rows],
        prompt_logprobs=[row.prompt_logprobs for row in rows],
        prompt_targets=[
            None if row.targets is None else np.array(row.targets, np.int64) for row in rows
        ],
    )


def run(runner: Runner, rows: list[Row]) -> StepResult:
    return runner.run(make_step(rows, runner.block_size))


def all_logprobs(runner: Runner, ids: list[int], blocks: list[int]) -> np.ndarray:
    """Log-probabilities of every token after each of `ids`, float32 [len(ids), V]."""
    row = Row(ids, 0, blocks, None, runner.vocab_size, [0] * len(ids))
    prompt = run(runner, [row]).prompt[0]
    result = np.empty((len(ids), runner.vocab_size), np.float32)
    np.put_along_axis(result, prompt.ids, prompt.logprobs, axis=1)
    return result

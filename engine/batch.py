"""What one engine step computes: the contract between the scheduler's side and the runner.

Plain NumPy, no torch, so that scheduling is tested without a model. A step is a ragged batch of
rows (one per request): decode rows first, prefill chunks after. Not for request state: that is
`engine.request`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to draw one row's next token.

    `temperature` 0 is greedy. `seed` with `position` (index of the token to be drawn in the
    sequence) fixes the draw, so a row's token never depends on its batch mates. `top_logprobs`
    is how many alternatives to report (0: only the drawn token's log-probability).
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int
    top_logprobs: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One scheduled step of R rows and T tokens.

    Shapes: token_ids int64 [T]; positions int32 [T]; query_start int32 [R+1], row r owns tokens
    query_start[r]:query_start[r+1]; context_lens int32 [R], tokens in the KV cache once the step
    has run (earlier + this step's); block_tables int32 [R, B], padded with -1; slot_mapping
    int64 [T], block * block_size + offset where each token's K/V goes. `sampling[r]` is None for
    a prefill chunk that is not the prompt's last. `prompt_logprobs[r]` is None or the number of
    alternatives wanted for every token of the row except the prompt's first.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    sampling: list[RowSampling | None]
    prompt_logprobs: list[int | None]
    prompt_targets: list[np.ndarray | None] = field(default_factory=list)
    """For rows with prompt_logprobs: int64 ids of the tokens that follow each of the row's tokens
    (the last chunk has one fewer target than tokens: its last position predicts a new token)."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Alternatives at consecutive positions: ids int64 [P, k], logprobs float32 [P, k], sorted
    from likely to unlikely; `chosen` float32 [P] and `rank` int64 [P] (1 = most likely) are those
    of the token that stands there."""

    ids: np.ndarray
    logprobs: np.ndarray
    chosen: np.ndarray
    rank: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, row by row (length R; entries of unsampled rows are -1 / NaN / None).

    token_ids int64 [R]; logprobs float32 [R], natural log of the drawn token's probability under
    the raw (temperature 1, untruncated) distribution; margins float32 [R], top-1 minus top-2
    log-probability; durations in microseconds.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    margins: np.ndarray
    top: list[TopLogprobs | None]
    prompt: list[TopLogprobs | None]
    prepare_us: float
    forward_us: float
    sample_us: float
    device_us: float = float("nan")


class Runner(Protocol):
    """Executes steps on a device. It owns weights and KV cache and no request state."""

    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step; raises `engine.errors.RunnerError` when the device fails."""
        ...

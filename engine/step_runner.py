"""What every runner does around its device: checks a step, cuts it, samples, collects results.

A runner of one device derives from `StepRunner` and supplies the decoder and the output head.
Not for device memory or arithmetic.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np

from engine.batch import StepBatch, StepResult, TopLogprobs
from engine.errors import RunnerError
from engine.sampler import alternatives, draw

MAX_TOKENS = 512
"""Tokens that go through the layers at once; larger steps are cut, which changes no result."""

HEAD_ROWS = 64
"""Rows of logits held at once: bounds the memory of prompt log-probabilities."""

Inputs = TypeVar("Inputs")
"""What a runner makes of some tokens of a step before its layers run."""


class StepRunner(ABC, Generic[Inputs]):
    """`engine.batch.Runner` without a device. One step at a time, from one thread."""

    def __init__(
        self, *, block_size: int, num_blocks: int, max_model_len: int, vocab_size: int
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size

    @abstractmethod
    def _prepare(self, batch: StepBatch, first: int, last: int) -> Inputs:
        """Inputs of the layers for tokens first..last-1 of the step, at most MAX_TOKENS."""

    @abstractmethod
    def _forward(self, inputs: Inputs) -> np.ndarray:
        """Run all layers and fill the cache; float32 [last - first, dim], before the final norm,
        valid until the next call."""

    @abstractmethod
    def _head(self, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of n hidden rows, n <= HEAD_ROWS: logits float32 [n, V], argmax int64 [n] (the lowest
        of equals), and float64 [n, 3]: largest, second largest, log of the sum of exp(logit).
        Valid until the next call."""

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step; raises RunnerError for a step that does not fit this runner."""
        began = time.perf_counter_ns()
        self._check(batch)
        outcome = Outcome(batch)
        prepare = time.perf_counter_ns() - began
        forward = sample = 0
        for first in range(0, batch.token_ids.size, MAX_TOKENS):
            last = min(first + MAX_TOKENS, batch.token_ids.size)
            mark = time.perf_counter_ns()
            inputs = self._prepare(batch, first, last)
            ready = time.perf_counter_ns()
            hidden = self._forward(inputs)
            computed = time.perf_counter_ns()
            prepare += ready - mark
            forward += computed - ready
            outcome.collect(hidden, first, last)
            self._prompt_logprobs(outcome, hidden, first, last)
            sample += time.perf_counter_ns() - computed
        mark = time.perf_counter_ns()
        self._sample(outcome)
        sample += time.perf_counter_ns() - mark
        return outcome.result(prepare / 1e3, forward / 1e3, sample / 1e3)

    def _check(self, batch: StepBatch) -> None:
        """Refuse what a device would turn into a write outside the cache."""
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

    def _sample(self, outcome: Outcome) -> None:
        """Draw a token for every row that wants one."""
        rows = outcome.sampled
        for start in range(0, len(rows), HEAD_ROWS):
            part = rows[start : start + HEAD_ROWS]
            hidden = np.stack([outcome.hidden[row] for row in part])
            logits, best, stats = self._head(hidden)
            for i, row in enumerate(part):
                outcome.draw(row, logits[i], int(best[i]), stats[i])

    def _prompt_logprobs(self, outcome: Outcome, hidden: np.ndarray, first: int, last: int) -> None:
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
                logits, _, stats = self._head(hidden[start - first : stop - first])
                wanted = targets[start - base : stop - base]
                outcome.parts[row].append(alternatives(logits, stats[:, 2], wanted, k))


class Outcome:
    """A step's results while they come together."""

    def __init__(self, batch: StepBatch) -> None:
        rows = batch.query_start.size - 1
        self.batch = batch
        self.sampled = [row for row in range(rows) if batch.sampling[row] is not None]
        self.hidden: dict[int, np.ndarray] = {}
        self.parts: list[list[TopLogprobs]] = [[] for _ in range(rows)]
        self._ids = np.full(rows, -1, np.int64)
        self._logprobs = np.full(rows, np.nan, np.float32)
        self._margins = np.full(rows, np.nan, np.float32)
        self._top: list[TopLogprobs | None] = [None] * rows

    def collect(self, hidden: np.ndarray, first: int, last: int) -> None:
        """Keep the last hidden state of sampled rows that end in tokens first..last-1."""
        for row in self.sampled:
            end = int(self.batch.query_start[row + 1]) - 1
            if first <= end < last:
                self.hidden[row] = hidden[end - first].copy()

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

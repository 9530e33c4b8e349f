"""A model without a model: its next token is a hash of the tokens it finds in its paged cache.

Because it reads the context back through the block tables, a block that is shared wrongly, freed
too early or not recomputed shows as a wrong token; `expected` says what is right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import xxhash

from engine.batch import RowSampling, StepBatch, StepResult, TopLogprobs
from engine.errors import RunnerError
from tests.waiting import PATIENCE_S, until

EOS = 256
VOCAB = 260


class ByteTokenizer:
    """One token per byte; 256 ends an answer, the ids above it are control tokens."""

    vocab_size = VOCAB
    eos_ids = frozenset({EOS})
    bos_id: int | None = None
    fingerprint = "bytes"
    control_tokens: tuple[str, ...] = ()
    longest_token = 4

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")


def draw(context: Sequence[int] | np.ndarray, sampling: RowSampling) -> int:
    """The next token: printable ASCII, a function of the context and, if sampled, of the seed."""
    seed = 0 if sampling.temperature == 0 else (sampling.seed * 1_000_003 + sampling.position)
    data = np.asarray(context, np.int64).tobytes()
    return 32 + xxhash.xxh3_64_intdigest(data, seed=seed & (2**64 - 1)) % 95


def expected(prompt: Sequence[int], count: int, *, temperature: float = 0.0, seed: int = 0) -> list:
    """The tokens a request must get, whatever happened to it on the way."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(draw(tokens, RowSampling(temperature, 1.0, 0, seed, len(tokens), 0)))
    return tokens[len(prompt) :]


class FakeRunner:
    """Runs steps on a paged cache of token ids. Tokens left in `script` are drawn first.

    `hold` stops the engine in the middle of a step, so that a test has all the time it needs."""

    vocab_size = VOCAB

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 512,
        delay_s: float = 0.0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.delay_s = delay_s
        self.script: list[int] = []
        self.fail_next = 0
        self.steps: list[StepBatch] = []
        self._hold_at = 0
        self._free, self._held = threading.Event(), threading.Event()
        self._free.set()
        self._cache = np.full(num_blocks * block_size, -1, np.int64)

    def hold(self, *, after: int) -> None:
        """Let `after` more steps end; the next one waits for `release`."""
        self._hold_at = len(self.steps) + after
        self._held.clear()
        self._free.clear()

    def until_held(self) -> int:
        """Wait until a step is held; the number of steps begun, that one included."""
        until(self._held.is_set, "a step is held")
        return len(self.steps)

    def release(self) -> None:
        self._free.set()

    def run(self, batch: StepBatch) -> StepResult:
        self.steps.append(batch)
        if len(self.steps) > self._hold_at and not self._free.is_set():
            self._held.set()
            self._free.wait(PATIENCE_S)
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.fail_next:
            self.fail_next -= 1
            raise RunnerError("planted failure")
        assert len(set(batch.slot_mapping.tolist())) == len(batch.token_ids), "a slot written twice"
        assert batch.slot_mapping.min() >= 0
        self._cache[batch.slot_mapping] = batch.token_ids
        rows = len(batch.sampling)
        tokens = np.full(rows, -1, np.int64)
        logprobs = np.full(rows, np.nan, np.float32)
        top: list[TopLogprobs | None] = [None] * rows
        prompt: list[TopLogprobs | None] = [None] * rows
        for row, sampling in enumerate(batch.sampling):
            context = self._context(batch, row)
            if sampling is not None:
                tokens[row] = self._draw(context, sampling)
                logprobs[row] = -0.5
                if sampling.top_logprobs:
                    top[row] = _top(tokens[row : row + 1], sampling.top_logprobs)
            count = batch.prompt_logprobs[row]
            if count is not None:
                targets = batch.prompt_targets[row]
                assert targets is not None
                prompt[row] = _top(targets, count)
        margins = np.where(tokens >= 0, 0.25, np.nan).astype(np.float32)
        return StepResult(tokens, logprobs, margins, top, prompt, 1.0, 2.0, 3.0)

    def _context(self, batch: StepBatch, row: int) -> np.ndarray:
        length = int(batch.context_lens[row])
        table = batch.block_tables[row]
        places = np.arange(length)
        return self._cache[
            table[places // self.block_size] * self.block_size + places % self.block_size
        ]

    def _draw(self, context: np.ndarray, sampling: RowSampling) -> int:
        if self.script:
            return self.script.pop(0)
        return draw(context, sampling)


def _top(chosen: np.ndarray, count: int) -> TopLogprobs:
    ids = (chosen[:, None] + np.arange(count)[None, :]) % VOCAB
    logprobs = -0.5 - np.arange(count, dtype=np.float32)[None, :].repeat(len(chosen), 0)
    return TopLogprobs(
        ids=ids.astype(np.int64),
        logprobs=logprobs.astype(np.float32),
        chosen=np.full(len(chosen), -0.5, np.float32),
        rank=np.ones(len(chosen), np.int64),
    )

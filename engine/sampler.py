"""Chooses tokens from logits: greedy, or seeded with temperature, top-k and top-p.

A draw depends on (seed, position) and the row's own logits only. Log-probabilities reported are
raw: temperature 1, nothing cut off. Not for stop conditions.
"""

from __future__ import annotations

import numpy as np

from engine.batch import RowSampling, TopLogprobs
from kernels.cpu_sample import draw_token, top_tokens

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
COLDEST = 1e-5
"""Temperatures below are greedy: logits divided by them would not be finite."""


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on its arguments only.

    Two rounds of SplitMix64's finalizer (Steele, Lea and Flood 2014) over seed and position.
    """
    state = seed & _MASK
    for salt in (position + 1, position + 2):
        state = (state + salt * _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def draw(logits: np.ndarray, best: int, sampling: RowSampling) -> int:
    """The token drawn from one row of logits, float32 [V]; `best` is its argmax.

    top-k cuts first, then top-p keeps the smallest set of most likely tokens whose share of what
    is left reaches top_p.
    """
    if sampling.temperature < COLDEST or sampling.top_k == 1:
        return best
    u = uniform(sampling.seed, sampling.position)
    # float(): the kernel is compiled for floats, and clients send 1 for 1.0.
    temperature, top_p = float(sampling.temperature), float(sampling.top_p)
    return draw_token(logits, logits[best], temperature, top_p, sampling.top_k, u)


def alternatives(
    logits: np.ndarray, log_total: np.ndarray, tokens: np.ndarray, k: int
) -> TopLogprobs:
    """Log-probabilities at P positions: logits float32 [P, V], log_total float64 [P] the log of
    the sum of exp(logits), tokens int64 [P] those that stand there, k alternatives each."""
    count = tokens.size
    k = min(k, logits.shape[1])
    ids = np.zeros((count, k), np.int64)
    chosen = np.zeros(count, np.float64)
    rank = np.zeros(count, np.int64)
    for i in range(count):
        row = logits[i]
        chosen[i] = row[tokens[i]]
        rank[i] = np.count_nonzero(row > row[tokens[i]]) + 1
        if k:
            ids[i] = top_tokens(row, k)
    top = np.take_along_axis(logits[:count], ids, axis=1) - log_total[:, None]
    return TopLogprobs(
        ids=ids,
        logprobs=top.astype(np.float32),
        chosen=(chosen - log_total).astype(np.float32),
        rank=rank,
    )

"""Chooses tokens from logits: greedy, or seeded with temperature, top-k and top-p.

A draw depends on (seed, position) and the row's own logits only. Log-probabilities reported are
raw: temperature 1, nothing cut off. Not for stop conditions.
"""

from __future__ import annotations

import numpy as np

from engine.batch import RowSampling, TopLogprobs

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
NUCLEUS_GUESS = 512
"""Tokens looked at first for top-p; nearly every nucleus is smaller."""


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
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[best])
    u = uniform(sampling.seed, sampling.position)
    limited = 0 < sampling.top_k < logits.size
    if not limited and sampling.top_p >= 1:
        cumulative = np.cumsum(weights)
        return _pick(cumulative, u)
    if limited:
        ids = most_likely(logits, sampling.top_k)
        total = weights[ids].sum()
    else:
        ids = most_likely(logits, min(NUCLEUS_GUESS, logits.size))
        total = weights.sum()
    cumulative = np.cumsum(weights[ids])
    if not limited and cumulative[-1] < sampling.top_p * total:
        ids = most_likely(logits, logits.size)
        cumulative = np.cumsum(weights[ids])
    kept = min(int(np.searchsorted(cumulative, sampling.top_p * total)) + 1, ids.size)
    return int(ids[_pick(cumulative[:kept], u)])


def _pick(cumulative: np.ndarray, u: float) -> int:
    """Index drawn by `u` from cumulative weights; never one of weight zero."""
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, cumulative.size - 1)


def most_likely(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest of float32 [V], largest first, lower ids first among equals."""
    if k >= logits.size:
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, logits.size - k)[logits.size - k]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: k - above.size]
    ids = np.concatenate([above, equal])
    return ids[np.lexsort((ids, -logits[ids]))]


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
            ids[i] = most_likely(row, k)
    top = np.take_along_axis(logits[:count], ids, axis=1) - log_total[:, None]
    return TopLogprobs(
        ids=ids,
        logprobs=top.astype(np.float32),
        chosen=(chosen - log_total).astype(np.float32),
        rank=rank,
    )

"""Draws a token from a row of logits without sorting the vocabulary.

Tokens fall into buckets by their distance from the largest logit; only the buckets that top-k or
top-p can reach are sorted. References: the definition, in `tests.engine.test_sampler`.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu_jit import kernel, part, reduction
from kernels.cpu_math import exp32

BUCKETS = 1024
BUCKETS_PER_NAT = np.float32(32)
"""Buckets per factor e of probability: the last one holds all below e**-32 of the best."""

SPAN = 256
"""Weights that are summed at once when nothing is cut off."""


@reduction
def _sum(weights):
    total = 0.0
    for i in range(weights.size):
        total += np.float64(weights[i])
    return total


@part
def _pick(weights, target):
    """Index at which the running sum passes `target`; the last one of weight if none does."""
    total, last = 0.0, 0
    for i in range(weights.size):
        if weights[i] > 0:
            total += np.float64(weights[i])
            last = i
            if total > target:
                break
    return last


@part
def _pick_any(weights, u):
    """Index drawn in proportion to the weights: by spans first, then within the span."""
    spans = (weights.size + SPAN - 1) // SPAN
    sums = np.empty(spans, np.float64)
    for s in range(spans):
        sums[s] = _sum(weights[s * SPAN : (s + 1) * SPAN])
    target = u * sums.sum()
    s, before = 0, 0.0
    while s < spans - 1 and before + sums[s] <= target:
        before += sums[s]
        s += 1
    return s * SPAN + _pick(weights[s * SPAN : (s + 1) * SPAN], target - before)


@part
def _candidates(logits, weights, top, inverse, top_p, top_k):
    """Ids, in order of id, of all tokens in the buckets that top-k or else top-p reaches."""
    scale = inverse * BUCKETS_PER_NAT
    counts = np.zeros(BUCKETS, np.int64)
    masses = np.zeros(BUCKETS, np.float64)
    buckets = np.empty(logits.size, np.int32)
    for i in range(logits.size):
        buckets[i] = np.int32(min((top - logits[i]) * scale, np.float32(BUCKETS - 1)))
    for i in range(logits.size):
        counts[buckets[i]] += 1
        masses[buckets[i]] += np.float64(weights[i])
    wanted = top_p * masses.sum()
    last, count, mass = 0, counts[0], masses[0]
    while last < BUCKETS - 1 and (count < top_k if top_k > 0 else mass < wanted):
        last += 1
        count += counts[last]
        mass += masses[last]
    ids = np.empty(count, np.int64)
    n = 0
    for i in range(logits.size):
        if buckets[i] <= last:
            ids[n] = i
            n += 1
    return ids


@kernel
def draw_token(logits, top, temperature, top_p, top_k, u):
    """The token drawn from logits float32 [V] whose largest is `top`, by `u` in [0, 1).

    temperature > 0. top_k (0: no limit) cuts first, then top_p keeps the smallest set of most
    likely tokens whose share of what is left reaches it; of equals, lower ids come first.
    """
    inverse = np.float32(1.0 / temperature)
    weights = np.empty(logits.size, np.float32)
    for i in range(logits.size):
        weights[i] = exp32((logits[i] - top) * inverse)
    limit = top_k if top_k < logits.size else 0
    if limit == 0 and top_p >= 1.0:
        return _pick_any(weights, u)
    ids = _candidates(logits, weights, top, inverse, top_p, limit)
    order = ids[np.argsort(-logits[ids], kind="mergesort")]
    if limit > 0:
        order = order[:limit]
    total = _sum(weights[order] if limit > 0 else weights)
    kept, mass = 0, 0.0
    while kept < order.size and mass < top_p * total:
        mass += np.float64(weights[order[kept]])
        kept += 1
    order = order[: max(kept, 1)]
    kept_weights = weights[order]
    return order[_pick(kept_weights, u * mass)]


FEW = 64
"""Up to this many alternatives are kept sorted by insertion; more are sorted outright."""


@kernel
def top_tokens(logits, k):
    """Ids int64 [k] of the k largest of float32 [V], 1 <= k <= V: largest first, of equals the
    lower id first."""
    if k > FEW:
        return np.argsort(-logits, kind="mergesort")[:k]
    ids = np.empty(k, np.int64)
    values = np.empty(k, np.float32)
    held = 0
    for i in range(logits.size):
        value = logits[i]
        if held == k and value <= values[k - 1]:
            continue
        place = held if held < k else k - 1
        while place > 0 and values[place - 1] < value:
            values[place], ids[place] = values[place - 1], ids[place - 1]
            place -= 1
        values[place], ids[place] = value, i
        held = min(held + 1, k)
    return ids

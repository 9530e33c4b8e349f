"""Attention over a paged KV cache on the CPU.

Layout: keys [layer, block, kv head, dim, block size], so that 16 scores are one vector of running
sums over dim; values [layer, block, kv head, block size, dim]. Each query goes through its own
positions in order, alone or in a tile, so a result never depends on the batch, the chunk or on
which blocks were reused. Block sizes are multiples of 16, dim a multiple of 16.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu_ir import LANES, scores_tile, values_tile
from kernels.cpu_jit import part, reduction
from kernels.cpu_math import exp32

MAX_QUERIES = 6
"""Query vectors (tokens x heads of one group) that share the reading of keys and values."""

_scores_1, _scores_2, _scores_3, _scores_6 = (scores_tile(n) for n in (1, 2, 3, 6))
_values_1_1, _values_1_4 = values_tile(1, 1), values_tile(1, 4)
_values_3_1, _values_3_4 = values_tile(3, 1), values_tile(3, 4)
_values_6_1, _values_6_4 = values_tile(6, 1), values_tile(6, 4)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)


@reduction
def maximum(row):
    top = _LOWEST
    for i in range(row.size):
        top = max(top, row[i])
    return top


@reduction
def total(row):
    result = _ZERO
    for i in range(row.size):
        result += row[i]
    return result


@part
def softmax_weights(row):
    """Replace scores by exp(score - max); returns the float32 to multiply the outcome by."""
    top = maximum(row)
    for i in range(row.size):
        row[i] = exp32(row[i] - top)
    return _ONE / total(row)


@part
def _score_block(q, count, keys, stride, dim, out, out_stride):
    """Scores of `count` queries (addresses) against 16 keys."""
    i = 0
    while i < count:
        left = count - i
        args = (q + 4 * dim * i, keys, stride, dim, out + out_stride * i, out_stride)
        if left >= 6:
            _scores_6(args)
            i += 6
        elif left >= 3:
            _scores_3(args)
            i += 3
        elif left == 2:
            _scores_2(args)
            i += 2
        else:
            _scores_1(args)
            i += 1


@part
def _add_values(p, p_stride, count, values, dim, positions, out):
    """Add `positions` weighted values to the outputs [count, dim] of `count` queries."""
    d = 0
    while d < dim:
        wide = d + 4 * LANES <= dim
        i = 0
        while i < count:
            left = count - i
            args = (
                p + p_stride * i, p_stride, values + 4 * d, 4 * dim, positions,
                out + 4 * (dim * i + d), 4 * dim,
            )  # fmt: skip
            if left >= 6:
                if wide:
                    _values_6_4(args)
                else:
                    _values_6_1(args)
                i += 6
            elif left >= 3:
                if wide:
                    _values_3_4(args)
                else:
                    _values_3_1(args)
                i += 3
            else:
                if wide:
                    _values_1_4(args)
                else:
                    _values_1_1(args)
                i += 1
        d += 4 * LANES if wide else LANES


@part
def attend(queries, tokens, first_context, keys, values, table, kv_head, weights, out):
    """Attention of a tile of consecutive tokens of one request, for one group of heads.

    queries: float32 [tokens * heads, dim], token-major, scaled; token t sees positions
    0 .. first_context + t - 1 (first_context >= 1). keys, values: one layer of the cache; table:
    int32 block ids of the request. weights: scratch float32 [>= tokens * heads, >= context
    rounded up to 16]. out: float32 [tokens * heads, dim].
    """
    count, dim = queries.shape
    heads = count // tokens
    size = keys.shape[3]
    longest = first_context + tokens - 1
    stride = 4 * weights.shape[1]
    q, p, o = queries.ctypes.data, weights.ctypes.data, out.ctypes.data
    blocks = (longest + size - 1) // size
    for b in range(blocks):
        block = keys[table[b], kv_head].ctypes.data
        for half in range(0, min(size, longest - b * size), LANES):
            place = p + 4 * (b * size + half)
            _score_block(q, count, block + 4 * half, 4 * size, dim, place, stride)
    for i in range(count):
        context = first_context + i // heads
        factor = softmax_weights(weights[i, :context])
        weights[i, context:longest] = _ZERO
        queries[i, 0] = factor
    out[:count] = _ZERO
    for b in range(blocks):
        block = values[table[b], kv_head].ctypes.data
        positions = min(size, longest - b * size)
        _add_values(p + 4 * b * size, stride, count, block, dim, positions, o)
    for i in range(count):
        factor = queries[i, 0]
        for d in range(dim):
            out[i, d] *= factor

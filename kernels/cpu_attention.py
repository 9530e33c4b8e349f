"""Attention over a paged KV cache on the CPU.

Layout: keys [layer, block, kv head, dim, block size], so that 16 scores are one vector of running
sums over dim; values [layer, block, kv head, block size, dim]. Both float32, or float16 held as
uint16, which halves what a step reads once caches outgrow the processor's. Each query goes through
its own positions in order, alone or in a tile, so a result never depends on the batch, the chunk
or on which blocks were reused. Block sizes and dim are multiples of 16.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu_ir import LANES, prefetch, store_float, store_half
from kernels.cpu_jit import part, reduction
from kernels.cpu_math import exp32, largest
from kernels.cpu_memory import LINE
from kernels.cpu_tiles import scores_tile, values_tile

MAX_QUERIES = 6
"""Query vectors (tokens x heads of one group) that share the reading of keys and values."""

_scores_1, _scores_2, _scores_3, _scores_6 = (scores_tile(n, False) for n in (1, 2, 3, 6))
_half_scores_1, _half_scores_2, _half_scores_3, _half_scores_6 = (
    scores_tile(n, True) for n in (1, 2, 3, 6)
)
_values_1_1, _values_3_1, _values_6_1 = (values_tile(n, 1, False) for n in (1, 3, 6))
_values_1_4, _values_3_4, _values_6_4 = (values_tile(n, 4, False) for n in (1, 3, 6))
_half_values_1_1, _half_values_3_1, _half_values_6_1 = (values_tile(n, 1, True) for n in (1, 3, 6))
_half_values_1_4, _half_values_3_4, _half_values_6_4 = (values_tile(n, 4, True) for n in (1, 3, 6))
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@reduction
def total(row):
    result = _ZERO
    for i in range(row.size):
        result += row[i]
    return result


@part
def softmax_weights(row):
    """Replace scores by exp(score - max); returns the float32 to multiply the outcome by."""
    top = largest(row)
    for i in range(row.size):
        row[i] = exp32(row[i] - top)
    return _ONE / total(row)


@part
def _score_tile(half, rows, args):
    """One tile of 1, 2, 3 or 6 queries."""
    if half:
        if rows == 6:
            _half_scores_6(args)
        elif rows == 3:
            _half_scores_3(args)
        elif rows == 2:
            _half_scores_2(args)
        else:
            _half_scores_1(args)
    elif rows == 6:
        _scores_6(args)
    elif rows == 3:
        _scores_3(args)
    elif rows == 2:
        _scores_2(args)
    else:
        _scores_1(args)


@part
def _value_tile(half, wide, rows, args):
    """One tile of 1, 3 or 6 queries and 64 (`wide`) or 16 output columns."""
    if half and wide:
        if rows == 6:
            _half_values_6_4(args)
        elif rows == 3:
            _half_values_3_4(args)
        else:
            _half_values_1_4(args)
    elif half:
        if rows == 6:
            _half_values_6_1(args)
        elif rows == 3:
            _half_values_3_1(args)
        else:
            _half_values_1_1(args)
    elif wide:
        if rows == 6:
            _values_6_4(args)
        elif rows == 3:
            _values_3_4(args)
        else:
            _values_1_4(args)
    elif rows == 6:
        _values_6_1(args)
    elif rows == 3:
        _values_3_1(args)
    else:
        _values_1_1(args)


@part
def _score_block(half, q, count, keys, stride, dim, out, out_stride):
    """Scores of `count` queries (addresses) against 16 keys."""
    i = 0
    while i < count:
        left = count - i
        rows = 6 if left >= 6 else 3 if left >= 3 else left
        args = (q + 4 * dim * i, keys, stride, dim, out + out_stride * i, out_stride)
        _score_tile(half, rows, args)
        i += rows


@part
def _add_values(half, p, p_stride, count, values, dim, positions, out):
    """Add `positions` weighted values to the outputs [count, dim] of `count` queries."""
    width = 2 if half else 4
    d = 0
    while d < dim:
        wide = d + 4 * LANES <= dim
        i = 0
        while i < count:
            left = count - i
            rows = 6 if left >= 6 else 3 if left >= 3 else 1
            args = (
                p + p_stride * i, p_stride, values + width * d, width * dim, positions,
                out + 4 * (dim * i + d), 4 * dim,
            )  # fmt: skip
            _value_tile(half, wide, rows, args)
            i += rows
        d += 4 * LANES if wide else LANES


@part
def _prefetch_block(start, size):
    """Ask for one block's keys or values of one head."""
    for line in range(0, size, LINE):
        prefetch(start + line)


@part
def store(numbers, array, index, stride):
    """Write float32 `numbers` into the flat float32 or uint16 (float16) `array`.

    From element `index` on, `stride` elements apart.
    """
    at = array.ctypes.data + index * array.itemsize
    step = stride * array.itemsize
    for i in range(numbers.size):
        if array.itemsize == 2:
            store_half(at + i * step, numbers[i])
        else:
            store_float(at + i * step, numbers[i])


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
    size, item = keys.shape[3], keys.itemsize
    half = item == 2
    longest = first_context + tokens - 1
    stride = 4 * weights.shape[1]
    q, p, o = queries.ctypes.data, weights.ctypes.data, out.ctypes.data
    block_bytes = size * dim * item
    pool, value_pool = keys.ctypes.data, values.ctypes.data
    kv_heads = keys.shape[1]
    blocks = (longest + size - 1) // size
    for b in range(blocks):
        if b + 1 < blocks:
            ahead = np.int64(table[b + 1]) * kv_heads + kv_head
            _prefetch_block(pool + ahead * block_bytes, block_bytes)
        block = pool + (np.int64(table[b]) * kv_heads + kv_head) * block_bytes
        for part_start in range(0, min(size, longest - b * size), LANES):
            place = p + 4 * (b * size + part_start)
            keys_at = block + item * part_start
            _score_block(half, q, count, keys_at, item * size, dim, place, stride)
    first = np.int64(table[0]) * kv_heads + kv_head
    _prefetch_block(value_pool + first * block_bytes, block_bytes)
    for i in range(count):
        context = first_context + i // heads
        # The query is spent: its first number holds the factor until the end.
        queries[i, 0] = softmax_weights(weights[i, :context])
        weights[i, context:longest] = _ZERO
    out[:count] = _ZERO
    for b in range(blocks):
        if b + 1 < blocks:
            ahead = np.int64(table[b + 1]) * kv_heads + kv_head
            _prefetch_block(value_pool + ahead * block_bytes, block_bytes)
        block = value_pool + (np.int64(table[b]) * kv_heads + kv_head) * block_bytes
        positions = min(size, longest - b * size)
        _add_values(half, p + 4 * b * size, stride, count, block, dim, positions, o)
    for i in range(count):
        factor = queries[i, 0]
        for d in range(dim):
            out[i, d] *= factor

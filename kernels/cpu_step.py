"""The Llama decoder on the CPU as two compiled functions: all layers, and the output head.

Every thread runs the whole function and takes its share of each phase (see `kernels.cpu_threads`).
The order of every sum depends on the token's own row and position only, so a token's result is
bit-for-bit the same whatever shares the step with it. Reference: `kernels.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels.cpu_attention import MAX_QUERIES, attend, store
from kernels.cpu_ir import LANES
from kernels.cpu_jit import kernel, part, reduction
from kernels.cpu_math import exp32, prepare_row, rms_norm, rotate, swiglu
from kernels.cpu_matmul import Activations, matmul
from kernels.cpu_threads import barrier, next_item, share

# np.int64, here and below: Numba compiles a function anew for every literal int it is given.
QKV, OUTPUT, GATE_UP, DOWN = (np.int64(i) for i in range(4))
"""Order of a layer's matrices in Weights.linears."""

HEAD = np.int64(0)
"""Place of the output head in the last entry of Weights.linears."""

STORE, ADD = np.int64(0), np.int64(1)
"""What a product does with its output: replace it, or add to the residual stream."""

_ZERO = np.float32(0.0)


class Weights(NamedTuple):
    """A model's weights, packed by `kernels.cpu_matmul`."""

    kind: int
    """Format of the layers' matrices."""
    head_kind: int
    """Format of the output head."""
    packed: np.ndarray
    """uint8: all packed matrices."""
    scales: np.ndarray
    """float32: column scales of INT8 matrices."""
    linears: np.ndarray
    """int64 [layers + 1, 4, 4]: (offset in packed, offset in scales, padded outputs, inputs) of
    each matrix; the head is [layers, 0]."""
    norms: np.ndarray
    """float32 [2 * layers + 1, dim]: attention and MLP norm of each layer, then the final norm."""
    epsilon: np.float32
    rotary: np.ndarray
    """float32 [positions, 2, head dim / 2]: cosines, sines."""


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int


class Cache(NamedTuple):
    keys: np.ndarray
    """[layers, blocks, kv heads, head dim, block size], float32 or uint16 (float16 bits)"""
    values: np.ndarray
    """[layers, blocks, kv heads, block size, head dim], likewise"""


class Buffers(NamedTuple):
    """Working memory, allocated once; T is the largest step."""

    hidden: np.ndarray
    """float32 [T, dim]: residual stream, input and output."""
    qkv: np.ndarray
    """float32 [T, (heads + 2 kv heads) * head dim, padded]"""
    attention: np.ndarray
    """float32 [T, heads * head dim]"""
    gate_up: np.ndarray
    """float32 [T, 2 * ffn, padded]"""
    x: Activations
    row: np.ndarray
    """float32 [threads, widest row]: scratch."""
    queries: np.ndarray
    """float32 [threads, tile queries, head dim]: scratch."""
    weights: np.ndarray
    """float32 [threads, tile queries, positions]: scratch."""
    outputs: np.ndarray
    """float32 [threads, tile queries, head dim]: scratch."""


class Tokens(NamedTuple):
    """One step's tokens: T of them in `tiles` runs of consecutive tokens of one request."""

    count: int
    positions: np.ndarray
    """int32 [T]"""
    slots: np.ndarray
    """int64 [T]: block * block size + offset where the token's key and value go."""
    tile_start: np.ndarray
    """int32 [tiles]: first token."""
    tile_tokens: np.ndarray
    """int32 [tiles]: at most `tokens_per_tile`."""
    tile_row: np.ndarray
    """int32 [tiles]: row of block_tables."""
    block_tables: np.ndarray
    """int32 [rows, blocks]"""


def tokens_per_tile(heads: int, kv_heads: int) -> int:
    """Tokens whose queries share the reading of one KV head."""
    return max(1, MAX_QUERIES // (heads // kv_heads))


@part
def _linear(thread, threads, weights, layer, which, x, rows, out, add):
    """This thread's share of the output columns of one matrix."""
    spec = weights.linears[layer, which]
    kind = weights.kind if layer < weights.linears.shape[0] - 1 else weights.head_kind
    first, last = share(spec[2] // LANES, thread, threads)
    w = weights.packed.ctypes.data + spec[0]
    scale = weights.scales.ctypes.data + 4 * spec[1]
    matmul(kind, x, rows, w, scale, spec[3], out, add, first, last)


@part
def _normed(thread, threads, kind, hidden, count, weight, epsilon, buffers):
    """This thread's share of the rows: RMS norm, then the matrix product's input form."""
    first, last = share(count, thread, threads)
    row = buffers.row[thread, : hidden.shape[1]]
    for t in range(first, last):
        rms_norm(hidden[t], weight, epsilon, row)
        prepare_row(kind, row, buffers.x, t)


@part
def _write_kv(thread, threads, weights, shape, cache, layer, tokens, qkv):
    """Rotate this thread's share of queries (in place, scaled) and keys; store keys, values."""
    d, kv_heads = shape.head_dim, shape.kv_heads
    keys, values = cache.keys, cache.values
    size = keys.shape[4]
    scale = np.float32(1.0) / np.sqrt(np.float32(d))
    first, last = share(tokens.count, thread, threads)
    for t in range(first, last):
        cosine, sine = weights.rotary[tokens.positions[t]]
        for h in range(shape.heads + kv_heads):
            head = qkv[t, h * d : (h + 1) * d]
            rotate(head, cosine, sine, scale if h < shape.heads else np.float32(1.0), head)
        block, offset = tokens.slots[t] // size, tokens.slots[t] % size
        for h in range(kv_heads):
            at = ((layer * keys.shape[1] + block) * kv_heads + h) * d * size
            k = (shape.heads + h) * d
            store(qkv[t, k : k + d], keys, at + offset, size)
            v = k + kv_heads * d
            store(qkv[t, v : v + d], values, at + offset * d, 1)


@part
def _attention(thread, sync, shape, cache, layer, tokens, buffers):
    """Take tiles of queries from the layer's work queue until none is left."""
    d = shape.head_dim
    group = shape.heads // shape.kv_heads
    items = tokens.tile_start.size * shape.kv_heads
    item = next_item(sync, layer)
    while item < items:
        # Late tiles see the most positions: longest work first.
        tile, kv_head = tokens.tile_start.size - 1 - item // shape.kv_heads, item % shape.kv_heads
        start, count = tokens.tile_start[tile], tokens.tile_tokens[tile]
        queries = buffers.queries[thread, : count * group]
        outputs = buffers.outputs[thread, : count * group]
        at = kv_head * group * d
        for t in range(count):
            for g in range(group):
                queries[t * group + g] = buffers.qkv[start + t, at + g * d : at + (g + 1) * d]
        attend(
            queries, count, tokens.positions[start] + 1, cache.keys[layer], cache.values[layer],
            tokens.block_tables[tokens.tile_row[tile]], kv_head, buffers.weights[thread], outputs,
        )  # fmt: skip
        for t in range(count):
            for g in range(group):
                buffers.attention[start + t, at + g * d : at + (g + 1) * d] = outputs[t * group + g]
        item = next_item(sync, layer)


@part
def _activated(thread, threads, kind, count, ffn, buffers):
    """This thread's share of the rows: silu(gate) * up in the matrix product's input form."""
    first, last = share(count, thread, threads)
    row = buffers.row[thread, :ffn]
    for t in range(first, last):
        swiglu(buffers.gate_up[t, : 2 * ffn], row)
        prepare_row(kind, row, buffers.x, t)


@kernel
def run_layers(thread, threads, sync, weights, shape, cache, tokens, buffers):
    """All decoder layers over buffers.hidden[:tokens.count], in place; fills the cache."""
    kind, n = weights.kind, tokens.count
    hidden = buffers.hidden
    phase = 1
    first, last = share(n, thread, threads)
    for layer in range(weights.linears.shape[0] - 1):
        norm = weights.norms[2 * layer]
        _normed(thread, threads, kind, hidden, n, norm, weights.epsilon, buffers)
        phase = barrier(sync, threads, phase)
        _linear(thread, threads, weights, layer, QKV, buffers.x, n, buffers.qkv, STORE)
        phase = barrier(sync, threads, phase)
        _write_kv(thread, threads, weights, shape, cache, layer, tokens, buffers.qkv)
        phase = barrier(sync, threads, phase)
        _attention(thread, sync, shape, cache, layer, tokens, buffers)
        phase = barrier(sync, threads, phase)
        for t in range(first, last):
            prepare_row(kind, buffers.attention[t], buffers.x, t)
        phase = barrier(sync, threads, phase)
        _linear(thread, threads, weights, layer, OUTPUT, buffers.x, n, hidden, ADD)
        phase = barrier(sync, threads, phase)
        norm = weights.norms[2 * layer + 1]
        _normed(thread, threads, kind, hidden, n, norm, weights.epsilon, buffers)
        phase = barrier(sync, threads, phase)
        _linear(thread, threads, weights, layer, GATE_UP, buffers.x, n, buffers.gate_up, STORE)
        phase = barrier(sync, threads, phase)
        _activated(thread, threads, kind, n, shape.ffn, buffers)
        phase = barrier(sync, threads, phase)
        _linear(thread, threads, weights, layer, DOWN, buffers.x, n, hidden, ADD)
        phase = barrier(sync, threads, phase)


@reduction
def _sum_exponentials(row, top):
    """Sum of exp(row - top), float64."""
    total = 0.0
    for i in range(row.size):
        total += np.float64(exp32(row[i] - top))
    return total


@part
def _top_two(row):
    """(index of the first largest, largest, second largest)."""
    best, second, index = row[0], np.float32(-np.inf), 0
    for i in range(1, row.size):
        value = row[i]
        if value > second:
            if value > best:
                best, second, index = value, best, i
            else:
                second = value
    return index, best, second


@kernel
def run_head(thread, threads, sync, weights, shape, hidden, rows, buffers, logits, best, stats):
    """Final norm and output head over hidden[:rows].

    logits: float32 [>= rows, padded vocabulary]; best: int64 [>= rows], the largest logit's
    token (the lowest id of equals); stats: float64 [>= rows, 3]: largest, second largest, and
    log of the sum of exp(logit).
    """
    layer = weights.linears.shape[0] - 1
    norm = weights.norms[2 * layer]
    _normed(thread, threads, weights.head_kind, hidden, rows, norm, weights.epsilon, buffers)
    phase = barrier(sync, threads, 1)
    _linear(thread, threads, weights, layer, HEAD, buffers.x, rows, logits, STORE)
    phase = barrier(sync, threads, phase)
    first, last = share(rows, thread, threads)
    for t in range(first, last):
        row = logits[t, : shape.vocabulary]
        best[t], stats[t, 0], stats[t, 1] = _top_two(row)
        stats[t, 2] = stats[t, 0] + np.log(_sum_exponentials(row, np.float32(stats[t, 0])))

"""Row-wise CPU kernels: exponential, RMS norm, INT8 quantization, rotary embedding, SwiGLU.

Single rows of contiguous float32; the callers in `kernels.cpu_step` share rows among threads.
References: `kernels.reference`.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu_ir import bits_of, float_bits
from kernels.cpu_jit import part, reduction
from kernels.cpu_tiles import GROUP

FLOAT32, INT8, INT4 = 0, 1, 2
"""Weight formats."""

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST = np.float32(-87.0)
_LARGEST = np.float32(88.0)
_MAGNITUDE = np.int32(2**31 - 1)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_TOP = np.float32(127.0)
_C2 = np.float32(1 / 2)
_C3 = np.float32(1 / 6)
_C4 = np.float32(1 / 24)
_C5 = np.float32(1 / 120)
_C6 = np.float32(1 / 720)
_C7 = np.float32(1 / 5040)


@part
def exp32(x):
    """e**x of a float32, clamped to [-87, 88]; relative error < 3e-7.

    x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite), Taylor series of degree 7 in r.
    """
    x = min(max(x, _SMALLEST), _LARGEST)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    y = _C6 + r * _C7
    y = _C5 + r * y
    y = _C4 + r * y
    y = _C3 + r * y
    y = _C2 + r * y
    y = _ONE + r * y
    y = _ONE + r * y
    return y * float_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@reduction
def mean_square(row):
    """Mean of the squares, float32."""
    total = _ZERO
    for i in range(row.size):
        total += row[i] * row[i]
    return total / np.float32(row.size)


@part
def largest(row):
    """max x, float32; a row without NaN.

    Compares bit patterns as integers, in an order that is that of the numbers: float comparisons
    would not be vectorised.
    """
    top = np.int32(-(2**31))
    for i in range(row.size):
        bits = bits_of(row[i])
        key = bits ^ ((bits >> np.int32(31)) & _MAGNITUDE)
        top = key if key > top else top
    return float_bits(np.int32(top ^ ((top >> np.int32(31)) & _MAGNITUDE)))


@part
def largest_magnitude(row):
    """max |x|, float32; a row without NaN. Compares bit patterns, as `largest`."""
    top = np.int32(0)
    for i in range(row.size):
        bits = bits_of(row[i]) & _MAGNITUDE
        top = bits if bits > top else top
    return float_bits(top)


@part
def rms_norm(row, weight, epsilon, out):
    """out = row / sqrt(mean(row**2) + epsilon) * weight."""
    scale = _ONE / np.sqrt(mean_square(row) + epsilon)
    for i in range(row.size):
        out[i] = row[i] * scale * weight[i]


@part
def quantize_span(row, out):
    """Symmetric INT8 of one span of values: returns (scale float32, sum of the integers)."""
    top = largest_magnitude(row)
    inverse = _TOP / top if top > _ZERO else _ZERO
    total = np.int32(0)
    for i in range(row.size):
        q = np.int32(np.rint(row[i] * inverse))
        total += q
        out[i] = np.int8(q)
    return top / _TOP, total


@part
def prepare_row(kind, row, x, t):
    """Write `row` as row `t` of the activations `x`, in the form the weight format wants.

    One scale per 32 values and not per row: activations have outliers, and one scale per row
    costs SmolLM2 five times the divergence from float32 (KL 0.044 instead of 0.009).
    """
    if kind == FLOAT32:
        x.plain[t, : row.size] = row
        return
    for g in range(row.size // GROUP):
        span = slice(g * GROUP, (g + 1) * GROUP)
        scale, total = quantize_span(row[span], x.bytes[t, span])
        x.scale[t, g] = scale
        x.offset[t, g] = total * np.int32(-128)
        x.sum[t, g] = scale * np.float32(total)


@part
def rotate(head, cosine, sine, factor, out):
    """Rotary embedding of one head on adjacent pairs (GGUF's order), times `factor`.

    `cosine`, `sine`: float32 [dim / 2] of the position.
    """
    for i in range(head.size // 2):
        a, b = head[2 * i], head[2 * i + 1]
        out[2 * i] = (a * cosine[i] - b * sine[i]) * factor
        out[2 * i + 1] = (a * sine[i] + b * cosine[i]) * factor


@part
def swiglu(gate_up, out):
    """out = silu(gate) * up; `gate_up` holds all gates, then all ups."""
    n = out.size
    gates, ups = gate_up[:n], gate_up[n:]
    for i in range(n):
        out[i] = gates[i] / (_ONE + exp32(-gates[i])) * ups[i]

"""The decoder's operations in plain PyTorch, which `engine.torch_decoder` runs on.

Written so that a row's result does not depend on how many rows there are. The truth that they
are tested against is `kernels.reference`, in double precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

INT4_GROUP = 32
"""Weights that share one INT4 scale and zero point."""

SMALLEST = 1e-30
"""Least largest magnitude of a quantized row, so that a row of zeros has a scale."""

FINE = 254
"""Steps of the fine number of `linear_int8` in one of the coarse: half a step is 127."""

SEGMENT = 128
"""Positions of a context that are summed at once in attention; see `paged_attention`."""

LEAST_ROWS = 4
"""Fewer rows than this take another path through the BLAS, with another order of additions."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x**2) + epsilon) * weight over the last dimension of [..., dim]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding on adjacent pairs (GGUF's order) of [..., n, dim].

    turns: complex [..., 1, dim / 2], cos + i sin of each pair's angle, so that a rotation is a
    product.
    """
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 * ffn], all gates before all ups -> [..., ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def row_scales(x: Tensor) -> Tensor:
    """What one step of INT8 is worth in each row of [n, k]: [n, 1] > 0, largest magnitude / 127."""
    return x.abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / 127


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 per row: [n, k] -> int8 [n, k] and scale [n, 1], x about int8 * scale."""
    scale = row_scales(x)
    return (x / scale).round().to(torch.int8), scale


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [n, k] times weight [m, k] transposed, with exact integer sums; float32 [n, m].

    weight, scale: of `quantize_rows` over the outputs, scale flat [m]. A value of x becomes two
    INT8 numbers, coarse + fine / FINE of its row's scale: coarse alone loses three times what the
    weights lost, because activations have outliers.
    """
    row_scale = row_scales(x)
    steps = x / row_scale
    coarse = steps.round()
    fine = ((steps - coarse) * FINE).round()
    both = torch.cat([coarse, fine]).to(torch.int8)
    sums, fine_sums = torch._int_mm(both, weight.t()).chunk(2)
    return (sums + fine_sums / FINE) * row_scale * scale


def pack_int4(quants: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Weights scale * q + minimum in the form `linear_int4` takes.

    quants: integers 0..15 [m, k / 32, 32]; scale, minimum: float [m, k / 32]; m a multiple of 16.
    Returns PyTorch's packed weight and bfloat16 (scale, zero) [k / 32, m, 2] of
    scale * (q - 8) + zero.
    """
    inner_tiles = 2
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        quants.flatten(1).to(torch.int32), inner_tiles
    )
    parameters = torch.stack([scale, minimum + 8 * scale], dim=-1)
    return packed, parameters.transpose(0, 1).to(torch.bfloat16).contiguous()


def linear_int4(x: Tensor, packed: Tensor, parameters: Tensor) -> Tensor:
    """x [n, k] times the transposed weight of `pack_int4`; bfloat16 inside, in x's type outside.

    PyTorch's kernel is fast for bfloat16 activations only. CPU only.
    """
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.to(torch.bfloat16), packed, INT4_GROUP, parameters
    )
    return product.to(x.dtype)


def paged_attention(
    queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, hidden: Tensor
) -> Tensor:
    """Grouped-query attention of R rows with T queries each over their positions in the cache.

    queries: [R, T, heads, dim], scaled; query heads h * g .. h * g + g - 1 read KV head h.
    keys, values: [cache slots, kv heads, dim]. slots: int64 [R, S], where each position lies; S
    is a multiple of SEGMENT, and positions past a row's context repeat a slot of its own. hidden:
    bool [R, T, S], positions a query must not see; at least one is visible. Returns queries' shape.

    A query's result does not depend on R, T or S as long as the BLAS computes the rows of a
    product independently and, for equal inner length, in the same order: scores have inner length
    dim, and weighted values are summed in segments of equal length, one after the other. Hidden
    positions add zeros.
    """
    tokens, kv_heads = queries.shape[1], keys.shape[1]
    # [R, kv heads, T * g, dim]: what reads the same keys is one matrix.
    q = queries.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)
    k, v = (
        cache.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
        for cache in (keys, values)
    )
    scores = _product(q, k.mT).unflatten(2, (tokens, -1))
    scores = scores.masked_fill(hidden[:, None, :, None], -torch.inf).flatten(2, 3)
    weights = torch.softmax(scores, dim=-1)
    outcome = torch.zeros_like(q)
    for segment in zip(weights.split(SEGMENT, -1), v.split(SEGMENT, -2), strict=True):
        outcome += _product(*segment)
    return outcome.unflatten(2, (tokens, -1)).transpose(1, 2).reshape(queries.shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with a filled up to LEAST_ROWS rows."""
    rows = a.shape[-2]
    if rows < LEAST_ROWS:
        a = functional.pad(a, (0, 0, 0, LEAST_ROWS - rows))
    return (a @ b)[..., :rows, :]

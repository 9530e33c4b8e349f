"""What the kernels compute, in plain PyTorch and double precision: the specification in tests.

Not fast and not used by the engine.
"""

from __future__ import annotations

import torch

GROUP = 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + epsilon) * weight over the last dimension, float64."""
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight.double()


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [T, K] -> int8 [T, K] and float32 scale [T, K/32]: symmetric, nearest even."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    top = groups.abs().amax(-1)
    inverse = torch.where(top > 0, 127 / top, torch.zeros_like(top))
    quants = torch.round(groups * inverse[..., None]).to(torch.int8)
    return quants.reshape(x.shape), top / 127


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 x @ weight.T for weight [N, K]."""
    return x.double() @ weight.double().T


def linear_int8(
    quants: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Activations int8 [T, K] with scale [T, K/32]; weight int8 [N, K] with scale [N]."""
    x = quants.double() * scale.double().repeat_interleave(GROUP, dim=1)
    return linear(x, weight) * weight_scale.double()


def linear_int4(
    quants: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_minimum: torch.Tensor,
) -> torch.Tensor:
    """As `linear_int8`, for weight uint8 [N, K/32, 32] with scale and minimum [N, K/32]."""
    x = quants.double() * scale.double().repeat_interleave(GROUP, dim=1)
    dense = weight.double() * weight_scale.double()[..., None] + weight_minimum.double()[..., None]
    return linear(x, dense.reshape(weight.shape[0], -1))


def rotate_adjacent(head: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """Rotary embedding of adjacent pairs (GGUF's order) of [dim], float64 angles."""
    dim = head.shape[-1]
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.polar(torch.ones_like(frequency), position * frequency)
    pairs = torch.view_as_complex(head.double().reshape(-1, 2).contiguous())
    return torch.view_as_real(pairs * turn).reshape(dim)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension, float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def paged_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: list[int],
    first_context: int,
) -> torch.Tensor:
    """Causal attention of consecutive tokens of one request over one KV head, float64.

    queries [tokens, heads, dim], scaled; keys [blocks, dim, block size] and values [blocks, block
    size, dim] of that head; token t sees positions 0 .. first_context + t - 1.
    """
    k = torch.cat([keys[b].T for b in table]).double()
    v = torch.cat([values[b] for b in table]).double()
    rows = []
    for t, query in enumerate(queries.double()):
        context = first_context + t
        weights = torch.softmax(query @ k[:context].T, dim=-1)
        rows.append(weights @ v[:context])
    return torch.stack(rows)

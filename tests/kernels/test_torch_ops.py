"""The PyTorch operations against the double-precision reference, and their independence of rows."""

from __future__ import annotations

import pytest
import torch

from kernels import reference, torch_ops

DIM = 32


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, expected: torch.Tensor, relative: float) -> bool:
    """Whether the RMS error is within `relative` of the RMS of what is expected."""
    error = (found.double() - expected).square().mean().sqrt()
    return bool(error <= relative * expected.square().mean().sqrt())


def test_rms_norm_and_swiglu_match_the_reference() -> None:
    x, weight = random(5, 64), random(64, seed=1)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert close(torch_ops.rms_norm(x, weight, 1e-5), expected, 1e-6)
    assert close(torch_ops.swiglu(x), reference.swiglu(x), 1e-6)


@pytest.mark.parametrize("position", [0, 1, 257, 8191])
def test_rotation_matches_the_reference(position: int) -> None:
    heads = random(1, 3, DIM)
    angles = position * 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    found = torch_ops.rotate(heads, turns[None, None])
    for head in range(3):
        expected = reference.rotate_adjacent(heads[0, head], position, 10000.0)
        assert close(found[0, head], expected, 1e-6)


def test_a_quantized_row_is_within_half_a_step_and_zeros_stay_zero() -> None:
    x = random(6, 96)
    x[2] = 0
    x[4] *= 1e4
    quants, scale = torch_ops.quantize_rows(x)
    assert quants.dtype == torch.int8
    assert ((x - quants * scale).abs() <= 0.501 * scale).all()
    assert not quants[2].any()


def test_int8_product_loses_in_the_weights_only() -> None:
    x, matrix = random(7, 96), random(48, 96, seed=1)
    x[:, 5] *= 50
    weight, scale = torch_ops.quantize_rows(matrix)
    found = torch_ops.linear_int8(x, weight, scale.flatten())
    assert close(found, reference.linear(x, weight * scale), 1e-4)
    assert close(found, reference.linear(x, matrix), 0.02)


def test_int8_product_keeps_rows_of_zeros() -> None:
    x = random(3, 96)
    x[1] = 0
    weight, scale = torch_ops.quantize_rows(random(48, 96, seed=1))
    found = torch_ops.linear_int8(x, weight, scale.flatten())
    assert not found[1].any()
    assert found[0].all()


def test_int4_product_matches_the_dequantized_weight_to_bfloat16() -> None:
    x = random(7, 96)
    generator = torch.Generator().manual_seed(1)
    quants = torch.randint(0, 16, (48, 3, 32), generator=generator, dtype=torch.uint8)
    scale, minimum = random(48, 3, seed=2).abs(), random(48, 3, seed=3)
    dense = (quants * scale[..., None] + minimum[..., None]).flatten(1)
    found = torch_ops.linear_int4(x, *torch_ops.pack_int4(quants, scale, minimum))
    assert found.dtype == torch.float32
    assert close(found, reference.linear(x, dense), 2e-2)


class Cache:
    """Random keys and values of 2 KV heads in 40 blocks of 16; unused slots hold NaN."""

    def __init__(self, tables: list[list[int]], contexts: list[int]) -> None:
        self.keys, self.values = random(640, 2, DIM), random(640, 2, DIM, seed=1)
        used = torch.cat(
            [self.slots(t, torch.arange(c)) for t, c in zip(tables, contexts, strict=True)]
        )
        unused = torch.ones(640, dtype=torch.bool)
        unused[used] = False
        self.keys[unused] = torch.nan
        self.values[unused] = torch.nan

    @staticmethod
    def slots(table: list[int], positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor(table)[positions // 16] * 16 + positions % 16

    def attend(
        self, queries: torch.Tensor, tables: list[list[int]], contexts: list[int], reach: int
    ) -> torch.Tensor:
        """Rows whose last query sees all of its row's context."""
        tokens = queries.shape[1]
        seen = torch.arange(reach)
        slots = [
            self.slots(t, seen.clamp(max=c - 1)) for t, c in zip(tables, contexts, strict=True)
        ]
        last = torch.tensor(contexts)[:, None] - tokens + torch.arange(tokens)
        hidden = seen > last[..., None]
        return torch_ops.paged_attention(
            queries, self.keys, self.values, torch.stack(slots), hidden
        )


@pytest.mark.parametrize(("contexts", "tokens"), [([1, 130], 1), ([5, 128], 3), ([300, 37], 20)])
def test_attention_matches_the_reference(contexts: list[int], tokens: int) -> None:
    tables = [list(range(19, 0, -1)), list(range(20, 39))]
    cache = Cache(tables, contexts)
    queries = random(2, tokens, 6, DIM, seed=2)
    found = cache.attend(queries, tables, contexts, 384)
    for row, (table, context) in enumerate(zip(tables, contexts, strict=True)):
        blocks = -(-context // 16)
        for head in range(2):
            keys, values = (c[:, head].unflatten(0, (-1, 16)) for c in (cache.keys, cache.values))
            own = slice(3 * head, 3 * head + 3)
            expected = reference.paged_attention(
                queries[row, :, own], keys.mT, values, table[:blocks], context - tokens + 1
            )
            assert close(found[row, :, own], expected, 1e-6)


def test_attention_of_a_query_is_the_same_alone_and_among_others() -> None:
    tables = [list(range(19, 0, -1)), list(range(20, 39))]
    contexts = [290, 200]
    cache = Cache(tables, contexts)
    queries = random(2, 20, 6, DIM, seed=2)
    together = cache.attend(queries, tables, contexts, 512)
    for row in range(2):
        alone = cache.attend(queries[[row]], [tables[row]], [contexts[row]], 384)
        assert torch.equal(alone[0], together[row])
        for token in (0, 7, 19):
            single = cache.attend(
                queries[[row], token : token + 1], [tables[row]], [contexts[row] - 19 + token], 384
            )
            assert torch.equal(single[0, 0], together[row, token])

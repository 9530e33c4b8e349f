"""Paged attention against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu_attention import attend, store


class Pool:
    """One layer's cache with NaN in everything that was never written."""

    def __init__(self, blocks: int, kv_heads: int, dim: int, size: int, dtype: type) -> None:
        self.size, self.dim, self.kv_heads = size, dim, kv_heads
        nan = np.float16(np.nan).view(np.uint16) if dtype == np.uint16 else np.nan
        self.keys = np.full((blocks, kv_heads, dim, size), nan, dtype)
        self.values = np.full((blocks, kv_heads, size, dim), nan, dtype)

    def fill(self, table: list[int], length: int, rng: np.random.Generator) -> None:
        for position in range(length):
            block, offset = table[position // self.size], position % self.size
            for h in range(self.kv_heads):
                at = (block * self.kv_heads + h) * self.dim * self.size
                key, value = rng.normal(0, 1, (2, self.dim)).astype(np.float32)
                store(key, self.keys, at + offset, self.size)
                store(value, self.values, at + offset * self.dim, 1)

    def floats(self, array: np.ndarray, head: int) -> torch.Tensor:
        array = array[:, head]
        if array.dtype == np.uint16:
            array = array.view(np.float16)
        return torch.from_numpy(array.astype(np.float32))


def run(pool: Pool, queries: np.ndarray, table: list[int], first: int, head: int) -> np.ndarray:
    """queries float32 [tokens, heads, dim]; returns the same shape."""
    tokens, heads, dim = queries.shape
    scratch = np.full((tokens * heads, 16 * 8 + 32), np.nan, np.float32)
    out = np.full((tokens * heads, dim), np.nan, np.float32)
    attend(
        queries.reshape(-1, dim).copy(), tokens, first, pool.keys, pool.values,
        np.array(table, np.int32), head, scratch, out,
    )  # fmt: skip
    return out.reshape(queries.shape)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_attention_matches_the_reference(dtype: type, size: int, dim: int) -> None:
    rng = np.random.default_rng(dim + size)
    table = [5, 2, 7, 0, 3, 6, 1, 4][: 128 // size]
    for context in (1, 15, 16, 17, 32, 33, 64, 65):
        for tokens, heads in ((1, 1), (1, 3), (2, 3), (1, 4), (3, 2), (1, 8)):
            pool = Pool(8, 2, dim, size, dtype)
            pool.fill(table, context + tokens - 1, rng)
            queries = rng.normal(0, dim**-0.25, (tokens, heads, dim)).astype(np.float32)
            for head in (0, 1):
                found = run(pool, queries, table, context, head)
                expected = reference.paged_attention(
                    torch.from_numpy(queries), pool.floats(pool.keys, head),
                    pool.floats(pool.values, head), table, context,
                )  # fmt: skip
                error = float(np.abs(found - expected.numpy()).max())
                assert error < 5e-6  # float32 scores of up to 15 are off by 1e-6


def test_a_query_is_bit_equal_in_any_tile_and_block_size() -> None:
    rng = np.random.default_rng(0)
    queries = rng.normal(0, 1, (2, 3, 64)).astype(np.float32)
    results = []
    for size, table in ((16, [4, 0, 3]), (32, [1, 2])):
        pool = Pool(8, 1, 64, size, np.float32)
        pool.fill(table, 34, np.random.default_rng(1))
        results.append(run(pool, queries, table, 33, 0))
        for t in range(2):
            for h in range(3):
                alone = run(pool, queries[t : t + 1, h : h + 1], table, 33 + t, 0)
                assert np.array_equal(alone[0, 0], results[-1][t, h])
    assert np.array_equal(*results)


def test_huge_scores_do_not_overflow() -> None:
    pool = Pool(2, 1, 64, 16, np.float32)
    pool.fill([1], 3, np.random.default_rng(0))
    pool.keys[1, 0, :, :3] = 300
    pool.keys[1, 0, :, 1] = -300
    queries = np.full((1, 1, 64), -300, np.float32)
    found = run(pool, queries, [1], 3, 0)
    assert np.allclose(found[0, 0], pool.values[1, 0, 1], atol=1e-6)

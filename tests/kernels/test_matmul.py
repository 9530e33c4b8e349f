"""Packed matrix products against their references, over shapes with every kind of remainder."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu_math import FLOAT32, INT4, INT8, prepare_row
from kernels.cpu_matmul import (
    allocate_activations,
    matmul,
    pack_f32,
    pack_int4,
    pack_int8,
    padded_columns,
    quantize_int4,
    quantize_int8,
)
from kernels.cpu_memory import aligned_zeros
from kernels.cpu_tiles import matmul_int4_tile, matmul_int8_tile

SHAPES = [(16, 32), (48, 64), (80, 96), (64, 576), (100, 32)]


class Linear:
    """A random weight of one format: `run` by the kernel, `expected` by the reference."""

    def __init__(self, kind: int, n: int, k: int, rng: np.random.Generator) -> None:
        self.kind, self.n, self.k = kind, n, k
        self.dense = rng.normal(0, 1, (n, k)).astype(np.float32)
        self.scale = np.zeros(padded_columns(n), np.float32)
        if kind == FLOAT32:
            packed = pack_f32(self.dense)
        elif kind == INT8:
            self.quants, scale = quantize_int8(self.dense)
            self.scale[:n] = scale
            packed = pack_int8(self.quants)
        else:
            self.groups = quantize_int4(self.dense)
            packed = pack_int4(*self.groups)
        self.packed = aligned_zeros(packed.shape, np.uint8)
        self.packed[:] = packed

    def run(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        columns = padded_columns(self.n)
        add = int(out is not None)
        out = np.full((x.shape[0], columns), np.nan, np.float32) if out is None else out
        activations = allocate_activations(self.kind, x.shape[0], self.k)
        for t in range(x.shape[0]):
            prepare_row(self.kind, x[t], activations, t)
        matmul(
            self.kind, activations, x.shape[0], self.packed.ctypes.data, self.scale.ctypes.data,
            self.k, out, add, 0, columns // 16,
        )  # fmt: skip
        return out[:, : self.n]

    def expected(self, x: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(x)
        if self.kind == FLOAT32:
            return reference.linear(x, torch.from_numpy(self.dense)).numpy()
        quants, scale = reference.quantize_groups(x)
        if self.kind == INT8:
            weight, weight_scale = torch.from_numpy(self.quants), self.scale[: self.n]
            return reference.linear_int8(quants, scale, weight, torch.tensor(weight_scale)).numpy()
        parts = [torch.from_numpy(part) for part in self.groups]
        return reference.linear_int4(quants, scale, *parts).numpy()


@pytest.mark.parametrize("kind", [FLOAT32, INT8, INT4])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_match_the_reference(kind: int, n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    linear = Linear(kind, n, k, rng)
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 17):
        x = rng.normal(0, 1, (rows, k)).astype(np.float32)
        x[rows // 2] *= 1000
        x[0, :32] = 0
        expected = linear.expected(x)
        error = np.abs(linear.run(x) - expected)
        assert (error <= 3e-6 * np.abs(expected).max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("kind", [FLOAT32, INT8, INT4])
def test_a_row_is_bit_equal_alone_and_in_any_batch(kind: int) -> None:
    rng = np.random.default_rng(1)
    linear = Linear(kind, 100, 96, rng)
    x = rng.normal(0, 1, (11, 96)).astype(np.float32)
    together = linear.run(x)
    for t in range(11):
        assert np.array_equal(linear.run(x[t : t + 1])[0], together[t])


@pytest.mark.parametrize("kind", [FLOAT32, INT8, INT4])
def test_adding_to_the_residual(kind: int) -> None:
    rng = np.random.default_rng(2)
    linear = Linear(kind, 48, 64, rng)
    x = rng.normal(0, 1, (5, 64)).astype(np.float32)
    residual = rng.normal(0, 1, (5, 48)).astype(np.float32)
    expected = residual + linear.run(x)
    assert np.allclose(linear.run(x, residual.copy()), expected, rtol=1e-6, atol=1e-5)


def test_int4_packing_keeps_every_nibble_in_its_place() -> None:
    """One weight of 15 among zeros at every position; activations name the position."""
    k = 64
    x = np.zeros((k, k), np.float32)
    np.fill_diagonal(x, 127)
    for column in (0, 7, 15):
        quants = np.zeros((16, 2, 32), np.uint8)
        quants[column] = (np.arange(k) % 16).reshape(2, 32)
        linear = Linear(INT4, 16, k, np.random.default_rng(0))
        linear.packed[:] = pack_int4(
            quants, np.ones((16, 2), np.float32), np.zeros((16, 2), np.float32)
        )
        result = linear.run(x)
        expected = np.zeros((k, 16), np.float32)
        expected[:, column] = 127 * (np.arange(k) % 16)
        assert np.array_equal(result, expected)


def test_int8_extremes_do_not_overflow() -> None:
    linear = Linear(INT8, 16, 1536, np.random.default_rng(0))
    linear.packed[:] = pack_int8(np.full((16, 1536), -127, np.int8))
    linear.scale[:] = 1
    x = np.full((4, 1536), 127, np.float32)
    assert (linear.run(x) == -127.0 * 127 * 1536).all()


def test_int4_quantization_covers_the_range_of_a_group() -> None:
    weight = np.random.default_rng(3).normal(0, 1, (8, 64)).astype(np.float32)
    quants, scale, minimum = quantize_int4(weight)
    dense = (quants * scale[..., None] + minimum[..., None]).reshape(8, 64)
    assert np.abs(dense - weight).max() <= 0.51 * scale.max()


@pytest.mark.parametrize("factory", [matmul_int8_tile, matmul_int4_tile])
def test_portable_code_is_bit_equal_to_vnni(factory) -> None:
    from kernels.cpu_jit import has_vnni

    if not has_vnni():
        pytest.skip("this CPU has no AVX512-VNNI to compare with")
    kind = INT8 if factory is matmul_int8_tile else INT4
    rng = np.random.default_rng(4)
    linear = Linear(kind, 32, 64, rng)
    x = rng.normal(0, 1, (2, 64)).astype(np.float32)
    a = allocate_activations(kind, 2, 64)
    for t in range(2):
        prepare_row(kind, x[t], a, t)
    panel = linear.packed.size // 2
    out = np.zeros((2, 32), np.float32)
    tile = factory(2, 2, False)
    head = (a.bytes.ctypes.data, 64, a.scale.ctypes.data)
    if kind == INT8:
        middle = (a.offset.ctypes.data, 8, linear.packed.ctypes.data, panel)
        arguments = (*head, *middle, linear.scale.ctypes.data, 64, out.ctypes.data, 128, 0)
    else:
        middle = (a.sum.ctypes.data, 8, linear.packed.ctypes.data, panel)
        arguments = (*head, *middle, 64, out.ctypes.data, 128, 0)
    numba.njit(lambda values: tile(values))(arguments)
    assert np.array_equal(out, linear.run(x))

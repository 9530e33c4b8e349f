"""Row-wise kernels against their references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu_math import (
    exp32,
    largest,
    largest_magnitude,
    quantize_span,
    rms_norm,
    rotate,
    swiglu,
)


def test_exponential_is_accurate_and_clamped() -> None:
    x = np.linspace(-87, 88, 4001).astype(np.float32)
    found = np.array([exp32(v) for v in x], np.float64)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert exp32(np.float32(0)) == 1
    assert exp32(np.float32(-1000)) == exp32(np.float32(-87))
    assert np.isfinite(exp32(np.float32(1000)))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 576])
def test_maxima(size: int) -> None:
    rng = np.random.default_rng(size)
    for shift in (-10, 0, 10):
        row = (rng.normal(0, 1, size) + shift).astype(np.float32)
        assert largest(row) == row.max()
        assert largest_magnitude(row) == np.abs(row).max()


@pytest.mark.parametrize("size", [16, 32, 100, 576])
def test_rms_norm_matches_the_reference(size: int) -> None:
    rng = np.random.default_rng(size)
    row, weight = rng.normal(0, 3, (2, size)).astype(np.float32)
    out = np.empty(size, np.float32)
    rms_norm(row, weight, np.float32(1e-5), out)
    expected = reference.rms_norm(torch.from_numpy(row), torch.from_numpy(weight), 1e-5)
    assert np.allclose(out, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("factor", [1e-20, 1e-3, 1.0, 1e20])
def test_quantization_is_symmetric_and_sums_its_integers(factor: float) -> None:
    row = (np.random.default_rng(0).normal(0, 1, 32) * factor).astype(np.float32)
    out = np.empty(32, np.int8)
    scale, total = quantize_span(row, out)
    assert total == out.astype(int).sum()
    assert np.abs(out).max() == 127
    assert np.abs(out * np.float64(scale) - row).max() <= 0.5001 * scale


def test_a_span_of_zeros_quantizes_to_zeros() -> None:
    out = np.full(32, 9, np.int8)
    assert quantize_span(np.zeros(32, np.float32), out) == (0, 0)
    assert not out.any()


@pytest.mark.parametrize("position", [0, 1, 255, 4095, 8191])
def test_rotation_keeps_its_phase_far_out(position: int) -> None:
    from engine.llama import LlamaConfig

    config = LlamaConfig(1, 64, 1, 1, 64, 64, 16, 8192, 100000.0, 1e-5)
    cosine, sine = config.rotary_table(8192, None)[position]
    head = np.random.default_rng(0).normal(0, 1, 64).astype(np.float32)
    out = np.empty(64, np.float32)
    rotate(head, cosine, sine, np.float32(1), out)
    expected = reference.rotate_adjacent(torch.from_numpy(head), position, 100000.0).numpy()
    assert np.abs(out - expected).max() < 1e-6


def test_rotation_in_place() -> None:
    head = np.arange(16, dtype=np.float32)
    angle = np.linspace(0, 3, 8).astype(np.float32)
    out = np.empty(16, np.float32)
    rotate(head, np.cos(angle), np.sin(angle), np.float32(0.5), out)
    rotate(head, np.cos(angle), np.sin(angle), np.float32(0.5), head)
    assert np.array_equal(head, out)


def test_swiglu_matches_the_reference() -> None:
    gate_up = np.random.default_rng(0).normal(0, 8, 200).astype(np.float32)
    gate_up[0], gate_up[1] = -200, 200
    out = np.empty(100, np.float32)
    swiglu(gate_up, out)
    expected = reference.swiglu(torch.from_numpy(gate_up)).numpy()
    assert np.allclose(out, expected, rtol=1e-6, atol=1e-30)

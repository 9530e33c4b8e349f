"""Matrix products of activations with packed weights on the CPU, and the packing.

Three formats: float32, INT8 with a scale per output column, INT4 with scale and minimum per 32
inputs; activations of the latter two are INT8 with a scale per 32. All are bit-for-bit independent
of how many rows there are.
References: `kernels.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels.cpu_ir import LANES
from kernels.cpu_jit import has_vnni, part
from kernels.cpu_math import FLOAT32, INT8
from kernels.cpu_memory import aligned_zeros
from kernels.cpu_tiles import (
    GROUP,
    GROUP_BYTES,
    matmul_f32_tile,
    matmul_int4_tile,
    matmul_int8_tile,
)


class Activations(NamedTuple):
    """Rows ready to be multiplied; which arrays are used depends on the weight format."""

    plain: np.ndarray
    """float32 [T, K]: FLOAT32."""
    bytes: np.ndarray
    """int8 [T, K]: INT8, INT4."""
    scale: np.ndarray
    """float32 [T, K / 32]: INT8, INT4."""
    offset: np.ndarray
    """int32 [T, K / 32], -128 * sum of the group's integers: INT8."""
    sum: np.ndarray
    """float32 [T, K / 32], scale * sum of the group's integers: INT4."""


def allocate_activations(kind: int, rows: int, width: int) -> Activations:
    """Buffers for `rows` rows of up to `width` values; those `kind` does not use are minimal."""
    plain = rows if kind == FLOAT32 else 1
    quantized = rows if kind != FLOAT32 else 1
    groups = -(-width // GROUP)
    return Activations(
        plain=aligned_zeros((plain, width), np.float32),
        bytes=aligned_zeros((quantized, width), np.int8),
        scale=aligned_zeros((quantized, groups), np.float32),
        offset=aligned_zeros((quantized, groups), np.int32),
        sum=aligned_zeros((quantized, groups), np.float32),
    )


def padded_columns(n: int) -> int:
    """Output columns as stored: a multiple of 16."""
    return -(-n // LANES) * LANES


def _pad(weight: np.ndarray) -> np.ndarray:
    missing = padded_columns(weight.shape[0]) - weight.shape[0]
    return np.pad(weight, [(0, missing)] + [(0, 0)] * (weight.ndim - 1))


def pack_f32(weight: np.ndarray) -> np.ndarray:
    """float32 [N, K] -> uint8 bytes of panels [N/16, K, 16]."""
    panels = _pad(weight).reshape(-1, LANES, weight.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(panels, np.float32).view(np.uint8).reshape(-1)


def quantize_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, K] -> int8 [N, K] and float32 scale [N], symmetric, range -127..127."""
    scale = np.abs(weight).max(axis=1) / np.float32(127)
    divisor = np.where(scale > 0, scale, np.float32(1))
    return np.rint(weight / divisor[:, None]).astype(np.int8), scale.astype(np.float32)


def pack_int8(quants: np.ndarray) -> np.ndarray:
    """int8 [N, K] -> uint8 bytes of panels [N/16, K/4, 16, 4], each value + 128."""
    k = quants.shape[1]
    unsigned = _pad(quants).view(np.uint8) ^ np.uint8(128)
    panels = unsigned.reshape(-1, LANES, k // 4, 4).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(panels).reshape(-1)


def quantize_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 [N, K] -> quants uint8 [N, K/32, 32] in 0..15, scale and minimum [N, K/32].

    Scale and minimum are rounded to float16, as they are stored, before quantizing.
    """
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    minimum = groups.min(axis=2).astype(np.float16).astype(np.float32)
    scale = ((groups.max(axis=2) - minimum) / 15).astype(np.float16).astype(np.float32)
    divisor = np.where(scale > 0, scale, np.float32(1))
    quants = np.rint((groups - minimum[..., None]) / divisor[..., None]).clip(0, 15)
    return quants.astype(np.uint8), scale, minimum


def pack_int4(quants: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """Groups as of `quantize_int4` -> uint8 bytes of panels [N/16, K/32, GROUP_BYTES].

    The order of the nibbles is that of `cpu_tiles.matmul_int4_tile`.
    """
    quants, scale, minimum = _pad(quants), _pad(scale), _pad(minimum)
    groups = quants.shape[1]
    # [panel, group, half, line, column, byte]
    split = quants.reshape(-1, LANES, groups, 2, 4, 4).transpose(0, 2, 3, 4, 1, 5)
    nibbles = (split[:, :, 0] | (split[:, :, 1] << 4)).reshape(-1, groups, 16 * GROUP // 2)
    halves = [
        np.ascontiguousarray(v.astype(np.float16).reshape(-1, LANES, groups).transpose(0, 2, 1))
        for v in (scale, minimum)
    ]
    return np.concatenate([nibbles, *(h.view(np.uint8) for h in halves)], axis=2).reshape(-1)


@part
def panel_bytes(kind, k):
    """Bytes of one panel of 16 output columns."""
    if kind == FLOAT32:
        return 4 * LANES * k
    if kind == INT8:
        return LANES * k
    return k // GROUP * GROUP_BYTES


_VNNI = has_vnni()
_f32_4_4, _f32_4_1 = matmul_f32_tile(4, 4), matmul_f32_tile(4, 1)
_f32_1_4, _f32_1_1 = matmul_f32_tile(1, 4), matmul_f32_tile(1, 1)
_int8_4_2, _int8_4_1 = matmul_int8_tile(4, 2, _VNNI), matmul_int8_tile(4, 1, _VNNI)
_int8_2_2, _int8_1_2 = matmul_int8_tile(2, 2, _VNNI), matmul_int8_tile(1, 2, _VNNI)
_int8_1_1 = matmul_int8_tile(1, 1, _VNNI)
_int4_4_2, _int4_4_1 = matmul_int4_tile(4, 2, _VNNI), matmul_int4_tile(4, 1, _VNNI)
_int4_2_2, _int4_1_2 = matmul_int4_tile(2, 2, _VNNI), matmul_int4_tile(1, 2, _VNNI)
_int4_1_1 = matmul_int4_tile(1, 1, _VNNI)


@part
def _float_columns(rows, wide, x, x_stride, w, k, out, out_stride, add):
    """All rows times 64 (`wide`) or 16 output columns of float32 panels."""
    panel = 4 * LANES * k
    m = 0
    while m < rows:
        args = (x + x_stride * m, x_stride, w, panel, k, out + out_stride * m, out_stride, add)
        if m + 4 <= rows:
            if wide:
                _f32_4_4(args)
            else:
                _f32_4_1(args)
            m += 4
        else:
            if wide:
                _f32_1_4(args)
            else:
                _f32_1_1(args)
            m += 1


@part
def _int8_columns(
    rows, wide, x, x_stride, scale, offset, g_stride, w, w_scale, k, out, out_stride, add
):
    """All rows times 32 (`wide`) or 16 output columns of INT8 panels."""
    panel = LANES * k
    m = 0
    while m < rows:
        args = (
            x + x_stride * m, x_stride, scale + g_stride * m, offset + g_stride * m, g_stride, w,
            panel, w_scale, k, out + out_stride * m, out_stride, add,
        )  # fmt: skip
        if m + 4 <= rows:
            if wide:
                _int8_4_2(args)
            else:
                _int8_4_1(args)
            m += 4
        elif wide and m + 2 <= rows:
            _int8_2_2(args)
            m += 2
        else:
            if wide:
                _int8_1_2(args)
            else:
                _int8_1_1(args)
            m += 1


@part
def _int4_columns(rows, wide, x, x_stride, scale, total, g_stride, w, k, out, out_stride, add):
    """All rows times 32 (`wide`) or 16 output columns of INT4 panels."""
    panel = k // GROUP * GROUP_BYTES
    m = 0
    while m < rows:
        args = (
            x + x_stride * m, x_stride, scale + g_stride * m, total + g_stride * m, g_stride, w,
            panel, k, out + out_stride * m, out_stride, add,
        )  # fmt: skip
        if m + 4 <= rows:
            if wide:
                _int4_4_2(args)
            else:
                _int4_4_1(args)
            m += 4
        elif wide and m + 2 <= rows:
            _int4_2_2(args)
            m += 2
        else:
            if wide:
                _int4_1_2(args)
            else:
                _int4_1_1(args)
            m += 1


@part
def matmul(kind, x, rows, w, w_scale, k, out, add, first, last):
    """out[:rows, c] (+)= x[:rows] @ weight[c] for the output columns of panels first..last-1.

    w, w_scale: addresses of the packed weight and (INT8) its float32 column scales; k: input
    columns; out: float32 [>= rows, >= 16 * last]; add: 1 to add to what is there.
    """
    o, o_stride = out.ctypes.data, 4 * out.shape[1]
    panel = panel_bytes(kind, k)
    plain, plain_stride = x.plain.ctypes.data, 4 * x.plain.shape[1]
    xb, xb_stride, g_stride = x.bytes.ctypes.data, x.bytes.shape[1], 4 * x.scale.shape[1]
    scale, offset, total = x.scale.ctypes.data, x.offset.ctypes.data, x.sum.ctypes.data
    columns = 4 if kind == FLOAT32 else 2
    j = first
    while j < last:
        wide = j + columns <= last
        wj, oj = w + j * panel, o + 4 * LANES * j
        if kind == FLOAT32:
            _float_columns(rows, wide, plain, plain_stride, wj, k, oj, o_stride, add)
        elif kind == INT8:
            sj = w_scale + 4 * LANES * j
            _int8_columns(
                rows, wide, xb, xb_stride, scale, offset, g_stride, wj, sj, k, oj, o_stride, add
            )
        else:
            _int4_columns(
                rows, wide, xb, xb_stride, scale, total, g_stride, wj, k, oj, o_stride, add
            )
        j += columns if wide else 1

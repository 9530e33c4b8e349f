"""Cache-line aligned arrays: a 64-byte vector load that straddles two lines costs two loads."""

from __future__ import annotations

import math

import numpy as np

LINE = 64


def aligned_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Zeros at an address divisible by 64; pages are touched only when written."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size].view(dtype).reshape(shape)

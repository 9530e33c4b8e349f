"""Register-blocked inner loops: small matrix products and attention blocks.

What Numba's vectoriser makes of such loops is a matter of luck, so they are written as vector
code. Each factory returns an intrinsic that takes a tuple of addresses and sizes (int64) and runs
one tile. Every output element is computed in an order that depends on its own row and column
only, so results never depend on the tile's shape.
"""

from __future__ import annotations

from llvmlite import ir

from kernels.cpu_ir import F32, I32, I64, LANES, VF32, VI32, ZERO, tile_intrinsic

GROUP = 32
"""Activations per scale, and weights per INT4 scale: GGUF's block."""

GROUP_BYTES = LANES * GROUP // 2 + 4 * LANES
"""Bytes of one INT4 group of 16 columns: nibbles, 16 float16 scales, 16 float16 minima."""

AHEAD = 512
"""Bytes of each weight panel to prefetch ahead; the hardware's prefetcher alone left a quarter of
the bandwidth unused on the INT4 panels."""


def _finish(e, rows, columns, result, out, out_stride, add):
    """Store result(row, column, before) at `out`; before: what is there, or 0 if `add` is 0."""
    keep = e.b.icmp_signed("!=", add, ZERO)
    for m in range(rows):
        for n in range(columns):
            place = ((out_stride, m), 4 * LANES * n)
            before = e.b.select(keep, e.load(VF32, out, *place), ir.Constant(VF32, None))
            e.store(result(m, n, before), out, *place)


def matmul_f32_tile(rows, columns):
    """`rows` x (16 * `columns`) outputs of a float32 product.

    Weights: per 16 output columns, [K, 16] float32; `w_stride` bytes from one such panel to the
    next. x: float32 rows, `x_stride` bytes apart. `add` not 0: added to `out`.
    """

    def emit(e, x, x_stride, w, w_stride, k, out, out_stride, add):
        def body(i, totals):
            at = e.b.shl(i, ir.Constant(I64, 2))
            line = e.b.shl(i, ir.Constant(I64, 6))
            weights = [e.load(VF32, w, (w_stride, n), line) for n in range(columns)]
            result = []
            for m in range(rows):
                value = e.splat(e.load(F32, x, (x_stride, m), at))
                result += [
                    e.multiply_add(value, weights[n], totals[m * columns + n])
                    for n in range(columns)
                ]
            return result

        totals = e.loop(k, [ir.Constant(VF32, None)] * (rows * columns), body)

        def result(m, n, before):
            return e.b.fadd(before, totals[m * columns + n])

        _finish(e, rows, columns, result, out, out_stride, add)

    return tile_intrinsic(emit)


def matmul_int8_tile(rows, columns, vnni):
    """`rows` x (16 * `columns`) outputs of an INT8 product, activations in groups of 32.

    Weights: per 16 output columns, [K/4, 16, 4] bytes, each weight + 128 (the instruction wants
    one operand unsigned); `w_scale`: float32 of each column. x: int8 rows with, per group,
    `x_scale` float32 and `x_offset` int32 = -128 * sum of the group, which takes the + 128 out
    again; both `g_stride` bytes a row. A group is integer-exact; groups add up in order.
    """

    def emit(
        e, x, x_stride, x_scale, x_offset, g_stride, w, w_stride, w_scale, k, out, out_stride, add
    ):
        def body(i, totals):
            at = e.b.shl(i, ir.Constant(I64, 5))
            group = e.b.shl(i, ir.Constant(I64, 9))
            scale_at = e.b.shl(i, ir.Constant(I64, 2))
            exact = []
            for m in range(rows):
                offset = e.splat(e.load(I32, x_offset, (g_stride, m), scale_at))
                exact += [offset] * columns
            for step in range(GROUP // 4):
                line = 4 * LANES * step
                weights = [e.load(VI32, w, (w_stride, n), group, line) for n in range(columns)]
                for n in range(columns):
                    e.prefetch(w, (w_stride, n), group, line + AHEAD)
                for m in range(rows):
                    value = e.splat(e.load(I32, x, (x_stride, m), at, 4 * step))
                    for n in range(columns):
                        j = m * columns + n
                        exact[j] = e.dot4(exact[j], weights[n], value)
            result = list(totals)
            for m in range(rows):
                scale = e.splat(e.load(F32, x_scale, (g_stride, m), scale_at))
                for j in range(m * columns, (m + 1) * columns):
                    result[j] = e.multiply_add(e.b.sitofp(exact[j], VF32), scale, result[j])
            return result

        groups = e.b.ashr(k, ir.Constant(I64, 5))
        totals = e.loop(groups, [ir.Constant(VF32, None)] * (rows * columns), body)

        def result(m, n, before):
            scale = e.load(VF32, w_scale, 4 * LANES * n)
            return e.multiply_add(totals[m * columns + n], scale, before)

        _finish(e, rows, columns, result, out, out_stride, add)

    return tile_intrinsic(emit, vnni)


def matmul_int4_tile(rows, columns, vnni):
    """`rows` x (16 * `columns`) outputs of an INT4 product in groups of 32 weights.

    Weights: per 16 output columns, K/32 groups of GROUP_BYTES. Byte 4c+j of nibble line v holds
    column c at k = 4v+j in its low and k = 16+4v+j in its high half. A weight is
    scale * nibble + minimum. x: int8 rows with, per group, `x_scale` float32 and `x_sum` float32
    = scale * sum of the group's values, both `g_stride` bytes a row. Groups add up in order.
    """

    def emit(e, x, x_stride, x_scale, x_sum, g_stride, w, w_stride, k, out, out_stride, add):
        nibbles = 4 * LANES * GROUP // 8
        low = e.constant(0x0F0F0F0F)

        def body(i, totals):
            at = e.b.shl(i, ir.Constant(I64, 5))
            group = e.b.mul(i, ir.Constant(I64, GROUP_BYTES))
            scale_at = e.b.shl(i, ir.Constant(I64, 2))
            exact = [ir.Constant(VI32, None)] * (rows * columns)
            for line in range(4):
                start = 4 * LANES * line
                packed = [e.load(VI32, w, (w_stride, n), group, start) for n in range(columns)]
                for n in range(columns):
                    e.prefetch(w, (w_stride, n), group, start + AHEAD)
                halves = [packed, [e.b.lshr(v, e.constant(4)) for v in packed]]
                for half in range(2):
                    weights = [e.b.and_(v, low) for v in halves[half]]
                    for m in range(rows):
                        word = e.load(I32, x, (x_stride, m), at, 16 * half + 4 * line)
                        value = e.splat(word)
                        for n in range(columns):
                            j = m * columns + n
                            exact[j] = e.dot4(exact[j], weights[n], value)
            result = list(totals)
            for n in range(columns):
                scale = e.load_floats(True, w, (w_stride, n), group, nibbles)
                least = e.load_floats(True, w, (w_stride, n), group, nibbles + 2 * LANES)
                for m in range(rows):
                    j = m * columns + n
                    factor = e.splat(e.load(F32, x_scale, (g_stride, m), scale_at))
                    part = e.b.fmul(e.b.sitofp(exact[j], VF32), factor)
                    total = e.splat(e.load(F32, x_sum, (g_stride, m), scale_at))
                    result[j] = e.multiply_add(total, least, result[j])
                    result[j] = e.multiply_add(part, scale, result[j])
            return result

        groups = e.b.ashr(k, ir.Constant(I64, 5))
        totals = e.loop(groups, [ir.Constant(VF32, None)] * (rows * columns), body)

        def result(m, n, before):
            return e.b.fadd(before, totals[m * columns + n])

        _finish(e, rows, columns, result, out, out_stride, add)

    return tile_intrinsic(emit, vnni)


def scores_tile(rows, half):
    """`rows` queries against 16 keys of one block.

    q: float32 [rows, dim]; keys: [dim, 16] of float16 (`half`) or float32, lines `key_stride`
    bytes apart; out: float32, rows `out_stride` bytes apart. Each score is a sum over dim in
    order.
    """

    def emit(e, q, keys, key_stride, dim, out, out_stride):
        q_stride = e.b.shl(dim, ir.Constant(I64, 2))

        def body(i, totals):
            at = e.b.shl(i, ir.Constant(I64, 2))
            line = e.load_floats(half, keys, e.b.mul(i, key_stride))
            return [
                e.multiply_add(e.splat(e.load(F32, q, (q_stride, m), at)), line, totals[m])
                for m in range(rows)
            ]

        totals = e.loop(dim, [ir.Constant(VF32, None)] * rows, body)
        for m in range(rows):
            e.store(totals[m], out, (out_stride, m))

    return tile_intrinsic(emit)


def values_tile(rows, vectors, half):
    """Add weighted values of consecutive positions to `rows` outputs of 16 * `vectors` numbers.

    p: float32 rows of weights, `p_stride` bytes apart; values: float16 (`half`) or float32,
    `value_stride` bytes from one position to the next; out: float32, `out_stride` bytes a row.
    Positions add up in order.
    """
    width = LANES * (2 if half else 4)

    def emit(e, p, p_stride, values, value_stride, count, out, out_stride):
        def body(i, totals):
            at = e.b.shl(i, ir.Constant(I64, 2))
            position = e.b.mul(i, value_stride)
            lines = [e.load_floats(half, values, position, width * n) for n in range(vectors)]
            result = []
            for m in range(rows):
                weight = e.splat(e.load(F32, p, (p_stride, m), at))
                result += [
                    e.multiply_add(weight, lines[n], totals[m * vectors + n])
                    for n in range(vectors)
                ]
            return result

        places = [((out_stride, m), 4 * LANES * n) for m in range(rows) for n in range(vectors)]
        totals = e.loop(count, [e.load(VF32, out, *place) for place in places], body)
        for total, place in zip(totals, places, strict=True):
            e.store(total, out, *place)

    return tile_intrinsic(emit)

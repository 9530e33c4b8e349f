"""Register-blocked inner loops of the CPU kernels, written as LLVM IR.

Numba cannot express vector registers, and what its vectoriser makes of a small matrix product is
a matter of luck. Each factory here returns an intrinsic that takes plain addresses (int64) and
runs one tile: the caller owns bounds and layout. Every output element is computed in an order
that depends on its own row and column only, so results never depend on the tile's shape.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16
"""Columns per vector register: 16 x 32 bits."""

GROUP = 32
"""Weights per INT4 scale, GGUF's Q4_1 block."""

GROUP_BYTES = LANES * GROUP // 2 + 4 * LANES
"""Bytes of one INT4 group of 16 columns: nibbles, 16 float16 scales, 16 float16 minima."""

AHEAD = 512
"""Bytes of each weight panel to prefetch ahead; the hardware's prefetcher alone left a quarter of
the bandwidth unused on the INT4 panels."""

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
VI32 = ir.VectorType(I32, LANES)
VI8 = ir.VectorType(I8, 4 * LANES)
VF32 = ir.VectorType(F32, LANES)
VF16 = ir.VectorType(ir.HalfType(), LANES)
ZERO = ir.Constant(I64, 0)


class _Emit:
    """Short names for the few instruction patterns the tiles are made of."""

    def __init__(self, builder: ir.IRBuilder, vnni: bool) -> None:
        self.b = builder
        self._vnni = vnni

    def address(self, base, *terms):
        """base + sum of terms; a term is a byte count or (stride value, factor)."""
        for term in terms:
            if isinstance(term, tuple):
                stride, factor = term
                term = self.b.mul(stride, ir.Constant(I64, factor))
            elif isinstance(term, int):
                term = ir.Constant(I64, term)
            base = self.b.add(base, term)
        return base

    def load(self, kind, base, *terms):
        address = self.address(base, *terms)
        return self.b.load(self.b.inttoptr(address, ir.PointerType(kind)), align=4)

    def load_floats(self, half, base, *terms):
        """16 consecutive numbers as float32, stored as float16 (`half`) or float32."""
        if half:
            return self.b.fpext(self.load(VF16, base, *terms), VF32)
        return self.load(VF32, base, *terms)

    def store(self, value, base, *terms):
        address = self.address(base, *terms)
        self.b.store(value, self.b.inttoptr(address, ir.PointerType(value.type)), align=4)

    def prefetch(self, base, *terms):
        """Ask for the cache line at an address; any address is allowed."""
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
        name = "llvm.prefetch.p0"
        function = self.b.module.globals.get(name)
        if function is None:
            function = ir.Function(self.b.module, kind, name)
        place = self.b.inttoptr(self.address(base, *terms), ir.PointerType(I8))
        read, keep, data = (ir.Constant(I32, v) for v in (0, 3, 1))
        self.b.call(function, [place, read, keep, data])

    def splat(self, value):
        kind = ir.VectorType(value.type, LANES)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(VI32, None))

    def constant(self, value):
        return ir.Constant(VI32, [value] * LANES)

    def multiply_add(self, x, y, total):
        kind = ir.FunctionType(VF32, [VF32] * 3)
        function = self.b.module.declare_intrinsic(f"llvm.fmuladd.v{LANES}f32", fnty=kind)
        return self.b.call(function, [x, y, total])

    def dot4(self, total, unsigned, signed):
        """total[i] + sum over j of unsigned[i, j] * signed[i, j], 4 bytes a lane, exact.

        `unsigned` and `signed` are <16 x i32> holding 4 bytes each.
        """
        if self._vnni:
            name = "llvm.x86.avx512.vpdpbusd.512"
            kind = ir.FunctionType(VI32, [VI32, VI8, VI8])
            function = self.b.module.declare_intrinsic(name, fnty=kind)
            cast = [self.b.bitcast(v, VI8) for v in (unsigned, signed)]
            return self.b.call(function, [total, *cast])
        for byte in range(4):
            left = self.b.lshr(unsigned, self.constant(8 * byte))
            left = self.b.and_(left, self.constant(255))
            right = self.b.shl(signed, self.constant(24 - 8 * byte))
            right = self.b.ashr(right, self.constant(24))
            total = self.b.add(total, self.b.mul(left, right))
        return total

    def loop(self, count, initial, body):
        """for i in range(count): values = body(i, values); count >= 1. Returns the values."""
        before = self.b.block
        block = self.b.append_basic_block("tile")
        after = self.b.append_basic_block("done")
        self.b.branch(block)
        self.b.position_at_end(block)
        index = self.b.phi(I64)
        index.add_incoming(ZERO, before)
        phis = [self.b.phi(value.type) for value in initial]
        for phi, value in zip(phis, initial, strict=True):
            phi.add_incoming(value, before)
        results = body(index, phis)
        following = self.b.add(index, ir.Constant(I64, 1))
        last = self.b.block
        index.add_incoming(following, last)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, last)
        self.b.cbranch(self.b.icmp_signed("<", following, count), block, after)
        self.b.position_at_end(after)
        return results


def _tile(emit_tile, vnni=True):
    """A numba intrinsic that takes one tuple of int64, the arguments of `emit_tile`."""
    count = emit_tile.__code__.co_argcount - 1

    @intrinsic
    def tile(context, arguments):
        def generate(target, builder, signature, values):
            unpacked = [builder.extract_value(values[0], i) for i in range(count)]
            emit_tile(_Emit(builder, vnni), *unpacked)
            return target.get_dummy_value()

        return types.void(types.UniTuple(types.int64, count)), generate

    return tile


def _finish(e, rows, columns, value, out, out_stride, add):
    """Store value(row, column) vectors at `out`, added to what is there when `add` is not 0."""
    keep = e.b.icmp_signed("!=", add, ZERO)
    for m in range(rows):
        for n in range(columns):
            place = ((out_stride, m), 4 * LANES * n)
            before = e.b.select(keep, e.load(VF32, out, *place), ir.Constant(VF32, None))
            e.store(e.b.fadd(before, value(m, n)), out, *place)


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
        _finish(e, rows, columns, lambda m, n: totals[m * columns + n], out, out_stride, add)

    return _tile(emit)


def matmul_int8_tile(rows, columns, vnni):
    """`rows` x (16 * `columns`) outputs of an INT8 product, integer-exact before scaling.

    Weights: per 16 output columns, [K/4, 16, 4] bytes, each weight + 128 (the instruction wants
    one operand unsigned); `w_scale`: float32 of each column. x: int8 rows with `x_scale` float32
    and `x_offset` int32 = 128 * sum of the row, which takes the + 128 out again.
    """

    def emit(e, x, x_stride, x_scale, x_offset, w, w_stride, w_scale, k, out, out_stride, add):
        def body(i, totals):
            at = e.b.shl(i, ir.Constant(I64, 2))
            line = e.b.shl(i, ir.Constant(I64, 6))
            weights = [e.load(VI32, w, (w_stride, n), line) for n in range(columns)]
            for n in range(columns):
                e.prefetch(w, (w_stride, n), line, AHEAD)
            result = []
            for m in range(rows):
                value = e.splat(e.load(I32, x, (x_stride, m), at))
                result += [
                    e.dot4(totals[m * columns + n], weights[n], value) for n in range(columns)
                ]
            return result

        steps = e.b.ashr(k, ir.Constant(I64, 2))
        totals = e.loop(steps, [ir.Constant(VI32, None)] * (rows * columns), body)

        def value(m, n):
            offset = e.splat(e.load(I32, x_offset, 4 * m))
            exact = e.b.sitofp(e.b.sub(totals[m * columns + n], offset), VF32)
            scaled = e.b.fmul(exact, e.splat(e.load(F32, x_scale, 4 * m)))
            return e.b.fmul(scaled, e.load(VF32, w_scale, 4 * LANES * n))

        _finish(e, rows, columns, value, out, out_stride, add)

    return _tile(emit, vnni)


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
                for n in range(columns):
                    e.prefetch(w, (w_stride, n), group, 4 * LANES * line + AHEAD)
                packed = [
                    e.load(VI32, w, (w_stride, n), group, 4 * LANES * line) for n in range(columns)
                ]
                for half in range(2):
                    weights = [
                        e.b.and_(e.b.lshr(v, e.constant(4)) if half else v, low) for v in packed
                    ]
                    for m in range(rows):
                        value = e.load(I32, x, (x_stride, m), at, 16 * half + 4 * line)
                        value = e.splat(value)
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
        _finish(e, rows, columns, lambda m, n: totals[m * columns + n], out, out_stride, add)

    return _tile(emit, vnni)


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

    return _tile(emit)


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

    return _tile(emit)


@intrinsic
def store_half(context, address, number):
    """Write a float32 as float16, rounded to nearest even."""

    def generate(target, builder, signature, values):
        half = builder.fptrunc(values[1], ir.HalfType())
        builder.store(half, builder.inttoptr(values[0], ir.PointerType(half.type)))
        return target.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def store_float(context, address, number):
    """Write a float32."""

    def generate(target, builder, signature, values):
        builder.store(values[1], builder.inttoptr(values[0], ir.PointerType(F32)))
        return target.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def prefetch(context, address):
    """Ask for the cache line at an address; any address is allowed."""

    def generate(target, builder, signature, values):
        _Emit(builder, False).prefetch(values[0])
        return target.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def float_bits(context, exponent):
    """The float32 whose bit pattern is the given int32."""

    def generate(target, builder, signature, values):
        return builder.bitcast(values[0], F32)

    return types.float32(types.int32), generate


@intrinsic
def bits_of(context, number):
    """The bit pattern of a float32, as int32."""

    def generate(target, builder, signature, values):
        return builder.bitcast(values[0], I32)

    return types.int32(types.float32), generate


@intrinsic
def atomic_add(context, address, amount):
    """Add to the int64 at `address`; returns what it was. Sequentially consistent."""

    def generate(target, builder, signature, values):
        place = builder.inttoptr(values[0], ir.PointerType(I64))
        return builder.atomic_rmw("add", place, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(context, address):
    """The int64 at `address`, sequentially consistent."""

    def generate(target, builder, signature, values):
        place = builder.inttoptr(values[0], ir.PointerType(I64))
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def yield_core(context):
    """Let another thread have this core (POSIX sched_yield)."""

    def generate(target, builder, signature, values):
        kind = ir.FunctionType(I32, [])
        function = builder.module.globals.get("sched_yield")
        if function is None:
            function = ir.Function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return target.get_dummy_value()

    return types.void(), generate

"""What Numba cannot express, emitted as LLVM IR: vector registers, bit casts, atomics, prefetch.

`Emit` builds the vector code of `kernels.cpu_tiles`; the intrinsics below it are called from
compiled kernels with plain addresses (int64): the caller owns bounds and layout.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16
"""Columns per vector register: 16 x 32 bits."""

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
VI32 = ir.VectorType(I32, LANES)
VI8 = ir.VectorType(I8, 4 * LANES)
VF32 = ir.VectorType(F32, LANES)
VF16 = ir.VectorType(ir.HalfType(), LANES)
ZERO = ir.Constant(I64, 0)


class Emit:
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


def tile_intrinsic(emit_tile, vnni=True):
    """A numba intrinsic that takes one tuple of int64, the arguments of `emit_tile`."""
    count = emit_tile.__code__.co_argcount - 1

    @intrinsic
    def tile(context, arguments):
        def generate(target, builder, signature, values):
            unpacked = [builder.extract_value(values[0], i) for i in range(count)]
            emit_tile(Emit(builder, vnni), *unpacked)
            return target.get_dummy_value()

        return types.void(types.UniTuple(types.int64, count)), generate

    return tile


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
        Emit(builder, False).prefetch(values[0])
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

"""Vectors of fp32 as LLVM IR, one width for all instruction sets.

numba compiles scalars and leaves vectors to LLVM's guesses; attention needs accumulators that
stay in registers, so its inner loops are built from explicit vectors instead. LLVM splits or joins
them for whatever the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir
from numba import types
from numba.core import cgutils

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()


def literals(*kinds: types.Literal) -> list[int]:
    """The values of compile-time arguments."""
    return [kind.literal_value for kind in kinds]


@contextmanager
def loop(builder: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    with cgutils.for_range(builder, count) as counted:
        yield counted.index


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


class Lanes:
    """Emits code on vectors of ``n`` fp32; ``n`` = 1 works on scalars.

    Addresses are int64 values, offsets are bytes (int or int64 value).
    """

    def __init__(self, builder: ir.IRBuilder, n: int) -> None:
        self.b = builder
        self.n = n
        self.f32 = ir.VectorType(F32, n) if n > 1 else F32
        self.i32 = ir.VectorType(I32, n) if n > 1 else I32
        self.i16 = ir.VectorType(I16, n) if n > 1 else I16
        self.i8 = ir.VectorType(I8, n) if n > 1 else I8

    # -- constants and memory ---------------------------------------------------------------

    def number(self, value: float) -> ir.Value:
        return ir.Constant(self.f32, [value] * self.n if self.n > 1 else value)

    def bits(self, value: int) -> ir.Value:
        return ir.Constant(self.i32, [value] * self.n if self.n > 1 else value)

    def at(self, address: ir.Value, offset: ir.Value | int, kind: ir.Type) -> ir.Value:
        if isinstance(offset, int):
            offset = I64(offset)
        return self.b.inttoptr(self.b.add(address, offset), kind.as_pointer())

    def load(
        self, address: ir.Value, offset: ir.Value | int, kind: ir.Type | None = None
    ) -> ir.Value:
        kind = kind or self.f32
        load = self.b.load(self.at(address, offset, kind))
        load.align = 2 if kind in (self.i16, I16) else 4
        return load

    def store(self, value: ir.Value, address: ir.Value, offset: ir.Value | int) -> None:
        store = self.b.store(value, self.at(address, offset, value.type))
        store.align = {self.i8: 1, self.i16: 2, I16: 2}.get(value.type, 4)

    def variable(self, value: ir.Value) -> ir.Value:
        """A register (LLVM promotes the slot) that a loop may update, starting at ``value``."""
        slot = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, slot)
        return slot

    def splat(self, scalar: ir.Value) -> ir.Value:
        if self.n == 1:
            return scalar
        kind = ir.VectorType(scalar.type, self.n)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, I32(0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(self.i32, [0] * self.n))

    def splat_at(self, address: ir.Value, offset: ir.Value | int, kind: ir.Type = F32) -> ir.Value:
        return self.splat(self.load(address, offset, kind))

    def prefetch(self, address: ir.Value, offset: int) -> None:
        """Ask for the cache line there; the address need not be valid."""
        pointer = self.at(address, offset, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        self.b.call(function, [pointer, I32(0), I32(3), I32(1)])  # to read, keep close, data

    # -- arithmetic -------------------------------------------------------------------------

    def _call(self, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def _suffix(self) -> str:
        return f"v{self.n}f32" if self.n > 1 else "f32"

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a·b + c, fused where the machine can."""
        return self._call(f"llvm.fmuladd.{self._suffix()}", self.f32, (a, b, c))

    def bf16_dot(self, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """``total`` [16] + sum over the two bf16 halves of each of ``a``, ``b`` [16] int32."""
        pairs = ir.VectorType(_Bfloat(), 2 * self.n)
        args = (total, self.b.bitcast(a, pairs), self.b.bitcast(b, pairs))
        return self._call("llvm.x86.avx512bf16.dpbf16ps.512", self.f32, args)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """NaN where ``b`` is NaN; one in ``a`` is dropped."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def largest(self, x: ir.Value) -> ir.Value:
        if self.n == 1:
            return x
        return self._call(f"llvm.vector.reduce.fmax.{self._suffix()}", F32, (x,))

    def total(self, x: ir.Value) -> ir.Value:
        if self.n == 1:
            return x
        name = f"llvm.vector.reduce.fadd.{self._suffix()}"
        kind = ir.FunctionType(F32, [F32, x.type])
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(function, [F32(0.0), x], fastmath=("reassoc",))

    def halves(self, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The low and high bf16 of each int32, widened to fp32."""
        low = self.b.shl(pairs, self.bits(16))
        high = self.b.and_(pairs, self.bits(0xFFFF0000))
        return self.b.bitcast(low, self.f32), self.b.bitcast(high, self.f32)

    def widen(self, bf16: ir.Value) -> ir.Value:
        """bf16 as int16 to fp32."""
        return self.b.bitcast(self.b.shl(self.b.zext(bf16, self.i32), self.bits(16)), self.f32)

    def narrow(self, x: ir.Value) -> ir.Value:
        """fp32 to bf16 as int16: to nearest, ties to even, NaN stays NaN."""
        b, bits = self.b, self.b.bitcast(x, self.i32)
        odd = b.and_(b.lshr(bits, self.bits(16)), self.bits(1))
        rounded = b.lshr(b.add(bits, b.add(odd, self.bits(0x7FFF))), self.bits(16))
        nan = b.fcmp_unordered("uno", x, x)
        return b.trunc(b.select(nan, self.bits(0x7FC0), rounded), self.i16)

    def narrow_by_instruction(self, x: ir.Value) -> ir.Value:
        """:meth:`narrow` of 16 where the machine has bf16 instructions; subnormals become 0."""
        kind = ir.VectorType(_Bfloat(), self.n)
        return self.b.bitcast(
            self._call("llvm.x86.avx512bf16.cvtneps2bf16.512", kind, (x,)), self.i16
        )

    def exp2_below_one(self, y: ir.Value, coefficients: Sequence[float]) -> ir.Value:
        """2^y for y ≤ 0 by a polynomial on [-1/2, 1/2]; 0 from -127 down, NaN for NaN."""
        b, number = self.b, self.number
        y = self.maximum(number(-127.0), y)
        shift = number(12582912.0 + 127.0)  # 1.5·2^23: adding it rounds to an integer, kept in
        shifted = b.fadd(y, shift)  # the low bits, here with the exponent's bias
        fraction = b.fsub(y, b.fsub(shifted, shift))
        p = number(coefficients[0])
        for coefficient in coefficients[1:]:
            p = self.fma(p, fraction, number(coefficient))
        power = b.bitcast(b.shl(b.bitcast(shifted, self.i32), self.bits(23)), self.f32)
        return b.fmul(p, power)

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x to 2 ulp in [-87, 88]; 0 below, inf above, NaN for NaN (Cephes' polynomial)."""
        b, number = self.b, self.number
        shift = number(12582912.0)  # 1.5·2^23: adding it rounds to an integer, kept in low bits
        shifted = self.fma(x, number(1.4426950408889634), shift)
        whole = b.fsub(shifted, shift)
        r = self.fma(whole, number(-0.693359375), x)
        r = self.fma(whole, number(2.12194440e-4), r)
        p = number(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            p = self.fma(p, r, number(c))
        p = self.fma(p, b.fmul(r, r), b.fadd(r, number(1.0)))
        exponent = b.shl(b.add(b.bitcast(shifted, self.i32), self.bits(127)), self.bits(23))
        y = b.fmul(p, b.bitcast(exponent, self.f32))
        y = b.select(b.fcmp_ordered("<", x, number(-87.0)), number(0.0), y)
        return b.select(b.fcmp_ordered(">", x, number(88.0)), number(float("inf")), y)

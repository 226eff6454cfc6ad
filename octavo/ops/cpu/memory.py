"""Scalars at raw addresses, for the kernels that numba compiles.

Kernels take one address, of a block of 8-byte arguments, and find everything else through it:
no array is unboxed, and a call costs a microsecond. An element is ``index`` items past ``address``.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.ops.cpu.simd import F32, F64, I16, I32, I64, Lanes

_INT64 = types.int64
_FLOAT32 = types.float32


def _element(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


@intrinsic
def load_int32(typing, address, index):
    def emit(context, builder, signature, args):
        return builder.sext(builder.load(_element(builder, *args, I32)), I64)

    return _INT64(_INT64, _INT64), emit


@intrinsic
def load_int64(typing, address, index):
    def emit(context, builder, signature, args):
        return builder.load(_element(builder, *args, I64))

    return _INT64(_INT64, _INT64), emit


@intrinsic(prefer_literal=True)
def load_arguments(typing, address, first, count):
    """``count`` int64 arguments, ``first`` to last, as a tuple."""
    begin, number = first.literal_value, count.literal_value

    def emit(context, builder, signature, args):
        values = [
            builder.load(_element(builder, args[0], I64(begin + i), I64)) for i in range(number)
        ]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(_INT64, number)(_INT64, first, count), emit


@intrinsic
def load_float64(typing, address, index):
    """A float64 as float32: scalars arrive so in an argument block."""

    def emit(context, builder, signature, args):
        return builder.fptrunc(builder.load(_element(builder, *args, F64)), F32)

    return _FLOAT32(_INT64, _INT64), emit


@intrinsic(prefer_literal=True)
def load(typing, address, index, bf16):
    """A bf16 or fp32 number as fp32; ``bf16`` is a compile-time bool."""
    is_bf16 = bf16.literal_value

    def emit(context, builder, signature, args):
        kind = I16 if is_bf16 else F32
        value = builder.load(_element(builder, *args[:2], kind))
        return Lanes(builder, 1).widen(value) if is_bf16 else value

    return _FLOAT32(_INT64, _INT64, bf16), emit


@intrinsic(prefer_literal=True)
def store(typing, address, index, value, bf16):
    """Store fp32 as bf16 or fp32; ``bf16`` is a compile-time bool."""
    is_bf16 = bf16.literal_value

    def emit(context, builder, signature, args):
        value = Lanes(builder, 1).narrow(args[2]) if is_bf16 else args[2]
        builder.store(value, _element(builder, *args[:2], value.type))
        return context.get_dummy_value()

    return types.void(_INT64, _INT64, _FLOAT32, bf16), emit


@intrinsic(prefer_literal=True)
def rounded(typing, value, bf16):
    """``value`` as it reads back after a store."""
    is_bf16 = bf16.literal_value

    def emit(context, builder, signature, args):
        lanes = Lanes(builder, 1)
        return lanes.widen(lanes.narrow(args[0])) if is_bf16 else args[0]

    return _FLOAT32(_FLOAT32, bf16), emit


@intrinsic
def exp(typing, value):
    """e^value in fp32, in plain arithmetic that LLVM can vectorise."""

    def emit(context, builder, signature, args):
        return Lanes(builder, 1).exp(args[0])

    return _FLOAT32(_FLOAT32), emit


@intrinsic
def take(typing, address, index):
    """The next ticket of a counter that all threads share."""

    def emit(context, builder, signature, args):
        counter = _element(builder, *args, I64)
        return builder.atomic_rmw("add", counter, I64(1), "monotonic")

    return _INT64(_INT64, _INT64), emit


@intrinsic(prefer_literal=True)
def copy_item(typing, source, index, target, target_index, bits):
    """target[target_index] = source[index], items of ``bits`` bits."""
    width = ir.IntType(bits.literal_value)

    def emit(context, builder, signature, args):
        item = builder.load(_element(builder, args[0], args[1], width))
        builder.store(item, _element(builder, args[2], args[3], width))
        return context.get_dummy_value()

    return types.void(_INT64, _INT64, _INT64, _INT64, bits), emit

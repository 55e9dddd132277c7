"""Vector instructions of the CPU kernels, for where LLVM's loop vectoriser falls short.

Rows are short, and a vectorised loop over one head pays for checks of aliasing and remainders each
time; these emit the vector code itself. All sizes are multiples of `LANES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from . import dtypes
from ._emit import I32, I64, LANES, accumulate, address, fold, read, round_to, splat, write
from .dtypes import U64, Bits
from .rowhash import MIX_1, MIX_2

__all__ = ["LANES", "copy_lanes", "load_lanes", "mix_words", "rotate_lanes", "store_lanes"]


@intrinsic
def _copy_lanes(typing_context: Any, out: Any, to: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types, size = signature.args, array.dtype.bitwidth // 8
        lanes = ir.VectorType(ir.IntType(8 * size), LANES).as_pointer()
        target = address(context, builder, types[0], args[0], args[1])
        source = address(context, builder, types[2], args[2], args[3])
        bits = builder.load(builder.bitcast(source, lanes), align=size)
        builder.store(bits, builder.bitcast(target, lanes), align=size)
        return context.get_dummy_value()

    intp = numba.types.intp
    return numba.types.void(out, intp, array, intp), generate


@intrinsic
def _load_lanes(typing_context: Any, array: Any, index: Any, out: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types = signature.args
        x = read(context, builder, types[0], args[0], args[1], LANES)
        write(context, builder, types[2], args[2], args[3], x)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, out, numba.types.intp), generate


@intrinsic
def _store_lanes(typing_context: Any, row: Any, at: Any, out: Any, to: Any) -> Any:
    element = out.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types = signature.args
        x = read(context, builder, types[0], args[0], args[1], LANES)
        pointer = address(context, builder, types[2], args[2], args[3])
        bits = round_to(builder, x, element, LANES)
        builder.store(
            bits, builder.bitcast(pointer, bits.type.as_pointer()), align=element.bitwidth // 8
        )
        return context.get_dummy_value()

    return numba.types.void(row, numba.types.intp, out, numba.types.intp), generate


@intrinsic
def _rotate_lanes(
    typing_context: Any,
    array: Any,
    index: Any,
    half: Any,
    cos: Any,
    sin: Any,
    sign: Any,
    at: Any,
    out: Any,
    to: Any,
) -> Any:
    intp = numba.types.intp

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types = signature.args
        array, index, half, cos, sin, sign, at, out, to = args
        x = read(context, builder, types[0], array, index, LANES)
        y = read(context, builder, types[0], array, builder.add(index, half), LANES)
        c = read(context, builder, types[3], cos, at, LANES)
        s = builder.fmul(read(context, builder, types[4], sin, at, LANES), splat(builder, sign))
        low = builder.fsub(builder.fmul(x, c), builder.fmul(y, s))
        high = builder.fadd(builder.fmul(y, c), builder.fmul(x, s))
        write(context, builder, types[7], out, to, low)
        write(context, builder, types[7], out, builder.add(to, half), high)
        return context.get_dummy_value()

    return (
        numba.types.void(array, intp, intp, cos, sin, numba.types.float32, intp, out, intp),
        generate,
    )


@intrinsic
def _mix_words(
    typing_context: Any, array: Any, index: Any, keys: Any, masks: Any, words: Any
) -> Any:
    lanes = 8
    vectors = ir.VectorType(I64, lanes)

    def constant(number: int) -> Any:
        return ir.Constant(vectors, [number] * lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types = signature.args
        array, index, keys, masks, words = args
        base = builder.bitcast(address(context, builder, types[0], array, index), I64.as_pointer())
        key_base = address(context, builder, types[2], keys, ir.Constant(I64, 0))
        align = types[0].dtype.bitwidth // 8

        def mask(number: int) -> Any:
            at = address(context, builder, types[3], masks, ir.Constant(I64, number))
            one = builder.insert_element(
                ir.Constant(vectors, ir.Undefined), builder.load(at), ir.Constant(I32, 0)
            )
            zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
            return builder.shuffle_vector(one, ir.Constant(vectors, ir.Undefined), zeros)

        magnitude, exponent, low = mask(0), mask(1), mask(2)

        def load8(start: Any, i: Any, align: int) -> Any:
            at = builder.bitcast(builder.gep(start, [i], inbounds=True), vectors.as_pointer())
            return builder.load(at, align=align)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            some, bad, total = sums
            x = load8(base, i, align)
            some = builder.or_(some, builder.and_(x, magnitude))
            bad = builder.or_(bad, builder.add(builder.and_(x, exponent), low))
            x = builder.mul(builder.xor(x, load8(key_base, i, 8)), constant(int(MIX_1)))
            x = builder.xor(x, builder.lshr(x, constant(32)))
            return [some, bad, builder.add(total, builder.mul(x, constant(int(MIX_2))))]

        sums = accumulate(context, builder, words, lanes, [constant(0)] * 3, body)
        combine = (builder.or_, builder.or_, builder.add)
        folded = [fold(builder, one, how) for one, how in zip(sums, combine, strict=True)]
        return context.make_tuple(builder, signature.return_type, folded)

    intp = numba.types.intp
    triple = numba.types.UniTuple(numba.types.uint64, 3)  # type: ignore[no-untyped-call]
    return triple(array, intp, keys, masks, intp), generate


# The names kernels use, typed for the checker.
_Row = dtypes.F32
copy_lanes = cast(Callable[[Bits, int, Bits, int], None], _copy_lanes)
"""Copy LANES elements of a flat bit array from `index` to `out` at `to`; no overlap."""
load_lanes = cast(Callable[[Bits, int, _Row, int], None], _load_lanes)
"""out[at:] = 16 elements of a flat bit array from `index`, as float32."""
store_lanes = cast(Callable[[_Row, int, Bits, int], None], _store_lanes)
"""Round row[at:], 16 elements, to the element type of `out` and write them at `to`."""
rotate_lanes = cast(Callable[..., None], _rotate_lanes)
"""Rotate 16 pairs (index + i, index + half + i) by (cos, sign * sin)[at + i] into out[to:]."""
mix_words = cast(Callable[[Bits, int, U64, U64, int], tuple[Any, Any, Any]], _mix_words)
"""(some, bad, total) of the hash over `words` 64-bit words, a multiple of 8, from `index`."""

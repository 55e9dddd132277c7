"""Vector instructions of signatures: fold a row into 256 sums, and turn those into 128 bits.

The sums stay in registers while the row streams by, so that memory sets the pace. Multiplications
by random signs are exact: fused with the addition after them they round as NumPy does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from . import dtypes
from ._emit import F32, I16, I32, I64, LANES, accumulate, address, prefetch, read, splat, write
from .simhash import BLOCK, PLANES

__all__ = [
    "ASKED",
    "fold",
    "fold_2x128",
    "fold_3x64",
    "fold_4x64",
    "prefetch_far",
    "walsh_signs",
]

ASKED = 3 * BLOCK
"""Elements of the next row that `walsh_signs` asks for. It uses no memory itself: requests that are
all made while a row is folded wait for one another, and then the memory idles."""

_VECTORS = BLOCK // LANES


def _zeros() -> Any:
    return ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES)


def _offset(builder: Any, index: Any, by: int) -> Any:
    return builder.add(index, ir.Constant(I64, by))


def _add_signed(builder: Any, total: Any, x: Any, signs: Any) -> Any:
    """total + x * signs, for signs of 1 and -1."""
    flags = ("contract",)
    return builder.fadd(builder.fmul(x, signs, flags=flags), total, flags=flags)


@intrinsic
def _fold(
    typing_context: Any, array: Any, index: Any, width: Any, flips: Any, start: Any, out: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types = signature.args
        array, index, width, flips, start, out = args

        def body(piece: Any, sums: list[Any]) -> list[Any]:
            after = []
            for i, total in enumerate(sums):
                at = _offset(builder, piece, LANES * i)
                x = read(context, builder, types[0], array, builder.add(index, at), LANES)
                f = read(context, builder, types[3], flips, builder.add(start, at), LANES)
                after.append(_add_signed(builder, total, x, f))
            return after

        sums = accumulate(context, builder, width, BLOCK, [_zeros()] * _VECTORS, body)
        for i, total in enumerate(sums):
            write(context, builder, types[5], out, ir.Constant(I64, LANES * i), total)
        return context.get_dummy_value()

    intp = numba.types.intp
    return numba.types.void(array, intp, intp, flips, intp, out), generate


def _make_fold_rotated(half: int, heads: int) -> Any:
    """For pieces of `heads` heads of 2 * half elements: sizes known, sums stay in registers."""

    @intrinsic
    def fold_rotated(
        typing_context: Any,
        array: Any,
        index: Any,
        width: Any,
        cos: Any,
        sin: Any,
        sign: Any,
        turn: Any,
        flips: Any,
        start: Any,
        out: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            types = signature.args
            array, index, width, cos, sin, sign, turn, flips, start, out = args
            turns = []
            for i in range(0, half, LANES):
                at = _offset(builder, turn, i)
                s = read(context, builder, types[4], sin, at, LANES)
                s = builder.fmul(s, splat(builder, sign))
                turns.append((read(context, builder, types[3], cos, at, LANES), s))

            def body(piece: Any, sums: list[Any]) -> list[Any]:
                after = list(sums)
                row_at, flips_at = builder.add(index, piece), builder.add(start, piece)

                def add(vector: int, z: Any) -> None:
                    at = _offset(builder, flips_at, LANES * vector)
                    f = read(context, builder, types[7], flips, at, LANES)
                    after[vector] = _add_signed(builder, sums[vector], z, f)

                for head in range(heads):
                    for i, (c, s) in enumerate(turns):
                        low = 2 * len(turns) * head + i
                        high = low + len(turns)
                        x, y = (
                            read(context, builder, types[0], array, at, LANES)
                            for at in (_offset(builder, row_at, LANES * v) for v in (low, high))
                        )
                        add(low, builder.fsub(builder.fmul(x, c), builder.fmul(y, s)))
                        add(high, builder.fadd(builder.fmul(y, c), builder.fmul(x, s)))
                return after

            sums = accumulate(context, builder, width, BLOCK, [_zeros()] * _VECTORS, body)
            for i, total in enumerate(sums):
                write(context, builder, types[9], out, ir.Constant(I64, LANES * i), total)
            return context.get_dummy_value()

        intp, float32 = numba.types.intp, numba.types.float32
        return (
            numba.types.void(array, intp, intp, cos, sin, float32, intp, flips, intp, out),
            generate,
        )

    return fold_rotated


def _across(builder: Any, vectors: list[Any]) -> list[Any]:
    """Walsh-Hadamard transform across 16 vectors, lane by lane."""
    for step in (8, 4, 2, 1):
        vectors = [
            builder.fsub(vectors[i ^ step], vectors[i])
            if i & step
            else builder.fadd(vectors[i], vectors[i ^ step])
            for i in range(_VECTORS)
        ]
    return vectors


def _within(builder: Any, x: Any) -> Any:
    """Walsh-Hadamard transform of the 16 lanes of a vector.

    Combines the vector with permutations of itself, instead of transposing the matrix.
    """
    for step in (8, 4, 2, 1):
        swap = ir.Constant(ir.VectorType(I32, LANES), [lane ^ step for lane in range(LANES)])
        partner = builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), swap)
        signs = ir.Constant(x.type, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        x = _add_signed(builder, partner, x, signs)
    return x


@intrinsic
def _walsh_signs(
    typing_context: Any, sums: Any, constants: Any, array: Any, ahead: Any, stride: Any
) -> Any:
    """The mixing of a signature (see `simhash.SimHasher`), with the floats held in 16 vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types = signature.args
        array, ahead, stride = args[2:]

        def piece(which: int, start: int, i: int) -> Any:
            at = ir.Constant(I64, start + LANES * i)
            return read(context, builder, types[which], args[which], at, LANES)

        v = [builder.fsub(piece(0, 0, i), piece(1, 0, i)) for i in range(_VECTORS)]
        mixed = []
        lines = ASKED * types[2].dtype.bitwidth // 8 // 64
        for i, x in enumerate(_across(builder, v)):
            for _ in range(lines * i // _VECTORS, lines * (i + 1) // _VECTORS):
                prefetch(builder, address(context, builder, types[2], array, ahead), keep=2)
                ahead = builder.add(ahead, stride)
            mixed.append(builder.fmul(_within(builder, x), piece(1, BLOCK, i)))
        v = _across(builder, mixed)
        words = [ir.Constant(I64, 0), ir.Constant(I64, 0)]
        for slot, plane in enumerate(PLANES):
            signs = builder.bitcast(builder.fcmp_ordered(">=", v[int(plane)], _zeros()), I16)
            shifted = builder.shl(builder.zext(signs, I64), ir.Constant(I64, 16 * (slot % 4)))
            words[slot // 4] = builder.or_(words[slot // 4], shifted)
        return context.make_tuple(builder, signature.return_type, words)

    intp = numba.types.intp
    pair = numba.types.UniTuple(numba.types.uint64, 2)  # type: ignore[no-untyped-call]
    return pair(sums, constants, array, intp, intp), generate


@intrinsic
def _prefetch_far(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, address(context, builder, signature.args[0], *args), keep=2)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


# The names kernels use, typed for the checker.
_Row = dtypes.F32
_Rotated = Callable[[dtypes.Bits, int, int, _Row, _Row, np.float32, int, _Row, int, _Row], None]
fold = cast(Callable[[dtypes.Bits, int, int, _Row, int, _Row], None], _fold)
"""(array, index, width, flips, start, out): out[:256] = the sum of the pieces of 256 of
array[index:] * flips[start:], `width` elements of a flat bit array."""
fold_2x128 = cast(_Rotated, _make_fold_rotated(64, 2))
fold_4x64 = cast(_Rotated, _make_fold_rotated(32, 4))
fold_3x64 = cast(_Rotated, _make_fold_rotated(32, 3))
"""(array, index, width, cos, sin, sign, turn, flips, start, out): the same where every head of 128
or 64 elements is rotated by (cos, sign * sin)[turn:] before it is folded."""
walsh_signs = cast(Callable[[_Row, _Row, dtypes.Bits, int, int], tuple[Any, Any]], _walsh_signs)
"""(sums, constants, array, ahead, stride): the 128 bits of sums - constants[:256] under the second
flips constants[256:512], as two uint64. Meanwhile asks for the cache lines of `ASKED` elements of
a flat bit array from `ahead`, or the same number of them nearer together, by `stride`."""
prefetch_far = cast(Callable[[dtypes.Bits, int], None], _prefetch_far)
"""Ask for the cache line of element `index`, which may lie anywhere, into the second cache."""

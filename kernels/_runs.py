"""Vector instructions of the block kernels, for runs of elements at one distance of each other.

All sums stay in registers while the runs stream by, so that memory sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from . import dtypes
from ._emit import F32, I64, LANES, accumulate, fold, read, write
from .simhash import BLOCK

__all__ = ["STEP", "difference_runs", "fold_64", "fold_128", "fold_256"]

STEP = 2 * LANES
"""Elements that `difference_runs` takes at a time."""

_FUSED = ("contract",)


def _zeros() -> Any:
    return ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES)


def _offset(builder: Any, index: Any, by: int) -> Any:
    return builder.add(index, ir.Constant(I64, by))


def _add_product(builder: Any, total: Any, x: Any, y: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=_FUSED), total, flags=_FUSED)


def _make_fold(run: int) -> Any:
    """For runs of `run` elements: a part of 256, or for 256 any multiple."""

    @intrinsic
    def fold_runs(
        typing_context: Any,
        array: Any,
        index: Any,
        stride: Any,
        runs: Any,
        size: Any,
        flips: Any,
        out: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            types = signature.args
            array, index, stride, runs, size, flips, out = args

            def add(places: list[Any], sign: Any, sums: list[Any]) -> list[Any]:
                """Add 256 elements, which lie in runs from each of `places`."""
                after = []
                for i, total in enumerate(sums):
                    place, within = divmod(LANES * i, BLOCK // len(places))
                    at = _offset(builder, places[place], within)
                    x = read(context, builder, types[0], array, at, LANES)
                    signs_at = _offset(builder, sign, LANES * i)
                    signs = read(context, builder, types[5], flips, signs_at, LANES)
                    after.append(_add_product(builder, total, x, signs))
                return after

            def whole(number: Any, sums: list[Any]) -> list[Any]:
                start = builder.add(index, builder.mul(number, stride))
                sign = builder.mul(number, size)

                def piece(at: Any, inner: list[Any]) -> list[Any]:
                    return add([builder.add(start, at)], builder.add(sign, at), inner)

                return accumulate(context, builder, size, BLOCK, sums, piece)

            def parts(number: Any, sums: list[Any]) -> list[Any]:
                places = [builder.add(index, builder.mul(number, stride))]
                for _ in range(BLOCK // run - 1):
                    places.append(builder.add(places[-1], stride))
                return add(places, builder.mul(number, ir.Constant(I64, run)), sums)

            start = [_zeros()] * (BLOCK // LANES)
            body = whole if run == BLOCK else parts
            sums = accumulate(context, builder, runs, BLOCK // run, start, body)
            for i, total in enumerate(sums):
                write(context, builder, types[6], out, ir.Constant(I64, LANES * i), total)
            return context.get_dummy_value()

        intp = numba.types.intp
        return numba.types.void(array, intp, intp, intp, intp, flips, out), generate

    return fold_runs


@intrinsic
def _difference_runs(
    typing_context: Any, array: Any, left: Any, right: Any, stride: Any, runs: Any, size: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        array, left, right, stride, runs, size = args

        def run(number: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(number, stride)

            def step(at: Any, inner: list[Any]) -> list[Any]:
                after = list(inner)
                for i in range(STEP // LANES):
                    place = _offset(builder, builder.add(offset, at), LANES * i)
                    x, y = (
                        read(context, builder, kind, array, builder.add(start, place), LANES)
                        for start in (left, right)
                    )
                    d = builder.fsub(x, y)
                    for j, z in enumerate((d, x, y)):
                        after[3 * i + j] = _add_product(builder, after[3 * i + j], z, z)
                return after

            return accumulate(context, builder, size, STEP, sums, step)

        start = [_zeros()] * (3 * STEP // LANES)
        sums = accumulate(context, builder, runs, 1, start, run)
        folded = [
            fold(builder, builder.fadd(low, high), builder.fadd)
            for low, high in zip(sums[:3], sums[3:], strict=True)
        ]
        return context.make_tuple(builder, signature.return_type, folded)

    intp = numba.types.intp
    triple = numba.types.UniTuple(numba.types.float32, 3)  # type: ignore[no-untyped-call]
    return triple(array, intp, intp, intp, intp, intp), generate


# The names kernels use, typed for the checker.
_Row = dtypes.F32
_Fold = Callable[[dtypes.Bits, int, int, int, int, _Row, _Row], None]
fold_64 = cast(_Fold, _make_fold(64))
fold_128 = cast(_Fold, _make_fold(128))
fold_256 = cast(_Fold, _make_fold(256))
"""(array, index, stride, runs, size, flips, out): out[:256] = the sum of the pieces of 256 of
`runs` runs of `size` elements, `stride` apart from `index`, laid end to end and multiplied by
flips. `size` is 64, 128, or a multiple of 256; all together are a multiple of 256."""
difference_runs = cast(
    Callable[[dtypes.Bits, int, int, int, int, int], tuple[float, float, float]],
    _difference_runs,
)
"""(array, left, right, stride, runs, size): (|x - y|^2, |x|^2, |y|^2) of runs from `left` and from
`right`, `size` elements each, a multiple of STEP; summed in 32 lanes of float32."""

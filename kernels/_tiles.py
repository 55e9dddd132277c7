"""The two inner loops of attention, for up to four query heads that share a key head.

A tile of query heads reads each key or value once and keeps its sums in registers; with one head at
a time the loads and stores of the sums, not the pool, would set the pace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from . import dtypes
from ._emit import F32, I32, I64, LANES, accumulate, address, read, splat, write

__all__ = ["dot_tile", "mix_tile"]

_CONTRACT = ("contract",)


def _zeros() -> Any:
    return ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, index: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(index)), index))


def _four_sums(builder: Any, vectors: list[Any]) -> list[Any]:
    """The sums of the lanes of up to four vectors of 16, together in 5 additions."""
    a, b, c, d = vectors + [_zeros()] * (4 - len(vectors))
    halves = [
        builder.fadd(
            _shuffle(builder, x, y, [*range(8), *range(16, 24)]),
            _shuffle(builder, x, y, [*range(8, 16), *range(24, 32)]),
        )
        for x, y in ((a, b), (c, d))
    ]
    fours = [lane + 8 * part for part in range(4) for lane in range(4)]
    total = builder.fadd(
        _shuffle(builder, halves[0], halves[1], fours),
        _shuffle(builder, halves[0], halves[1], [lane + 4 for lane in fours]),
    )
    for step in (2, 1):
        swapped = _shuffle(builder, total, total, [lane ^ step for lane in range(LANES)])
        total = builder.fadd(total, swapped)
    return [builder.extract_element(total, ir.Constant(I32, 4 * i)) for i in range(len(vectors))]


def _make_dot(tile: int) -> Any:
    @intrinsic
    def dot(
        typing_context: Any,
        query: Any,
        at: Any,
        stride: Any,
        keys: Any,
        index: Any,
        size: Any,
        scores: Any,
        to: Any,
        step: Any,
    ) -> Any:
        intp = numba.types.intp

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            types = signature.args
            query, at, stride, keys, index, size, scores, to, step = args

            def body(i: Any, sums: list[Any]) -> list[Any]:
                key = read(context, builder, types[3], keys, builder.add(index, i), LANES)
                out = []
                place = builder.add(at, i)
                for total in sums:
                    x = read(context, builder, types[0], query, place, LANES)
                    place = builder.add(place, stride)
                    out.append(
                        builder.fadd(total, builder.fmul(x, key, flags=_CONTRACT), flags=_CONTRACT)
                    )
                return out

            sums = accumulate(context, builder, size, LANES, [_zeros()] * tile, body)
            for value in _four_sums(builder, sums):
                builder.store(value, address(context, builder, types[6], scores, to))
                to = builder.add(to, step)
            return context.get_dummy_value()

        return (
            numba.types.void(query, intp, intp, keys, intp, intp, scores, intp, intp),
            generate,
        )

    return dot


def _make_mix(tile: int) -> Any:
    @intrinsic
    def mix(
        typing_context: Any,
        values: Any,
        row_elems: Any,
        rows: Any,
        start: Any,
        size: Any,
        offset: Any,
        weights: Any,
        at: Any,
        stride: Any,
        out: Any,
        to: Any,
        step: Any,
    ) -> Any:
        intp = numba.types.intp

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            types = signature.args
            values, row_elems, rows, start, size, offset = args[:6]
            weights, at, stride, out, to, step = args[6:]
            places = [to]
            for _ in range(tile - 1):
                places.append(builder.add(places[-1], step))
            before = [read(context, builder, types[9], out, place, LANES) for place in places]

            def body(n: Any, sums: list[Any]) -> list[Any]:
                token = builder.add(start, n)
                row = builder.load(address(context, builder, types[2], rows, token))
                base = builder.mul(builder.sext(row, I64), row_elems)
                value = read(context, builder, types[0], values, builder.add(base, offset), LANES)
                after = []
                place = builder.add(at, token)
                for total in sums:
                    weight = builder.load(address(context, builder, types[6], weights, place))
                    place = builder.add(place, stride)
                    scaled = builder.fmul(splat(builder, weight), value, flags=_CONTRACT)
                    after.append(builder.fadd(total, scaled, flags=_CONTRACT))
                return after

            sums = accumulate(context, builder, size, 1, before, body)
            for place, value in zip(places, sums, strict=True):
                write(context, builder, types[9], out, place, value)
            return context.get_dummy_value()

        signature = numba.types.void(
            values, intp, rows, intp, intp, intp, weights, intp, intp, out, intp, intp
        )
        return signature, generate

    return mix


_Row = dtypes.F32
_Dot = Callable[[_Row, int, int, dtypes.Bits, int, int, _Row, int, int], None]
_Mix = Callable[[dtypes.Bits, int, dtypes.I32, int, int, int, _Row, int, int, _Row, int, int], None]
dot_tile: tuple[_Dot, ...] = tuple(cast(_Dot, _make_dot(tile)) for tile in (1, 2, 3, 4))
"""[tile - 1](query, at, stride, keys, index, size, scores, to, step): for each query head of the
tile, scores[to] = query[at:] . keys[index:] over `size` elements, at, to advancing by stride, step.
"""
mix_tile: tuple[_Mix, ...] = tuple(cast(_Mix, _make_mix(tile)) for tile in (1, 2, 3, 4))
"""[tile - 1](values, row_elems, rows, start, size, offset, weights, at, stride, out, to, step): for
each query head, out[to:] += sum over `size` tokens from `start` of weights[at + token] *
values[rows[token] * row_elems + offset:], 16 elements; at, to advancing by stride, step.
"""

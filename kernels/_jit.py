"""Compilation of the CPU kernels: a typed decorator and the few instructions Numba lacks.

The intrinsics address flat arrays without Numba's handling of negative indices, which would keep
LLVM from vectorising the loops around them. Indices must be in range: the callers check every row
id first.

Numba notices a changed kernel, not a changed intrinsic: after an edit of `_emit`, `_folds`,
`_jit`, `_lanes` or `_tiles`, delete the cached code (`__pycache__/*.nb?`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.cgutils import raw_memcpy
from numba.extending import intrinsic

from . import _emit
from ._emit import F32, I32, I64, address, read, round_to
from .dtypes import Bits

__all__ = [
    "bits",
    "copy",
    "exact",
    "f32_bits",
    "load",
    "load64",
    "popcount",
    "prefetch",
    "reassociating",
    "store",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compile(function: _Function, **options: Any) -> _Function:
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return cast(_Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:
        # No directory to keep compiled code in (a read-only image): compile in each process.
        return cast(_Function, numba.njit(**options)(function))


def exact(function: _Function) -> _Function:
    """Compile with strict float semantics: results are the same, bit for bit, as in NumPy."""
    return _compile(function)


def reassociating(function: _Function) -> _Function:
    """Compile so that sums vectorise, in any order; NaN and infinity keep their meaning."""
    return _compile(function, fastmath={"reassoc", "contract", "nsz"})


@intrinsic
def _load(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index = args
        return read(context, builder, signature.args[0], array, index, 1)

    return numba.types.float32(array, numba.types.intp), generate


@intrinsic
def _store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    element = array.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = address(context, builder, signature.args[0], args[0], args[1])
        builder.store(round_to(builder, args[2], element, 1), pointer)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, numba.types.float32), generate


@intrinsic
def _bits(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(address(context, builder, signature.args[0], *args))
        return builder.zext(bits, I64)

    return numba.types.uint64(array, numba.types.intp), generate


@intrinsic
def _load64(typing_context: Any, array: Any, index: Any) -> Any:
    size = array.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *args)
        return builder.load(builder.bitcast(pointer, I64.as_pointer()), align=size)

    return numba.types.uint64(array, numba.types.intp), generate


@intrinsic
def _popcount(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.trunc(builder.ctpop(args[0]), I32)

    return numba.types.int32(numba.types.uint64), generate


@intrinsic
def _f32_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return numba.types.float32(numba.types.int32), generate


@intrinsic
def _copy(typing_context: Any, out: Any, to: Any, array: Any, index: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types = signature.args
        target = address(context, builder, types[0], args[0], args[1])
        source = address(context, builder, types[2], args[2], args[3])
        raw_memcpy(builder, target, source, args[4], array.dtype.bitwidth // 8)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    intp = numba.types.intp
    return numba.types.void(out, intp, array, intp, intp), generate


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit.prefetch(builder, address(context, builder, signature.args[0], *args), keep=3)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


# The names kernels use, typed for the checker: inside compiled code an intrinsic is an instruction.
load = cast(Callable[[Bits, int], float], _load)
"""Element `index` of a flat bit or float32 array, as float32."""
store = cast(Callable[[Bits, int, float], None], _store)
"""Round a float32 to the element type of a flat bit array and write it at `index`."""
bits = cast(Callable[[Bits, int], Any], _bits)
"""Raw bits of element `index` of a flat bit array, zero-extended to uint64."""
load64 = cast(Callable[[Bits, int], Any], _load64)
"""Eight bytes from element `index` of a flat bit array, little-endian, aligned to elements."""
popcount = cast(Callable[[Any], Any], _popcount)
"""Set bits of a uint64, as int32."""
f32_bits = cast(Callable[[Any], Any], _f32_bits)
"""The float32 with these int32 bits."""
copy = cast(Callable[[Bits, int, Bits, int, int], None], _copy)
"""Copy `count` elements of a flat bit array from `index` to `out` at `to`; no overlap."""
prefetch = cast(Callable[[Bits, int], None], _prefetch)
"""Ask for the cache line of element `index`, which may lie anywhere."""

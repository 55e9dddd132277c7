"""LLVM code that the intrinsics of the CPU kernels are put together from.

A bit view tells the element type by its integer type, so one source serves all three and the
compiled code stays cacheable: uint32 is fp32, uint16 is fp16, int16 is bf16 (see `host.typed`).
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

LANES = 16
"""Floats handled by one vector instruction of the kernels; LLVM splits them where it must."""

F32 = ir.FloatType()
I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index], inbounds=True)


def vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes) if lanes > 1 else element


def read(context: Any, builder: Any, array_type: Any, array: Any, index: Any, lanes: int) -> Any:
    """Read `lanes` elements, of raw bits or float32, from `index` on, as float32."""
    pointer = address(context, builder, array_type, array, index)
    element = array_type.dtype
    floats = vector(F32, lanes)

    def read_as(scalar: Any, align: int) -> Any:
        wanted = vector(scalar, lanes)
        return builder.load(builder.bitcast(pointer, wanted.as_pointer()), align=align)

    if element in (numba.types.uint32, numba.types.float32):
        return read_as(F32, 4)
    if element == numba.types.uint16:
        return builder.fpext(read_as(ir.HalfType(), 2), floats)
    integers = vector(I32, lanes)
    shift = ir.Constant(integers, [16] * lanes if lanes > 1 else 16)
    return builder.bitcast(builder.shl(builder.zext(read_as(I16, 2), integers), shift), floats)


def write(context: Any, builder: Any, array_type: Any, array: Any, index: Any, value: Any) -> None:
    """Write a vector of float32 to a float32 array from `index` on."""
    pointer = address(context, builder, array_type, array, index)
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(F32, LANES), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, undefined, zeros)


def round_to(builder: Any, value: Any, element: Any, lanes: int) -> Any:
    """Float32 to the bits of an element type, nearest with ties to even."""
    integers = vector(I32, lanes)
    if element == numba.types.uint32:
        return builder.bitcast(value, integers)
    shorts = vector(I16, lanes)
    if element == numba.types.uint16:
        return builder.bitcast(builder.fptrunc(value, vector(ir.HalfType(), lanes)), shorts)

    def constant(number: int) -> Any:
        return ir.Constant(integers, [number] * lanes if lanes > 1 else number)

    # The same steps as `dtypes.float32_to_bits`.
    raw = builder.bitcast(value, integers)
    upper = builder.lshr(raw, constant(16))
    odd = builder.and_(upper, constant(1))
    rounded = builder.lshr(builder.add(raw, builder.add(odd, constant(0x7FFF))), constant(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(
        builder.select(is_nan, builder.or_(upper, constant(0x40)), rounded), shorts
    )


def prefetch(builder: Any, pointer: Any, keep: int) -> None:
    """Ask for a cache line, which may lie anywhere: into all caches (3) or not the first (2)."""
    byte_pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte_pointer, I32, I32, I32])
    function = builder.module.globals.get("llvm.prefetch.p0")
    if function is None:
        function = ir.Function(builder.module, kind, "llvm.prefetch.p0")
    read, data = ir.Constant(I32, 0), ir.Constant(I32, 1)
    where = builder.bitcast(pointer, byte_pointer)
    builder.call(function, [where, read, ir.Constant(I32, keep), data])


def accumulate(
    context: Any, builder: Any, stop: Any, step: int, start: list[Any], body: Any
) -> list[Any]:
    """for i in range(0, stop, step): sums = body(i, sums), with vector sums kept in registers."""
    slots = []
    for value in start:
        slot = cgutils.alloca_once(builder, value.type)  # type: ignore[no-untyped-call]
        builder.store(value, slot)
        slots.append(slot)
    advance = ir.Constant(I64, step)
    with cgutils.for_range_slice(builder, ir.Constant(I64, 0), stop, advance) as (i, _):
        for slot, value in zip(slots, body(i, [builder.load(slot) for slot in slots]), strict=True):
            builder.store(value, slot)
    return [builder.load(slot) for slot in slots]


def fold(builder: Any, vector_value: Any, combine: Any) -> Any:
    """Combine the lanes of a vector, halving it until one is left."""
    lanes = vector_value.type.count
    undefined = ir.Constant(vector_value.type, ir.Undefined)
    while lanes > 1:
        lanes //= 2
        upper_mask = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes, 2 * lanes)))
        lower_mask = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        lower = builder.shuffle_vector(vector_value, undefined, lower_mask)
        upper = builder.shuffle_vector(vector_value, undefined, upper_mask)
        vector_value = combine(lower, upper)
        undefined = ir.Constant(vector_value.type, ir.Undefined)
    return builder.extract_element(vector_value, ir.Constant(I32, 0))

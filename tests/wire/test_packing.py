"""Packed ids and masks: round trips, and refusals that name the field."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from memshare.wire import packing
from memshare.wire.errors import InvalidArgument

DTYPES = [
    packing.INT32,
    packing.UINT32,
    packing.UINT64,
    packing.UINT16,
    packing.UINT8,
    packing.FLOAT32,
]
shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9)


@given(st.data(), st.sampled_from(DTYPES))
def test_what_is_packed_is_unpacked(data, dtype):
    values = data.draw(arrays.arrays(dtype, shapes))
    back = packing.unpack(packing.pack(values, dtype), dtype, "rows", values.size)
    np.testing.assert_array_equal(back, values.ravel())
    assert back.dtype == dtype


def test_ids_travel_little_endian():
    assert packing.pack([1, -2], packing.INT32) == b"\x01\0\0\0\xfe\xff\xff\xff"
    big = np.array([1, 258], ">i4")
    assert packing.pack(big, packing.INT32) == b"\x01\0\0\0\x02\x01\0\0"


def test_a_view_with_strides_is_packed_in_c_order():
    table = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    expected = np.ascontiguousarray(table[:, :, 1:3]).tobytes()
    assert packing.pack(table[:, :, 1:3], packing.INT32) == expected


def test_unpacked_values_cannot_be_written_through():
    values = packing.unpack(packing.pack([1, 2], packing.INT32), packing.INT32, "rows")
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 3


@given(st.binary(max_size=64), st.sampled_from(DTYPES))
def test_bytes_that_are_no_whole_values_are_refused_by_name(data, dtype):
    if len(data) % dtype.itemsize == 0:
        assert packing.unpack(data, dtype, "target_rows").nbytes == len(data)
        return
    with pytest.raises(InvalidArgument, match=r"target_rows.*not a whole number") as refusal:
        packing.unpack(data, dtype, "target_rows")
    assert refusal.value.details["field"] == "target_rows"


@given(st.integers(0, 20), st.integers(0, 20))
def test_another_count_than_expected_is_refused_by_name(count, expected):
    data = packing.pack(np.zeros(count), packing.INT32)
    if count == expected:
        assert len(packing.unpack(data, packing.INT32, "deltas", expected)) == count
        return
    with pytest.raises(InvalidArgument, match=f"deltas: expected {expected} values, got {count}"):
        packing.unpack(data, packing.INT32, "deltas", expected)


@given(arrays.arrays(np.bool_, shapes))
def test_a_mask_comes_back_as_it_was(mask):
    packed = packing.pack_mask(mask)
    np.testing.assert_array_equal(packing.unpack_mask(packed, mask.shape, "targets"), mask)


def test_each_row_of_a_mask_starts_at_a_whole_byte():
    mask = np.zeros((2, 9), np.bool_)
    mask[0, 8] = mask[1, 0] = True
    assert packing.pack_mask(mask) == b"\x00\x01\x01\x00"


@given(st.binary(max_size=12), st.integers(1, 4), st.integers(1, 20))
def test_a_mask_of_another_length_is_refused_by_name(data, rows, columns):
    if len(data) == rows * -(-columns // 8):
        assert packing.unpack_mask(data, (rows, columns), "donors").shape == (rows, columns)
        return
    with pytest.raises(InvalidArgument, match="donors"):
        packing.unpack_mask(data, (rows, columns), "donors")


@given(arrays.arrays(np.bool_, (3, 5)), st.integers(1, 7))
def test_stray_bits_in_the_padding_of_a_mask_mean_nothing(mask, stray):
    packed = np.frombuffer(packing.pack_mask(mask), np.uint8) | np.uint8(stray << 5)
    np.testing.assert_array_equal(packing.unpack_mask(packed.tobytes(), (3, 5), "donors"), mask)

"""The layout of an engine's rows: what is accepted, and refusals that say what is wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memshare.v1 import common_pb2
from memshare.wire.errors import InvalidArgument
from memshare.wire.layout import ITEMSIZE, MAX_LAYERS, MAX_ROW_ELEMENTS, RowLayout

GOOD = RowLayout(4, 2, 16, 8, common_pb2.ROW_DTYPE_BF16, (1.0, 0.5))

layouts = st.builds(
    RowLayout,
    num_layers=st.integers(1, MAX_LAYERS),
    num_kv_heads=st.integers(1, 64),
    key_head_dim=st.integers(32, 256),
    value_head_dim=st.integers(1, 256),
    dtype=st.sampled_from(list(ITEMSIZE)),
    inv_freq=st.lists(
        st.floats(-1e6, 1e6, allow_nan=False, width=32), max_size=16
    ).map(tuple),
)  # fmt: skip


@given(layouts)
def test_a_layout_survives_its_message(layout):
    message = common_pb2.RowLayout.FromString(layout.to_proto().SerializeToString())
    assert RowLayout.from_proto(message) == layout
    assert message.HasField("rope") == bool(layout.inv_freq)


def test_a_row_holds_the_wider_of_key_and_value():
    assert (GOOD.key_width, GOOD.value_width, GOOD.row_elements) == (32, 16, 32)
    assert GOOD.row_bytes == 64
    assert dataclasses.replace(GOOD, value_head_dim=48).row_bytes == 192
    assert dataclasses.replace(GOOD, dtype=common_pb2.ROW_DTYPE_FP32).row_bytes == 128


@pytest.mark.parametrize("value", [0, -1, 1 << 21])
@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "key_head_dim", "value_head_dim"])
def test_a_size_out_of_range_is_refused_by_name_and_value(name, value):
    with pytest.raises(InvalidArgument, match=rf"{name} is {value}, must be 1 to"):
        dataclasses.replace(GOOD, **{name: value})


def test_a_row_too_large_for_any_pool_is_refused():
    with pytest.raises(InvalidArgument, match=f"row elements is .*must be 1 to {MAX_ROW_ELEMENTS}"):
        dataclasses.replace(GOOD, num_kv_heads=1 << 12, key_head_dim=1 << 12)


@pytest.mark.parametrize("dtype", [common_pb2.ROW_DTYPE_UNSPECIFIED, 4, -1, 99])
def test_an_unknown_element_type_is_refused(dtype):
    with pytest.raises(InvalidArgument, match=rf"dtype {dtype} is unknown, use fp32, fp16 or bf16"):
        dataclasses.replace(GOOD, dtype=dtype)


def test_more_rotated_pairs_than_the_key_has_are_refused():
    assert dataclasses.replace(GOOD, inv_freq=(1.0,) * 8).inv_freq == (1.0,) * 8
    with pytest.raises(InvalidArgument, match="9 rotary frequencies need a key head of at least"):
        dataclasses.replace(GOOD, inv_freq=(1.0,) * 9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_frequencies_that_are_no_numbers_are_refused(value):
    with pytest.raises(InvalidArgument, match="inv_freq holds NaN or Inf"):
        dataclasses.replace(GOOD, inv_freq=(1.0, value))


@given(
    st.builds(
        common_pb2.RowLayout,
        num_layers=st.integers(0, (1 << 32) - 1),
        num_kv_heads=st.integers(0, (1 << 32) - 1),
        key_head_dim=st.integers(0, 300),
        value_head_dim=st.integers(0, 300),
        dtype=st.integers(-3, 9),
        rope=st.none() | st.builds(common_pb2.RopeParameters, inv_freq=st.binary(max_size=70)),
    )
)
def test_any_message_is_a_layout_or_refused(message):
    try:
        layout = RowLayout.from_proto(message)
    except InvalidArgument:
        return
    assert 0 < layout.row_bytes <= 4 * MAX_ROW_ELEMENTS

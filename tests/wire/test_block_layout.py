"""The layout of an engine's blocks: what is accepted, and refusals that say what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memshare.v1 import common_pb2
from memshare.wire import packing
from memshare.wire.block_layout import (
    MAX_BLOCK_TOKENS,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_PAGE_ELEMENTS,
    BlockGroup,
    BlockLayout,
    PagePart,
)
from memshare.wire.errors import InvalidArgument
from memshare.wire.layout import ITEMSIZE, MAX_LAYERS

FORMS = ("transposed", "key then value", "token by token", "apart")


def parts_of(form: str, heads: int, tokens: int, key: int, value: int) -> tuple[PagePart, PagePart]:
    """K and V in one of the ways in which engines lay them into a page."""
    both = key + value
    return {
        "transposed": (
            PagePart(0, tokens * both, 1, tokens),
            PagePart(tokens * key, tokens * both, value, 1),
        ),
        "key then value": (
            PagePart(0, tokens * both, both, 1),
            PagePart(key, tokens * both, both, 1),
        ),
        "token by token": (
            PagePart(0, both, heads * both, 1),
            PagePart(key, both, heads * both, 1),
        ),
        "apart": (
            PagePart(0, tokens * key, key, 1),
            PagePart(heads * tokens * key, tokens * value, value, 1),
        ),
    }[form]


def group_of(
    heads: int = 2,
    tokens: int = 4,
    key: int = 3,
    value: int = 2,
    *,
    form: str = "transposed",
    layers: int = 3,
    blocks: int = 5,
    itemsize: int = 2,
    contiguous: bool = True,
) -> BlockGroup:
    """A group whose pages lie block by block, or layer by layer."""
    page = heads * tokens * (key + value) * itemsize
    stride = page * layers if contiguous else page
    offsets = tuple(layer * page * (1 if contiguous else blocks) for layer in range(layers))
    return BlockGroup(
        heads, key, value, offsets, stride, *parts_of(form, heads, tokens, key, value)
    )


PAGE = 2 * 4 * (3 + 2) * 2
GOOD = BlockLayout(common_pb2.ROW_DTYPE_BF16, 4, 3 * PAGE, 5, (group_of(),))


def with_group(layout: BlockLayout = GOOD, **changes: Any) -> BlockLayout:
    return dataclasses.replace(
        layout, groups=(dataclasses.replace(layout.groups[0], **changes), *layout.groups[1:])
    )


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    """Groups of different shapes over the same memory; a block may be larger than its pages."""
    dtype = draw(st.sampled_from(list(ITEMSIZE)))
    itemsize, tokens, blocks = ITEMSIZE[dtype], draw(st.integers(1, 6)), draw(st.integers(1, 9))
    groups = tuple(
        group_of(
            draw(st.integers(1, 3)),
            tokens,
            draw(st.integers(1, 6)),
            draw(st.integers(1, 6)),
            form=draw(st.sampled_from(FORMS)),
            layers=draw(st.integers(1, 4)),
            blocks=blocks,
            itemsize=itemsize,
            contiguous=draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 3)))
    )
    needed = max(
        group.num_layers * group.num_kv_heads * tokens * (group.key_head_dim + group.value_head_dim)
        for group in groups
    )
    spare = draw(st.integers(0, 5))
    return BlockLayout(dtype, tokens, (needed + spare) * itemsize, blocks, groups)


def refused(**changes: Any) -> InvalidArgument:
    """How GOOD is refused with these changes."""
    with pytest.raises(InvalidArgument) as refusal:
        dataclasses.replace(GOOD, **changes)
    return refusal.value


def refused_group(**changes: Any) -> InvalidArgument:
    """How GOOD is refused with these changes of its group."""
    with pytest.raises(InvalidArgument) as refusal:
        with_group(**changes)
    return refusal.value


def assert_partition(layout: BlockLayout) -> None:
    """K and V fill each page, each element once, and all pages lie within the pool."""
    for group in layout.groups:
        page = layout.page_elements(group)
        shape = group.num_kv_heads, layout.block_tokens
        places = np.concatenate(
            [
                group.keys.positions(*shape, group.key_head_dim).ravel(),
                group.values.positions(*shape, group.value_head_dim).ravel(),
            ]
        )
        assert np.array_equal(np.sort(places), np.arange(page))
        last = max(group.layer_offsets) + (layout.num_blocks - 1) * group.block_stride
        assert last + page * layout.itemsize <= layout.num_bytes


# ---- what is accepted ----------------------------------------------------------------------


@given(layouts())
def test_a_layout_survives_its_message(layout: BlockLayout) -> None:
    message = common_pb2.BlockLayout.FromString(layout.to_proto().SerializeToString())
    assert BlockLayout.from_proto(message) == layout
    assert_partition(layout)


@pytest.mark.parametrize("form", FORMS)
def test_positions_are_those_of_the_page_as_an_array(form: str) -> None:
    heads, tokens, key, value = 3, 4, 5, 2
    keys, values = parts_of(form, heads, tokens, key, value)
    page = np.arange(heads * tokens * (key + value))
    if form == "transposed":
        each = page.reshape(heads, -1)
        want_keys = each[:, : tokens * key].reshape(heads, key, tokens).transpose(0, 2, 1)
        want_values = each[:, tokens * key :].reshape(heads, tokens, value)
    elif form == "apart":
        want_keys = page[: heads * tokens * key].reshape(heads, tokens, key)
        want_values = page[heads * tokens * key :].reshape(heads, tokens, value)
    else:
        order = (heads, tokens) if form == "key then value" else (tokens, heads)
        entries = page.reshape(*order, key + value)
        entries = entries if form == "key then value" else entries.transpose(1, 0, 2)
        want_keys, want_values = entries[..., :key], entries[..., key:]
    for part, dims, want in ((keys, key, want_keys), (values, value, want_values)):
        positions = part.positions(heads, tokens, dims)
        assert positions.dtype == np.int64
        assert np.array_equal(positions, want)
        assert part.span(heads, tokens, dims) == want.max() + 1


def test_sizes_follow_from_the_shape() -> None:
    assert (GOOD.itemsize, GOOD.num_groups) == (2, 1)
    assert GOOD.page_elements(GOOD.groups[0]) == 2 * 4 * (3 + 2)
    assert GOOD.row_bytes == GOOD.block_bytes == 3 * PAGE
    assert GOOD.num_bytes == 5 * 3 * PAGE
    assert GOOD.groups[0].num_layers == 3


def test_groups_of_other_shapes_may_lie_in_the_same_blocks() -> None:
    other = group_of(heads=1, key=4, value=4, form="apart", layers=2, contiguous=False)
    layout = dataclasses.replace(GOOD, groups=(*GOOD.groups, other))
    assert [layout.page_elements(group) for group in layout.groups] == [40, 32]
    assert_partition(layout)


def test_a_block_may_be_larger_than_its_pages() -> None:
    larger = dataclasses.replace(GOOD, block_bytes=3 * PAGE + 6)
    assert larger.num_bytes == 5 * (3 * PAGE + 6)
    with_group(larger, block_stride=3 * PAGE + 6)


def test_the_last_page_may_end_with_the_pool() -> None:
    end = GOOD.num_bytes - PAGE
    with_group(layer_offsets=(0, PAGE, end - 4 * 3 * PAGE))
    error = refused_group(layer_offsets=(0, PAGE, end - 4 * 3 * PAGE + 2))
    assert error.details["field"] == "block_stride"
    assert f"reach byte {GOOD.num_bytes + 2} of {GOOD.num_bytes}" in str(error)


def test_a_part_of_one_head_token_or_element_may_have_any_stride_there() -> None:
    """Strides along an axis of one are never taken."""
    group = dataclasses.replace(
        group_of(1, 1, 1, 1, layers=1),
        keys=PagePart(0, 7, 1 << 30, 0),
        values=PagePart(1, 1 << 31, 0, 9),
    )
    layout = BlockLayout(common_pb2.ROW_DTYPE_FP16, 1, 4, 5, (group,))
    assert_partition(layout)


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("block_tokens", MAX_BLOCK_TOKENS),
        ("num_blocks", MAX_BLOCKS),
        ("block_bytes", 1 << 40),
    ],
)
def test_a_size_out_of_range_is_refused_by_name_and_value(name: str, limit: int) -> None:
    for value in (0, -1, limit + 1):
        error = refused(**{name: value})
        assert error.details == {"field": name}
        assert f"{name} is {value}, must be 1 to {limit}" in str(error)


def test_there_are_one_to_many_groups() -> None:
    assert refused(groups=()).details == {"field": "groups"}
    assert dataclasses.replace(GOOD, groups=GOOD.groups * MAX_GROUPS).num_groups == MAX_GROUPS
    error = refused(groups=GOOD.groups * (MAX_GROUPS + 1))
    assert error.details == {"field": "groups"}


@pytest.mark.parametrize("name", ["num_kv_heads", "key_head_dim", "value_head_dim"])
@pytest.mark.parametrize("value", [0, -1, (1 << 16) + 1])
def test_a_size_of_a_group_out_of_range_is_refused(name: str, value: int) -> None:
    error = refused_group(**{name: value})
    assert error.details == {"field": name}
    assert f"{name} is {value}, must be 1 to {1 << 16}" in str(error)


@pytest.mark.parametrize("layers", [0, MAX_LAYERS + 1])
def test_layers_out_of_range_are_refused(layers: int) -> None:
    error = refused_group(layer_offsets=(0,) * layers)
    assert f"layers of a group is {layers}, must be 1 to {MAX_LAYERS}" in str(error)


def test_a_page_too_large_to_check_is_refused_before_it_is_checked() -> None:
    error = refused_group(num_kv_heads=1 << 16, key_head_dim=1 << 16, value_head_dim=1 << 16)
    assert f"elements of a page is {1 << 35}, must be 1 to {MAX_PAGE_ELEMENTS}" in str(error)


@pytest.mark.parametrize("dtype", [common_pb2.ROW_DTYPE_UNSPECIFIED, 4, -1, 99])
def test_an_unknown_element_type_is_refused(dtype: int) -> None:
    error = refused(dtype=dtype)
    assert error.details == {"field": "dtype"}
    assert f"dtype {dtype} is unknown, use fp32, fp16 or bf16" in str(error)


def test_every_group_is_checked() -> None:
    bad = dataclasses.replace(group_of(), block_stride=PAGE - 2)
    assert refused(groups=(group_of(), bad)).details == {"field": "block_stride"}


def test_pages_that_do_not_fit_into_a_block_are_refused() -> None:
    error = refused(block_bytes=3 * PAGE - 1)
    assert error.details == {"field": "block_bytes"}
    assert f"3 pages of {PAGE} bytes do not fit into a block of {3 * PAGE - 1}" in str(error)
    # Nor do those of the wider element.
    assert refused(dtype=common_pb2.ROW_DTYPE_FP32).details == {"field": "block_bytes"}


@pytest.mark.parametrize("stride", [0, 2, PAGE - 2, 3 * PAGE + 2, 1 << 63])
def test_pages_that_overlap_the_next_or_leave_the_pool_are_refused(stride: int) -> None:
    assert refused_group(block_stride=stride).details == {"field": "block_stride"}


@pytest.mark.parametrize("offset", [GOOD.num_bytes, 1 << 40, (1 << 64) - 2])
def test_a_layer_outside_the_pool_is_refused(offset: int) -> None:
    error = refused_group(layer_offsets=(0, offset, PAGE))
    assert error.details == {"field": "block_stride"}
    assert f"of {GOOD.num_bytes}" in str(error)


def test_more_blocks_than_the_strides_are_made_for_are_refused() -> None:
    """Layer by layer: the last layer's pages of further blocks lie behind the pool."""
    by_layer = dataclasses.replace(GOOD, groups=(group_of(contiguous=False),))
    assert_partition(by_layer)
    with pytest.raises(InvalidArgument) as refusal:
        dataclasses.replace(by_layer, num_blocks=6, block_bytes=3 * PAGE - 6 * 6)
    assert refusal.value.details == {"field": "block_bytes"}
    with pytest.raises(InvalidArgument) as refusal:
        with_group(by_layer, layer_offsets=(0, 5 * PAGE, 10 * PAGE + 2))
    assert refusal.value.details == {"field": "block_stride"}


def test_elements_across_the_element_size_are_refused() -> None:
    loose = dataclasses.replace(GOOD, block_bytes=4 * PAGE)
    for changes in ({"layer_offsets": (1, PAGE, 2 * PAGE)}, {"block_stride": 3 * PAGE + 1}):
        with pytest.raises(InvalidArgument, match="multiples of the element size") as refusal:
            with_group(loose, **changes)
        assert refusal.value.details == {"field": "layer_offsets"}


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("stride", ["offset", "head_stride", "token_stride", "dim_stride"])
def test_a_part_that_leaves_its_page_is_refused_by_name(name: str, stride: str) -> None:
    part = getattr(GOOD.groups[0], name)
    error = refused_group(**{name: dataclasses.replace(part, **{stride: 1 << 31})})
    assert error.details == {"field": name}
    assert f"{name} reach beyond the {2 * 4 * 5} elements of the page" in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"values": GOOD.groups[0].keys},
        {"keys": PagePart(0, 0, 0, 0)},
        # The two parts overlap in the first head and leave a gap in the last.
        {"values": PagePart(0, 20, 2, 1)},
        # Within the page, but two tokens of K lie in one place.
        {"keys": PagePart(0, 20, 1, 3)},
    ],
)
def test_parts_that_overlap_or_leave_a_gap_are_refused(changes: dict[str, Any]) -> None:
    error = refused_group(**changes)
    assert error.details == {"field": "keys"}
    assert "overlap or leave a gap" in str(error)


def test_offsets_that_are_no_whole_numbers_are_refused_by_name() -> None:
    message = GOOD.to_proto()
    message.groups[0].layer_offsets += b"\0"
    with pytest.raises(InvalidArgument) as refusal:
        BlockLayout.from_proto(message)
    assert refusal.value.details["field"] == "layer_offsets"


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="block_tokens is 0"):
        BlockLayout.from_proto(common_pb2.BlockLayout())


small = st.integers(0, 40)
uint32 = small | st.integers(0, (1 << 32) - 1)
uint64 = uint32 | st.integers(0, (1 << 64) - 1)
CHANGES: list[tuple[str, str, st.SearchStrategy[Any]]] = [
    *(("layout", name, uint32) for name in ("block_tokens", "num_blocks")),
    ("layout", "block_bytes", uint64),
    ("layout", "dtype", st.integers(-3, 9)),
    *(("group", name, uint32) for name in ("num_kv_heads", "key_head_dim", "value_head_dim")),
    ("group", "block_stride", uint64),
    (
        "group",
        "layer_offsets",
        st.lists(uint64, max_size=4).map(lambda offsets: packing.pack(offsets, packing.UINT64)),
    ),
    *(
        (part, field, uint32)
        for part in ("keys", "values")
        for field in ("offset", "head_stride", "token_stride", "dim_stride")
    ),
]


@given(layouts(), st.data())
def test_any_message_is_a_layout_within_its_pool_or_refused(
    layout: BlockLayout, data: st.DataObject
) -> None:
    message = layout.to_proto()
    group = message.groups[data.draw(st.integers(0, len(message.groups) - 1))]
    places = {"layout": message, "group": group, "keys": group.keys, "values": group.values}
    for place, field, values in data.draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        setattr(places[place], field, data.draw(values))
    try:
        changed = BlockLayout.from_proto(message)
    except InvalidArgument:
        return
    assert_partition(changed)


@pytest.mark.parametrize(
    "offsets",
    [(0, 0), (0, PAGE - 2), (0, 2 * PAGE + PAGE // 2), (0, 4 * PAGE - PAGE // 2)],
)
def test_layers_whose_pages_overlap_are_refused(offsets: tuple[int, ...]) -> None:
    error = refused_group(layer_offsets=offsets, block_stride=2 * PAGE)
    assert error.details == {"field": "layer_offsets"}
    assert "of layers 0 and 1 of a group overlap" in str(error)

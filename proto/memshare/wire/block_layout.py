"""The shape of an engine's blocks, as every process sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memshare.v1 import common_pb2
from memshare.wire import packing
from memshare.wire.errors import InvalidArgument
from memshare.wire.layout import ITEMSIZE, MAX_LAYERS

MAX_BLOCK_TOKENS: Final = 1 << 16
MAX_BLOCKS: Final = (1 << 31) - 1
MAX_GROUPS: Final = 64
MAX_PAGE_ELEMENTS: Final = 1 << 22


@dataclass(frozen=True)
class PagePart:
    """Where K or V lies within a layer's page: element (head, token, dim) is at
    `offset + head * head_stride + token * token_stride + dim * dim_stride` elements.
    """

    offset: int
    head_stride: int
    token_stride: int
    dim_stride: int

    def positions(
        self, heads: int, tokens: int, dims: int
    ) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
        """Element positions within the page, int64 [heads, tokens, dims]."""
        return (
            self.offset
            + np.arange(heads, dtype=np.int64)[:, None, None] * self.head_stride
            + np.arange(tokens, dtype=np.int64)[:, None] * self.token_stride
            + np.arange(dims, dtype=np.int64) * self.dim_stride
        )

    def span(self, heads: int, tokens: int, dims: int) -> int:
        """Elements from the start of the page to the end of this part."""
        return (
            self.offset
            + (heads - 1) * self.head_stride
            + (tokens - 1) * self.token_stride
            + (dims - 1) * self.dim_stride
            + 1
        )


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share one block table and have one shape.

    The page of block b in layer l starts at byte `layer_offsets[l] + b * block_stride` of the
    pool. Within a page K takes `num_kv_heads * block_tokens * key_head_dim` elements, as `keys`
    says, and V likewise; together they fill the page without gap or overlap.
    """

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    layer_offsets: tuple[int, ...]
    block_stride: int
    keys: PagePart
    values: PagePart

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.layer_offsets)


@dataclass(frozen=True)
class BlockLayout:
    """A row of the pool is a block: K and V of `block_tokens` tokens in all layers of a group.

    `dtype` is a `memshare.v1.RowDtype` value. The pool is divided into `num_blocks` blocks of
    `block_bytes`; the strides of `groups` say where their parts lie. Raises `InvalidArgument`
    for sizes out of range, parts that overlap or leave gaps, and pages that overlap or lie
    outside the pool.
    """

    dtype: int
    block_tokens: int
    block_bytes: int
    num_blocks: int
    groups: tuple[BlockGroup, ...]

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("block_tokens", self.block_tokens, MAX_BLOCK_TOKENS),
            ("num_blocks", self.num_blocks, MAX_BLOCKS),
            ("block_bytes", self.block_bytes, 1 << 40),
            ("groups", len(self.groups), MAX_GROUPS),
        ):
            _require(name, value, limit)
        _require("bytes of all blocks", self.num_bytes, 1 << 62)
        if self.dtype not in ITEMSIZE:
            raise InvalidArgument(
                f"block layout: dtype {self.dtype} is unknown, use fp32, fp16 or bf16",
                field="dtype",
            )
        for group in self.groups:
            self._check_group(group)

    def _check_group(self, group: BlockGroup) -> None:
        for name, value, limit in (
            ("layers of a group", group.num_layers, MAX_LAYERS),
            ("num_kv_heads", group.num_kv_heads, 1 << 16),
            ("key_head_dim", group.key_head_dim, 1 << 16),
            ("value_head_dim", group.value_head_dim, 1 << 16),
            ("elements of a page", self.page_elements(group), MAX_PAGE_ELEMENTS),
        ):
            _require(name, value, limit)
        self._check_parts(group)
        page = self.page_elements(group) * self.itemsize
        if page * group.num_layers > self.block_bytes:
            raise InvalidArgument(
                f"block layout: {group.num_layers} pages of {page} bytes do not fit into a "
                f"block of {self.block_bytes}",
                field="block_bytes",
            )
        offsets = np.array(group.layer_offsets, np.uint64).astype(np.float64)
        end = offsets.max() + float(group.block_stride) * (self.num_blocks - 1) + page
        if end > self.num_bytes or group.block_stride < page:
            raise InvalidArgument(
                f"block layout: with a block stride of {group.block_stride} bytes pages overlap "
                f"or reach byte {end:.0f} of {self.num_bytes}",
                field="block_stride",
            )
        if any(offset % self.itemsize for offset in (*group.layer_offsets, group.block_stride)):
            raise InvalidArgument(
                "block layout: offsets and strides must be multiples of the element size",
                field="layer_offsets",
            )
        self._check_layers_apart(group, page)

    def _check_layers_apart(self, group: BlockGroup, page: int) -> None:
        """No page of one layer may reach into a page of another one."""
        offsets = np.array(group.layer_offsets, np.uint64).astype(np.int64)
        apart = offsets[:, None] - offsets
        # The two blocks of two layers that come nearest to one another.
        most = self.num_blocks - 1
        blocks = np.clip(np.rint(apart / group.block_stride), -most, most).astype(np.int64)
        overlap = np.abs(apart - blocks * group.block_stride) < page
        first, second = np.nonzero(np.triu(overlap, 1))
        if first.size:
            raise InvalidArgument(
                f"block layout: pages of {page} bytes of layers {first[0]} and {second[0]} of a "
                f"group overlap, at offsets {offsets[first[0]]} and {offsets[second[0]]}",
                field="layer_offsets",
            )

    def _check_parts(self, group: BlockGroup) -> None:
        """K and V must fill the page exactly."""
        page = self.page_elements(group)
        parts = (
            (group.keys, group.key_head_dim, "keys"),
            (group.values, group.value_head_dim, "values"),
        )
        seen = np.zeros(page, np.bool_)
        for part, dims, name in parts:
            if part.span(group.num_kv_heads, self.block_tokens, dims) > page:
                raise InvalidArgument(
                    f"block layout: {name} reach beyond the {page} elements of the page",
                    field=name,
                )
            seen[part.positions(group.num_kv_heads, self.block_tokens, dims)] = True
        if not seen.all():
            raise InvalidArgument(
                "block layout: keys and values overlap or leave a gap in the page", field="keys"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def num_groups(self) -> int:
        """Groups that can be shared."""
        return len(self.groups)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the pool: a block."""
        return self.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool that the blocks take."""
        return self.block_bytes * self.num_blocks

    def page_elements(self, group: BlockGroup) -> int:
        """Elements of one layer's page."""
        dims = group.key_head_dim + group.value_head_dim
        return group.num_kv_heads * self.block_tokens * dims

    def to_proto(self) -> common_pb2.BlockLayout:
        """The message of this layout."""
        return common_pb2.BlockLayout(
            dtype=self.dtype,  # type: ignore[arg-type]
            block_tokens=self.block_tokens,
            block_bytes=self.block_bytes,
            num_blocks=self.num_blocks,
            groups=[
                common_pb2.BlockGroup(
                    num_kv_heads=group.num_kv_heads,
                    key_head_dim=group.key_head_dim,
                    value_head_dim=group.value_head_dim,
                    layer_offsets=packing.pack(group.layer_offsets, packing.UINT64),
                    block_stride=group.block_stride,
                    keys=_part_to_proto(group.keys),
                    values=_part_to_proto(group.values),
                )
                for group in self.groups
            ],
        )

    @classmethod
    def from_proto(cls, layout: common_pb2.BlockLayout) -> BlockLayout:
        """The layout of a message. Raises `InvalidArgument` naming what is wrong."""
        return cls(
            dtype=layout.dtype,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            num_blocks=layout.num_blocks,
            groups=tuple(
                BlockGroup(
                    num_kv_heads=group.num_kv_heads,
                    key_head_dim=group.key_head_dim,
                    value_head_dim=group.value_head_dim,
                    layer_offsets=tuple(
                        packing.unpack(
                            group.layer_offsets, packing.UINT64, "layer_offsets"
                        ).tolist()
                    ),
                    block_stride=group.block_stride,
                    keys=_part_from_proto(group.keys),
                    values=_part_from_proto(group.values),
                )
                for group in layout.groups
            ),
        )


def _require(name: str, value: int, limit: int) -> None:
    if not 0 < value <= limit:
        raise InvalidArgument(f"block layout: {name} is {value}, must be 1 to {limit}", field=name)


def _part_to_proto(part: PagePart) -> common_pb2.PagePart:
    return common_pb2.PagePart(
        offset=part.offset,
        head_stride=part.head_stride,
        token_stride=part.token_stride,
        dim_stride=part.dim_stride,
    )


def _part_from_proto(part: common_pb2.PagePart) -> PagePart:
    return PagePart(part.offset, part.head_stride, part.token_stride, part.dim_stride)

"""Where the blocks of an engine lie in the pool, in the form that kernels read.

An engine lays K and V out within a layer's page as its attention likes it: head by head or token by
token, K perhaps transposed. No operation on blocks looks at heads, tokens or dimensions: distances,
sketches and hashes are sums over elements. So a layout is reduced once to contiguous runs of K and
of V, and kernels read run after run, whatever the engine's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .dtypes import RowDtype

__all__ = ["CHUNK", "KEY", "VALUE", "BlockPages"]

CHUNK: Final = 2048
"""Elements worked on at a time: as float32, two chunks and the signs of a sketch lie in the first
cache, and few enough are added up in float32 lanes that float64 sums of them are exact to 1e-6."""

KEY: Final = 0
VALUE: Final = 1

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BlockPages:
    """Where the blocks of one group of layers lie. All arrays are read-only.

    The page of block b in layer l is the `page_elems` elements from
    `layer_starts[l] + b * block_stride` of the flat pool. `is_key` bool [page_elems] tells its
    elements of K from those of V. `chunks` int64 [c, 5] cut the page into pieces of one kind and at
    most `CHUNK` elements, in the order of the page: (start, stride, runs, run, kind) are `runs`
    times `run` contiguous elements, `stride` apart.
    """

    dtype: RowDtype
    num_blocks: int
    layer_starts: I64
    block_stride: int
    is_key: Bools
    chunks: I64

    @classmethod
    def build(
        cls,
        dtype: RowDtype,
        num_blocks: int,
        layer_offsets: Sequence[int],
        block_stride: int,
        is_key: Bools,
    ) -> BlockPages:
        """`layer_offsets` and `block_stride` in bytes; `is_key`: bool [elements of a page].

        ValueError for offsets that are no multiples of the element size, pages that overlap those
        of the next block, a page without K or V, or sizes that are not positive.
        """
        offsets = np.array(layer_offsets, np.int64)
        if num_blocks < 1 or offsets.ndim != 1 or not len(offsets) or is_key.ndim != 1:
            raise ValueError("blocks, layers and elements of a page must be at least one")
        if offsets.min() < 0 or (offsets % dtype.itemsize).any() or block_stride % dtype.itemsize:
            raise ValueError(
                f"layer offsets and block stride must be multiples of {dtype.itemsize} bytes"
            )
        if not 0 < len(is_key) * dtype.itemsize <= block_stride:
            raise ValueError(
                f"pages of {len(is_key)} elements overlap at a stride of {block_stride} bytes"
            )
        if is_key.all() or not is_key.any():
            raise ValueError("a page must hold elements of K and of V")
        pages = cls(
            dtype,
            num_blocks,
            offsets // dtype.itemsize,
            block_stride // dtype.itemsize,
            is_key.copy(),
            _cut(is_key),
        )
        for array in (pages.layer_starts, pages.is_key, pages.chunks):
            array.flags.writeable = False
        return pages

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.layer_starts)

    @property
    def page_elems(self) -> int:
        """Elements of one layer's page."""
        return len(self.is_key)

    @property
    def elems(self) -> I64:
        """int64 [2]: elements of K and of V in a page."""
        keys = int(self.is_key.sum())
        return np.array([keys, self.page_elems - keys])

    @property
    def end(self) -> int:
        """Elements of the pool up to the end of the last page."""
        last = int(self.layer_starts.max()) + (self.num_blocks - 1) * self.block_stride
        return last + self.page_elems


def _cut(is_key: Bools) -> I64:
    """The chunks of a page."""
    chunks = []
    for kind, mask in ((KEY, is_key), (VALUE, ~is_key)):
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        starts, sizes = _split(edges[::2], edges[1::2])
        # Runs continue a chunk while they are of one size and one distance apart.
        steps = np.diff(starts)
        uneven = np.flatnonzero((sizes[1:-1] != sizes[2:]) | (steps[:-1] != steps[1:])) + 2
        uneven = np.append(uneven, len(starts))
        first = 0
        while first < len(starts):
            size = sizes[first]
            end = first + 1
            if end < len(starts) and sizes[end] == size:
                end = min(uneven[np.searchsorted(uneven, end, "right")], first + CHUNK // size)
            step = steps[first] if end - first > 1 else size
            chunks.append((starts[first], step, end - first, size, kind))
            first = end
    return np.array(sorted(chunks), np.int64)


def _split(starts: I64, ends: I64) -> tuple[I64, I64]:
    """(start, size) of the runs, with those longer than a chunk cut into whole chunks."""
    pieces = -(-(ends - starts) // CHUNK)
    run = np.repeat(np.arange(len(starts)), pieces)
    within = np.arange(len(run)) - (np.cumsum(pieces) - pieces)[run]
    where = starts[run] + within * CHUNK
    return where, np.minimum(ends[run] - where, CHUNK)

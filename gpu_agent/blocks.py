"""The kernels, bound to the pool and to the layout of one session's blocks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memshare.gpu_agent.rows import ROW_DTYPES, Bools, Float32, Int32, UInt64
from memshare.kernels import BlockKernels, BlockPages, BlockSketcher
from memshare.wire.block_layout import BlockGroup, BlockLayout

# The inverse of less would overflow.
_SMALLEST: Final = 1e-30
# Of the norms by which distances are measured.
_LARGEST: Final = float(np.finfo(np.float32).max)


class SessionBlocks:
    """Reads the blocks of one layout. All ids must lie within the pool.

    In place of a row's kind stands the group (`kinds` numbers them), and there is one layer.
    Stateless: calls may run side by side.
    """

    def __init__(self, kernels: BlockKernels, pool: npt.NDArray[Any], layout: BlockLayout) -> None:
        """`pool`: flat raw bits of the layout's element size."""
        self.layout = layout
        self.kinds = tuple(range(layout.num_groups))
        self.num_layers = 1
        self.num_rows = layout.num_blocks
        self._kernels = kernels
        self._pool = pool
        self.pages = tuple(_pages(layout, group) for group in layout.groups)
        self._sketchers = tuple(BlockSketcher(pages) for pages in self.pages)

    def weights(self, group: int, blocks: Int32) -> Float32:
        """float32 [layers, 2]: one over the root mean square of K and of V over finite blocks."""
        squares = self._kernels.squares(self._pool, self.pages[group], blocks)
        finite = np.asarray(np.isfinite(squares).all(axis=(1, 2)), np.bool_)
        mean = squares[finite].mean(axis=0) if finite.any() else np.ones(squares.shape[1:])
        weights: Float32 = (1.0 / np.sqrt(np.maximum(mean, _SMALLEST))).astype(np.float32)
        return weights

    def sketches(self, group: int, blocks: Int32, weights: Float32) -> Float32:
        """float32 [n, SKETCH]; not finite where a block is not."""
        return self._kernels.sketches(
            self._pool, self.pages[group], blocks, weights, self._sketchers[group]
        )

    def sign(self, group: int, sketches: Float32, mean: Float32) -> UInt64:
        """Signatures [n, 2] of sketches less their mean."""
        return self._kernels.sketch_signatures(sketches, mean, self._sketchers[group])

    def distances(self, group: int, targets: Int32, donors: Int32) -> Float32:
        """float32 [m, k, 2], K and V apart.

        Infinity for donor -1, and for blocks whose K or V in some layer is zero or too large.
        """
        return self._kernels.pair_distances(self._pool, self.pages[group], targets, donors)

    def hashes(self, group: int, blocks: Int32) -> UInt64:
        """Hash of each block's bits; 0 for blocks that match nothing."""
        return self._kernels.hashes(self._pool, self.pages[group], blocks)

    def equal(self, group: int, left: Int32, right: Int32) -> Bools:
        """Whether blocks are equal bit for bit."""
        return self._kernels.equal(self._pool, self.pages[group], left, right)

    def unusable(self, group: int, blocks: Int32) -> tuple[Bools, Bools]:
        """(holds NaN or Inf, is finite but of no measurable distance) for each block.

        The latter are still equal to others, unless they are all zero: see `distances`, `hashes`.
        """
        squares = self._kernels.squares(self._pool, self.pages[group], blocks)
        # A block of large finite numbers has infinite squares too, but a hash.
        without_hash = self.hashes(group, blocks) == 0
        nonfinite = np.asarray(without_hash & (squares != 0).any(axis=(1, 2)), np.bool_)
        norms = squares * self.pages[group].elems
        measurable = ((norms > 0) & (norms <= _LARGEST)).all(axis=(1, 2))
        return nonfinite, np.asarray(~nonfinite & ~measurable, np.bool_)

    def copy(self, sources: Int32, destinations: Int32) -> None:
        """Copy whole blocks. ValueError if one is written twice, or both read and written."""
        self._kernels.copy_blocks(self._pool, self.pages, sources, destinations)

    def zero(self, blocks: Int32) -> None:
        """Fill whole blocks with zeros."""
        self._kernels.zero_blocks(self._pool, self.pages, blocks)


def _pages(layout: BlockLayout, group: BlockGroup) -> BlockPages:
    is_key = np.zeros(layout.page_elements(group), np.bool_)
    shape = group.num_kv_heads, layout.block_tokens, group.key_head_dim
    is_key[group.keys.positions(*shape)] = True
    return BlockPages.build(
        ROW_DTYPES[layout.dtype],
        layout.num_blocks,
        group.layer_offsets,
        group.block_stride,
        is_key,
    )

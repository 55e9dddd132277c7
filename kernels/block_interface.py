"""The operations on an engine's blocks, as every backend offers them.

As in `interface`, the public methods check and the `_`-methods compute.

Terms: `pool` is a flat array of raw bits (`RowDtype.bits_dtype`), C-contiguous; `pages` says where
the blocks of a group lie in it. A block is the K and V of all layers of the group, as the engine
stored them: keys after RoPE, at their own positions. Block ids are int32. ValueError for a block
outside the pages (naming the first), a wrong dtype or shape: always before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from . import checks
from .block_pages import BlockPages
from .block_sketch import SKETCH, BlockSketcher
from .dtypes import F32, I32, U64, Bits

__all__ = ["F64", "BlockKernels"]

F64 = npt.NDArray[np.float64]


class BlockKernels(ABC):
    """All block operations of one backend. Stateless; the calls release the GIL where they can."""

    name: str

    def squares(self, pool: Bits, pages: BlockPages, blocks: I32) -> F64:
        """float64 [n, layers, 2]: mean square of the elements of K and of V.

        Not finite where the block is not.
        """
        return self._squares(pool, pages, _checked("blocks", pool, pages, blocks))

    def sketches(
        self, pool: Bits, pages: BlockPages, blocks: I32, weights: F32, sketcher: BlockSketcher
    ) -> F32:
        """float32 [n, 256]: a random projection of each block, linear in its elements.

        weights: float32 [layers, 2], factors of K and V. A block with NaN or infinity gets a sketch
        that is not finite. Method: `memshare.kernels.block_sketch`.
        """
        blocks = _checked("blocks", pool, pages, blocks)
        weights = checks.check_floats("weights", weights, (pages.num_layers, 2))
        if sketcher.signs.shape[:2] != (pages.num_layers, len(pages.chunks)):
            raise ValueError("the sketcher was made for other pages")
        return self._sketches(pool, pages, blocks, weights, sketcher)

    def sketch_signatures(self, sketches: F32, mean: F32, sketcher: BlockSketcher) -> U64:
        """uint64 [n, 2]: 128-bit SimHash of sketches [n, 256] less their mean [256].

        A sketch that is not finite gets a meaningless signature.
        """
        sketches = checks.check_floats("sketches", sketches, (len(sketches), SKETCH))
        mean = checks.check_floats("mean", mean, (SKETCH,))
        return self._sketch_signatures(sketches, mean, sketcher)

    def pair_distances(self, pool: Bits, pages: BlockPages, targets: I32, donors: I32) -> F32:
        """float32 [m, k, 2]: relative squared distances |x - y|^2 / |x|^2 to each donor, K and V.

        targets: [m]. donors: [m, k], -1 for none. Each distance is the mean over the layers.
        Infinity for donor -1, and where in any layer |x|^2 or |y|^2 is zero, is not finite or
        overflows float32: nothing is similar to an empty block.
        """
        targets = _checked("targets", pool, pages, targets)
        donors = checks.check_ids("donors", donors, pages.num_blocks, 2, True, "block")
        checks.check_shape("donors", donors, (len(targets), donors.shape[1]))
        return self._pair_distances(pool, pages, targets, donors)

    def hashes(self, pool: Bits, pages: BlockPages, blocks: I32) -> U64:
        """uint64 [n]: hash of the raw bits of each block, the same in all backends.

        The hash of the hashes (`memshare.kernels.rowhash`) of the `CHUNK`s of its pages. 0 is kept
        for blocks that must never match: all zero, or with NaN or infinity. Equal hashes are to be
        confirmed by `equal`.
        """
        return self._hashes(pool, pages, _checked("blocks", pool, pages, blocks))

    def equal(self, pool: Bits, pages: BlockPages, a: I32, b: I32) -> npt.NDArray[np.bool_]:
        """bool [m]: blocks a[i] and b[i] are the same bits.

        Blocks that are all zero, or hold NaN or infinity, equal nothing, not even themselves.
        """
        a = _checked("a", pool, pages, a)
        b = _checked("b", pool, pages, b)
        checks.check_shape("b", b, a.shape)
        return self._equal(pool, pages, a, b)

    def copy_blocks(self, pool: Bits, groups: Sequence[BlockPages], src: I32, dst: I32) -> None:
        """Copy blocks src[i] to dst[i], in place, in the pages of all `groups`.

        ValueError when a block is written twice or is both read and written: the result would
        depend on the order.
        """
        for pages in groups:
            src = _checked("src", pool, pages, src)
            dst = _checked("dst", pool, pages, dst)
        checks.check_shape("dst", dst, src.shape)
        checks.check_copy("block", src, dst)
        for pages in groups:
            self._copy_blocks(pool, pages, src, dst)

    def zero_blocks(self, pool: Bits, groups: Sequence[BlockPages], blocks: I32) -> None:
        """Fill blocks [n] with zeros, in place, in the pages of all `groups`."""
        for pages in groups:
            blocks = _checked("blocks", pool, pages, blocks)
        for pages in groups:
            self._zero_blocks(pool, pages, blocks)

    # What a backend implements, on checked arguments.

    @abstractmethod
    def _squares(self, pool: Bits, pages: BlockPages, blocks: I32) -> F64: ...

    @abstractmethod
    def _sketches(
        self, pool: Bits, pages: BlockPages, blocks: I32, weights: F32, sketcher: BlockSketcher
    ) -> F32: ...

    @abstractmethod
    def _sketch_signatures(self, sketches: F32, mean: F32, sketcher: BlockSketcher) -> U64: ...

    @abstractmethod
    def _pair_distances(self, pool: Bits, pages: BlockPages, targets: I32, donors: I32) -> F32: ...

    @abstractmethod
    def _hashes(self, pool: Bits, pages: BlockPages, blocks: I32) -> U64: ...

    @abstractmethod
    def _equal(self, pool: Bits, pages: BlockPages, a: I32, b: I32) -> npt.NDArray[np.bool_]: ...

    @abstractmethod
    def _copy_blocks(self, pool: Bits, pages: BlockPages, src: I32, dst: I32) -> None: ...

    @abstractmethod
    def _zero_blocks(self, pool: Bits, pages: BlockPages, blocks: I32) -> None: ...


def _checked(name: str, pool: Bits, pages: BlockPages, blocks: I32) -> I32:
    """Block ids within the pages, and the pages within the pool."""
    if pool.ndim != 1 or not pool.flags.c_contiguous or pool.dtype != pages.dtype.bits_dtype:
        raise ValueError(
            f"the pool must be a flat, contiguous array of {pages.dtype.bits_dtype} bits"
        )
    if pages.end > pool.size:
        raise ValueError(f"pages reach element {pages.end} of a pool of {pool.size}")
    return checks.check_ids(name, blocks, pages.num_blocks, what="block")

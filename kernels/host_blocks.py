"""Numba: every block operation on the host's processor, one thread per call, without the GIL."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import host_block_loops as loops
from .block_interface import F64, BlockKernels
from .block_pages import CHUNK, BlockPages
from .block_sketch import SKETCH, BlockSketcher
from .dtypes import F32, I32, U64, Bits
from .host import frozen, typed
from .host_signatures import aligned
from .rowhash import word_keys, word_masks

__all__ = ["NumbaBlockKernels"]


class NumbaBlockKernels(BlockKernels):
    """Every block operation compiled for the host's processor."""

    name = "numba"

    def _squares(self, pool: Bits, pages: BlockPages, blocks: I32) -> F64:
        out = np.zeros((len(blocks), pages.num_layers, 2))
        loops.squares(
            frozen(typed(pool, pages.dtype)),
            pages.layer_starts,
            pages.block_stride,
            pages.chunks,
            frozen(blocks),
            out,
        )
        return out / pages.elems

    def _sketches(
        self, pool: Bits, pages: BlockPages, blocks: I32, weights: F32, sketcher: BlockSketcher
    ) -> F32:
        out = np.zeros((len(blocks), SKETCH), np.float32)
        loops.sketches(
            frozen(typed(pool, pages.dtype)),
            pages.layer_starts,
            pages.block_stride,
            pages.page_elems,
            pages.chunks,
            frozen(blocks),
            frozen(weights),
            sketcher.flips,
            sketcher.signs,
            aligned(CHUNK + SKETCH),
            out,
        )
        return out

    def _sketch_signatures(self, sketches: F32, mean: F32, sketcher: BlockSketcher) -> U64:
        out = np.empty((len(sketches), 2), np.uint64)
        constants = aligned(2 * SKETCH)
        constants[:SKETCH] = mean
        constants[SKETCH:] = sketcher.second_flips
        loops.sketch_signatures(frozen(sketches), frozen(constants), out)
        return out

    def _pair_distances(self, pool: Bits, pages: BlockPages, targets: I32, donors: I32) -> F32:
        out = np.empty((*donors.shape, 2), np.float32)
        loops.pair_distances(
            frozen(typed(pool, pages.dtype)),
            pages.layer_starts,
            pages.block_stride,
            pages.page_elems,
            pages.chunks,
            frozen(targets),
            frozen(donors),
            out,
        )
        return out

    def _hashes(self, pool: Bits, pages: BlockPages, blocks: I32) -> U64:
        out = np.empty(len(blocks), np.uint64)
        # Hashes and equality look at words, not at numbers: one type for both half formats.
        loops.hashes(
            frozen(pool),
            pages.layer_starts,
            pages.block_stride,
            pages.page_elems,
            frozen(blocks),
            word_masks(pages.dtype),
            word_keys(CHUNK * pages.dtype.itemsize // 8),
            word_keys(pages.num_layers * -(-pages.page_elems // CHUNK)),
            out,
        )
        return out

    def _equal(self, pool: Bits, pages: BlockPages, a: I32, b: I32) -> npt.NDArray[np.bool_]:
        out = np.empty(len(a), np.bool_)
        loops.equal(
            frozen(pool),
            pages.layer_starts,
            pages.block_stride,
            pages.page_elems,
            frozen(a),
            frozen(b),
            word_masks(pages.dtype),
            out,
        )
        return out

    def _copy_blocks(self, pool: Bits, pages: BlockPages, src: I32, dst: I32) -> None:
        loops.copy_blocks(
            pool,
            pages.layer_starts,
            pages.block_stride,
            pages.page_elems,
            frozen(src),
            frozen(dst),
        )

    def _zero_blocks(self, pool: Bits, pages: BlockPages, blocks: I32) -> None:
        loops.zero_blocks(
            pool, pages.layer_starts, pages.block_stride, pages.page_elems, frozen(blocks)
        )

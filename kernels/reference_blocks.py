"""NumPy: the plain statement of every block operation; sums in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .block_interface import F64, BlockKernels
from .block_pages import CHUNK, I64, BlockPages
from .block_sketch import SKETCH, BlockSketcher
from .dtypes import F32, I32, U64, Bits, bits_to_float32
from .reference import matchable, mixed_signs, words_of
from .rowhash import hash_words

__all__ = ["NumpyBlockKernels"]


def _positions(pages: BlockPages, blocks: I32) -> I64:
    """Elements of the pool, int64 [n, layers, page_elems]."""
    page = pages.layer_starts + blocks.astype(np.int64)[:, None] * pages.block_stride
    positions: I64 = page[:, :, None] + np.arange(pages.page_elems)
    return positions


def _words(pool: Bits, pages: BlockPages, blocks: I32) -> U64:
    """Whole blocks as words uint64 [n, w]."""
    size = pages.num_layers * pages.page_elems
    return words_of(pool[_positions(pages, blocks)].reshape(len(blocks), size))


def _values(pool: Bits, pages: BlockPages, blocks: I32) -> F64:
    """Elements as float64 [n, layers, page_elems]."""
    return bits_to_float32(pool[_positions(pages, blocks)], pages.dtype).astype(np.float64)


def _by_kind(pages: BlockPages, x: F64) -> F64:
    """Sums over the elements of K and of V: [n, layers, page_elems] to [n, layers, 2]."""
    return np.stack([x[..., pages.is_key].sum(-1), x[..., ~pages.is_key].sum(-1)], axis=-1)


class NumpyBlockKernels(BlockKernels):
    """Every block operation in NumPy."""

    name = "numpy"

    def _squares(self, pool: Bits, pages: BlockPages, blocks: I32) -> F64:
        with np.errstate(all="ignore"):
            return _by_kind(pages, _values(pool, pages, blocks) ** 2) / pages.elems

    def _sketches(
        self, pool: Bits, pages: BlockPages, blocks: I32, weights: F32, sketcher: BlockSketcher
    ) -> F32:
        x = _values(pool, pages, blocks)
        total = np.zeros((len(blocks), SKETCH))
        with np.errstate(all="ignore"):
            for number, (start, stride, runs, run, kind) in enumerate(pages.chunks.tolist()):
                within = np.arange(runs)[:, None] * stride + np.arange(run)
                chosen = start + within.reshape(-1)
                terms = np.zeros((*x.shape[:2], CHUNK))
                terms[..., : len(chosen)] = x[..., chosen] * sketcher.flips[: len(chosen)]
                sums = terms.reshape(*x.shape[:2], CHUNK // SKETCH, SKETCH).sum(axis=2)
                bits = sketcher.signs[:, number].view(np.uint8)
                minus = np.unpackbits(bits, axis=1, bitorder="little")
                factors = np.where(minus, -1.0, 1.0) * weights[:, kind, None].astype(np.float64)
                total += (sums * factors).sum(axis=1)
            return total.astype(np.float32)

    def _sketch_signatures(self, sketches: F32, mean: F32, sketcher: BlockSketcher) -> U64:
        with np.errstate(all="ignore"):
            return mixed_signs(sketches - mean, sketcher.second_flips)

    def _pair_distances(self, pool: Bits, pages: BlockPages, targets: I32, donors: I32) -> F32:
        out = np.empty((*donors.shape, 2), np.float32)
        highest = np.finfo(np.float32).max
        with np.errstate(all="ignore"):
            x = _values(pool, pages, targets)
            xx = _by_kind(pages, x * x)
            for j, donor in enumerate(donors.T):
                y = _values(pool, pages, np.maximum(donor, 0))
                yy = _by_kind(pages, y * y)
                dd = _by_kind(pages, (x - y) ** 2)
                usable = (donor[:, None, None] >= 0) & (xx > 0) & (yy > 0)
                usable &= (xx <= highest) & (yy <= highest) & (dd <= highest)
                out[:, j] = np.where(usable, dd / xx, np.inf).mean(axis=1)
        return out

    def _hashes(self, pool: Bits, pages: BlockPages, blocks: I32) -> U64:
        bits = pool[_positions(pages, blocks)]
        pieces = [
            hash_words(words_of(page[:, at : at + CHUNK]))
            for page in bits.transpose(1, 0, 2)
            for at in range(0, pages.page_elems, CHUNK)
        ]
        hashes = np.maximum(hash_words(np.stack(pieces, axis=1)), np.uint64(1))
        words = _words(pool, pages, blocks)
        return np.where(matchable(words, pages.dtype), hashes, np.uint64(0))

    def _equal(self, pool: Bits, pages: BlockPages, a: I32, b: I32) -> npt.NDArray[np.bool_]:
        left, right = _words(pool, pages, a), _words(pool, pages, b)
        same: npt.NDArray[np.bool_] = (left == right).all(axis=1)
        return same & matchable(left, pages.dtype)

    def _copy_blocks(self, pool: Bits, pages: BlockPages, src: I32, dst: I32) -> None:
        pool[_positions(pages, dst)] = pool[_positions(pages, src)]

    def _zero_blocks(self, pool: Bits, pages: BlockPages, blocks: I32) -> None:
        pool[_positions(pages, blocks)] = 0

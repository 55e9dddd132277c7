"""Numba: the loops over blocks. `starts`, `block_stride`, `page_elems` and `chunks` are those of
`BlockPages`; the pool is flat.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._folds import prefetch_far, walsh_signs
from ._jit import copy, exact
from ._runs import STEP, difference_runs, fold_64, fold_128, fold_256
from .block_interface import F64
from .block_pages import CHUNK, I64
from .dtypes import F32, I32, U64, Bits
from .host_distance import compare, difference, finish, hash_piece, kept_hash, mix, norm
from .host_rows import load_row
from .simhash import BLOCK

__all__ = [
    "copy_blocks",
    "equal",
    "hashes",
    "pair_distances",
    "sketch_signatures",
    "sketches",
    "squares",
    "zero_blocks",
]

_ZERO = np.uint64(0)
_AHEAD = 8192
"""Bytes between what is asked of memory and what is worked on. A page is soon read, and the
processor cannot guess where the next one lies."""


@exact
def _following(starts: I64, block_stride: int, layer: int, block: int, after: int) -> Any:
    """Where the page lies that is read next, `after` being the next block."""
    if layer + 1 < starts.size:
        return starts[layer + 1] + block * block_stride
    return starts[0] + after * block_stride


@exact
def _ask(flat: Bits, page: int, following: int, page_elems: int, start: int, end: int) -> None:
    """Ask for what lies `_AHEAD` of the elements from `start` to `end` of a page."""
    ahead = _AHEAD // flat.itemsize
    for i in range(start + ahead, end + ahead, 64 // flat.itemsize):
        prefetch_far(flat, page + i if i < page_elems else following + i - page_elems)


@exact
def _load_chunk(flat: Bits, index: int, stride: int, runs: int, run: int, out: F32) -> None:
    """out[:runs * run] = the elements of a chunk."""
    for r in range(runs):
        load_row(flat, index + r * stride, run, out[r * run :])


@exact
def squares(flat: Bits, starts: I64, block_stride: int, chunks: I64, blocks: I32, out: F64) -> None:
    """out[n, layers, 2] = sum of the squares of K and of V; out comes as zeros."""
    x = np.empty(CHUNK, np.float32)
    for n in range(blocks.size):
        for layer in range(starts.size):
            page = starts[layer] + blocks[n] * block_stride
            for start, stride, runs, run, kind in chunks:
                _load_chunk(flat, page + start, stride, runs, run, x)
                out[n, layer, kind] += norm(x, 0, runs * run)


@exact
def _fold_chunk(
    flat: Bits, index: int, stride: int, runs: int, run: int, flips: F32, x: F32, sums: F32
) -> None:
    """sums[:256] = the pieces of 256 of a chunk times `flips`, added up; `x` is scratch."""
    if run % BLOCK == 0:
        fold_256(flat, index, stride, runs, run, flips, sums)
    elif run == 128 and runs % 2 == 0:
        fold_128(flat, index, stride, runs, run, flips, sums)
    elif run == 64 and runs % 4 == 0:
        fold_64(flat, index, stride, runs, run, flips, sums)
    else:
        padded = -(-runs * run // BLOCK) * BLOCK
        _load_chunk(flat, index, stride, runs, run, x)
        x[runs * run : padded] = 0
        fold_256(x, 0, 0, 1, padded, flips, sums)


@exact
def sketches(
    flat: Bits,
    starts: I64,
    block_stride: int,
    page_elems: int,
    chunks: I64,
    blocks: I32,
    weights: F32,
    flips: F32,
    signs: U64,
    scratch: F32,
    out: F32,
) -> None:
    """out[n, 256] = sketches; out comes as zeros. `scratch`: CHUNK + 256 floats."""
    x, sums = scratch[:CHUNK], scratch[CHUNK:]
    slices = len(chunks)
    for n in range(blocks.size):
        after = blocks[min(n + 1, blocks.size - 1)]
        for layer in range(starts.size):
            page = starts[layer] + blocks[n] * block_stride
            following = _following(starts, block_stride, layer, blocks[n], after)
            for c in range(slices):
                begin, end = c * page_elems // slices, (c + 1) * page_elems // slices
                _ask(flat, page, following, page_elems, begin, end)
                start, stride, runs, run, kind = chunks[c]
                _fold_chunk(flat, page + start, stride, runs, run, flips, x, sums)
                weight = weights[layer, kind]
                for word in range(BLOCK // 64):
                    bits = signs[layer, c, word]
                    for i in range(64):
                        term = weight * sums[word * 64 + i]
                        minus = (bits >> np.uint64(i)) & np.uint64(1) != _ZERO
                        out[n, word * 64 + i] += -term if minus else term


@exact
def sketch_signatures(sketches: F32, constants: F32, out: U64) -> None:
    """out[n, 2] = signatures; `constants`: [256] mean, [256] second flips."""
    flat = sketches.reshape(-1)
    for n in range(len(sketches)):
        out[n, 0], out[n, 1] = walsh_signs(sketches[n], constants, flat, n * BLOCK, 0)


@exact
def pair_distances(
    flat: Bits,
    starts: I64,
    block_stride: int,
    page_elems: int,
    chunks: I64,
    targets: I32,
    donors: I32,
    out: F32,
) -> None:
    """out[m, k, 2]; float32 sums of a chunk, float64 sums of them."""
    x = np.empty(CHUNK, np.float32)
    y = np.empty(CHUNK, np.float32)
    highest = np.float64(np.finfo(np.float32).max)
    slices = len(chunks)
    m, k = donors.shape
    # [|x - y|^2, |x|^2, |y|^2] of K and V in one layer.
    sums = np.empty((k, 2, 3))
    total = np.empty((k, 2))
    for i in range(m):
        total[:] = 0
        target, last = targets[i], min(i + 1, m - 1)
        for layer in range(starts.size):
            sums[:] = 0
            page = starts[layer] + target * block_stride
            page_after = _following(starts, block_stride, layer, target, targets[last])
            for c in range(slices):
                begin, end = c * page_elems // slices, (c + 1) * page_elems // slices
                _ask(flat, page, page_after, page_elems, begin, end)
                start, stride, runs, run, kind = chunks[c]
                for j in range(k):
                    donor = donors[i, j]
                    if donor < 0:
                        continue
                    other = starts[layer] + donor * block_stride
                    after = max(donors[last, j], 0)
                    other_after = _following(starts, block_stride, layer, donor, after)
                    _ask(flat, other, other_after, page_elems, begin, end)
                    if run % STEP == 0:
                        dd, xx, yy = difference_runs(
                            flat, page + start, other + start, stride, runs, run
                        )
                    else:
                        _load_chunk(flat, page + start, stride, runs, run, x)
                        _load_chunk(flat, other + start, stride, runs, run, y)
                        xx = norm(x, 0, runs * run)
                        dd, yy = difference(x, y, 0, runs * run)
                    sums[j, kind, 0] += dd
                    sums[j, kind, 1] += xx
                    sums[j, kind, 2] += yy
            for j in range(k):
                for kind in range(2):
                    d, p, q = sums[j, kind]
                    # A NaN anywhere fails every comparison, so it ends as infinity too.
                    if 0 < p <= highest and 0 < q <= highest and d <= highest:
                        total[j, kind] += d / p
                    else:
                        total[j, kind] = np.inf
        for j in range(k):
            for kind in range(2):
                out[i, j, kind] = total[j, kind] / starts.size


@exact
def hashes(
    flat: Bits,
    starts: I64,
    block_stride: int,
    page_elems: int,
    blocks: I32,
    masks: U64,
    keys: U64,
    outer_keys: U64,
    out: U64,
) -> None:
    """out[n] = hash of the hashes of the pieces of CHUNK elements of all pages."""
    for n in range(blocks.size):
        some = bad = total = _ZERO
        number = 0
        after = blocks[min(n + 1, blocks.size - 1)]
        for layer in range(starts.size):
            page = starts[layer] + blocks[n] * block_stride
            following = _following(starts, block_stride, layer, blocks[n], after)
            for at in range(0, page_elems, CHUNK):
                end = min(at + CHUNK, page_elems)
                _ask(flat, page, following, page_elems, at, end)
                magnitude, exponent, piece = hash_piece(flat, page + at, end - at, masks, keys)
                some |= magnitude
                bad |= exponent
                total += mix(piece, outer_keys[number])
                number += 1
        out[n] = kept_hash(some, bad, finish(total), masks)


@exact
def equal(
    flat: Bits,
    starts: I64,
    block_stride: int,
    page_elems: int,
    a: I32,
    b: I32,
    masks: U64,
    out: npt.NDArray[np.bool_],
) -> None:
    """out[m] = same bits, finite, not all zero."""
    for n in range(a.size):
        differ = some = bad = _ZERO
        for layer in range(starts.size):
            left = starts[layer] + a[n] * block_stride
            right = starts[layer] + b[n] * block_stride
            differ, magnitude, exponent = compare(flat, left, right, page_elems, masks)
            some |= magnitude
            bad |= exponent
            if differ != _ZERO:
                break
        out[n] = differ == _ZERO and some != _ZERO and (bad & masks[3]) == _ZERO


@exact
def copy_blocks(
    flat: Bits, starts: I64, block_stride: int, page_elems: int, src: I32, dst: I32
) -> None:
    """Whole blocks; `dst` shares none with `src`."""
    for n in range(src.size):
        for layer in range(starts.size):
            source = starts[layer] + src[n] * block_stride
            copy(flat, starts[layer] + dst[n] * block_stride, flat, source, page_elems)


@exact
def zero_blocks(flat: Bits, starts: I64, block_stride: int, page_elems: int, blocks: I32) -> None:
    """Whole blocks."""
    for n in range(blocks.size):
        for layer in range(starts.size):
            page = starts[layer] + blocks[n] * block_stride
            flat[page : page + page_elems] = 0

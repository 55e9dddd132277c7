"""The 64-bit hash of a row's raw bits, shared by every backend.

The row is cut into little-endian 64-bit words (the last one padded with zeros). Each word is mixed
with its own random key by xor, multiplication and shift, and the results are added: a sum, so that
words can be handled in any order and several at a time. The sum then passes the finaliser of
MurmurHash3 (Appleby, 2011; public domain). Not keyed by a secret: no defence against an adversary,
and equal hashes are a hint that `rows_equal` confirms.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .dtypes import U64, RowDtype

__all__ = ["FINAL_1", "FINAL_2", "MIX_1", "MIX_2", "hash_words", "word_keys", "word_masks"]

MIX_1 = np.uint64(0x9E3779B97F4A7C15)
MIX_2 = np.uint64(0xD6E8FEB86659FD93)
FINAL_1 = np.uint64(0xFF51AFD7ED558CCD)
FINAL_2 = np.uint64(0xC4CEB9FE1A85EC53)


@lru_cache(maxsize=64)
def word_keys(words: int) -> U64:
    """uint64 [words]: one key per word of a row, the same in every process; read-only."""
    keys = np.asarray(np.random.PCG64(0x726F7773).random_raw(max(words, 1)), dtype=np.uint64)
    keys.flags.writeable = False
    return keys


@lru_cache(maxsize=8)
def word_masks(dtype: RowDtype) -> U64:
    """uint64 [4]: magnitude, exponent, lowest exponent bit and sign of each element in a word.

    An element is infinite or NaN when its exponent bits are all set; then, and only then, adding
    the lowest of them to all of them carries into the sign bit. So one addition tests 2 or 4
    elements. Read-only.
    """
    bits = 8 * dtype.itemsize
    exponent = dtype.exponent_mask
    element = (dtype.magnitude_mask, exponent, exponent & -exponent, 1 << (bits - 1))
    repeat = sum(1 << shift for shift in range(0, 64, bits))
    masks = np.array([mask * repeat for mask in element], dtype=np.uint64)
    masks.flags.writeable = False
    return masks


def hash_words(words: U64) -> U64:
    """uint64 [n] hashes of uint64 words [n, w], before 0 is set apart."""
    x = (words ^ word_keys(words.shape[1])[: words.shape[1]]) * MIX_1
    total = ((x ^ (x >> np.uint64(32))) * MIX_2).sum(axis=1, dtype=np.uint64)
    total = (total ^ (total >> np.uint64(33))) * FINAL_1
    total = (total ^ (total >> np.uint64(33))) * FINAL_2
    hashes: U64 = total ^ (total >> np.uint64(33))
    return hashes

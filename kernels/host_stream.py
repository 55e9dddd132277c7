"""Numba: read memory and do nothing else, the bound on how fast any kernel gets through rows."""

from __future__ import annotations

import numpy as np

from ._jit import exact, prefetch
from .dtypes import U64

__all__ = ["sum_words"]

_LINE = 8
_CHUNK = 64 * _LINE
"""Words summed in a row, at the full width of the processor's vectors: a page."""


@exact
def sum_words(words: U64, ahead: int) -> int:
    """Sum of uint64 [n], asking for memory `ahead` words early; 0 leaves that to the processor."""
    total = np.uint64(0)
    whole = words.size - words.size % _CHUNK
    for start in range(0, whole, _CHUNK):
        if ahead:
            for i in range(0, _CHUNK, _LINE):
                prefetch(words, start + ahead + i)
        for i in range(start, start + _CHUNK):
            total += words[i]
    for i in range(whole, words.size):
        total += words[i]
    return int(total)

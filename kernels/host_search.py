"""Numba: nearest signatures by Hamming distance."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._jit import bits, exact, load64, popcount
from .dtypes import I32, U64

__all__ = ["hamming_topk"]

_TILE = 2048
"""Slab slots searched by all queries before the next ones: 32 KiB of signatures stay cached."""
_GROUP = 64
"""Slots whose minimum is compared before any of them is looked at: nearly all groups end there."""
_FAR = np.int32(1 << 20)
"""Distance of a slot that is not valid: above any real one."""


@exact
def hamming_topk(
    queries: U64,
    slab: U64,
    valid: npt.NDArray[np.uint8],
    limit: I32,
    index: I32,
    distance: I32,
) -> None:
    """index, distance [m, k], both -1 where there is no slot. Slab and queries are flat [2 n]."""
    m, k = index.shape
    n = valid.size
    near = np.empty(_GROUP, np.int32)
    index[:] = -1
    distance[:] = _FAR
    for tile in range(0, n, _TILE):
        for q in range(m):
            stop = min(limit[q], tile + _TILE, n)
            first, second = queries[2 * q], queries[2 * q + 1]
            worst = distance[q, k - 1]
            for start in range(tile, stop, _GROUP):
                size = min(_GROUP, stop - start)
                least = _FAR
                for i in range(size):
                    slot = start + i
                    d = popcount(load64(slab, 2 * slot) ^ first)
                    d += popcount(load64(slab, 2 * slot + 1) ^ second)
                    near[i] = d if bits(valid, slot) != 0 else _FAR
                    least = min(least, near[i])
                if least >= worst:
                    continue
                for i in range(size):
                    d = near[i]
                    if d < worst:
                        # Slots come in rising order and equals stay in place: lowest index first.
                        at = k - 1
                        while at > 0 and distance[q, at - 1] > d:
                            distance[q, at] = distance[q, at - 1]
                            index[q, at] = index[q, at - 1]
                            at -= 1
                        distance[q, at] = d
                        index[q, at] = start + i
                        worst = distance[q, k - 1]
    for q in range(m):
        for at in range(k):
            if index[q, at] < 0:
                distance[q, at] = -1

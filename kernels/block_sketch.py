"""Parameters of the sketch of a block and of its 128-bit signature, shared by every backend.

A sketch is a random projection of a block on 256 numbers: every element is multiplied by a random
sign and added to one of 256 sums (a sparse Johnson-Lindenstrauss transform; Charikar, Chen and
Farach-Colton, "Finding frequent items in data streams", 2002). K and V of each layer are first
multiplied by a weight, one over the root of their mean square, so that K does not drown V nor one
layer all others: inner products of sketches then estimate what the relative distance of blocks
adds up. Being linear, a sketch is centred by taking off the mean of other sketches, without a mean
of whole blocks. The signature is that of rows: see `memshare.kernels.simhash`.
"""

from __future__ import annotations

import numpy as np

from .block_pages import CHUNK, BlockPages
from .dtypes import F32, U64
from .simhash import BLOCK

__all__ = ["SKETCH", "BlockSketcher"]

SKETCH = BLOCK
"""Numbers of a sketch."""


class BlockSketcher:
    """The fixed random choices: sketches compare only under the same pages, weights and seed.

    Element i of a chunk gets the sign `flips[i]`, float32 [CHUNK], and goes to sum i % 256. The
    256 sums of chunk c of layer l get the signs `signs[l, c]` (uint64 [layers, chunks, 4], little
    bit order, 1 is minus) and are added up over all chunks and layers. So every element has a sign
    of its own, out of tables that stay in the cache. `second_flips`: those of the signature.
    """

    def __init__(self, pages: BlockPages, seed: int = 1) -> None:
        """`seed`: same pages and seed, same signatures, for ever."""
        # Raw bits of PCG64, because NumPy keeps those stable between versions.
        random = np.random.PCG64(seed)
        raw = random.random_raw(CHUNK + SKETCH)
        flips: F32 = np.where(raw >> np.uint64(63), -1, 1).astype(np.float32)
        self.flips, self.second_flips = flips[:CHUNK], flips[CHUNK:]
        shape = (pages.num_layers, len(pages.chunks), SKETCH // 64)
        self.signs: U64 = np.asarray(random.random_raw(int(np.prod(shape))), np.uint64)
        self.signs = self.signs.reshape(shape)
        for array in (flips, self.flips, self.second_flips, self.signs):
            array.flags.writeable = False

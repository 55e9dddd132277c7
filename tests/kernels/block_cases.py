"""Pools of blocks as engines lay them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memshare.kernels import BlockPages, RowDtype, bits_to_float32, float32_to_bits

NUM_BLOCKS = 13


@dataclass(frozen=True)
class Form:
    """How a page lies: `order` names how, see `key_mask`."""

    order: str
    heads: int
    tokens: int
    dims: int
    layers: int
    contiguous: bool = False

    def __str__(self) -> str:
        whole = "-block" if self.contiguous else ""
        return f"{self.order}-{self.heads}x{self.tokens}x{self.dims}x{self.layers}{whole}"

    @property
    def key_mask(self) -> npt.NDArray[np.bool_]:
        """bool [elements of a page]: which are K."""
        mask = np.zeros(2 * self.heads * self.tokens * self.dims, np.bool_)
        pieces = {
            "apart": 1,  # all of K, then all of V
            "heads": self.heads,  # head by head: K, be it transposed, then V
            "tokens": self.heads * self.tokens,  # head and token by token
            "elements": self.heads * self.tokens * self.dims,
        }[self.order]
        mask.reshape(pieces, 2, -1)[:, 0] = True
        return mask


FORMS = [
    Form("apart", 2, 16, 64, 3),
    Form("apart", 3, 16, 64, 2, contiguous=True),
    Form("heads", 3, 16, 64, 2),
    Form("heads", 2, 5, 10, 3),
    Form("heads", 3, 32, 128, 2),
    Form("tokens", 8, 16, 128, 2),
    Form("tokens", 3, 16, 64, 3, contiguous=True),
    Form("tokens", 1, 3, 64, 2),
    Form("tokens", 3, 16, 20, 1),
    Form("tokens", 2, 16, 96, 2),
    Form("elements", 1, 4, 33, 2),
]


def pages_of(form: Form, dtype: RowDtype) -> BlockPages:
    """`NUM_BLOCKS` blocks; layer after layer, or block after block with some space between."""
    page = len(form.key_mask) * dtype.itemsize
    if form.contiguous:
        stride = form.layers * page + 3 * dtype.itemsize
        offsets = [layer * page for layer in range(form.layers)]
    else:
        stride = page
        offsets = [layer * NUM_BLOCKS * page for layer in reversed(range(form.layers))]
    return BlockPages.build(dtype, NUM_BLOCKS, offsets, stride, form.key_mask)


def positions_of(form: Form, pages: BlockPages, block: int) -> npt.NDArray[np.int64]:
    """Elements of the pool, int64 [layers, 2, elements of K or V]; said once more, plainly."""
    keys = np.flatnonzero(form.key_mask)
    values = np.flatnonzero(~form.key_mask)
    starts = pages.layer_starts + block * pages.block_stride
    result: npt.NDArray[np.int64] = starts[:, None, None] + np.stack((keys, values))
    return result


def fill(pages: BlockPages, rng: np.random.Generator) -> npt.NDArray[Any]:
    """A pool of random numbers, somewhat larger than the pages reach."""
    return float32_to_bits(rng.standard_normal(pages.end + 5).astype(np.float32), pages.dtype)


def values_of(pool: npt.NDArray[Any], form: Form, pages: BlockPages) -> npt.NDArray[np.float64]:
    """float64 [NUM_BLOCKS, layers, 2, elements]."""
    floats = bits_to_float32(pool, pages.dtype).astype(np.float64)
    return np.stack([floats[positions_of(form, pages, block)] for block in range(NUM_BLOCKS)])

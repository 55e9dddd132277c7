"""Operations on a KV pool: signatures, search, distances, copies and attention.

`get_kernels()` gives a `Kernels`, for rows, `get_block_kernels()` a `BlockKernels`, for an engine's
own blocks; their methods are the whole interface.
"""

from .block_interface import BlockKernels
from .block_pages import BlockPages
from .block_sketch import BlockSketcher
from .dispatch import get_block_kernels, get_kernels
from .dtypes import RowDtype, bits_to_float32, float32_to_bits
from .interface import Kernels
from .rope import RopeTable
from .simhash import SimHasher

__all__ = [
    "BlockKernels",
    "BlockPages",
    "BlockSketcher",
    "Kernels",
    "RopeTable",
    "RowDtype",
    "SimHasher",
    "bits_to_float32",
    "float32_to_bits",
    "get_block_kernels",
    "get_kernels",
]

"""Operations on the rows of a KV pool: signatures, search, distances, copies and attention.

`get_kernels()` gives a `Kernels`; its methods are the whole interface.
"""

from .dispatch import get_kernels
from .dtypes import RowDtype, bits_to_float32, float32_to_bits
from .interface import Kernels
from .rope import RopeTable
from .simhash import SimHasher

__all__ = [
    "Kernels",
    "RopeTable",
    "RowDtype",
    "SimHasher",
    "bits_to_float32",
    "float32_to_bits",
    "get_kernels",
]

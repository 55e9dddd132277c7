"""Choice of the backend.

A backend is imported when it is asked for, so that each needs only its own packages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .block_interface import BlockKernels
from .interface import Kernels

__all__ = ["BACKENDS", "BlockKernels", "Kernels", "get_block_kernels", "get_kernels"]


def _numba() -> tuple[Kernels, BlockKernels]:
    from .host import NumbaKernels
    from .host_blocks import NumbaBlockKernels

    return NumbaKernels(), NumbaBlockKernels()


def _numpy() -> tuple[Kernels, BlockKernels]:
    from .reference import NumpyKernels
    from .reference_blocks import NumpyBlockKernels

    return NumpyKernels(), NumpyBlockKernels()


BACKENDS: dict[str, Callable[[], tuple[Kernels, BlockKernels]]] = {
    "numba": _numba,
    "numpy": _numpy,
}
"""How each backend is made."""


def get_kernels(backend: str = "numba") -> Kernels:
    """The row kernels of a backend.

    ValueError for an unknown one, ImportError where its packages are not installed.
    """
    return _backend(backend)[0]


def get_block_kernels(backend: str = "numba") -> BlockKernels:
    """The block kernels of a backend. Raises as `get_kernels`."""
    return _backend(backend)[1]


@cache
def _backend(backend: str) -> tuple[Kernels, BlockKernels]:
    try:
        make = BACKENDS[backend]
    except KeyError:
        names = ", ".join(sorted(BACKENDS))
        raise ValueError(f"unknown kernel backend {backend!r}; valid are {names}") from None
    return make()

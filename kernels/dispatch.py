"""Choice of the backend.

A backend is imported when it is asked for, so that each needs only its own packages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .interface import Kernels

__all__ = ["BACKENDS", "Kernels", "get_kernels"]


def _numba() -> Kernels:
    from .host import NumbaKernels

    return NumbaKernels()


def _numpy() -> Kernels:
    from .reference import NumpyKernels

    return NumpyKernels()


BACKENDS: dict[str, Callable[[], Kernels]] = {"numba": _numba, "numpy": _numpy}
"""How each backend is made."""


@cache
def get_kernels(backend: str = "numba") -> Kernels:
    """The kernels of a backend.

    ValueError for an unknown one, ImportError where its packages are not installed.
    """
    try:
        make = BACKENDS[backend]
    except KeyError:
        names = ", ".join(sorted(BACKENDS))
        raise ValueError(f"unknown kernel backend {backend!r}; valid are {names}") from None
    return make()

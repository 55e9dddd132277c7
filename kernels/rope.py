"""Cosine and sine tables of rotary position embedding (RoPE; Su et al., 2021, arXiv:2104.09864).

Half-split layout (Llama, NeoX): element i of the first half of the rotary part is rotated together
with element i of the second half, by the angle `position * inv_freq[i]`. Elements of a head past
`rotary_dim` are not rotated.

Rotations form a group, R(p + d) = R(d) R(p), so a key stored for position p is turned into the key
for p + d by one rotation by d, without knowing p.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from .dtypes import F32

__all__ = ["RopeTable"]

_FIRST_POSITIONS = 1024


class RopeTable:
    """cos and sin of `position * inv_freq`, grown on demand; safe to use from several threads.

    Rotation is pure: a model's attention scaling (YaRN) is part of the stored keys and survives
    it. Pass `inv_freq` as the engine uses it, after any scaling of the frequencies.
    """

    def __init__(self, inv_freq: npt.ArrayLike, max_positions: int = 1 << 21) -> None:
        """`inv_freq`: radians per position, shape [rotary_dim / 2]; finite, at least one.

        `max_positions` bounds the memory of the table (8 * rotary_dim / 2 bytes per position): a
        corrupt position is an error instead of an allocation of many gigabytes.
        """
        frequencies = np.array(inv_freq, dtype=np.float64)
        if frequencies.ndim != 1 or frequencies.size == 0 or not np.isfinite(frequencies).all():
            raise ValueError("inv_freq must be a non-empty vector of finite numbers")
        if max_positions < 1:
            raise ValueError("max_positions must be at least 1")
        self._frequencies = frequencies
        self._max_positions = max_positions
        self._lock = threading.Lock()
        self._tables = self._compute(0, min(_FIRST_POSITIONS, max_positions))

    @classmethod
    def from_theta(cls, rotary_dim: int, theta: float = 10000.0) -> RopeTable:
        """The plain table, inv_freq[i] = theta ** (-2 i / rotary_dim)."""
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and positive, not {rotary_dim}")
        return cls(theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated."""
        return 2 * self._frequencies.size

    def upto(self, n: int) -> tuple[F32, F32]:
        """(cos, sin), each float32 [n, rotary_dim / 2], for positions 0 .. n - 1; read-only.

        A negative position has the same cos and the negated sin. ValueError when `n` is above the
        limit of the table.
        """
        if not 0 <= n <= self._max_positions:
            raise ValueError(
                f"{n} positions asked of a RoPE table of at most {self._max_positions}"
            )
        cos, sin = (
            self._tables
        )  # one attribute, so that a reader never sees cos and sin of two ages
        if n > len(cos):
            cos, sin = self._grow(n)
        return cos[:n], sin[:n]

    def _grow(self, n: int) -> tuple[F32, F32]:
        with self._lock:
            cos, sin = self._tables
            if n > len(cos):
                size = min(max(n, 2 * len(cos)), self._max_positions)
                more_cos, more_sin = self._compute(len(cos), size)
                self._tables = (
                    _frozen(np.concatenate((cos, more_cos))),
                    _frozen(np.concatenate((sin, more_sin))),
                )
            return self._tables

    def _compute(self, start: int, stop: int) -> tuple[F32, F32]:
        # float64: at position 100,000 a float32 angle is already off by 0.004 radians.
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * self._frequencies
        return (
            _frozen(np.cos(angles).astype(np.float32)),
            _frozen(np.sin(angles).astype(np.float32)),
        )


def _frozen(table: F32) -> F32:
    table.flags.writeable = False
    return table

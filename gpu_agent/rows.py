"""The kernels, bound to the pool and to the layout of one session's rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memshare.kernels import Kernels, RopeTable, RowDtype, SimHasher
from memshare.v1 import common_pb2
from memshare.wire.layout import RowLayout

KEY: Final = 0
VALUE: Final = 1
KINDS: Final = (KEY, VALUE)

Bools = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]

ROW_DTYPES: Final[dict[int, RowDtype]] = {
    common_pb2.ROW_DTYPE_FP32: RowDtype.FP32,
    common_pb2.ROW_DTYPE_FP16: RowDtype.FP16,
    common_pb2.ROW_DTYPE_BF16: RowDtype.BF16,
}
# Longest request, in tokens: the range of a rotation.
MAX_TOKENS: Final = 1 << 21


class SessionRows:
    """Reads the K and V rows of one layout. All row ids must lie within the pool.

    `kind` is KEY or VALUE throughout, `rows` are int32 ids, `tokens` int32 positions of the rows
    in their request. Stateless: calls may run side by side.
    """

    def __init__(self, kernels: Kernels, pool: npt.NDArray[Any], layout: RowLayout) -> None:
        """`pool`: raw bits [num_rows, row_elements] of the layout's element size."""
        self.layout = layout
        self.kinds = KINDS
        self.num_layers = layout.num_layers
        self.num_rows = len(pool)
        self.pool = pool
        self._kernels = kernels
        self._dtype = ROW_DTYPES[layout.dtype]
        self._head_dims = (layout.key_head_dim, layout.value_head_dim)
        self.widths = (layout.key_width, layout.value_width)
        self._hashers = tuple(SimHasher(width) for width in self.widths)
        self._rope = RopeTable(layout.inv_freq, MAX_TOKENS) if layout.inv_freq else None

    @property
    def rotates(self) -> bool:
        """Whether keys can be corrected for their position."""
        return self._rope is not None

    def moments(self, kind: int, rows: Int32, tokens: Int32) -> tuple[Float32, Float32]:
        """(mean [width], mean square per head [num_heads]) of the finite rows, position-free."""
        return self._kernels.row_moments(
            self.pool, rows, self._steps(kind, tokens), *self._shape(kind), self._rope
        )

    def sign(self, kind: int, rows: Int32, tokens: Int32, mean: Float32) -> UInt64:
        """Signatures [n, 2] of position-free rows centred by `mean`."""
        return self._kernels.signatures(
            self.pool,
            rows,
            self._steps(kind, tokens),
            *self._shape(kind),
            mean,
            self._hashers[kind],
            self._rope,
        )

    def distances(
        self, kind: int, targets: Int32, donors: Int32, deltas: Int32, weights: Float32 | None
    ) -> Float32:
        """Relative squared distances [m, k] of `targets` [m] to `donors` [m, k] (-1: none).

        `deltas` [m, k]: tokens that the target is later than the donor. Infinity for a donor that
        is none and for rows without finite, nonzero content.
        """
        return self._kernels.pair_distances(
            self.pool,
            targets,
            donors,
            self._steps(kind, deltas),
            *self._shape(kind),
            weights,
            self._rope,
        )

    def hashes(self, kind: int, rows: Int32) -> UInt64:
        """Hash of each row's bits; 0 for rows that match nothing."""
        return self._kernels.row_hashes(self.pool, rows, self._dtype, self.widths[kind])

    def equal(self, kind: int, left: Int32, right: Int32) -> Bools:
        """Whether rows are equal bit for bit."""
        return self._kernels.rows_equal(self.pool, left, right, self._dtype, self.widths[kind])

    def unusable(self, kind: int, rows: Int32) -> tuple[Bools, Bools]:
        """(holds NaN or Inf, is all zero) for each row."""
        bits = self.pool[rows, : self.widths[kind]]
        exponents = bits & self._dtype.exponent_mask
        nonfinite: Bools = np.any(exponents == self._dtype.exponent_mask, axis=1)
        nonzero: Bools = np.any(bits & self._dtype.magnitude_mask, axis=1)
        return nonfinite, ~nonzero

    def _shape(self, kind: int) -> tuple[RowDtype, int, int]:
        return self._dtype, self.layout.num_kv_heads, self._head_dims[kind]

    def _steps(self, kind: int, tokens: Int32) -> Int32 | None:
        return tokens if kind == KEY and self.rotates else None

"""The shape of an engine's rows, as every process sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memshare.v1 import common_pb2
from memshare.wire import packing
from memshare.wire.errors import InvalidArgument

ITEMSIZE: Final[dict[int, int]] = {
    common_pb2.ROW_DTYPE_FP32: 4,
    common_pb2.ROW_DTYPE_FP16: 2,
    common_pb2.ROW_DTYPE_BF16: 2,
}
MAX_LAYERS: Final = 4096
MAX_ROW_ELEMENTS: Final = 1 << 20


@dataclass(frozen=True)
class RowLayout:
    """All KV heads of one token's K or V in one layer make a row, head-major.

    `dtype` is a `memshare.v1.RowDtype` value. `inv_freq` holds the rotary frequencies in
    radians per position (half-split RoPE over the first `2 * len(inv_freq)` elements of each
    head); it is empty when keys cannot be corrected for their position.
    """

    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: int
    inv_freq: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("num_layers", self.num_layers, MAX_LAYERS),
            ("num_kv_heads", self.num_kv_heads, MAX_ROW_ELEMENTS),
            ("key_head_dim", self.key_head_dim, MAX_ROW_ELEMENTS),
            ("value_head_dim", self.value_head_dim, MAX_ROW_ELEMENTS),
            ("row elements", self.row_elements, MAX_ROW_ELEMENTS),
        ):
            if not 0 < value <= limit:
                raise InvalidArgument(
                    f"layout: {name} is {value}, must be 1 to {limit}", field=name
                )
        if self.dtype not in ITEMSIZE:
            raise InvalidArgument(
                f"layout: dtype {self.dtype} is unknown, use fp32, fp16 or bf16", field="dtype"
            )
        if 2 * len(self.inv_freq) > self.key_head_dim:
            raise InvalidArgument(
                f"layout: {len(self.inv_freq)} rotary frequencies need a key head of at least "
                f"{2 * len(self.inv_freq)}, it has {self.key_head_dim}",
                field="inv_freq",
            )
        if not np.isfinite(self.inv_freq).all():
            raise InvalidArgument("layout: inv_freq holds NaN or Inf", field="inv_freq")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def key_width(self) -> int:
        """Elements of a K row."""
        return self.num_kv_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Elements of a V row."""
        return self.num_kv_heads * self.value_head_dim

    @property
    def row_elements(self) -> int:
        """Elements of a row of the pool: the wider of K and V."""
        return max(self.key_width, self.value_width)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the pool."""
        return self.row_elements * self.itemsize

    def to_proto(self) -> common_pb2.RowLayout:
        """The message of this layout."""
        layout = common_pb2.RowLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            key_head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            dtype=self.dtype,  # type: ignore[arg-type]
        )
        if self.inv_freq:
            layout.rope.inv_freq = packing.pack(self.inv_freq, packing.FLOAT32)
        return layout

    @classmethod
    def from_proto(cls, layout: common_pb2.RowLayout) -> RowLayout:
        """The layout of a message. Raises `InvalidArgument` naming what is wrong."""
        inv_freq = packing.unpack(layout.rope.inv_freq, packing.FLOAT32, "layout.rope.inv_freq")
        return cls(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            key_head_dim=layout.key_head_dim,
            value_head_dim=layout.value_head_dim,
            dtype=layout.dtype,
            inv_freq=tuple(float(value) for value in inv_freq),
        )

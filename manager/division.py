"""How a pool is divided among engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memshare.v1 import manager_pb2
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import InvalidArgument, LayoutMismatch
from memshare.wire.layout import RowLayout

Layout = RowLayout | BlockLayout
BLOCK_TABLES: Final = "block-tables"
_MAX_ROWS: Final = (1 << 31) - 1


@dataclass(frozen=True)
class Division:
    """`num_rows` rows of `row_bytes` each; with `blocks` they are the blocks of this layout."""

    row_bytes: int
    num_rows: int
    blocks: BlockLayout | None = None

    def __str__(self) -> str:
        if self.blocks is None:
            return f"rows of {self.row_bytes} bytes"
        return f"blocks of {self.blocks.block_tokens} tokens and {self.row_bytes} bytes"

    @classmethod
    def of(cls, layout: Layout, pool_bytes: int) -> Division:
        """The division that an engine of this layout needs.

        Raises `InvalidArgument` if the pool has not a single row, `LayoutMismatch` for a block
        layout that is made for another number of blocks.
        """
        num_rows = min(pool_bytes // layout.row_bytes, _MAX_ROWS)
        if not num_rows:
            raise InvalidArgument(
                f"layout: a row of {layout.row_bytes} bytes is larger than the pool of {pool_bytes}"
            )
        if isinstance(layout, RowLayout):
            return cls(layout.row_bytes, num_rows)
        if layout.num_blocks != num_rows:
            raise LayoutMismatch(
                f"the block layout is made for {layout.num_blocks} blocks of "
                f"{layout.block_bytes} bytes, the pool of {pool_bytes} bytes has {num_rows}: the "
                "engine must divide the whole pool",
                num_blocks=layout.num_blocks,
                pool_blocks=num_rows,
            )
        return cls(layout.row_bytes, num_rows, layout)

    def require_same(self, wanted: Division) -> None:
        """Raise `LayoutMismatch` unless engines of both may share a pool."""
        if wanted == self:
            return
        what = f"has {wanted}"
        if self.blocks and wanted.blocks and str(self) == str(wanted):
            what = "has blocks of the same size that lie otherwise"
        raise LayoutMismatch(
            f"the pool is divided into {self}, this engine {what}: give it a sidecar of its own",
            pool_row_bytes=self.row_bytes,
            row_bytes=wanted.row_bytes,
        )


def read_layout(hello: manager_pb2.Hello) -> Layout:
    """The one layout of a Hello.

    Raises `InvalidArgument` for none, two or a wrong one, or one of blocks from an engine that
    does not say that it has tables of them.
    """
    given = [name for name in ("layout", "block_layout") if hello.HasField(name)]
    if len(given) != 1:
        raise InvalidArgument(
            f"Hello has {' and '.join(given) or 'no layout'}: give either layout or block_layout",
            field="layout",
        )
    if given == ["layout"]:
        return RowLayout.from_proto(hello.layout)
    if BLOCK_TABLES not in hello.capabilities:
        raise InvalidArgument(
            f"an engine with a block_layout needs the capability {BLOCK_TABLES}",
            field="capabilities",
        )
    return BlockLayout.from_proto(hello.block_layout)


def planes(layout: Layout) -> int:
    """Tables of a request for one kind of row: layers, or groups of them."""
    return layout.num_groups if isinstance(layout, BlockLayout) else layout.num_layers

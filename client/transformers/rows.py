"""A batch of sequences whose K and V lie in the pool's rows."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from memshare.client.session import Session
from memshare.client.tables import KEY, RowTables
from memshare.kernels import RopeTable, RowDtype, get_kernels
from memshare.v1 import common_pb2
from memshare.wire.errors import InvalidArgument

Bits = npt.NDArray[Any]
_TORCH_BITS: Final = {4: torch.uint32, 2: torch.uint16}
_HUGE_PAGE: Final = 2 << 20
_ROW_DTYPE: Final[dict[int, RowDtype]] = {
    common_pb2.ROW_DTYPE_FP32: RowDtype.FP32,
    common_pb2.ROW_DTYPE_FP16: RowDtype.FP16,
    common_pb2.ROW_DTYPE_BF16: RowDtype.BF16,
}


class SequenceBatch:
    """Row tables of a batch, one request per sequence, all of one length.

    The engine's thread alone calls this, layer after layer: `begin_step`, then for each layer
    `write` and `gather`.
    """

    def __init__(self, session: Session, dtype: torch.dtype) -> None:
        self.session = session
        self.layout = session.layout
        self.tables: list[RowTables] = []
        self.length = 0
        self._dtype = dtype
        self._torch_bits = _TORCH_BITS[self.layout.itemsize]
        self._row_dtype = _ROW_DTYPE[self.layout.dtype]
        self._pool: Bits = session.pool.rows(self._row_dtype.bits_dtype)
        self._pool_rows = torch.from_numpy(
            self._pool.view(np.int32 if self.layout.itemsize == 4 else np.int16)
        ).view(dtype)
        self._head_dims = (self.layout.key_head_dim, self.layout.value_head_dim)
        rope = RopeTable(self.layout.inv_freq) if self.layout.inv_freq else None
        kernels, heads = get_kernels("numba"), self.layout.num_kv_heads
        self._readers = tuple(
            kernels.row_reader(self._pool, self._row_dtype, heads, dim, table)
            for dim, table in zip(self._head_dims, (rope, None), strict=True)
        )
        self._scratch: dict[int, tuple[torch.Tensor, Bits]] = {}
        self._start = 0
        self._unread: int | None = None

    def begin_step(self, batch_size: int, tokens: int) -> None:
        """The step before is complete: seal it, apply decisions, make room for `tokens`."""
        if not self.tables:
            self.tables = [self.session.open_request() for _ in range(batch_size)]
        if batch_size != len(self.tables):
            raise InvalidArgument(
                f"the cache holds {len(self.tables)} sequences, the step has {batch_size}: make "
                "a new MemShareCache for a new batch"
            )
        self.finish_step()
        self.session.reserve(self.tables, tokens, wait=tokens > 1)
        self._start = self.length
        self.length += tokens
        for tables in self.tables:
            tables.length = self.length

    def finish_step(self) -> None:
        """All layers of all tokens so far are written."""
        for tables in self.tables:
            tables.final = tables.length
        self.session.end_step()

    def set_padding(self, padding: list[int]) -> None:
        """Left padding of each sequence, in slots. Only before anything is sealed."""
        for tables, first_token in zip(self.tables, padding, strict=True):
            tables.first_token = first_token

    def expect_read(self, layer: int) -> None:
        """The attention of this layer will read its keys before the next layer comes.

        Raises `InvalidArgument` if the one before did not: it saw the newest tokens alone.
        """
        unread, self._unread = self._unread, layer
        if unread is not None:
            raise InvalidArgument(
                f"the model's attention did not read layer {unread} from the cache, because the "
                "model changes keys on their way to it: pass attention=None"
            )

    def write(self, layer: int, kind: int, states: torch.Tensor) -> None:
        """Store `[batch, heads, tokens, dim]` as the rows of this step's tokens."""
        batch, heads, tokens, dim = states.shape
        if (heads, dim) != (self.layout.num_kv_heads, self._head_dims[kind]):
            raise InvalidArgument(
                f"layer {layer} caches {heads} heads of {dim}, where the model's configuration "
                f"says {self.layout.num_kv_heads} of {self._head_dims[kind]}: models that do so "
                "are not supported"
            )
        width = heads * dim
        if tokens == 1:
            # NumPy stores a row in half the time that torch takes to find it.
            bits = states.detach().view(self._torch_bits).numpy()
            for index, tables in enumerate(self.tables):
                row = tables.rows[kind, layer, self._start]
                self._pool[row, :width] = bits[index].reshape(width)
            return
        rows = torch.from_numpy(
            np.concatenate([t.rows[kind, layer, self._start : self.length] for t in self.tables])
        )
        flat = states.transpose(1, 2).reshape(batch * tokens, width)
        self._pool_rows[:, :width].index_copy_(0, rows.long(), flat)

    def gather(self, layer: int, kind: int) -> torch.Tensor:
        """`[batch, heads, length, dim]`: what attention reads, shared keys rotated into place.

        The memory is reused by the next layer's call.
        """
        if kind == KEY:
            self._unread = None
        heads, dim = self.layout.num_kv_heads, self._head_dims[kind]
        size = heads * self.length * dim
        out, bits = self._scratch_of(kind, size * len(self.tables))
        read = self._readers[kind]
        for index, tables in enumerate(self.tables):
            rotated = kind == KEY and tables.shared_entries[KEY, layer] > 0
            read(
                tables.rows[kind, layer, : self.length],
                tables.deltas[layer, : self.length] if rotated else None,
                bits[index * size : (index + 1) * size],
            )
        return out.view(len(self.tables), heads, self.length, dim)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.finish_step()
        for tables in self.tables:
            self.session.truncate(tables, length)
        self.length = length

    def close(self) -> None:
        """Give all rows back."""
        self.session.close_requests(self.tables)
        self.tables = []
        self.length = 0
        self._unread = None

    def _scratch_of(self, kind: int, size: int) -> tuple[torch.Tensor, Bits]:
        scratch = self._scratch.get(kind)
        if scratch is None or scratch[0].numel() < size:
            # Room for some more steps, so that it is not made anew at each of them.
            bits = _huge_pages((size + size // 4) * self.layout.itemsize)
            out = torch.from_numpy(bits).view(self._dtype)
            scratch = self._scratch[kind] = out, bits.view(self._row_dtype.bits_dtype)
        return scratch[0][:size], scratch[1][:size]


def _huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """Memory that the kernel backs with huge pages if it can: attention reads it end to end."""
    size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + size]

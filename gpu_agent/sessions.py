"""The sessions of a worker, their requests, and the division of the pool into rows."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy.typing as npt

from memshare.gpu_agent.block_index import BlockIndex
from memshare.gpu_agent.blocks import SessionBlocks
from memshare.gpu_agent.exact import ExactRequest, Index, Reader
from memshare.gpu_agent.index import RequestIndex
from memshare.gpu_agent.pool import Pool
from memshare.gpu_agent.rows import SessionRows
from memshare.gpu_agent.table import ExactTable
from memshare.kernels import BlockKernels, Kernels
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import (
    InvalidArgument,
    LayoutMismatch,
    StaleGeneration,
    UnknownRequest,
    UnknownSession,
)
from memshare.wire.layout import RowLayout

MAX_ROWS: Final = (1 << 31) - 1


@dataclass
class Request:
    """One request: the index for similar rows and the entries for equal ones."""

    index: Index
    exact: ExactRequest


@dataclass
class Session:
    """One engine's requests. Hold `lock` to use `requests`; `closed` is final."""

    session_id: int
    layout: RowLayout | BlockLayout
    tenant: str
    reader: Reader
    table: ExactTable | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: dict[int, Request] = field(default_factory=dict)
    closed: bool = False

    def add(
        self, request_id: int, generation: int, first_token: int, private: bool = False
    ) -> Request:
        """Add a request without tokens; a `private` one matches nothing outside itself."""
        # Without a tenant all are private.
        table = None if private else self.table
        table = ExactTable(self.reader.num_rows) if table is None else table
        index = (
            BlockIndex(self.reader, generation)
            if isinstance(self.reader, SessionBlocks)
            else RequestIndex(self.reader, generation, first_token)
        )
        request = Request(index, ExactRequest(table, self.session_id, request_id))
        self.requests[request_id] = request
        return request

    def get(self, request_id: int, generation: int) -> Request:
        """The request. Raises `UnknownRequest` or `StaleGeneration`."""
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"request {request_id} is not indexed", request_id=request_id)
        if request.index.generation != generation:
            raise StaleGeneration(
                f"request {request_id} is at generation {request.index.generation}, the call "
                f"speaks of {generation}",
                request_id=request_id,
                generation=request.index.generation,
            )
        return request


class Sessions:
    """All sessions of the worker. Safe for several threads.

    The pool is divided by the first session's row size, until the last session is closed.
    """

    def __init__(self, pool: Pool, kernels: Kernels, block_kernels: BlockKernels) -> None:
        self.pool = pool
        self.kernels = kernels
        self._block_kernels = block_kernels
        self._lock = threading.Lock()
        self._sessions: dict[int, Session] = {}
        self._tables: dict[tuple[object, ...], ExactTable] = {}
        self._row_bytes = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, 0 while the pool is not divided."""
        return self._row_bytes

    @property
    def num_rows(self) -> int:
        """Rows of the pool, 0 while it is not divided."""
        return self.pool.num_bytes // self._row_bytes if self._row_bytes else 0

    def count(self) -> tuple[int, int, int]:
        """(sessions, requests, indexed rows), without waiting for calls in progress."""
        with self._lock:
            sessions = list(self._sessions.values())
        requests, rows = 0, 0
        for session in sessions:
            # A copy made in one step: the dictionary may change under a loop.
            opened = list(session.requests.values())
            requests += len(opened)
            planes = len(session.reader.kinds) * session.reader.num_layers
            rows += sum(planes * one.index.num_tokens for one in opened)
        return len(sessions), requests, rows

    def open(
        self, session_id: int, layout: RowLayout | BlockLayout, row_bytes: int, tenant: str
    ) -> None:
        """Add a session, or do nothing if it is open with these very arguments."""
        if not session_id:
            raise InvalidArgument("session_id is 0, which names no session", field="session_id")
        self.check_row_bytes(row_bytes)
        if isinstance(layout, BlockLayout):
            self._check_blocks(layout, row_bytes)
        elif row_bytes < layout.row_bytes or row_bytes % layout.itemsize:
            raise InvalidArgument(
                f"row_bytes is {row_bytes}, the layout needs a multiple of {layout.itemsize} of "
                f"at least {layout.row_bytes}",
                field="row_bytes",
            )
        with self._lock:
            if self._sessions and row_bytes != self._row_bytes:
                raise LayoutMismatch(
                    f"the pool is divided into rows of {self._row_bytes} bytes, the session needs "
                    f"{row_bytes}",
                    row_bytes=self._row_bytes,
                )
            self._check_division(layout)
            if (known := self._sessions.get(session_id)) is not None:
                if (known.layout, known.tenant) != (layout, tenant):
                    raise InvalidArgument(
                        f"session {session_id} is open with another layout or tenant",
                        field="session_id",
                    )
                return
            reader = self._reader(layout, row_bytes)
            table = None
            if tenant:
                key = (tenant, _equal_bits(layout))
                table = self._tables.setdefault(key, ExactTable(reader.num_rows))
            self._row_bytes = row_bytes
            self._sessions[session_id] = Session(session_id, layout, tenant, reader, table)

    def _reader(self, layout: RowLayout | BlockLayout, row_bytes: int) -> Reader:
        if isinstance(layout, BlockLayout):
            bits = self.pool.rows(layout.itemsize, layout.itemsize).reshape(-1)
            return SessionBlocks(self._block_kernels, bits, layout)
        return SessionRows(self.kernels, self.pool.rows(row_bytes, layout.itemsize), layout)

    def blocks(self, layout: BlockLayout, row_bytes: int) -> SessionBlocks:
        """A reader of blocks, for copies.

        Raises `InvalidArgument` if the pool has no room for them or their size is another,
        `LayoutMismatch` on another division.
        """
        self._check_blocks(layout, row_bytes)
        with self._lock:
            self._check_division(layout)
        reader = self._reader(layout, row_bytes)
        assert isinstance(reader, SessionBlocks)
        return reader

    def _check_blocks(self, layout: BlockLayout, row_bytes: int) -> None:
        if row_bytes != layout.block_bytes:
            raise InvalidArgument(
                f"row_bytes is {row_bytes}, the layout's blocks have {layout.block_bytes}",
                field="row_bytes",
            )
        if layout.num_bytes > self.pool.num_bytes:
            raise InvalidArgument(
                f"{layout.num_blocks} blocks of {layout.block_bytes} bytes reach beyond the pool "
                f"of {self.pool.num_bytes}",
                field="num_blocks",
            )

    def _check_division(self, layout: RowLayout | BlockLayout) -> None:
        """Raises `LayoutMismatch` where other sessions divide the pool in another way."""
        for other in self._sessions.values():
            blocks = isinstance(other.layout, BlockLayout) or isinstance(layout, BlockLayout)
            if blocks and other.layout != layout:
                raise LayoutMismatch(
                    f"session {other.session_id} lays its rows or blocks out in another way: one "
                    "pool serves one layout of blocks",
                    row_bytes=self._row_bytes,
                )

    def get(self, session_id: int) -> Session:
        """The session. Raises `UnknownSession`."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(
                f"session {session_id} is not open in this worker", session_id=session_id
            )
        return session

    def close_all(self) -> None:
        """Forget every session."""
        with self._lock:
            sessions = list(self._sessions)
        for session_id in sessions:
            self.close(session_id)

    def close(self, session_id: int) -> None:
        """Forget a session; one that is not open is no error."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
        if session is None:
            return
        with session.lock:
            session.closed = True
            for request in session.requests.values():
                request.exact.truncate(0)
            session.requests = {}
        with self._lock:
            used = {id(one.table) for one in self._sessions.values()}
            self._tables = {key: one for key, one in self._tables.items() if id(one) in used}
            if not self._sessions:
                self._row_bytes = 0

    def check_row_bytes(self, row_bytes: int) -> None:
        """Raises `InvalidArgument` if the pool cannot be divided into such rows."""
        if row_bytes < 2 or row_bytes % 2 or row_bytes > self.pool.num_bytes:
            raise InvalidArgument(
                f"row_bytes is {row_bytes}, must be even, 2 to {self.pool.num_bytes}",
                field="row_bytes",
            )
        if self.pool.num_bytes // row_bytes > MAX_ROWS:
            raise InvalidArgument(
                f"rows of {row_bytes} bytes divide the pool into more than {MAX_ROWS}",
                field="row_bytes",
            )

    def divided(self, row_bytes: int) -> npt.NDArray[Any]:
        """The pool's rows as integers, for copies. Raises `LayoutMismatch` on another division."""
        self.check_row_bytes(row_bytes)
        with self._lock:
            if self._sessions and row_bytes != self._row_bytes:
                raise LayoutMismatch(
                    f"the pool is divided into rows of {self._row_bytes} bytes, not {row_bytes}",
                    row_bytes=self._row_bytes,
                )
            if any(isinstance(one.layout, BlockLayout) for one in self._sessions.values()):
                raise LayoutMismatch(
                    "the pool is divided into blocks, which are not contiguous: give their "
                    "block_layout",
                    row_bytes=self._row_bytes,
                )
        return self.pool.rows(row_bytes, 2)


def _equal_bits(layout: RowLayout | BlockLayout) -> object:
    """What two sessions' layouts must have in common for equal bits to mean equal rows."""
    if isinstance(layout, BlockLayout):
        return layout
    return layout.dtype, layout.key_width, layout.value_width, layout.num_layers

"""What AgentService does, message by message. All arguments are checked before anything changes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memshare.gpu_agent.block_index import BlockIndex, find_similar_blocks
from memshare.gpu_agent.blocks import SessionBlocks
from memshare.gpu_agent.exact import Index, Reader
from memshare.gpu_agent.index import RequestIndex
from memshare.gpu_agent.rows import MAX_TOKENS, Float32, Int32, SessionRows
from memshare.gpu_agent.search import (
    CandidateSearch,
    Matches,
    Query,
    find_similar,
    search_exhaustively,
)
from memshare.gpu_agent.sessions import Session, Sessions
from memshare.v1 import agent_pb2, common_pb2
from memshare.wire import packing
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import InvalidArgument, StaleGeneration, UnknownSession
from memshare.wire.layout import RowLayout
from memshare.wire.version import VERSION

MAX_CANDIDATES: Final = 64


class AgentOperations:
    """The worker's calls, free of gRPC. Safe for several threads.

    Each raises `InvalidArgument` for a wrong value, `UnknownSession`, `UnknownRequest` or
    `StaleGeneration` for a name that does not (or no longer) stand for anything, and then has
    changed nothing.
    """

    def __init__(
        self, sessions: Sessions, search: CandidateSearch, epoch: int, weigh_heads: bool = False
    ) -> None:
        self.epoch = epoch
        self._sessions = sessions
        self._search = search
        self._weigh_heads = weigh_heads
        self._lock = threading.Lock()
        self._nonfinite_rows = 0

    def get_agent_info(self) -> agent_pb2.GetAgentInfoResponse:
        """Waits for no call in progress."""
        sessions, requests, rows = self._sessions.count()
        return agent_pb2.GetAgentInfoResponse(
            pool=common_pb2.PoolDescriptor(
                pool_id=self._sessions.pool.pool_id,
                pool_bytes=self._sessions.pool.num_bytes,
                row_bytes=self._sessions.row_bytes,
                num_rows=self._sessions.num_rows,
            ),
            worker_epoch=self.epoch,
            backend="host",
            version=VERSION,
            worker_pid=os.getpid(),
            sessions=sessions,
            requests=requests,
            indexed_rows=rows,
            cpu_seconds=time.process_time(),
            nonfinite_rows=self._nonfinite_rows,
        )

    def open_index(self, request: agent_pb2.OpenIndexRequest) -> agent_pb2.OpenIndexResponse:
        """Raises `LayoutMismatch` if the pool is divided into other rows."""
        if request.HasField("block_layout") == request.HasField("layout"):
            raise InvalidArgument("a session has either a layout or a block_layout", field="layout")
        layout = (
            BlockLayout.from_proto(request.block_layout)
            if request.HasField("block_layout")
            else RowLayout.from_proto(request.layout)
        )
        self._sessions.open(request.session_id, layout, request.row_bytes, request.tenant)
        return agent_pb2.OpenIndexResponse()

    def close_index(self, request: agent_pb2.CloseIndexRequest) -> agent_pb2.CloseIndexResponse:
        """Forget a session, or all with 0; one that is not open is no error."""
        if request.session_id:
            self._sessions.close(request.session_id)
        else:
            self._sessions.close_all()
        return agent_pb2.CloseIndexResponse()

    def index_rows(self, request: agent_pb2.IndexRowsRequest) -> agent_pb2.IndexRowsResponse:
        """Add sealed tokens, which must follow those that are indexed."""
        with self._locked(request.session_id) as session:
            start, count = request.start, request.num_tokens
            if count < 1 or start + count > MAX_TOKENS:
                raise InvalidArgument(
                    f"tokens {start} to {start + count} of request {request.request_id}: at least "
                    f"one, and none from {MAX_TOKENS} on",
                    field="num_tokens",
                )
            rows = _unpack_rows(session, request)
            candidates = _unpack_candidates(session, request)
            first_token = request.first_token
            indexed = 0
            if request.request_id in session.requests:
                known = session.get(request.request_id, request.generation).index
                indexed = known.num_tokens
                if first_token != known.first_token:
                    raise InvalidArgument(
                        f"first_token is {first_token}, the request began with {known.first_token}",
                        field="first_token",
                    )
            elif first_token > MAX_TOKENS:
                raise InvalidArgument(
                    f"first_token is {first_token}, at most {MAX_TOKENS}", field="first_token"
                )
            if start != indexed:
                raise InvalidArgument(
                    f"start is {start}, {indexed} tokens of request {request.request_id} are "
                    "indexed",
                    field="start",
                )
            target = session.requests.get(request.request_id)
            if target is None:
                target = session.add(
                    request.request_id, request.generation, first_token, request.private
                )
            if isinstance(target.index, BlockIndex):
                target.index.append(rows, candidates)
            else:
                target.index.append(rows)
            return agent_pb2.IndexRowsResponse(num_tokens=target.index.num_tokens)

    def drop_requests(
        self, request: agent_pb2.DropRequestsRequest
    ) -> agent_pb2.DropRequestsResponse:
        """All or none; requests that were never indexed are passed over."""
        ids = packing.unpack(request.request_ids, packing.UINT64, "request_ids")
        keeps = packing.unpack(request.keep_tokens, packing.UINT32, "keep_tokens", len(ids))
        generations = packing.unpack(request.generations, packing.UINT32, "generations", len(ids))
        if len(np.unique(ids)) != len(ids):
            raise InvalidArgument("request_ids: a request is named twice", field="request_ids")
        with self._locked(request.session_id) as session:
            drops = [
                (request_id, session.requests[request_id], keep, generation)
                for request_id, keep, generation in zip(
                    ids.tolist(), keeps.tolist(), generations.tolist(), strict=True
                )
                # What was never indexed is forgotten already.
                if request_id in session.requests
            ]
            for request_id, dropped, _, generation in drops:
                if generation < dropped.index.generation:
                    raise StaleGeneration(
                        f"request {request_id} is at generation {dropped.index.generation}, the "
                        f"call speaks of {generation}",
                        request_id=request_id,
                        generation=dropped.index.generation,
                    )
            for request_id, dropped, keep, generation in drops:
                dropped.exact.truncate(keep)
                dropped.index.truncate(keep)
                dropped.index.generation = generation
                if keep == 0:
                    del session.requests[request_id]
        return agent_pb2.DropRequestsResponse()

    def find_donors(self, request: agent_pb2.FindDonorsRequest) -> agent_pb2.FindDonorsResponse:
        """See `find_similar` and `ExactRequest.find`."""
        with self._locked(request.session_id) as session:
            target = session.get(request.request_id, request.generation)
            planes = len(session.reader.kinds), session.reader.num_layers
            start, end = request.target_start, request.target_end
            if not start < end <= target.index.num_tokens:
                raise InvalidArgument(
                    f"targets {start} to {end} are not a range of the {target.index.num_tokens} "
                    "indexed tokens",
                    field="target_end",
                )
            query = Query(
                start,
                end,
                packing.unpack_mask(request.target_mask, (*planes, end), "target_mask"),
                packing.unpack_mask(request.donor_mask, (*planes, end), "donor_mask"),
            )
            if request.exact:
                matches = target.exact.find(target.index, session.reader, query)
            else:
                matches = self._find_similar(target.index, session.reader, query, request)
            by_group = isinstance(session.reader, SessionBlocks)
        with self._lock:
            self._nonfinite_rows += matches.nonfinite
        return _pack_matches(matches, by_group)

    def _find_similar(
        self, index: Index, reader: Reader, query: Query, request: agent_pb2.FindDonorsRequest
    ) -> Matches:
        if not 1 <= request.candidates <= MAX_CANDIDATES:
            raise InvalidArgument(
                f"candidates is {request.candidates}, must be 1 to {MAX_CANDIDATES}",
                field="candidates",
            )
        search = search_exhaustively if request.exhaustive else self._search
        if isinstance(index, BlockIndex) and isinstance(reader, SessionBlocks):
            thresholds = _unpack_thresholds(request, len(reader.kinds))
            return find_similar_blocks(index, reader, search, query, thresholds, request.candidates)
        assert isinstance(index, RequestIndex)
        assert isinstance(reader, SessionRows)
        if not reader.rotates:
            raise InvalidArgument(
                "the session's layout has no rope: only exact donors can be found", field="exact"
            )
        thresholds = _unpack_thresholds(request, reader.num_layers)
        return find_similar(
            index, reader, search, query, thresholds, request.candidates, self._weigh_heads
        )

    def copy_rows(self, request: agent_pb2.CopyRowsRequest) -> agent_pb2.CopyRowsResponse:
        """Copy whole rows; none may be written twice or both read and written."""
        sources = packing.unpack(request.source_rows, packing.INT32, "source_rows")
        destinations = packing.unpack(
            request.destination_rows, packing.INT32, "destination_rows", len(sources)
        )
        blocks = self._blocks(request)
        try:
            if blocks is not None:
                blocks.copy(sources, destinations)
            else:
                pool = self._sessions.divided(request.row_bytes)
                self._sessions.kernels.copy_rows(pool, sources, destinations)
        except ValueError as error:
            raise InvalidArgument(str(error), field="destination_rows") from None
        return agent_pb2.CopyRowsResponse()

    def zero_rows(self, request: agent_pb2.ZeroRowsRequest) -> agent_pb2.ZeroRowsResponse:
        """Fill whole rows with zeros."""
        rows = packing.unpack(request.rows, packing.INT32, "rows")
        if len(np.unique(rows)) != len(rows):
            raise InvalidArgument("rows: a row is named twice", field="rows")
        blocks = self._blocks(request)
        try:
            if blocks is not None:
                blocks.zero(rows)
            else:
                pool = self._sessions.divided(request.row_bytes)
                self._sessions.kernels.zero_rows(pool, rows)
        except ValueError as error:
            raise InvalidArgument(str(error), field="rows") from None
        return agent_pb2.ZeroRowsResponse()

    def _blocks(
        self, request: agent_pb2.CopyRowsRequest | agent_pb2.ZeroRowsRequest
    ) -> SessionBlocks | None:
        if not request.HasField("block_layout"):
            return None
        return self._sessions.blocks(
            BlockLayout.from_proto(request.block_layout), request.row_bytes
        )

    @contextmanager
    def _locked(self, session_id: int) -> Iterator[Session]:
        session = self._sessions.get(session_id)
        with session.lock:
            if session.closed:
                raise UnknownSession(f"session {session_id} was closed", session_id=session_id)
            yield session


def _unpack_rows(session: Session, request: agent_pb2.IndexRowsRequest) -> Int32:
    """Row ids [kinds, num_layers, num_tokens], within the pool but in left padding."""
    reader, count = session.reader, request.num_tokens
    padding = min(max(request.first_token - request.start, 0), count)
    if isinstance(reader, SessionBlocks):
        # Groups stand in place of layers on the wire, in place of kinds in here.
        planes, layers = [("key_rows", request.key_rows)], len(reader.kinds)
        if request.value_rows or request.first_token:
            raise InvalidArgument(
                "a block holds K and V and has no padding: leave value_rows and first_token out",
                field="value_rows",
            )
    else:
        planes = [("key_rows", request.key_rows), ("value_rows", request.value_rows)]
        layers = reader.num_layers
    rows = np.empty((len(planes), layers, count), np.int32)
    for plane, (field, data) in enumerate(planes):
        ids = packing.unpack(data, packing.INT32, field, layers * count).reshape(layers, count)
        real = ids[:, padding:]
        # As unsigned, a negative id is too large.
        outside = real.view(np.uint32) >= reader.num_rows
        if outside.any():
            raise InvalidArgument(
                f"{field}: row {real[outside][0]} is not one of the pool's {reader.num_rows}",
                field=field,
            )
        rows[plane] = ids
    return rows.reshape(len(reader.kinds), reader.num_layers, count)


def _unpack_candidates(session: Session, request: agent_pb2.IndexRowsRequest) -> Int32:
    """The engine's candidates [num_tokens, k], each earlier than its block or -1."""
    count = request.num_tokens
    values = packing.unpack(request.candidates, packing.INT32, "candidates")
    if len(values) and not isinstance(session.reader, SessionBlocks):
        raise InvalidArgument("candidates are for sessions with blocks", field="candidates")
    if len(values) % count or len(values) // count > MAX_CANDIDATES:
        raise InvalidArgument(
            f"candidates: {len(values)} values are no equal number, at most {MAX_CANDIDATES}, for "
            f"each of {count} blocks",
            field="candidates",
        )
    candidates = values.reshape(count, -1)
    own = np.arange(request.start, request.start + count)[:, None]
    wrong = (candidates < -1) | (candidates >= own)
    if wrong.any():
        raise InvalidArgument(
            f"candidates: {candidates[wrong][0]} is neither -1 nor an earlier block",
            field="candidates",
        )
    return candidates


def _unpack_thresholds(request: agent_pb2.FindDonorsRequest, layers: int) -> Float32:
    """Thresholds [2, num_layers]."""
    thresholds = np.empty((2, layers), np.float32)
    for plane, (field, data) in enumerate(
        (
            ("key_thresholds", request.key_thresholds),
            ("value_thresholds", request.value_thresholds),
        )
    ):
        values = packing.unpack(data, packing.FLOAT32, field, layers)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise InvalidArgument(f"{field}: a threshold is not finite or negative", field=field)
        thresholds[plane] = values
    return thresholds


def _pack_matches(matches: Matches, by_group: bool) -> agent_pb2.FindDonorsResponse:
    def joined(parts: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> bytes:
        return packing.pack(np.concatenate(parts), dtype) if parts else b""

    kinds, layers = matches.kinds, matches.layers
    if by_group:
        kinds, layers = layers, kinds
    return agent_pb2.FindDonorsResponse(
        layers=joined(layers, packing.UINT16),
        kinds=joined(kinds, packing.UINT8),
        targets=joined(matches.targets, packing.INT32),
        donors=joined(matches.donors, packing.INT32),
        donor_rows=joined(matches.donor_rows, packing.INT32),
        distances=joined(matches.distances, packing.FLOAT32),
        donor_sessions=joined(matches.sessions, packing.UINT64),
        donor_requests=joined(matches.requests, packing.UINT64),
        examined=matches.examined,
        nonfinite=matches.nonfinite,
    )

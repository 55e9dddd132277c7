"""Exact donors: rows of any request of the tenant that are equal bit for bit."""

from __future__ import annotations

import numpy as np

from memshare.gpu_agent.block_index import BlockIndex
from memshare.gpu_agent.blocks import SessionBlocks
from memshare.gpu_agent.index import RequestIndex
from memshare.gpu_agent.rows import SessionRows
from memshare.gpu_agent.search import Matches, Query
from memshare.gpu_agent.table import MAX_EQUAL, ExactTable

Reader = SessionRows | SessionBlocks
Index = RequestIndex | BlockIndex


class ExactRequest:
    """The share of one request in its tenant's table. Not safe for several threads.

    Rows are hashed and entered when they are first searched for: similarity needs no hashes.
    """

    def __init__(self, table: ExactTable, session: int, request: int) -> None:
        self._table = table
        self._name = (session, request)
        # (segment, its first token)
        self._segments: list[tuple[int, int]] = []
        self._num_tokens = 0
        self._open = False

    def truncate(self, keep: int) -> None:
        """Forget the tokens from `keep` on."""
        emptied = [segment for segment, start in self._segments if start >= keep]
        self._segments = [(segment, start) for segment, start in self._segments if start < keep]
        # A segment without tokens may serve another request from here on.
        self._table.truncate(emptied, 0)
        if keep < self._num_tokens:
            self._table.truncate([segment for segment, _ in self._segments], keep)
            self._num_tokens = keep
            self._open = False

    def find(self, request: Index, reader: Reader, query: Query) -> Matches:
        """For each target the oldest donor that is equal to it, if there is one.

        The donor mask speaks of this request alone: whether a row of another request may still
        be shared is for its keeper to say.
        """
        self._enter(request, reader)
        layers = reader.num_layers
        matches = Matches()
        segments = [segment for segment, _ in self._segments]
        # One row of the mask for each plane, as the table numbers them.
        allowed = (query.donor_mask & request.usable[:, :, : query.end]).reshape(-1, query.end)
        allowed[:, query.start :] = False
        for kind in reader.kinds:
            wanted = query.target_mask[kind] & request.usable[kind, :, : query.end]
            wanted[:, : query.start] = False
            layer, target = (where.astype(np.int32) for where in np.nonzero(wanted))
            matches.examined += len(target)
            rows = request.rows[kind][layer, target]
            hashes = reader.hashes(kind, rows)
            odd = hashes == 0
            if odd.any():
                nonfinite, _ = reader.unusable(kind, rows[odd])
                request.usable[kind, layer[odd], target[odd]] = False
                matches.nonfinite += int(nonfinite.sum())
            planes = layer + np.int32(kind * layers)
            found = self._table.find(segments, planes, target, hashes, allowed)
            matched = np.zeros(len(target), np.bool_)
            open_targets = np.arange(len(target))
            for place in range(MAX_EQUAL):
                # Sorted, so the first place without a candidate is the last for a target.
                open_targets = open_targets[found["row"][open_targets, place] >= 0]
                candidate = found[open_targets, place]
                own = rows[open_targets]
                equal = reader.equal(kind, own, candidate["row"]) & (candidate["row"] != own)
                hit, donor = open_targets[equal], candidate[equal]
                matched[hit] = True
                matches.add(
                    kind,
                    layer[hit],
                    target[hit],
                    donor["token"],
                    donor["row"],
                    np.zeros(len(hit), np.float32),
                )
                matches.sessions.append(donor["session"])
                matches.requests.append(donor["request"])
                open_targets = open_targets[~equal]
            # A target that takes a donor gives up its row: it must not hide the rows that stay.
            self._table.forget(segments, planes[matched], target[matched], hashes[matched])
        return matches

    def _enter(self, request: Index, reader: Reader) -> None:
        start, end = max(self._num_tokens, request.first_token), request.num_tokens
        self._num_tokens = max(self._num_tokens, end)
        if start >= end:
            return
        if not self._open:
            self._segments.append((self._table.open_segment(*self._name), start))
            self._open = True
        layers = reader.num_layers
        tokens = np.arange(start, end, dtype=np.int32)
        for kind in reader.kinds:
            # Token by token, so that the order of the entries is that of their age.
            rows = np.ascontiguousarray(request.rows[kind, :, start:end].T).reshape(-1)
            planes = np.tile(np.arange(layers, dtype=np.int32) + kind * layers, len(tokens))
            self._table.insert(
                self._segments[-1][0],
                planes.astype(np.int32),
                np.repeat(tokens, layers),
                rows,
                reader.hashes(kind, rows),
            )

"""The index of one request of an engine that shares by its own block table."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from memshare.gpu_agent.blocks import SessionBlocks
from memshare.gpu_agent.rows import Bools, Float32, Int32, UInt64
from memshare.gpu_agent.search import CandidateSearch, Matches, Query
from memshare.kernels.block_sketch import SKETCH

_FIRST_CAPACITY: Final = 64
_Item = TypeVar("_Item", bound=np.generic)


class BlockIndex:
    """Sealed blocks of one request, for all groups.

    In place of tokens stand blocks. `rows` int32 [groups, 1, capacity]. `usable` and `measurable`
    bool of that shape: blocks that may match at all, and that may do so by their distance.
    `candidates` int32 [capacity, k] the earlier blocks that the engine named, -1 for none.
    Sketches are made when blocks are first searched; being linear they are centred, and signed
    again, whenever twice as many are there. Not safe for several threads.
    """

    def __init__(self, reader: SessionBlocks, generation: int) -> None:
        self.generation = generation
        self.first_token = 0
        self.num_tokens = 0
        self._reader = reader
        groups = len(reader.kinds)
        self.rows: Int32 = np.zeros((groups, 1, 0), np.int32)
        self.usable: Bools = np.zeros((groups, 1, 0), np.bool_)
        self.measurable: Bools = np.zeros((groups, 1, 0), np.bool_)
        self.candidates: Int32 = np.full((0, 0), -1, np.int32)
        self._sketches: Float32 = np.zeros((groups, 0, SKETCH), np.float32)
        self._signatures: UInt64 = np.zeros((groups, 0, 2), np.uint64)
        self._weights: list[Float32] | None = None
        self._num_sketched = 0
        self._num_signed = 0
        self._num_centred = 0

    def append(self, rows: Int32, candidates: Int32) -> None:
        """Add blocks after the last: ids [groups, 1, n] and candidates [n, k]."""
        start, end = self.num_tokens, self.num_tokens + rows.shape[2]
        if end > self.rows.shape[2] or candidates.shape[1] > self.candidates.shape[1]:
            self._grow(end, candidates.shape[1])
        self.rows[:, :, start:end] = rows
        self.usable[:, :, start:end] = True
        self.measurable[:, :, start:end] = True
        self.candidates[start:end] = -1
        self.candidates[start:end, : candidates.shape[1]] = candidates
        self.num_tokens = end

    def truncate(self, keep: int) -> None:
        """Forget the blocks from `keep` on."""
        self.num_tokens = min(self.num_tokens, keep)
        self._num_sketched = min(self._num_sketched, keep)
        self._num_signed = min(self._num_signed, keep)
        if keep < self._num_centred:
            # The mean was that of blocks which are gone.
            self._num_centred = self._num_signed = 0

    def signatures(self, group: int) -> UInt64:
        """uint64 [num_tokens, 2]."""
        self._sketch()
        if self.num_tokens >= 2 * max(1, self._num_centred):
            self._num_centred, self._num_signed = self.num_tokens, 0
        start, end = self._num_signed, self.num_tokens
        if start < end:
            for kind in self._reader.kinds:
                centre = self._sketches[kind, : self._num_centred]
                finite = np.isfinite(centre).all(axis=1)
                mean = centre[finite].mean(axis=0) if finite.any() else np.zeros(SKETCH)
                self._signatures[kind, start:end] = self._reader.sign(
                    kind, self._sketches[kind, start:end], mean.astype(np.float32)
                )
            self._num_signed = end
        return self._signatures[group, :end]

    def _sketch(self) -> None:
        start, end = self._num_sketched, self.num_tokens
        if start == end:
            return
        if self._weights is None:
            # Sketches compare only under the same weights, so those of the first blocks stay.
            self._weights = [
                self._reader.weights(kind, self.rows[kind, 0, :end]) for kind in self._reader.kinds
            ]
        for kind in self._reader.kinds:
            self._sketches[kind, start:end] = self._reader.sketches(
                kind, self.rows[kind, 0, start:end], self._weights[kind]
            )
        self._num_sketched = end

    def _grow(self, needed: int, width: int) -> None:
        capacity = max(needed, 2 * self.rows.shape[2], _FIRST_CAPACITY)
        width = max(width, self.candidates.shape[1])
        self.rows = _resized(self.rows, (*self.rows.shape[:2], capacity))
        self.usable = _resized(self.usable, (*self.usable.shape[:2], capacity))
        self.measurable = _resized(self.measurable, (*self.measurable.shape[:2], capacity))
        candidates = np.full((capacity, width), -1, np.int32)
        old = self.candidates
        candidates[: old.shape[0], : old.shape[1]] = old
        self.candidates = candidates
        groups = len(self._reader.kinds)
        self._sketches = _resized(self._sketches, (groups, capacity, SKETCH))
        self._signatures = _resized(self._signatures, (groups, capacity, 2))


def _resized(array: npt.NDArray[_Item], shape: tuple[int, ...]) -> npt.NDArray[_Item]:
    out = np.zeros(shape, array.dtype)
    out[tuple(slice(size) for size in array.shape)] = array
    return out


def find_similar_blocks(
    request: BlockIndex,
    reader: SessionBlocks,
    search: CandidateSearch,
    query: Query,
    thresholds: Float32,
    candidates: int,
) -> Matches:
    """For each target the nearest donor whose K and V are both within their thresholds.

    Verified are the candidates that the engine named and those of `search`. `thresholds`: float32
    [2, groups]. Marks blocks that are not finite as not usable, others whose distances are
    infinite as not measurable.
    """
    matches = Matches()
    for group in reader.kinds:
        usable = request.usable[group, 0] & request.measurable[group, 0]
        wanted = query.target_mask[group, 0][query.start :] & usable[query.start : query.end]
        targets = (np.flatnonzero(wanted) + query.start).astype(np.int32)
        matches.examined += len(targets)
        valid = query.donor_mask[group, 0][: query.start] & usable[: query.start]
        if not len(targets) or not valid.any():
            continue
        signatures = request.signatures(group)
        donors = np.concatenate(
            (
                search(signatures[targets], signatures[: query.start], valid, candidates),
                _allowed(request.candidates[targets], valid),
            ),
            axis=1,
        ).astype(np.int32)
        rows = request.rows[group, 0]
        measured = reader.distances(
            group, rows[targets], np.where(donors >= 0, rows[donors], np.int32(-1))
        )
        _mark_unusable(request, reader, group, targets, donors, measured, matches)
        near = (measured <= thresholds[:, group]).all(axis=2)
        distances = np.where(near, measured.mean(axis=2), np.inf).astype(np.float32)
        column = distances.argmin(axis=1)[:, None]
        found = np.take_along_axis(distances, column, axis=1)[:, 0]
        best = np.take_along_axis(donors, column, axis=1)[:, 0]
        accepted = np.isfinite(found)
        if accepted.any():
            best = best[accepted]
            layers = np.zeros(len(best), np.int32)
            matches.add(group, layers, targets[accepted], best, rows[best], found[accepted])
    return matches


def _allowed(candidates: Int32, valid: Bools) -> Int32:
    """The engine's candidates, -1 for those that may not be donors."""
    inside = (candidates >= 0) & (candidates < len(valid))
    allowed = inside & valid[np.where(inside, candidates, 0)]
    return np.where(allowed, candidates, np.int32(-1)).astype(np.int32)


def _mark_unusable(
    request: BlockIndex,
    reader: SessionBlocks,
    group: int,
    targets: Int32,
    donors: Int32,
    measured: Float32,
    matches: Matches,
) -> None:
    odd = (donors >= 0) & ~np.isfinite(measured).all(axis=2)
    if not odd.any():
        return
    suspects = np.unique(np.concatenate((targets[odd.any(axis=1)], donors[odd])))
    nonfinite, immeasurable = reader.unusable(group, request.rows[group, 0, suspects])
    request.usable[group, 0, suspects[nonfinite]] = False
    request.measurable[group, 0, suspects[immeasurable]] = False
    matches.nonfinite += int(nonfinite.sum())

"""Similar donors: candidates by signature, then the distance on the real rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from memshare.gpu_agent.index import RequestIndex
from memshare.gpu_agent.rows import KINDS, Bools, Float32, Int32, SessionRows, UInt64
from memshare.kernels import Kernels

# Donors verified at once, per target: bounds the memory of an exhaustive search.
_CHUNK: Final = 256


@dataclass(frozen=True)
class Query:
    """What is looked for in one request.

    Targets are the tokens [start, end) with a bit in `target_mask`, donors those below `start`
    with a bit in `donor_mask`; both masks are bool [2, num_layers, end].
    """

    start: int
    end: int
    target_mask: Bools
    donor_mask: Bools


@dataclass
class Matches:
    """Donors found, one array element each; the sums of a search."""

    layers: list[Int32] = field(default_factory=list)
    kinds: list[Int32] = field(default_factory=list)
    targets: list[Int32] = field(default_factory=list)
    donors: list[Int32] = field(default_factory=list)
    donor_rows: list[Int32] = field(default_factory=list)
    distances: list[Float32] = field(default_factory=list)
    sessions: list[UInt64] = field(default_factory=list)
    requests: list[UInt64] = field(default_factory=list)
    # Entries of targets that were searched for.
    examined: int = 0
    # Rows newly found to hold NaN or Inf.
    nonfinite: int = 0

    def add(
        self,
        kind: int,
        layers: Int32,
        targets: Int32,
        donors: Int32,
        rows: Int32,
        distances: Float32,
    ) -> None:
        """Add matches of one kind, each argument [n]."""
        self.layers.append(layers)
        self.kinds.append(np.full(len(targets), kind, np.int32))
        self.targets.append(targets)
        self.donors.append(donors)
        self.donor_rows.append(rows)
        self.distances.append(distances)


class CandidateSearch(Protocol):
    """Finds the tokens of one plane that are worth verifying."""

    def __call__(self, queries: UInt64, slab: UInt64, valid: Bools, k: int) -> Int32:
        """Slots int32 [m, width] for signatures [m, 2] among the valid of `slab` [n, 2].

        Filled with -1. `width` is `k`, unless the search is exhaustive.
        """
        ...


class PopcountSearch:
    """The `k` nearest by a scan over the whole slab."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, queries: UInt64, slab: UInt64, valid: Bools, k: int) -> Int32:
        """See `CandidateSearch`."""
        limit = np.full(len(queries), len(slab), np.int32)
        return self._kernels.hamming_topk(queries, slab, valid, limit, k)[0]


class FaissSearch:
    """The `k` nearest by FAISS. ImportError where it is not installed."""

    def __init__(self) -> None:
        import faiss

        # The calls run in parallel already.
        faiss.omp_set_num_threads(1)
        self._faiss = faiss

    def __call__(self, queries: UInt64, slab: UInt64, valid: Bools, k: int) -> Int32:
        """See `CandidateSearch`."""
        slots = np.flatnonzero(valid).astype(np.int32)
        index = self._faiss.IndexBinaryFlat(128)
        index.add(slab[slots].view(np.uint8))
        _, found = index.search(np.ascontiguousarray(queries).view(np.uint8), k)
        # Place -1 (none) is that of the element appended here.
        return np.append(slots, np.int32(-1))[found]


def search_exhaustively(queries: UInt64, slab: UInt64, valid: Bools, k: int) -> Int32:
    """Every valid slot for every query: the yardstick of the other searches."""
    slots = np.flatnonzero(valid).astype(np.int32)
    return np.broadcast_to(slots, (len(queries), len(slots)))


SEARCHES: Final[dict[str, Callable[[Kernels], CandidateSearch]]] = {
    "popcount": PopcountSearch,
    "faiss": lambda _: FaissSearch(),
}


def find_similar(
    request: RequestIndex,
    reader: SessionRows,
    search: CandidateSearch,
    query: Query,
    thresholds: Float32,
    candidates: int,
    weigh_heads: bool = False,
) -> Matches:
    """For each target the nearest donor within the threshold of its plane, if there is one.

    `thresholds`: float32 [2, num_layers], greatest relative squared distance. Marks the rows that
    turn out to be without finite, nonzero content as not usable.
    """
    request.sign()
    matches = Matches()
    for kind in KINDS:
        for layer in range(thresholds.shape[1]):
            plane = (kind, layer)
            usable = request.usable[plane]
            wanted = query.target_mask[plane][query.start :] & usable[query.start : query.end]
            targets = (np.flatnonzero(wanted) + query.start).astype(np.int32)
            matches.examined += len(targets)
            valid = query.donor_mask[plane][: query.start] & usable[: query.start]
            if not len(targets) or not valid.any():
                continue
            signatures = request.signatures[plane]
            donors = search(signatures[targets], signatures[: query.start], valid, candidates)
            weights = request.head_weights[kind][layer] if weigh_heads else None
            rows = request.rows[plane]
            best, distances, bad = _nearest(reader, kind, rows, targets, donors, weights)
            if len(bad):
                nonfinite, zero = reader.unusable(kind, rows[bad])
                usable[bad[nonfinite | zero]] = False
                matches.nonfinite += int(nonfinite.sum())
            near = distances <= thresholds[plane]
            if near.any():
                best = best[near]
                layers = np.full(len(best), layer, np.int32)
                matches.add(kind, layers, targets[near], best, rows[best], distances[near])
    return matches


def _nearest(
    reader: SessionRows,
    kind: int,
    rows: Int32,
    targets: Int32,
    donors: Int32,
    weights: Float32 | None,
) -> tuple[Int32, Float32, Int32]:
    """(nearest donor [m], its distance [m], tokens of immeasurable distance) of one plane."""
    best = np.full(len(targets), -1, np.int32)
    distances = np.full(len(targets), np.inf, np.float32)
    suspects = []
    for start in range(0, donors.shape[1], _CHUNK):
        chunk = donors[:, start : start + _CHUNK]
        present = chunk >= 0
        measured = reader.distances(
            kind,
            rows[targets],
            np.where(present, rows[chunk], np.int32(-1)),
            targets[:, None] - chunk,
            weights,
        )
        odd = present & ~np.isfinite(measured)
        if odd.any():
            suspects += [targets[odd.any(axis=1)], chunk[odd]]
        column = measured.argmin(axis=1)[:, None]
        found = np.take_along_axis(measured, column, axis=1)[:, 0]
        closer = found < distances
        best[closer] = np.take_along_axis(chunk, column, axis=1)[closer, 0]
        distances[closer] = found[closer]
    bad = np.unique(np.concatenate(suspects)) if suspects else np.empty(0, np.int32)
    return best, distances, bad

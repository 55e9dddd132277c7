"""Reasoning steps, and which earlier blocks hold a similar one.

The method of MemShare (step boundaries at newlines and sentence ends, similar steps by the cosine
of their token vectors); here only as one source of candidates, which the agent verifies on the
data. Tokens stay in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from memshare.client.block_tables import MAX_CANDIDATES, NO_CANDIDATE

# Token ids are folded into this many counts: collisions only add false candidates.
_VECTOR_SIZE: Final = 256
# Of a very long request only the newest steps are compared with, so that no step of the engine
# waits for long.
_MAX_COMPARED: Final = 2048
_ENDS: Final = ("\n", ".", "!", "?", "\u3002", "\uff01", "\uff1f")


def boundary_tokens(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which tokens end a step, bool `[vocabulary]`, from the text of each token."""
    return np.array([text.rstrip(" ").endswith(_ENDS) or "\n" in text for text in texts], np.bool_)


class ReasoningSteps:
    """The steps of one request, found as its tokens come.

    `boundaries`: bool `[vocabulary]`, tokens that end a step of at least `min_tokens`.
    """

    def __init__(
        self, boundaries: npt.NDArray[np.bool_], min_tokens: int, similarity: float
    ) -> None:
        self._boundaries = boundaries
        self._min_tokens = min_tokens
        self._similarity = similarity
        self._starts: list[int] = []
        self._vectors = np.zeros((16, _VECTOR_SIZE), np.float32)
        self._open = 0
        self._seen = 0
        # Per finished step, the earlier steps that are similar to it, best first.
        self._similar: list[list[int]] = []

    @property
    def count(self) -> int:
        """Finished steps."""
        return len(self._starts)

    def add(self, tokens: Sequence[int], end: int) -> None:
        """Take in the tokens of the request up to `end`; `tokens` are all of them."""
        fresh = np.asarray(tokens[self._seen : end], np.int64)
        known = fresh < len(self._boundaries)
        ends = np.flatnonzero(self._boundaries[np.where(known, fresh, 0)] & known)
        first = len(self._starts)
        for position in (ends + self._seen + 1).tolist():
            if position - self._open >= self._min_tokens:
                self._finish(tokens[self._open : position])
                self._open = position
        self._seen = max(self._seen, end)
        if len(self._starts) > first:
            self._compare(first)

    def _finish(self, tokens: Sequence[int]) -> None:
        number = len(self._starts)
        if number == len(self._vectors):
            self._vectors = np.concatenate((self._vectors, np.zeros_like(self._vectors)))
        counts = np.bincount(np.asarray(tokens) % _VECTOR_SIZE, minlength=_VECTOR_SIZE)
        vector = counts.astype(np.float32)
        self._vectors[number] = vector / np.linalg.norm(vector)
        self._starts.append(self._open)

    def _compare(self, first: int) -> None:
        """Find what the steps from `first` on resemble, in one product."""
        oldest = max(0, first - _MAX_COMPARED)
        vectors = self._vectors[oldest : len(self._starts)]
        cosines = vectors[first - oldest :] @ vectors.T
        for number, row in enumerate(cosines, first - oldest):
            near = np.flatnonzero(row[:number] >= self._similarity)
            best = near[np.argsort(-row[near], kind="stable")][:MAX_CANDIDATES]
            self._similar.append((best + oldest).tolist())

    def candidates(self, block: int, block_tokens: int) -> npt.NDArray[np.int32]:
        """Earlier blocks that may resemble a block, int32 `[MAX_CANDIDATES]`, -1 for none.

        For each step that lies in the block, where the same offset of a similar step lies.
        """
        found: list[int] = []
        start = block * block_tokens
        first = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        for step in range(first, len(self._starts)):
            if self._starts[step] >= start + block_tokens:
                break
            for earlier in self._similar[step]:
                shift = self._starts[step] - self._starts[earlier]
                # Blocks are aligned, steps are not: the nearest shift by whole blocks.
                other = block - round(shift / block_tokens)
                if 0 <= other < block and other not in found:
                    found.append(other)
        result = np.full(MAX_CANDIDATES, NO_CANDIDATE, np.int32)
        result[: len(found[:MAX_CANDIDATES])] = found[:MAX_CANDIDATES]
        return result

"""The index of one request: where its sealed rows lie, and their signatures."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from memshare.gpu_agent.rows import KINDS, Float32, Int32, SessionRows, UInt64

# Rows are centred before they are signed. The mean is taken from a request's first tokens and
# settled in these steps, at which what is signed already is signed again.
MEAN_TOKENS: Final = (64, 256)
_FIRST_CAPACITY: Final = 256
# The inverse of less would overflow.
_SMALLEST: Final = 1e-30
_Item = TypeVar("_Item", bound=np.generic)


class RequestIndex:
    """Sealed tokens of one request, for all of its (kind, layer) planes.

    A token is the slot it has in every array: `rows` int32 [2, num_layers, capacity], `signatures`
    uint64 [2, num_layers, capacity, 2], `usable` bool [2, num_layers, capacity], of which the
    first `num_tokens` slots are in use and the first `num_signed` carry a signature. Rows are
    signed when they are first searched for: exact sharing needs no signatures. `usable` is False
    for padding and for rows found without finite, nonzero content. Not safe for several threads.
    """

    def __init__(self, reader: SessionRows, generation: int, first_token: int) -> None:
        self.generation = generation
        self.first_token = first_token
        self.num_tokens = 0
        self.num_signed = 0
        self._reader = reader
        layers = reader.layout.num_layers
        self.rows: Int32 = np.empty((2, layers, 0), np.int32)
        self.usable: npt.NDArray[np.bool_] = np.empty((2, layers, 0), np.bool_)
        self.signatures: UInt64 = np.empty((2, layers, 0, 2), np.uint64)
        self.head_weights = tuple(
            np.ones((layers, reader.layout.num_kv_heads), np.float32) for _ in KINDS
        )
        self._means = tuple(np.zeros((layers, width), np.float32) for width in reader.widths)
        self._mean_tokens = 0

    def append(self, rows: Int32) -> None:
        """Add tokens after the last: row ids [2, num_layers, n], within the pool unless padding."""
        start, end = self.num_tokens, self.num_tokens + rows.shape[2]
        if end > self.rows.shape[2]:
            self._grow(end)
        self.rows[:, :, start:end] = rows
        self.usable[:, :, start:end] = np.arange(start, end) >= self.first_token
        self.num_tokens = end

    def truncate(self, keep: int) -> None:
        """Forget the tokens from `keep` on."""
        self.num_tokens = min(self.num_tokens, keep)
        self.num_signed = min(self.num_signed, keep)

    def sign(self) -> None:
        """Sign the tokens that have no signature yet."""
        settled = sum(self.num_tokens - self.first_token >= step for step in MEAN_TOKENS)
        done = sum(self._mean_tokens >= step for step in MEAN_TOKENS)
        if self.num_tokens > self.first_token and (settled > done or not self._mean_tokens):
            self._mean_tokens = self.num_tokens - self.first_token
            self._estimate(self.first_token + min(self._mean_tokens, MEAN_TOKENS[-1]))
            self.num_signed = 0
        start, end = max(self.num_signed, self.first_token), self.num_tokens
        if start < end:
            if self.signatures.shape[2] < self.rows.shape[2]:
                self._grow_signatures()
            tokens = np.arange(start, end, dtype=np.int32)
            for kind in KINDS:
                for layer, rows in enumerate(self.rows[kind, :, start:end]):
                    self.signatures[kind, layer, start:end] = self._reader.sign(
                        kind, rows, tokens, self._means[kind][layer]
                    )
        self.num_signed = self.num_tokens

    def _estimate(self, end: int) -> None:
        tokens = np.arange(self.first_token, end, dtype=np.int32)
        for kind in KINDS:
            for layer, rows in enumerate(self.rows[kind, :, self.first_token : end]):
                mean, squares = self._reader.moments(kind, rows, tokens)
                self._means[kind][layer] = mean
                self.head_weights[kind][layer] = _inverse(squares)

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * self.rows.shape[2], _FIRST_CAPACITY)
        self.rows = _resized(self.rows, capacity)
        self.usable = _resized(self.usable, capacity)

    def _grow_signatures(self) -> None:
        layers = self.rows.shape[1]
        signatures = np.zeros((2, layers, self.rows.shape[2], 2), np.uint64)
        signatures[:, :, : self.num_signed] = self.signatures[:, :, : self.num_signed]
        self.signatures = signatures


def _resized(array: npt.NDArray[_Item], capacity: int) -> npt.NDArray[_Item]:
    out = np.zeros((*array.shape[:2], capacity), array.dtype)
    out[:, :, : array.shape[2]] = array
    return out


def _inverse(squares: Float32) -> Float32:
    """1 / mean square per head, 1 for a head of (almost) nothing but zeros."""
    return np.divide(1, squares, out=np.ones_like(squares), where=squares > _SMALLEST)

"""A teacher-forced run through the sidecar: what a policy saves and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from memshare.client.evaluation.forced import run_forced
from memshare.client.evaluation.levers import SharedEntries, quantise
from memshare.client.session import Session
from memshare.client.transformers import MemShareCache
from memshare.v1 import common_pb2
from memshare.wire.errors import MemshareError
from memshare.wire.layout import RowLayout

TABLE_BYTES_PER_TOKEN_AND_LAYER = 12


@dataclass
class SharedRun:
    """Outcome of one trace under one policy.

    Attributes:
        log_probs: float32 `[positions, vocabulary]`, as `run_forced`.
        saved: share of all K and V bytes, the tables' bytes counted against it.
        saved_keys, saved_values: share of K and of V rows that point at another token's.
        by_layer: the same, float64 `[2, num_layers]`.
        events: what was shared when, to replay it with other donors.
    """

    log_probs: torch.Tensor
    saved: float = 0.0
    saved_keys: float = 0.0
    saved_values: float = 0.0
    by_layer: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    events: list[SharedEntries] = field(default_factory=list)

    def saved_of_16_bits(self, layout: RowLayout, bits: int) -> float:
        """Saved share of a 16-bit cache if rows of `bits` bits are shared.

        16 bits of scale and of offset for each token and head, and the tables, are counted.
        """
        row = layout.key_width * 2
        kept = 1 - (self.saved_keys + self.saved_values) / 2
        share = (bits + 32 / layout.key_head_dim) / 16
        return float(1 - kept * share - TABLE_BYTES_PER_TOKEN_AND_LAYER / (2 * row))


def run_shared(
    model: PreTrainedModel,
    ids: torch.Tensor,
    policy: str | common_pb2.Policy,
    runtime_dir: Path,
    first_wanted: int,
    bits: int | None = None,
) -> SharedRun:
    """Feed `ids` through a `MemShareCache`, waiting for the sidecar after each chunk.

    With `bits`, K and V are rounded to so many bits for each token and head before they are
    stored, as an engine with a low-bit cache would.

    Raises `MemshareError` if the sidecar does not keep up or goes away.
    """
    session = MemShareCache.attach(model, policy=policy, runtime_dir=runtime_dir, tenant="")
    with session, MemShareCache(model, session) as cache:
        if bits is not None:
            _round_what_is_written(cache, bits)
        run = SharedRun(torch.empty(0))
        before = np.zeros((2, session.layout.num_layers, 0), np.bool_)

        def settle(tokens: int) -> None:
            nonlocal before
            cache.finish_step()
            if not session.synchronise():
                raise MemshareError(
                    f"the sidecar did not settle after {tokens} tokens: {session.state}"
                )
            shared = cache.batch.tables[0].shared[:, :, :tokens].copy()
            new = shared.copy()
            new[:, :, : before.shape[2]] &= ~before
            run.events.append(_entries(tokens, new))
            before = shared

        run.log_probs = run_forced(model, ids, cache, settle, first_wanted)
        run.saved = saved_share(session, before)
        run.by_layer = before.mean(axis=2)
        run.saved_keys, run.saved_values = run.by_layer.mean(axis=1)
    return run


def _round_what_is_written(cache: MemShareCache, bits: int) -> None:
    write = cache.batch.write

    def write_rounded(layer: int, kind: int, states: torch.Tensor) -> None:
        write(layer, kind, quantise(states, bits, dim=-1))

    cache.batch.write = write_rounded  # type: ignore[method-assign]


def saved_share(session: Session, shared: np.ndarray) -> float:
    """Saved share of K and V bytes for `shared` flags `[2, num_layers, tokens]`."""
    layout = session.layout
    _, layers, tokens = shared.shape
    total = 2 * layers * tokens * layout.row_bytes
    tables = TABLE_BYTES_PER_TOKEN_AND_LAYER * layers * tokens
    return float((int(shared.sum()) * layout.row_bytes - tables) / total)


def _entries(tokens: int, flags: np.ndarray) -> SharedEntries:
    kinds, layers, targets = (torch.from_numpy(axis) for axis in np.nonzero(flags))
    return SharedEntries(tokens, kinds, layers, targets)

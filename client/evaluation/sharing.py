"""A teacher-forced run through the sidecar: what a policy saves and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from memshare.client.evaluation.forced import run_forced
from memshare.client.evaluation.levers import SharedEntries
from memshare.client.session import Session
from memshare.client.transformers import MemShareCache
from memshare.v1 import common_pb2
from memshare.wire.errors import MemshareError

TABLE_BYTES_PER_TOKEN_AND_LAYER = 12


@dataclass
class SharedRun:
    """Outcome of one trace under one policy.

    Attributes:
        log_probs: float32 `[positions, vocabulary]`, as `run_forced`.
        saved: share of all K and V bytes, the tables' bytes counted against it.
        saved_keys, saved_values: share of K and of V rows that point at another token's.
        by_layer: the same, float64 `[2, num_layers]`.
        over_tokens: (tokens, saved) after each chunk.
        events: what was shared when, to replay it with other donors.
    """

    log_probs: torch.Tensor
    saved: float = 0.0
    saved_keys: float = 0.0
    saved_values: float = 0.0
    by_layer: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    over_tokens: list[tuple[int, float]] = field(default_factory=list)
    events: list[SharedEntries] = field(default_factory=list)


def run_shared(
    model: PreTrainedModel,
    ids: torch.Tensor,
    policy: str | common_pb2.Policy,
    runtime_dir: Path,
    first_wanted: int,
) -> SharedRun:
    """Feed `ids` through a `MemShareCache`, waiting for the sidecar after each chunk.

    Raises `MemshareError` if the sidecar does not keep up or goes away.
    """
    session = MemShareCache.attach(model, policy=policy, runtime_dir=runtime_dir, tenant="")
    with session, MemShareCache(model, session) as cache:
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
            run.over_tokens.append((tokens, saved_share(session, shared)))
            before = shared

        run.log_probs = run_forced(model, ids, cache, settle, first_wanted)
        run.saved = saved_share(session, before)
        run.by_layer = before.mean(axis=2)
        run.saved_keys, run.saved_values = run.by_layer.mean(axis=1)
    return run


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

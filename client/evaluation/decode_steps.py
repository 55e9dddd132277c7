"""A decode step on memshare's memory against one on Transformers' own cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from memshare.client.transformers import SDPA, MemShareCache


@dataclass
class StepTimes:
    """Seconds of every decode step, pairwise: step i of both had the same context.

    Attributes:
        plain: with Transformers' `DynamicCache` and SDPA.
        shared: with `MemShareCache`, whose step includes all of the shim's work.
        between: of the shim's work, what lies between two steps (sealing, decisions, leases).
        waits: steps that waited for the sidecar.
        overflow_tokens: tokens that found no leased row.
    """

    plain: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    waits: int = 0
    overflow_tokens: int = 0

    def summary(self) -> dict[str, float]:
        """Ratio of the medians' pairs and percentiles in microseconds."""
        plain, shared, between = map(np.array, (self.plain, self.shared, self.between))
        return {
            "ratio": float(np.median(shared / plain)),
            "p50_us": float(np.percentile(shared, 50) * 1e6),
            "p99_us": float(np.percentile(shared, 99) * 1e6),
            "plain_p50_us": float(np.percentile(plain, 50) * 1e6),
            "plain_p99_us": float(np.percentile(plain, 99) * 1e6),
            "between_p50_us": float(np.percentile(between, 50) * 1e6),
            "between_p99_us": float(np.percentile(between, 99) * 1e6),
            "steps": len(self.plain),
            "waits": self.waits,
            "overflow_tokens": self.overflow_tokens,
        }


@torch.inference_mode()
def time_steps(
    model: PreTrainedModel,
    runtime_dir: Path,
    context: int,
    steps: int,
    policy: str,
    progress: Callable[[], object],
) -> StepTimes:
    """Decode `steps` tokens after a prompt of `context`, each with both caches in turn.

    With policy "observe" nothing is shared while the sidecar does all its searching. The order
    alternates, so that neither side always follows the other.
    """
    times = StepTimes()
    token = torch.randint(model.config.vocab_size, (1, 1), generator=torch.manual_seed(0))
    prompt = torch.randint(model.config.vocab_size, (1, context), generator=torch.manual_seed(1))
    session = MemShareCache.attach(model, policy=policy, runtime_dir=runtime_dir, tenant="")
    with session, MemShareCache(model, session) as shared:
        end_step = session.end_step

        def timed_end_step(flush: bool = False) -> None:
            started = time.perf_counter()
            end_step(flush)
            times.between.append(time.perf_counter() - started)

        plain = DynamicCache(config=model.config)
        _step(model, "sdpa", prompt, plain)
        _step(model, SDPA, prompt, shared)
        waits = session.statistics.waits
        session.end_step = timed_end_step  # type: ignore[method-assign]
        for index in range(steps):
            pair: list[tuple[str, Cache, list[float]]] = [
                ("sdpa", plain, times.plain),
                (SDPA, shared, times.shared),
            ]
            for attention, cache, seconds in pair if index % 2 else reversed(pair):
                seconds.append(_step(model, attention, token, cache))
            progress()
        times.waits = session.statistics.waits - waits
        times.overflow_tokens = session.statistics.overflow_tokens
    return times


def _step(model: Any, attention: str, ids: torch.Tensor, cache: Cache) -> float:
    # Set without Transformers' checks, which would be timed with the step.
    model.config._attn_implementation_internal = attention
    started = time.perf_counter()
    model(ids, cache=cache)
    return time.perf_counter() - started

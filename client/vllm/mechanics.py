"""Sharing that does not look at the data: what freed blocks are worth, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from memshare.client.vllm.engine_blocks import EngineBlocks
from memshare.client.vllm.metrics import ShareMetrics
from memshare.client.vllm.remaps import Remap


class BlindSharing:
    """Points every n-th block at the one before it. The model's output is spoilt by it.

    Stands in for `BlockSharing` in benchmarks of the mechanics, without the sidecar's decisions.
    """

    def __init__(self, blocks: EngineBlocks, every: int) -> None:
        self.metrics = ShareMetrics()
        self._blocks = blocks
        self._every = every
        # Blocks that were looked at, and the preemptions a request had then.
        self._seen: dict[str, tuple[int, int]] = {}
        self._remaps: list[Remap] = []

    def begin_step(self, running: Iterable[Any]) -> None:
        """Before vLLM schedules a step."""
        for request in running:
            name = request.request_id
            seen, preemptions = self._seen.get(name, (0, 0))
            if preemptions != request.num_preemptions:
                seen = 0
            final = self._blocks.num_final(request)
            for index in range(seen, final):
                if index and index % self._every == self._every - 1:
                    self._share(name, index)
            self._seen[name] = (max(seen, final), request.num_preemptions)

    def _share(self, name: str, index: int) -> None:
        donor, target = self._blocks.blocks_of(name, index - 1, index + 1)[0].tolist()
        if self._blocks.remap(name, 0, index, target, donor):
            self._blocks.keep_out_of_prefix_cache(name)
            self._remaps.append(Remap(name, 0, self._blocks.group_number(0), index, donor))
            self.metrics.shared_blocks += 1

    def take_remaps(self) -> list[Remap]:
        """What the worker's tables must follow."""
        remaps, self._remaps = self._remaps, []
        return [r for r in remaps if self._blocks.holds(r.request_id, r.group, r.index, r.block)]

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Noticed at the next step."""

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._seen.pop(request_id, None)

    @property
    def cache_usage(self) -> float:
        """Share of the blocks that this engine may use that are in use, 0 to 1."""
        return self._blocks.usage

    def nothing_held(self) -> AbstractContextManager[None]:
        """Nothing is lent: only what is not leased is kept from vLLM."""
        return self._blocks.nothing_held(())

    def close(self) -> None:
        """Nothing is held elsewhere."""

    def collect(self) -> ShareMetrics:
        """The metrics since the last call."""
        metrics, self.metrics = self.metrics, ShareMetrics()
        metrics.attached = True
        return metrics

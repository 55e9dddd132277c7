"""What happens between two steps: apply decisions, answer for pins, seal what is final."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memshare.client.block_session import BlockSession
from memshare.client.block_tables import (
    MAX_CANDIDATES,
    NO_CANDIDATE,
    BlockDecision,
    BlockTable,
    Int32,
    PinRequest,
)
from memshare.client.vllm.engine_blocks import EngineBlocks
from memshare.client.vllm.metrics import ShareMetrics
from memshare.client.vllm.remaps import Remap
from memshare.client.vllm.settings import Settings
from memshare.client.vllm.steps import ReasoningSteps
from memshare.v1 import common_pb2

# What is over a step's time waits for the next one: requests that run in step with one another
# fill their blocks, and get their decisions, all at once.
_STEP_SECONDS: Final = 1e-3
# Of a long prompt so many blocks are sealed in one step.
_STEP_BLOCKS: Final = 32

# In other modes nobody asks for similar blocks.
_SIMILAR: Final = (common_pb2.SHARING_MODE_BLOCK, common_pb2.SHARING_MODE_OBSERVE)


@dataclass
class _Tracked:
    """A request of vLLM and what the sidecar knows of it."""

    request: Any
    table: BlockTable
    steps: ReasoningSteps | None
    preemptions: int
    tainted: bool = False
    # The step from on which no step in flight reads what was taken from it.
    restart_at: int = 0

    @property
    def is_current(self) -> bool:
        """Whether vLLM still holds the blocks that were sealed."""
        return bool(self.request.num_preemptions == self.preemptions)


class BlockSharing:
    """For the scheduler's thread alone. Nothing in here waits for the sidecar."""

    def __init__(
        self,
        session: BlockSession,
        blocks: EngineBlocks,
        settings: Settings,
        boundaries: npt.NDArray[np.bool_] | None,
        reserve: int = 0,
        steps_in_flight: int = 0,
    ) -> None:
        """`boundaries`: bool `[vocabulary]`, tokens that end a step; None to compare no steps.

        At least `reserve` blocks are kept for this engine alone, whatever others would borrow.
        `steps_in_flight`: steps that vLLM may have scheduled and not finished when it takes
        blocks from a request. They may read what the request borrowed, so that its lender hears
        of it so much later; vLLM itself orders what it does with its own blocks.
        """
        self.metrics = ShareMetrics()
        self._session = session
        self._blocks = blocks
        self._settings = settings
        self._boundaries = boundaries
        self._reserve = reserve
        self._tracked: dict[str, _Tracked] = {}
        self._names: dict[int, str] = {}
        self._remaps: list[Remap] = []
        self._steps_in_flight = steps_in_flight
        self._step = 0
        self._ended: deque[tuple[int, BlockTable]] = deque()

    def begin_step(self, running: Iterable[Any]) -> None:
        """Before vLLM schedules a step: what is freed here can be allocated in it."""
        deadline = time.perf_counter() + _STEP_SECONDS
        self._step += 1
        self._close_ended()
        self._take_back()
        for pins, valid in self._session.take_pin_requests():
            self._pin(pins, valid)
        for decision in self._session.take_decisions():
            self._apply(decision)
            if time.perf_counter() > deadline:
                break
        if self._session.can_seal():
            for request in running:
                self._seal(request)
                if time.perf_counter() > deadline:
                    break
        else:
            self.metrics.deferred_steps += 1
        self._session.end_step()

    def take_remaps(self) -> list[Remap]:
        """What the worker's tables must follow, as far as it still holds."""
        remaps, self._remaps = self._remaps, []
        return [
            remap
            for remap in remaps
            if self._blocks.holds(remap.request_id, remap.group, remap.index, remap.block)
        ]

    def preempted(self, request_ids: Iterable[str]) -> None:
        """vLLM took all blocks of these requests; they will start from nothing."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None and not tracked.is_current:
                tracked.restart_at = self._step + self._steps_in_flight
                self._restart(tracked)

    def finished(self, request_id: str) -> None:
        """vLLM is about to free a request's blocks for good."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            del self._names[tracked.table.request_id]
            self._ended.append((self._step + self._steps_in_flight, tracked.table))
            self._close_ended()

    @property
    def cache_usage(self) -> float:
        """Share of the blocks that this engine may use that are in use, 0 to 1."""
        return self._blocks.usage

    def nothing_held(self) -> AbstractContextManager[None]:
        """Within it vLLM finds free what it was kept from; see `EngineBlocks.nothing_held`."""
        self._take_back()
        return self._blocks.nothing_held(self._session.pinned)

    def close(self) -> None:
        """vLLM shuts down."""
        self._session.detach()

    def collect(self) -> ShareMetrics:
        """The metrics since the last call."""
        metrics, self.metrics = self.metrics, ShareMetrics()
        metrics.attached = self._session.state == "attached"
        metrics.pinned_blocks = len(self._session.pinned)
        return metrics

    # ---- inside ---------------------------------------------------------------------------

    def _take_back(self) -> None:
        """Let vLLM have what nobody borrows any more."""
        self._blocks.unpin(self._session.take_unpinned())

    def _close_ended(self) -> None:
        tables = []
        while self._ended and self._ended[0][0] <= self._step:
            tables.append(self._ended.popleft()[1])
        if tables:
            self._session.close_requests(tables)

    def _restart(self, tracked: _Tracked) -> None:
        if self._step < tracked.restart_at:
            return
        tracked.preemptions = tracked.request.num_preemptions
        # It will be computed anew, and exactly.
        tracked.tainted = False
        self._session.truncate(tracked.table)

    def _pin(self, pins: PinRequest, valid: npt.NDArray[np.bool_]) -> None:
        pinned = set(self._session.pinned)
        for item in np.flatnonzero(valid).tolist():
            block = int(pins.blocks[item])
            name = self._names.get(int(pins.request_ids[item]), "")
            tracked = self._tracked.get(name)
            valid[item] = (
                tracked is not None
                and tracked.is_current
                and self._blocks.holds(name, int(pins.groups[item]), int(pins.indices[item]), block)
            )
            if valid[item] and block not in pinned:
                valid[item] = self._blocks.num_usable - len(pinned) > self._reserve
                if valid[item]:
                    self._blocks.pin(block)
                    pinned.add(block)
        self._session.answer_pins(pins, valid)

    def _apply(self, decision: BlockDecision) -> None:
        applied = np.zeros(len(decision.targets), np.bool_)
        name = self._names.get(decision.table.request_id, "")
        tracked = self._tracked.get(name)
        if tracked is not None and tracked.is_current:
            for item in range(len(applied)):
                applied[item] = self._apply_item(decision, name, item)
            if not tracked.tainted and decision.distances[applied].any():
                tracked.tainted = True
                self._blocks.keep_out_of_prefix_cache(name)
        self._session.answer(decision, applied)
        self.metrics.shared_blocks += int(applied.sum())
        self.metrics.refused_blocks += int((~applied).sum())

    def _apply_item(self, decision: BlockDecision, name: str, item: int) -> bool:
        group, index = int(decision.groups[item]), int(decision.targets[item])
        donor = int(decision.donor_blocks[item])
        if not self._still_donor(decision, group, item, donor):
            return False
        target = int(decision.target_blocks[item])
        if not self._blocks.remap(name, group, index, target, donor):
            return False
        self._remaps.append(Remap(name, group, self._blocks.group_number(group), index, donor))
        return True

    def _still_donor(self, decision: BlockDecision, group: int, item: int, donor: int) -> bool:
        """Whether the donor's bytes are those that the agent compared."""
        request_id = int(decision.donor_requests[item])
        if not request_id:
            # Another engine keeps it pinned.
            return not self._session.held[donor]
        name = self._names.get(request_id)
        tracked = self._tracked.get(name) if name is not None else None
        return (
            tracked is not None
            and tracked.is_current
            and tracked.table.generation == decision.donor_generations[item]
            and tracked.table.holds(group, int(decision.donors[item]), donor)
        )

    def _seal(self, request: Any) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._track(request)
        elif not tracked.is_current:
            self._restart(tracked)
            if not tracked.is_current:
                return
        start = tracked.table.sealed
        end = min(self._blocks.num_final(request), start + _STEP_BLOCKS)
        if end <= start:
            return
        blocks = self._blocks.blocks_of(request.request_id, start, end)
        self._session.seal(tracked.table, blocks, self._candidates(tracked, start, end))
        self.metrics.sealed_blocks += blocks.size

    def _track(self, request: Any) -> _Tracked:
        steps = None
        if self._boundaries is not None and self._session.policy.mode in _SIMILAR:
            settings = self._settings
            steps = ReasoningSteps(
                self._boundaries, settings.min_step_tokens, settings.step_similarity
            )
        # A salt keeps a request's cache from all that have another.
        table = self._session.open_request(private=bool(request.cache_salt))
        tracked = _Tracked(request, table, steps, request.num_preemptions)
        self._tracked[request.request_id] = tracked
        self._names[table.request_id] = request.request_id
        return tracked

    def _candidates(self, tracked: _Tracked, start: int, end: int) -> Int32:
        if tracked.steps is None:
            return np.full((end - start, MAX_CANDIDATES), NO_CANDIDATE, np.int32)
        tokens = self._session.layout.block_tokens
        tracked.steps.add(tracked.request.all_token_ids, end * tokens)
        return np.stack([tracked.steps.candidates(block, tokens) for block in range(start, end)])

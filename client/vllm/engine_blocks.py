"""vLLM's block pool and block tables, as far as sharing touches them.

Everything that is read or changed of vLLM's scheduler state is in here; `tests/vllm` pins it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# More blocks than a request can have: vLLM then takes all of them for cached already.
_ALL_CACHED: Final = 1 << 30


class EngineBlocks:
    """For the scheduler's thread alone, between two steps.

    A block that is not leased to this engine is *held*: it has a reference of its own and so is
    never in vLLM's free queue. Names of requests are vLLM's.
    """

    def __init__(self, kv_cache_manager: Any, groups: Sequence[int]) -> None:
        """`kv_cache_manager`: vLLM's `KVCacheManager`; `groups`: the groups that are shared."""
        self._pool = kv_cache_manager.block_pool
        self._managers = [
            kv_cache_manager.coordinator.single_type_managers[group] for group in groups
        ]
        self._groups = tuple(groups)
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM can allocate now."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_usable(self) -> int:
        """Blocks that this engine may ever use: all but those held and the null block."""
        return int(self._pool.num_gpu_blocks) - 1 - len(self._held)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable

    # ---- leases ---------------------------------------------------------------------------

    def hold_all(self) -> None:
        """Take every free block out of vLLM's reach. Only before the first request."""
        self._held = {block.block_id for block in self._pool.get_new_blocks(self.num_free)}

    def release(self, block_ids: Iterable[int]) -> None:
        """Let vLLM use held blocks; others (the null block) are passed over."""
        blocks = [self._pool.blocks[one] for one in block_ids if one in self._held]
        self._held.difference_update(block.block_id for block in blocks)
        self._pool.free_blocks(blocks)

    @contextmanager
    def nothing_held(self, pinned: Collection[int]) -> Iterator[None]:
        """Within it vLLM finds the held and the pinned blocks free, and must not allocate."""
        blocks = [self._pool.blocks[one] for one in self._held.union(pinned)]
        self._pool.free_blocks(blocks)
        try:
            yield
        finally:
            self._pool.touch(blocks)

    def pin(self, block_id: int) -> None:
        """Keep a block that is in use from reuse."""
        self._pool.touch([self._pool.blocks[block_id]])

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Undo `pin`."""
        self._pool.free_blocks([self._pool.blocks[one] for one in block_ids])

    # ---- tables ---------------------------------------------------------------------------

    def num_final(self, request: Any) -> int:
        """Leading blocks of a request that are whole, written and will not change.

        Drafts that are not verified do not count, nor blocks that vLLM has yet to enter into its
        prefix cache: it insists on doing so itself.
        """
        done = request.num_computed_tokens - request.num_in_flight_tokens
        final = done
        for manager in self._managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            count = min(done // manager.block_size, len(blocks))
            if manager.enable_caching:
                count = min(count, manager.num_cached_block.get(request.request_id, 0))
            final = min(final, count)
        return int(final)

    def blocks_of(self, request_id: str, start: int, end: int) -> npt.NDArray[np.int32]:
        """Block ids, int32 `[num_groups, end - start]`."""
        return np.array(
            [
                [block.block_id for block in manager.req_to_blocks[request_id][start:end]]
                for manager in self._managers
            ],
            np.int32,
        )

    def holds(self, request_id: str, group: int, index: int, block_id: int) -> bool:
        """Whether this very block is the entry of a request's table now."""
        blocks = self._managers[group].req_to_blocks.get(request_id, ())
        return index < len(blocks) and blocks[index].block_id == block_id

    def remap(self, request_id: str, group: int, index: int, target: int, donor: int) -> bool:
        """Point an entry at a donor's block; vLLM may reuse the target at once.

        Refused if the entry names another block by now, if someone else uses the target too (so
        that nothing would be gained), or if nobody uses the donor any more.
        """
        manager = self._managers[group]
        if not self.holds(request_id, group, index, target) or target == donor:
            return False
        blocks = manager.req_to_blocks[request_id]
        old, new = blocks[index], self._pool.blocks[donor]
        if old.is_null or new.is_null or old.ref_cnt != 1 or new.ref_cnt < 1:
            return False
        self._pool.touch([new])
        blocks[index] = new
        self._pool.free_blocks([old])
        return True

    def keep_out_of_prefix_cache(self, request_id: str) -> None:
        """No block that the request fills from now on is found by other requests.

        Those it filled before were computed from exact data and stay.
        """
        for manager in self._managers:
            if manager.enable_caching:
                manager.num_cached_block[request_id] = _ALL_CACHED

    def group_number(self, group: int) -> int:
        """vLLM's number of a shared group."""
        return self._groups[group]

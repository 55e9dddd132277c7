"""vLLM's scheduler with a look at the sidecar before each step."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from memshare.client.vllm.connector import MemShareConnector
from memshare.client.vllm.versions import installed_version, require_supported
from memshare.wire.errors import InvalidArgument

require_supported(installed_version())


class _Sharing:
    """What is added to either of vLLM's schedulers."""

    connector: MemShareConnector
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, MemShareConnector):
            raise InvalidArgument(
                "memshare's scheduler needs memshare's connector, alone and not within another: "
                "use the flags that `memshare vllm-flags` prints"
            )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Blocks that sharing frees can be allocated in the very step."""
        self.connector.begin_step(self.running)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM resets its cache only when it finds every block free."""
        with self.connector.nothing_held():
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """The cache's use, counted in the blocks that this engine may use."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            stats.kv_cache_usage = self.connector.cache_usage()
        return stats


class _SyncScheduler(_Sharing, Scheduler):  # type: ignore[misc]
    pass


class _AsyncScheduler(_Sharing, AsyncScheduler):  # type: ignore[misc]
    pass


def MemShareScheduler(*args: Any, **kwargs: Any) -> Any:  # noqa: N802
    """For `--scheduler-cls`: the scheduler that vLLM would use, with sharing."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = _AsyncScheduler if config.scheduler_config.async_scheduling else _SyncScheduler
    return kind(*args, **kwargs)

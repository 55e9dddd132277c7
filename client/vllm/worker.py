"""vLLM's worker on memshare's memory: the pool is its KV cache, its block tables follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.platforms import current_platform

from memshare.client.vllm.connector import ShareMetadata
from memshare.client.vllm.memory import engine_pool
from memshare.client.vllm.remaps import Remap
from memshare.client.vllm.settings import Settings
from memshare.client.vllm.versions import installed_version, require_supported

require_supported(installed_version())

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class MemShareWorker(_Worker):  # type: ignore[misc]
    """For `--worker-cls`."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        pool = engine_pool(
            Settings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        )
        self._pool_bytes = pool.num_bytes
        # The memory is there already: vLLM must not look for as much again.
        with _cache_size_is(vllm_config.cache_config, self._pool_bytes):
            super().__init__(vllm_config, *args, **kwargs)

    def determine_available_memory(self) -> int:
        """The bytes of the pool: vLLM divides them into blocks."""
        if current_platform.is_cpu():
            # What vLLM does while it measures, without measuring.
            if self._should_warm_up_model():
                self.model_runner.warming_up_model()
        else:
            with _cache_size_is(self.cache_config, self._pool_bytes):
                super().determine_available_memory()
        return self._pool_bytes

    def execute_model(self, scheduler_output: Any) -> Any:
        """Point the block tables at what was shared, then run the step."""
        metadata = scheduler_output.kv_connector_metadata
        if isinstance(metadata, ShareMetadata) and metadata.remaps:
            apply_remaps(self.model_runner, metadata.remaps)
        return super().execute_model(scheduler_output)


@contextmanager
def _cache_size_is(cache_config: Any, num_bytes: int) -> Iterator[None]:
    """Within it vLLM takes the size of its cache for given."""
    asked = cache_config.kv_cache_memory_bytes
    cache_config.kv_cache_memory_bytes = num_bytes
    try:
        yield
    finally:
        cache_config.kv_cache_memory_bytes = asked


def apply_remaps(runner: Any, remaps: Iterable[Remap]) -> None:
    """Edit a model runner's block tables. Requests that it does not know any more are passed over.

    Reads what vLLM's model runners keep: V1 `requests` and `input_batch`, V2 `req_states` and
    `block_tables`.
    """
    if hasattr(runner, "req_states"):
        rows = runner.req_states.req_id_to_index
        for remap in remaps:
            row = rows.get(remap.request_id)
            if row is not None:
                runner.block_tables.block_tables[remap.engine_group].stage_write(
                    row, remap.index, [remap.block]
                )
        return
    for remap in remaps:
        state = runner.requests.get(remap.request_id)
        if state is None:
            continue
        state.block_ids[remap.engine_group][remap.index] = remap.block
        row = runner.input_batch.req_id_to_index.get(remap.request_id)
        if row is not None:
            table = runner.input_batch.block_table[remap.engine_group]
            table.block_table.np[row, remap.index] = remap.block

"""What the plugin refuses at start, rather than at run time."""

from __future__ import annotations

from typing import Any

from memshare.client.vllm.settings import SCHEDULER_CLASS, WORKER_CLASS, Settings
from memshare.client.vllm.versions import installed_version, require_supported
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import InvalidArgument, PoolExhausted


def require_supported_engine(config: Any) -> None:
    """Raise `InvalidArgument` or `VersionMismatch` for what this plugin cannot serve.

    `config`: vLLM's `VllmConfig`.
    """
    require_supported(installed_version())
    parallel, cache = config.parallel_config, config.cache_config
    for obstacle, value in (
        ("tensor parallelism", parallel.tensor_parallel_size > 1),
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
        ("decode context parallelism", parallel.decode_context_parallel_size > 1),
        ("sleep mode, whose memory vLLM must own", config.model_config.enable_sleep_mode),
    ):
        if value:
            raise InvalidArgument(f"memshare does not support {obstacle} yet: switch it off")
    if cache.num_gpu_blocks_override is not None:
        raise InvalidArgument(
            f"num_gpu_blocks_override is {cache.num_gpu_blocks_override}, but the sidecar's pool "
            "decides: leave it out and set memshare's lease_blocks instead"
        )
    if cache.cache_dtype.startswith("fp8"):
        raise InvalidArgument(
            f"kv_cache_dtype is {cache.cache_dtype}, memshare shares fp32, fp16 and bf16: use auto"
        )
    for flag, value, ours in (
        ("--worker-cls", parallel.worker_cls, WORKER_CLASS),
        ("--scheduler-cls", config.scheduler_config.scheduler_cls, SCHEDULER_CLASS),
    ):
        if value != ours:
            raise InvalidArgument(
                f"{flag} is {value}, memshare's connector needs {ours}: use all the flags that "
                "`memshare vllm-flags` prints, or memshare.client.vllm.engine_arguments()"
            )


def blocks_to_lease(settings: Settings, config: Any, layout: BlockLayout) -> int:
    """How many blocks the user wants this engine to have, 0 for all that are free."""
    if settings.lease_blocks:
        return settings.lease_blocks
    asked = config.cache_config.kv_cache_memory_bytes
    return min(layout.num_blocks, asked // layout.block_bytes) if asked else 0


def require_room(num_usable: int, config: Any, layout: BlockLayout) -> None:
    """Raise `PoolExhausted` if a request of the greatest length would never fit."""
    longest = config.model_config.max_model_len
    if num_usable * layout.block_tokens < longest:
        raise PoolExhausted(
            f"{num_usable} leased blocks hold {num_usable * layout.block_tokens} tokens, "
            f"max_model_len is {longest}: lower --max-model-len, raise lease_blocks, or give the "
            "sidecar a larger --pool-bytes"
        )

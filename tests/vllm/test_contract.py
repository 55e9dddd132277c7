"""Every attribute of vLLM that the plugin touches: an upgrade fails here, not in production."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request
from vllm.v1.worker import utils
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from memshare.client.vllm import SUPPORTED_VERSIONS, register
from memshare.client.vllm.settings import CONNECTOR
from memshare.client.vllm.versions import installed_version, require_supported
from memshare.wire.errors import VersionMismatch


def test_this_version_is_supported_and_others_are_refused_by_name():
    require_supported(installed_version())
    with pytest.raises(VersionMismatch, match=" or ".join(SUPPORTED_VERSIONS)):
        require_supported("0.99.1")


def test_registering_twice_is_no_error():
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR).__name__ == CONNECTOR


def test_block_pool():
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=32)
    assert pool.num_gpu_blocks == 4
    assert pool.null_block.block_id == 0
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert [block.ref_cnt for block in taken] == [1, 1, 1]
    pool.touch(taken[:1])
    pool.free_blocks(taken)
    assert pool.blocks[taken[0].block_id].ref_cnt == 1
    assert pool.get_num_free_blocks() == 2
    pool.free_blocks(taken[:1])
    # Taking a free block back, as after a reset of the cache.
    pool.touch(taken)
    assert pool.get_num_free_blocks() == 0
    assert {"block_id", "ref_cnt", "is_null"} <= set(dir(KVCacheBlock))


def test_kv_cache_manager():
    source = inspect.getsource(SingleTypeKVCacheManager.__init__)
    for attribute in ("req_to_blocks", "num_cached_block", "enable_caching", "block_size"):
        assert f"self.{attribute}" in source
    cache = inspect.getsource(SingleTypeKVCacheManager.cache_blocks)
    # A count above all blocks keeps later ones out of the prefix cache.
    assert "if num_cached_blocks >= num_full_blocks:\n            return" in cache


def test_request():
    request = Request(
        request_id="r", prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(),
        pooling_params=None, cache_salt="salt",
    )  # fmt: skip
    assert request.num_computed_tokens == request.num_in_flight_tokens == 0
    assert request.num_preemptions == 0
    assert request.cache_salt == "salt"
    assert list(request.all_token_ids[1:3]) == [2, 3]


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_scheduler(scheduler):
    for method in ("schedule", "reset_prefix_cache", "make_stats"):
        assert callable(getattr(scheduler, method))
    source = inspect.getsource(Scheduler)
    assert "self.connector = KVConnectorFactory.create_connector(" in source
    assert "self.connector.bind_kv_cache_manager(self.kv_cache_manager)" in source
    assert "self.running: list[Request]" in source


def test_scheduler_messages():
    names = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert {"preempted_req_ids", "kv_connector_metadata"} <= names
    assert "kv_cache_usage" in {field.name for field in dataclasses.fields(SchedulerStats)}


def test_worker_tables():
    assert "block_ids" in {field.name for field in dataclasses.fields(CachedRequestState)}
    assert "self.block_table" in inspect.getsource(BlockTable.__init__)
    assert "stage_write" in inspect.getsource(BlockTables)


def test_the_cache_is_one_allocation_that_the_connector_can_serve():
    source = inspect.getsource(utils.allocate_kv_cache)
    assert source.count("torch.zeros(") == 1
    assert "torch.zeros(buf_size, dtype=torch.int8, device=device)" in source


def test_connector_hooks():
    for hook in (
        "get_mem_pool_context", "register_kv_caches", "get_handshake_metadata",
        "set_xfer_handshake_metadata", "bind_kv_cache_manager", "build_connector_meta",
        "request_finished", "reset_cache", "shutdown", "get_kv_connector_stats",
        "build_kv_connector_stats", "build_prom_metrics", "requires_kv_delivery",
    ):  # fmt: skip
        assert hasattr(KVConnectorBase_V1, hook), hook


def test_layout_of_the_cpu_backend():
    assert CPUAttentionBackend.get_name() == "CPU_ATTN"
    source = inspect.getsource(CPUAttentionBackendImpl.forward)
    assert "kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))" in source
    assert "key_cache, value_cache = kv_cache.chunk(2, dim=2)" in source


def test_cache_description():
    group = KVCacheGroupSpec(
        ["layer"],
        FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32),
    )
    assert not group.is_eagle_group
    spec = group.kv_cache_spec
    assert (spec.sliding_window, spec.attention_chunk_size) == (None, None)
    names = {field.name for field in dataclasses.fields(KVCacheConfig)}
    assert {"num_blocks", "kv_cache_tensors", "kv_cache_groups"} <= names

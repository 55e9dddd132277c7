"""vLLM's KV connector that attaches an engine to the sidecar."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from memshare.client.block_session import BlockSession
from memshare.client.options import SessionOptions
from memshare.client.vllm import preflight
from memshare.client.vllm.engine_blocks import EngineBlocks
from memshare.client.vllm.layout import SharedGroups, describe
from memshare.client.vllm.mechanics import BlindSharing
from memshare.client.vllm.memory import PoolAllocation, engine_pool
from memshare.client.vllm.metrics import SharePromMetrics, ShareStats
from memshare.client.vllm.remaps import Remap
from memshare.client.vllm.settings import Settings
from memshare.client.vllm.sharing import BlockSharing
from memshare.client.vllm.tokens import step_boundaries
from memshare.v1 import common_pb2
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import InvalidArgument

_log = logging.getLogger("vllm.memshare")


@dataclass
class ShareMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """With each step, from the scheduler's connector to the worker."""

    remaps: list[Remap] = field(default_factory=list)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """At start, from the worker's connector to the scheduler's: the memory it mapped."""

    layout: bytes
    groups: tuple[int, ...]
    token: bytes


class MemShareConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Made twice: in the worker, where the memory is, and beside the scheduler.

    Nothing is transferred: vLLM's cache is the pool. A step never waits for the sidecar.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.from_extra_config(
            self._kv_transfer_config.kv_connector_extra_config
        )
        preflight.require_supported_engine(vllm_config)
        self._shared: SharedGroups | None = None
        self._manager: Any = None
        self._sharing: BlockSharing | BlindSharing | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed on that a preemption could lose."""
        return False

    # ---- worker ---------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any]:
        """The context in which vLLM allocates its cache: from the pool."""
        return PoolAllocation(engine_pool(self._settings))

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See how the cache lies in the pool. Raises `LayoutMismatch`."""
        backends = {
            name: get_current_attn_backends(self._vllm_config, [name])[0].get_name()
            for name in kv_caches
        }
        self._shared = describe(
            self._kv_cache_config, kv_caches, backends, engine_pool(self._settings).address
        )

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """What the scheduler's connector attaches with."""
        if self._shared is None:
            return None
        layout = self._shared.layout.to_proto().SerializeToString()
        return WorkerHandshake(layout, self._shared.groups, engine_pool(self._settings).token)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # ---- scheduler ------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keep vLLM from every block until it is leased."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The worker has mapped the pool: attach, and lease this engine's blocks."""
        handshake = next(iter(metadata.values()))
        if not isinstance(handshake, WorkerHandshake):
            raise InvalidArgument(f"the worker answered with {type(handshake).__name__}")
        layout = BlockLayout.from_proto(common_pb2.BlockLayout.FromString(handshake.layout))
        settings = self._settings
        options = SessionOptions(
            runtime_dir=settings.runtime_dir or None,
            policy=settings.policy or None,
            tenant=settings.tenant,
            engine=settings.engine,
            timeout=settings.attach_seconds,
        )
        session = BlockSession(layout, options, handshake.token)
        try:
            blocks = EngineBlocks(self._manager, handshake.groups)
            blocks.hold_all()
            leased = session.lease(preflight.blocks_to_lease(settings, self._vllm_config, layout))
            blocks.release(leased.tolist())
            preflight.require_room(blocks.num_usable, self._vllm_config, layout)
        except BaseException:
            session.detach()
            raise
        if settings.test_share_every:
            _log.warning("memshare: test_share_every is set: what the model says is spoilt")
            self._sharing = BlindSharing(blocks, settings.test_share_every)
            self._session = session
        else:
            boundaries = step_boundaries(settings, self._vllm_config.model_config)
            longest = -(-self._vllm_config.model_config.max_model_len // layout.block_tokens)
            in_flight = 2 if self._vllm_config.scheduler_config.async_scheduling else 0
            self._sharing = BlockSharing(session, blocks, settings, boundaries, longest, in_flight)
        _log.info(
            "memshare: attached as session %d, %d of %d blocks leased, policy %s%s",
            session.session_id,
            len(leased),
            layout.num_blocks,
            session.policy.name,
            f" ({session.mode_reason})" if session.mode_reason else "",
        )

    def begin_step(self, running: Iterable[Any]) -> None:
        """Called by `MemShareScheduler` before it schedules."""
        sharing, start = self._attached(), time.perf_counter()
        sharing.begin_step(running)
        sharing.metrics.step_seconds.append(time.perf_counter() - start)

    def nothing_held(self) -> AbstractContextManager[None]:
        """Within it vLLM finds free what it was kept from, and must not allocate."""
        return self._attached().nothing_held()

    def cache_usage(self) -> float:
        """Share of the blocks this engine may use that are in use, 0 to 1."""
        return self._attached().cache_usage

    def build_connector_meta(self, scheduler_output: Any) -> ShareMetadata:
        """Tell the worker what its tables must follow."""
        if self._sharing is None:
            return ShareMetadata()
        self._sharing.preempted(scheduler_output.preempted_req_ids or ())
        return ShareMetadata(self._sharing.take_remaps())

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM frees the blocks itself."""
        if self._sharing is not None:
            self._sharing.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for models with several groups."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Nothing is cached outside vLLM's own cache."""
        return True

    def shutdown(self) -> None:
        """Say goodbye to the sidecar."""
        if self._sharing is not None:
            self._sharing.close()

    def _attached(self) -> BlockSharing | BlindSharing:
        if self._sharing is None:
            raise InvalidArgument("vLLM passed no handshake on from the worker to the scheduler")
        return self._sharing

    # ---- metrics --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ShareStats | None:
        """What happened since the last call, on the scheduler's side."""
        return None if self._sharing is None else ShareStats.of(self._sharing.collect())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ShareStats:
        """The stats in a payload."""
        return ShareStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SharePromMetrics:
        """Metrics on vLLM's own endpoint."""
        return SharePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

"""The agent's pool as the memory of vLLM's KV cache."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from memshare.client.memory import MappedPool
from memshare.client.vllm.settings import Settings
from memshare.v1 import handoff_pb2
from memshare.wire.errors import InvalidArgument
from memshare.wire.handoff import PoolConnection, connect_pool
from memshare.wire.runtime import RuntimeDirectory

_BYTE: Final = 1


class EnginePool:
    """The connection of a worker process to the memory owner, and the mapped pool.

    The session's blocks are this engine's as long as the connection lives: it is kept until the
    process ends.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises `AgentUnavailable`, `PeerRefused` or `VersionMismatch`."""
        runtime = RuntimeDirectory.at(settings.runtime_dir)
        self._connection: PoolConnection = connect_pool(
            runtime.owner_socket, handoff_pb2.POOL_ROLE_ENGINE, settings.attach_seconds
        )
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self._connection.pool.pool_bytes

    @property
    def token(self) -> bytes:
        """What the session is opened with, in whatever process the scheduler runs."""
        return self._connection.token

    @property
    def address(self) -> int:
        """Where the pool is mapped. Only after `allocate`."""
        if self._memory is None:
            raise InvalidArgument("the KV cache was not allocated from memshare's pool")
        return self._memory.data_ptr()

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The first bytes of the pool as an int8 tensor, without a copy; not zeroed.

        Raises `InvalidArgument` if the pool has fewer, lives on another kind of device, or
        memory was asked for twice.
        """
        if self._memory is not None:
            raise InvalidArgument("vLLM asked for two KV caches: only one can be shared")
        if num_bytes > self.num_bytes:
            raise InvalidArgument(
                f"vLLM's KV cache needs {num_bytes} bytes, the pool has {self.num_bytes}"
            )
        if device.type == "cpu":
            self._memory = self._map_host()[:num_bytes]
        else:
            from memshare.client.vllm.device_memory import map_device

            self._memory = map_device(self._connection.descriptor, self.num_bytes, device)[
                :num_bytes
            ]
        self._connection.close_descriptor()
        return self._memory

    def _map_host(self) -> torch.Tensor:
        mapped = MappedPool(self._connection.descriptor, self.num_bytes, _BYTE, 0)
        return torch.from_numpy(mapped.rows("int8").reshape(-1))

    def forget_in_child(self) -> None:
        """A forked child neither holds the engine's blocks nor keeps them after it."""
        self._connection.close()


_pool: EnginePool | None = None


def engine_pool(settings: Settings) -> EnginePool:
    """The pool of this process, connected at the first call."""
    global _pool
    if _pool is None:
        _pool = EnginePool(settings)
    return _pool


def _forget_in_child() -> None:
    if _pool is not None:
        _pool.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


class PoolAllocation(TorchFunctionMode):
    """Within it, the one allocation that makes vLLM's KV cache is served from the pool.

    vLLM enters the context that a connector returns from `get_mem_pool_context` around it.
    """

    def __init__(self, pool: EnginePool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1:
            return self._pool.allocate(int(args[0]), torch.device(kwargs.get("device", "cpu")))
        return func(*args, **kwargs)

"""What a user may set: the `kv_connector_extra_config` of the connector."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from memshare.wire.block_layout import MAX_BLOCKS
from memshare.wire.errors import InvalidArgument
from memshare.wire.names import require_name

CONNECTOR: Final = "MemShareConnector"
WORKER_CLASS: Final = "memshare.client.vllm.worker.MemShareWorker"
SCHEDULER_CLASS: Final = "memshare.client.vllm.scheduler.MemShareScheduler"


@dataclass(frozen=True)
class Settings:
    """How a vLLM engine attaches. Raises `InvalidArgument` for a value out of range.

    Attributes:
        runtime_dir: directory of the sidecar's sockets; "" for the default one.
        policy: a preset's name; "" for the manager's default.
        tenant: blocks are never shared between tenants; "" shares nothing between requests.
        engine: what operators see this engine as.
        lease_blocks: blocks of the pool that this engine may use, 0 for all that are free.
        min_step_tokens: least length of a reasoning step; shorter ones join the next.
        step_similarity: least cosine of the token counts of two similar steps; above 1 no
            steps are compared.
        attach_seconds: how long to wait for the sidecar at start.
        test_share_every: for benchmarks of the mechanics only. Points every n-th block at the
            one before it, whatever it holds: THIS CHANGES WHAT THE MODEL SAYS. 0 for off.
    """

    runtime_dir: str = ""
    policy: str = ""
    tenant: str = "default"
    engine: str = "vllm"
    lease_blocks: int = 0
    min_step_tokens: int = 8
    step_similarity: float = 0.8
    attach_seconds: float = 30.0
    test_share_every: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("lease_blocks", 0, MAX_BLOCKS),
            ("min_step_tokens", 1, 1 << 20),
            ("step_similarity", 0.0, 2.0),
            ("attach_seconds", 0.1, 3600.0),
            ("test_share_every", 0, 1 << 20),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidArgument(
                    f"memshare setting {name} is {value}, must be {least} to {most}", field=name
                )
        for name in ("policy", "tenant", "engine"):
            require_name(f"memshare setting {name}", getattr(self, name))
        if self.test_share_every == 1:
            raise InvalidArgument(
                "memshare setting test_share_every is 1, which leaves no block to share: use 2 "
                "or more, or 0 for off",
                field="test_share_every",
            )

    @classmethod
    def from_extra_config(cls, config: Mapping[str, Any]) -> Settings:
        """The settings in a connector's extra configuration.

        Raises `InvalidArgument` for an unknown key, naming the known ones, and for a value of
        another type.
        """
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        unknown = sorted(set(config) - set(kinds))
        if unknown:
            raise InvalidArgument(
                f"memshare setting {unknown[0]!r} is unknown: kv_connector_extra_config may have "
                f"{', '.join(kinds)}",
                field=unknown[0],
            )
        return cls(**{name: _typed(name, value, kinds[name]) for name, value in config.items()})

    def to_extra_config(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def _typed(name: str, value: Any, kind: type) -> Any:
    # True is an int, and never meant as one here.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise InvalidArgument(
            f"memshare setting {name} is {value!r}, must be of type {kind.__name__}", field=name
        )
    return value


def engine_arguments(**settings: Any) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` or `EngineArgs`; `settings` are those of `Settings`."""
    return {
        "kv_transfer_config": _transfer_config(Settings.from_extra_config(settings)),
        "worker_cls": WORKER_CLASS,
        "scheduler_cls": SCHEDULER_CLASS,
    }


def serve_flags(settings: Settings) -> list[str]:
    """The same as flags of `vllm serve`, none of which holds a space."""
    config = json.dumps(_transfer_config(settings), separators=(",", ":"))
    return [
        f"--kv-transfer-config={config}",
        f"--worker-cls={WORKER_CLASS}",
        f"--scheduler-cls={SCHEDULER_CLASS}",
    ]


def _transfer_config(settings: Settings) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings.to_extra_config(),
    }

"""The plugin's own metrics, through vLLM's loggers and its Prometheus endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

STEP_BUCKETS: Final = (
    1e-5, 2e-5, 3e-5, 5e-5, 7e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3,
    5e-3, 1e-2, 5e-2,
)  # fmt: skip
"""Seconds."""


@dataclass
class ShareMetrics:
    """Counts between two collections; `step_seconds` is what each step cost the scheduler."""

    shared_blocks: int = 0
    refused_blocks: int = 0
    sealed_blocks: int = 0
    deferred_steps: int = 0
    step_seconds: list[float] = field(default_factory=list)
    pinned_blocks: int = 0
    attached: bool = False


class ShareStats(KVConnectorStats):  # type: ignore[misc]
    """`ShareMetrics` on their way through vLLM, as plain data."""

    @classmethod
    def of(cls, metrics: ShareMetrics) -> ShareStats:
        """The payload of a collection."""
        return cls(data=dict(vars(metrics)))

    def reset(self) -> None:
        """Forget everything."""
        self.data = dict(vars(ShareMetrics()))

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counts add up; states are those of the later one."""
        for key, value in other.data.items():
            if key in ("attached", "pinned_blocks"):
                self.data[key] = value
            else:
                self.data[key] = self.data.get(key, type(value)()) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows."""
        steps = sorted(self.data["step_seconds"])
        return {
            "memshare blocks shared": self.data["shared_blocks"],
            "refused": self.data["refused_blocks"],
            "attached": int(self.data["attached"]),
            "step p50 (us)": round(1e6 * steps[len(steps) // 2]) if steps else 0,
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data.get("step_seconds")


class SharePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters and a histogram, labelled as vLLM labels its own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            key: self._for_engines(self._counter_cls, name, text)
            for key, name, text in (
                ("shared_blocks", "memshare_shared_blocks", "Blocks pointed at a donor's."),
                ("refused_blocks", "memshare_refused_blocks", "Decisions that came too late."),
                ("sealed_blocks", "memshare_sealed_blocks", "Blocks the manager was told of."),
                ("deferred_steps", "memshare_deferred_steps", "Steps that could seal nothing."),
            )
        }
        self._attached = self._for_engines(
            self._gauge_cls, "memshare_attached", "1 while the sidecar takes part."
        )
        self._pinned = self._for_engines(
            self._gauge_cls, "memshare_pinned_blocks", "Blocks kept for other engines."
        )
        self._steps = self._for_engines(
            self._histogram_cls,
            "memshare_step_seconds",
            "What the plugin costs the scheduler in each step.",
            buckets=STEP_BUCKETS,
        )

    def _for_engines(self, kind: Any, name: str, text: str, **options: Any) -> dict[int, Any]:
        metric = kind(name=name, documentation=text, labelnames=self._labelnames, **options)
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one collection."""
        for key, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data[key])
        self._attached[engine_idx].set(int(transfer_stats_data["attached"]))
        self._pinned[engine_idx].set(transfer_stats_data["pinned_blocks"])
        for seconds in transfer_stats_data["step_seconds"]:
            self._steps[engine_idx].observe(seconds)

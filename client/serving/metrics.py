"""What a server tells about itself: pages in Prometheus' text format."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final, Self

_LINE: Final = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_BOUND: Final = re.compile(r'(?:^|,)le="([^"]*)"')


class Metrics:
    """One reading of a server's `/metrics`. Label sets of one name are summed up."""

    def __init__(self, text: str) -> None:
        """Lines that are no samples are passed over, as Prometheus' own comments are."""
        self._totals: dict[str, float] = defaultdict(float)
        self._buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            try:
                value = float(match["value"])
            except ValueError:
                continue
            name, bound = match["name"], _BOUND.search(match["labels"] or "")
            if bound is not None and name.endswith("_bucket"):
                self._buckets[name.removesuffix("_bucket")][float(bound[1])] += value
            else:
                self._totals[name] += value

    def total(self, name: str) -> float:
        """A gauge, or a counter without its `_total`; 0 where the server has none."""
        for candidate in (name, f"{name}_total"):
            if candidate in self._totals:
                return self._totals[candidate]
        return 0.0

    def named(self, prefix: str) -> dict[str, float]:
        """Gauges and counters whose names begin so, without times of creation."""
        return {
            name: value
            for name, value in self._totals.items()
            if name.startswith(prefix) and not name.endswith("_created")
        }

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound, empty where the server has none."""
        return dict(self._buckets.get(name, {}))


def quantile(before: Metrics, after: Metrics, name: str, share: float) -> float | None:
    """The value below which `share` of what a histogram counted between two readings lies.

    Linear within a bucket, as Prometheus does it; None if nothing was counted.
    """
    earlier, later = before.buckets(name), after.buckets(name)
    counts = [(bound, later[bound] - earlier.get(bound, 0.0)) for bound in sorted(later)]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share * counts[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


@dataclass(frozen=True)
class Sample:
    """How a server was at one moment of a load.

    Attributes:
        seconds: since the load began.
        running: requests in the batch.
        waiting: requests that wait for room.
        kv_use: share of the KV blocks that requests hold.
        preemptions: since the load began.
        generated: tokens since the load began, those of preempted requests once.
        probed: what else was asked at that moment, by name.
    """

    seconds: float
    running: float
    waiting: float
    kv_use: float
    preemptions: float
    generated: float
    probed: dict[str, float]

    @classmethod
    def of(
        cls, seconds: float, first: Metrics, now: Metrics, probed: dict[str, float] | None = None
    ) -> Self:
        """From the reading before the load and the one now."""

        def since(name: str) -> float:
            return now.total(name) - first.total(name)

        return cls(
            seconds=seconds,
            running=now.total("vllm:num_requests_running"),
            waiting=now.total("vllm:num_requests_waiting"),
            kv_use=now.total("vllm:kv_cache_usage_perc"),
            preemptions=since("vllm:num_preemptions"),
            generated=since("vllm:generation_tokens"),
            probed=probed or {},
        )

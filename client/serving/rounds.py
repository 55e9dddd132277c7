"""The same load on two servers in turn, and what tells them apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from memshare.client.serving.comparison import compare, loops, repeated_share
from memshare.client.serving.load import Load, LoadFailed, LoadResult, Probe, run_load
from memshare.client.serving.metrics import Sample, quantile
from memshare.client.serving.server import MODEL_NAME, VllmServer

# Time of one scheduling step that memshare's plugin takes, a histogram.
STEP_METRIC: Final = "memshare_step_seconds"
# Names of what only grows; all else is a state.
_COUNTED: Final = ("_total", "_sum", "_count")
_WARM_UP_REQUESTS: Final = 4
_WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True)
class Contender:
    """One of the servers that are compared. `probe` is asked beside its metrics."""

    name: str
    server: VllmServer
    probe: Probe | None = None


@dataclass(frozen=True)
class Round:
    """One load on each server: the results by name, in the order in which they were measured."""

    results: dict[str, LoadResult]


Watch = Callable[[str, int, Sample], object]


def warm_up(contender: Contender, load: Load) -> None:
    """A few short answers: the first ones also compile and allocate."""
    short = replace(
        load,
        prompts=load.prompts[:_WARM_UP_REQUESTS],
        output_tokens=min(_WARM_UP_TOKENS, load.output_tokens),
        salt="warm-up",
    )
    _measure(contender, short, None)


def run_rounds(
    contenders: Sequence[Contender], load: Load, rounds: int, watch: Watch | None = None
) -> list[Round]:
    """The load on each server, one after the other, `rounds` times.

    The servers stay up, and idle while another is measured; the order is turned round each
    time, so that a machine that gets slower or faster favours none. Raises `ServerFailed` or
    `LoadFailed`.
    """
    measured = []
    for number in range(rounds):
        order = contenders if number % 2 == 0 else contenders[::-1]
        results = {}
        for contender in order:

            def tell(sample: Sample, name: str = contender.name, number: int = number) -> None:
                if watch is not None:
                    watch(name, number, sample)

            salted = replace(load, salt=f"round {number}")
            results[contender.name] = _measure(contender, salted, tell)
        measured.append(Round(results))
    return measured


def _measure(
    contender: Contender, load: Load, watch: Callable[[Sample], object] | None
) -> LoadResult:
    try:
        return run_load(contender.server.url, MODEL_NAME, load, watch=watch, probe=contender.probe)
    except LoadFailed:
        # That it has ended says more than that it broke off.
        contender.server.check()
        raise


def describe(result: LoadResult) -> dict[str, Any]:
    """One load in numbers."""
    completions, samples = result.completions, result.samples
    first = [c.first_token_seconds for c in completions if c.first_token_seconds is not None]
    latencies = [c.seconds for c in completions]
    repeated = [repeated_share(c.tokens) for c in completions]
    last = samples[-1]
    # The last sample is of the idle server.
    during = samples[:-1] or samples
    return {
        "requests": len(completions),
        "output_tokens": result.output_tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "preemptions": last.preemptions,
        "mean_running": _mean([sample.running for sample in during]),
        "mean_kv_use": _mean([sample.kv_use for sample in during]),
        "latency_p50_seconds": float(np.quantile(latencies, 0.5)),
        "latency_p95_seconds": float(np.quantile(latencies, 0.95)),
        "first_token_p50_seconds": float(np.quantile(first, 0.5)) if first else None,
        "looping": sum(map(loops, completions)),
        "mean_repeated_share": _mean(repeated),
        "step_p50_us": _microseconds(result, 0.5),
        "step_p99_us": _microseconds(result, 0.99),
        **{
            name: value - (result.before.total(name) if name.endswith(_COUNTED) else 0)
            for name, value in sorted(result.after.named("memshare_").items())
        },
        **_describe_probed([sample.probed for sample in during if sample.probed]),
    }


def _describe_probed(probed: Sequence[dict[str, float]]) -> dict[str, float]:
    """What grows by its growth, all else by its mean."""
    if not probed:
        return {}
    series = {name: [each[name] for each in probed] for name in probed[0]}
    return {
        name if name.endswith("_seconds") else f"mean_{name}": (
            values[-1] - values[0] if name.endswith("_seconds") else _mean(values)
        )
        for name, values in series.items()
    }


def report(rounds: Sequence[Round], reference: str, other: str) -> dict[str, Any]:
    """What `other` does against `reference`: medians over the rounds, and each round.

    The control is the agreement of the reference with itself, from the first round to the
    later ones: what batching alone changes. It is None with one round.
    """
    ratios = [
        r.results[other].tokens_per_second / r.results[reference].tokens_per_second for r in rounds
    ]
    agreements = [
        compare(r.results[reference].completions, r.results[other].completions) for r in rounds
    ]
    first = rounds[0].results[reference].completions
    controls = [compare(first, r.results[reference].completions) for r in rounds[1:]]
    described = [{name: describe(r) for name, r in round.results.items()} for round in rounds]
    differences = [a.log_prob_difference for a in agreements if a.log_prob_difference is not None]
    return {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratio_min": min(ratios),
        "throughput_ratio_max": max(ratios),
        "agreement_identical": _mean([a.identical for a in agreements]),
        "agreement_prefix": _mean([a.prefix for a in agreements]),
        "log_prob_difference": _mean(differences) if differences else None,
        "control_identical": _mean([c.identical for c in controls]) if controls else None,
        "control_prefix": _mean([c.prefix for c in controls]) if controls else None,
        **{name: _medians([numbers[name] for numbers in described]) for name in (reference, other)},
        "rounds": [
            {"ratio": ratio, "order": list(numbers), **numbers}
            for ratio, numbers in zip(ratios, described, strict=True)
        ],
    }


def _medians(numbers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in numbers[0]:
        values = [each[name] for each in numbers if isinstance(each[name], int | float)]
        if values:
            found[name] = statistics.median(values)
    return found


def _microseconds(result: LoadResult, share: float) -> float | None:
    seconds = quantile(result.before, result.after, STEP_METRIC, share)
    return None if seconds is None else seconds * 1e6


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))

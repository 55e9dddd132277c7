"""The PNG of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from memshare.client.serving.metrics import Sample

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw_load(samples: Mapping[str, Sequence[Sample]], path: Path) -> None:
    """Running requests, KV use and preemptions of each server over its load."""
    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for name, series in samples.items():
        seconds = [sample.seconds for sample in series]
        axes[0].plot(seconds, [sample.running for sample in series], label=name)
        axes[1].plot(seconds, [100 * sample.kv_use for sample in series], label=name)
        axes[2].plot(seconds, [sample.preemptions for sample in series], label=name)
    axes[0].set(title="The same load, one after the other", ylabel="requests in the batch")
    axes[1].set(ylabel="KV blocks held, %", ylim=(0, 105))
    axes[2].set(ylabel="preemptions so far", xlabel="seconds")
    for place in axes:
        place.grid(alpha=0.3)
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)

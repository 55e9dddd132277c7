"""The PNGs of evaluation and demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Point:
    """A method's place on the frontier."""

    name: str
    kind: str
    saved: float
    kl: float


_MARKERS = {
    "policy": ("o", "tab:blue", "policy"),
    "control": ("x", "tab:red", "control"),
    "lever": ("s", "tab:green", "low-bit cache (of 16 bits)"),
    "combined": ("D", "tab:purple", "policy on an 8-bit cache (of 16 bits)"),
}


def draw_frontier(points: Sequence[Point], path: Path, title: str) -> None:
    """Saved bytes against KL, logarithmic."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for kind, (marker, colour, label) in _MARKERS.items():
        chosen = sorted((p for p in points if p.kind == kind), key=lambda p: p.saved)
        if not chosen:
            continue
        saved, kl = [100 * p.saved for p in chosen], [max(p.kl, 1e-6) for p in chosen]
        axes.scatter(saved, kl, marker=marker, color=colour, label=label, zorder=3)
        if kind in ("policy", "combined"):
            axes.plot(saved, kl, color=colour, alpha=0.4)
        for point in chosen:
            place = (100 * point.saved, max(point.kl, 1e-6))
            axes.annotate(point.name, place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(yscale="log", xlabel="KV bytes saved, %", ylabel="KL, nats per token", title=title)
    axes.margins(x=0.25)
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower left", fontsize=8)
    _save(figure, path)


def draw_savings(
    by_layer: np.ndarray, over_tokens: Sequence[tuple[int, float]], path: Path
) -> None:
    """Shared K and V by layer, and saved bytes over the length of the chain.

    `by_layer`: float `[2, num_layers]`, shares; `over_tokens`: (tokens, saved bytes).
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    layers = np.arange(by_layer.shape[1])
    left.bar(layers - 0.2, 100 * by_layer[0], width=0.4, label="K")
    left.bar(layers + 0.2, 100 * by_layer[1], width=0.4, label="V")
    left.set(xlabel="layer", ylabel="rows shared, %", title="Shared rows by layer")
    left.legend()
    tokens, saved = zip(*over_tokens, strict=True) if over_tokens else ((), ())
    right.plot(tokens, np.asarray(saved) / (1 << 20))
    right.set(
        xlabel="tokens per chain", ylabel="MiB saved, all chains", title="Saved over the chains"
    )
    right.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)

"""The bandwidth measurement gives every figure."""

from __future__ import annotations

import pytest

from memshare.gpu_agent import benchmark


def test_every_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_BUFFER_BYTES", 1 << 20)
    figures = benchmark.measure_signature_bandwidth(0.01, backend="numpy")
    assert figures.pop("read_bytes_per_second") > 0
    assert len(figures) == 8
    assert all(value > 0 for value in figures.values())

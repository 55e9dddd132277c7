"""The bandwidth measurement gives every figure."""

from __future__ import annotations

import numpy as np
import pytest

from memshare.gpu_agent import benchmark
from memshare.kernels.host_stream import sum_words


def test_every_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_BUFFER_BYTES", 1 << 20)
    figures = benchmark.measure_signature_bandwidth(0.01, backend="numpy")
    assert figures.pop("read_bytes_per_second") > 0
    assert len(figures) == 8
    assert all(value > 0 for value in figures.values())


@pytest.mark.parametrize("ahead", [0, 1024])
def test_the_plain_read_reads_every_word(ahead: int) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 64, 4101, np.uint64)
    assert sum_words(words, ahead) == int(words.sum())

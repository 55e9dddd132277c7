"""Reading Prometheus pages."""

from __future__ import annotations

import pytest

from memshare.client.serving.metrics import Metrics, Sample, quantile

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
vllm:num_preemptions_total{engine="0"} 12.0
vllm:num_preemptions_created{engine="0"} 1.796256882e+09
memshare_shared_blocks_total{engine="0"} 40.0
memshare_shared_blocks_created{engine="0"} 1.796256882e+09
memshare_step_seconds_bucket{engine="0",le="0.001"} 50.0
memshare_step_seconds_bucket{engine="0",le="0.002"} 100.0
memshare_step_seconds_bucket{engine="0",le="+Inf"} 100.0
memshare_step_seconds_sum{engine="0"} 0.12
up 1
broken{ 7
wrong{engine="0"} many
"""


def steps(*counts: int) -> Metrics:
    bounds = ("0.001", "0.002", "+Inf")
    return Metrics(
        "\n".join(f's_bucket{{le="{b}"}} {c}' for b, c in zip(bounds, counts, strict=True))
    )


def test_names_are_summed_over_their_labels() -> None:
    page = Metrics(PAGE)
    assert page.total("vllm:num_requests_running") == 7
    assert page.total("vllm:num_preemptions") == page.total("vllm:num_preemptions_total") == 12
    assert page.total("up") == 1
    assert page.total("vllm:no_such_metric") == 0
    assert page.named("memshare") == {
        "memshare_shared_blocks_total": 40,
        "memshare_step_seconds_sum": 0.12,
    }


def test_a_quantile_is_of_what_came_between_two_readings() -> None:
    assert quantile(steps(0, 0, 0), steps(50, 100, 100), "s", 0.5) == pytest.approx(0.001)
    assert quantile(steps(0, 0, 0), steps(50, 100, 100), "s", 0.75) == pytest.approx(0.0015)
    assert quantile(steps(50, 50, 50), steps(50, 150, 150), "s", 0.5) == pytest.approx(0.0015)
    # What lies above the last bound is known to be above it, no more.
    assert quantile(steps(0, 0, 0), steps(1, 1, 10), "s", 0.9) == 0.002


def test_nothing_counted_has_no_quantile() -> None:
    assert quantile(steps(5, 5, 5), steps(5, 5, 5), "s", 0.5) is None
    assert quantile(Metrics(""), Metrics(PAGE), "s", 0.5) is None


def test_a_server_without_a_metric_has_a_sample_all_the_same() -> None:
    sample = Sample.of(2.0, Metrics(""), Metrics(PAGE))
    assert (sample.running, sample.waiting, sample.preemptions) == (7, 0, 12)
    assert sample.probed == {}

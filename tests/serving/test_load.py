"""The load generator against a real HTTP server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memshare.client.serving.load import Load, LoadFailed, LoadResult, run_load
from memshare.client.serving.metrics import Sample
from memshare.wire.errors import ManagerUnavailable

from .stand_in import answer_tokens, stand_in

LOAD = Load(prompts=("a", "bb", "ccc", "dddd"), output_tokens=8, concurrency=2)


def run(load: Load = LOAD, delay: float = 0.0) -> LoadResult:
    with stand_in(delay) as server:
        return run_load(server.url, "model", load)


@pytest.mark.parametrize("stream", [True, False])
def test_answers_come_whole_and_in_the_order_of_the_prompts(stream: bool) -> None:
    result = run(replace(LOAD, stream=stream, log_probs=True))
    for prompt, completion in zip(LOAD.prompts, result.completions, strict=True):
        tokens = answer_tokens(prompt, 8)
        assert completion.tokens == tokens
        assert completion.text == " ".join(map(str, tokens))
        assert completion.log_probs == [-token / 1000 for token in tokens]
        assert completion.prompt_tokens == len(prompt)
        assert (completion.first_token_seconds is not None) == stream
        assert completion.seconds > 0
    assert result.output_tokens == 32
    assert result.tokens_per_second == pytest.approx(32 / result.seconds)


def test_so_many_requests_at_a_time_and_no_more() -> None:
    with stand_in(delay=0.05) as server:
        run_load(server.url, "model", replace(LOAD, prompts=("x",) * 9, concurrency=3))
        assert server.most_running == 3
        assert len(server.bodies) == 9


def test_what_is_asked() -> None:
    with stand_in() as server:
        run_load(server.url, "model", replace(LOAD, prompts=("x",), salt="round 1"))
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "x"}]
    assert (body["temperature"], body["max_tokens"], body["ignore_eos"]) == (0, 8, True)
    assert body["cache_salt"] == "round 1"


def test_samples_count_from_the_beginning_of_the_load() -> None:
    seen: list[Sample] = []
    with stand_in(delay=0.1) as server:
        result = run_load(
            server.url,
            "model",
            LOAD,
            watch=seen.append,
            probe=lambda: {"live_blocks": 7.0},
            interval=0.03,
        )
    assert seen == result.samples
    assert {sample.running for sample in seen} >= {0.0, 2.0}
    assert seen[0].probed == {"live_blocks": 7.0}
    last = seen[-1]
    assert (last.generated, last.preemptions, last.waiting, last.kv_use) == (32, 4, 2, 0.5)
    assert last.seconds == result.seconds
    assert result.after.total("memshare_shared_blocks") == 1032


def test_a_sidecar_that_does_not_answer_stops_no_load() -> None:
    def probe() -> dict[str, float]:
        raise ManagerUnavailable("gone")

    with stand_in(delay=0.1) as server:
        result = run_load(server.url, "model", LOAD, probe=probe, interval=0.02)
    assert result.output_tokens == 32
    assert len(result.samples) == 1


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("refuse", "status 400.*the prompt is too long"),
        ("break", "the server broke off"),
        ("fail", "the server broke off.*the engine died"),
        ("bare", "without token ids"),
    ],
)
@pytest.mark.parametrize("others", [(), ("x",) * 5])
def test_what_goes_wrong_is_told(prompt: str, said: str, others: tuple[str, ...]) -> None:
    with pytest.raises(LoadFailed, match=said):
        run(replace(LOAD, prompts=(*others, prompt, *others)))


def test_too_slow_a_server_is_left_in_time() -> None:
    with pytest.raises(LoadFailed, match=r"2 of 4 requests were answered within 0\.5 s"):
        run(replace(LOAD, timeout=0.5), delay=0.3)


def test_nobody_there_is_told() -> None:
    with stand_in() as server:
        url = server.url
    with pytest.raises(LoadFailed, match="the server broke off: ConnectError"):
        run_load(url, "model", LOAD)

"""Real vLLM engines on a real sidecar."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from memshare.client.cli.admin import AdminClient
from memshare.client.cli.sidecar import Sidecar
from memshare.client.evaluation.model import small_model_folder
from memshare.client.vllm import engine_arguments
from memshare.v1 import common_pb2
from tests.vllm.engine_process import BLOCK_TOKENS, Engine

PROMPTS = [[100 + (i * 37 + j * 11) % 4000 for j in range(70 + i)] for i in range(6)]
TOKENS = 96
# An engine takes half a minute to start, more on a busy machine.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    small_model_folder()


def attach(pool: Sidecar, **settings: Any) -> Engine:
    """An engine on the sidecar's pool."""
    return Engine(engine_arguments(runtime_dir=str(pool.runtime.path), **settings))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within time"
        time.sleep(0.1)


def integrity(pool: Sidecar) -> Any:
    """The manager's counts, after a check of all of them."""
    with AdminClient(pool.runtime) as admin:
        response = admin.check_integrity()
    assert not response.errors
    return response.rows


@pytest.fixture(scope="module")
def stock() -> list[list[list[int]]]:
    """What vLLM says without memshare."""
    with Engine({"num_gpu_blocks_override": 160, "kv_cache_memory_bytes": 1 << 30}) as engine:
        answers: list[list[list[int]]] = engine.ask("generate", prompts=PROMPTS, tokens=TOKENS)
        return answers


def test_exact_gives_the_output_of_stock_vllm_and_shares_across_requests(pool, stock):
    with attach(pool, policy="exact") as engine:
        assert engine.ask("generate", prompts=PROMPTS, tokens=TOKENS) == stock
        free = engine.ask("blocks")
        assert free["free"] == free["usable"]
        # The same prompts at once, without the help of the prefix cache.
        twice = [prompt for prompt in PROMPTS[:3] for _ in range(2)]
        engine.ask("reset")
        answers = engine.ask("generate", prompts=twice, tokens=TOKENS)
        assert answers[::2] == answers[1::2] == stock[:3]
        engine.ask("settle")
        shared = engine.ask("shared")
        assert shared["state"] == "attached"
        assert shared["statistics"]["rejected"] == 0
        assert integrity(pool).live == 0


def test_two_hundred_requests_leave_nothing_behind_and_get_the_answers_of_stock_vllm(pool):
    churn = {"seed": 1, "count": 200, "tokens": 60}
    # One more block: vLLM keeps one for itself, which the lease does not count.
    with Engine({"num_gpu_blocks_override": 35, "kv_cache_memory_bytes": 1 << 30}) as engine:
        expected = engine.ask("churn", **churn)
        assert expected["preempted"] > 0
    with attach(pool, policy="exact", lease_blocks=34) as engine:
        result = engine.ask("churn", **churn)
        assert result["problems"] == []
        assert result["preempted"] > 0
        assert result["aborted"] > 0
        assert len(result["answers"]) > 100
        assert result["answers"] == expected["answers"]
        assert result["free"] == result["usable"]
        assert engine.ask("settle")
        rows = integrity(pool)
        assert (rows.live, rows.leased) == (0, 34)
    wait_until(lambda: integrity(pool).free == integrity(pool).total)


def test_block_mode_frees_blocks_and_keeps_what_it_changed_from_other_requests(pool):
    loop = ([11, 12, 13, 14, 15, 16, 17, 18] * 60)[:450]
    with Engine({"num_gpu_blocks_override": 160, "kv_cache_memory_bytes": 1 << 30}) as engine:
        exact = engine.ask("cached", prompt=loop + [19] * 20)
    with attach(pool, policy="block") as engine:
        with AdminClient(pool.runtime) as admin:
            policy = admin.policy(session_id=admin.engines()[0].session_id).policy
            stage = policy.stages[0]
            stage.key_threshold, stage.value_threshold, stage.min_age = 4.0, 4.0, 64
            policy.fidelity_budget, policy.name = 4.0, "everything"
            admin.set_policy(policy, admin.engines()[0].session_id)
        engine.ask("generate", prompts=[loop], tokens=60)
        assert engine.ask("shared")["statistics"]["applied"] > 0
        blocks = engine.ask("blocks")
        assert blocks["free"] == blocks["usable"]
        later = engine.ask("cached", prompt=loop + [19] * 20)
        # Blocks that were filled before the first one was shared are exact, later ones are gone.
        assert later["logprob"] == pytest.approx(exact["logprob"], abs=1e-3)
    assert later["cached"] % BLOCK_TOKENS == 0


def test_drafts_and_chunked_prompts_change_nothing(pool):
    arguments = {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
        },
        "max_num_batched_tokens": 48,
        "enable_chunked_prefill": True,
    }  # fmt: skip
    # A chain that loops, so that drafts are accepted and blocks repeat.
    prompts = [[50 + i, *([11, 12, 13, 14, 15, 16, 17, 18] * 20)] for i in range(3)]
    cache = {"num_gpu_blocks_override": 160, "kv_cache_memory_bytes": 1 << 30}
    with Engine({**cache, **arguments}) as engine:
        expected = engine.ask("generate", prompts=prompts, tokens=TOKENS)
    settings = engine_arguments(runtime_dir=str(pool.runtime.path), policy="exact")
    with Engine({**settings, **arguments}) as engine:
        assert engine.ask("generate", prompts=prompts, tokens=TOKENS) == expected
        assert engine.ask("settle")
        shared = engine.ask("shared")["statistics"]
        assert shared["sealed_tokens"] > 0
        assert shared["rejected"] == 0
        blocks = engine.ask("blocks")
        assert blocks["free"] == blocks["usable"]
    assert integrity(pool).live == 0


def test_a_salted_request_shares_within_itself_alone(pool):
    loop = ([11, 12, 13, 14, 15, 16, 17, 18] * 60)[:400]
    with attach(pool, policy="exact") as engine:
        for salt in ("mine", "yours"):
            engine.ask("generate", prompts=[loop], tokens=4, salt=salt)
            assert engine.ask("settle")
        # The same tokens at other places are not the same bits, and the other's are not asked.
        assert engine.ask("shared")["statistics"]["applied"] == 0
        with AdminClient(pool.runtime) as admin:
            policy = admin.policy(session_id=admin.engines()[0].session_id).policy
            policy.mode = common_pb2.SHARING_MODE_BLOCK
            policy.stages.add(min_age=64, key_threshold=4.0, value_threshold=4.0)
            policy.fidelity_budget, policy.name = 4.0, "everything"
            admin.set_policy(policy, admin.engines()[0].session_id)
        engine.ask("generate", prompts=[loop], tokens=60, salt="third")
        assert engine.ask("shared")["statistics"]["applied"] > 0


def test_serving_goes_on_without_the_manager_and_attaches_again(pool, stock):
    with attach(pool, policy="exact") as engine:
        engine.ask("generate", prompts=PROMPTS[:1], tokens=8)
        pool.kill_manager()
        assert engine.ask("generate", prompts=PROMPTS[1:], tokens=TOKENS) == stock[1:]
        assert engine.ask("shared")["state"] != "attached"
        pool.start_manager()
        wait_until(lambda: engine.ask("shared")["state"] == "attached")
        assert engine.ask("generate", prompts=PROMPTS, tokens=TOKENS) == stock
        assert engine.ask("settle")
        assert integrity(pool).live == 0


def test_two_engines_share_a_pool_and_a_killed_one_gives_all_back(pool, stock):
    with attach(pool, policy="exact", lease_blocks=60) as first:
        with attach(pool, policy="exact", lease_blocks=60) as second:
            assert second.ask("generate", prompts=PROMPTS, tokens=TOKENS) == stock
            assert integrity(pool).leased == 120
            os.kill(second.process.pid, signal.SIGKILL)
            wait_until(lambda: integrity(pool).leased == 60)
        assert first.ask("generate", prompts=PROMPTS, tokens=TOKENS) == stock
    wait_until(lambda: integrity(pool).free == integrity(pool).total)


@pytest.mark.parametrize(
    ("settings", "arguments", "text"),
    [
        ({"polcy": "exact"}, {}, "polcy"),
        ({}, {"scheduler_cls": None}, "--scheduler-cls"),
        ({}, {"num_gpu_blocks_override": 50}, "lease_blocks"),
        ({"lease_blocks": 3}, {}, "max_model_len"),
    ],
)
def test_what_cannot_work_is_refused_at_start(pool, settings, arguments, text):
    config = engine_arguments(runtime_dir=str(pool.runtime.path))
    config["kv_transfer_config"]["kv_connector_extra_config"].update(settings)
    with pytest.raises(RuntimeError, match=text):
        Engine({**config, **arguments})

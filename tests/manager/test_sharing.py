"""Sharing over real sockets, with the real agent and real data in the pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from manager_harness import HEAD, LAYERS, LAYOUT, PER_TOKEN, Engine, Sidecar, wait_for

from memshare.manager.policy import Mode, Policy, Stage
from memshare.v1 import admin_pb2, common_pb2, manager_pb2
from memshare.wire.packing import INT32, UINT8, UINT16, unpack

NEAR = Policy("near", Mode.ROW, (Stage(8, 0.02, 0.02),), protected_tokens=2, fidelity_budget=1)


@pytest.fixture
def near(sidecar: Sidecar) -> Iterator[Engine]:
    """An engine that shares similar rows."""
    engine = Engine(sidecar, policy=NEAR.to_proto())
    yield engine
    engine.vanish()


def columns(decision: manager_pb2.ShareDecision) -> dict[str, np.ndarray]:
    count = len(decision.kinds)
    return {
        "layers": unpack(decision.layers, UINT16, "layers", count),
        "kinds": unpack(decision.kinds, UINT8, "kinds", count),
        "targets": unpack(decision.targets, INT32, "targets", count),
        "target_rows": unpack(decision.target_rows, INT32, "target_rows", count),
        "donor_rows": unpack(decision.donor_rows, INT32, "donor_rows", count),
        "deltas": unpack(decision.deltas, INT32, "deltas", count),
    }


def write(engine: Engine, request: int, content: np.ndarray) -> np.ndarray:
    """Write and seal [2, layers, tokens, HEAD] rows; keys are rotated to their positions."""
    tokens = content.shape[2]
    rows = engine.lease(PER_TOKEN * tokens)
    half = HEAD // 2
    angle = np.arange(tokens)[:, None] * np.array(LAYOUT.inv_freq)
    first, second = content[0, ..., :half], content[0, ..., half:]
    data = content.copy()
    data[0, ..., :half] = first * np.cos(angle) - second * np.sin(angle)
    data[0, ..., half:] = second * np.cos(angle) + first * np.sin(angle)
    engine.data[rows] = data.reshape(-1, HEAD)
    engine.open(request)
    engine.seal(request, rows)
    return rows.reshape(2, LAYERS, tokens)


def repeating(tokens: int, period: int, noise: float = 0.01) -> np.ndarray:
    draw = np.random.default_rng(1)
    base = draw.standard_normal((2, LAYERS, period, HEAD), np.float32)
    content = base[:, :, np.arange(tokens) % period]
    return content + noise * draw.standard_normal(content.shape).astype(np.float32)


def test_similar_rows_are_shared_with_corrected_positions(sidecar: Sidecar, near: Engine) -> None:
    rows = write(near, 1, repeating(40, 10))
    near.sync()
    assert near.decisions
    seen: set[tuple[int, ...]] = set()
    for decision in near.decisions:
        items = columns(decision)
        kinds, layers, targets = items["kinds"], items["layers"], items["targets"]
        assert np.array_equal(rows[kinds, layers, targets], items["target_rows"])
        assert (targets >= 2).all()  # protected
        assert (targets < 40 - 8).all()  # too young
        owner = {int(row): position for position, row in np.ndenumerate(rows)}
        for kind, layer, target, donor, delta in zip(
            kinds, layers, targets, items["donor_rows"], items["deltas"], strict=True
        ):
            donor_kind, donor_layer, token = owner[int(donor)]
            assert (donor_kind, donor_layer) == (kind, layer)
            assert 2 <= token < target
            assert (target - token) % 10 == 0
            assert delta == (target - token if kind == 0 else 0)
            assert (kind, layer, target) not in seen
            seen.add((kind, layer, target))
        near.answer(decision)
    # The search runs in windows of 16 tokens, donors lie before the window.
    assert len(seen) == PER_TOKEN * len([t for t in range(18, 32) if t >= 12])
    near.step(1)
    near.sync()
    [info] = sidecar.admin.ListRequests(admin_pb2.ListRequestsRequest()).requests
    assert info.taint == min(seen, key=lambda item: item[2])[2]
    assert info.shared_keys + info.shared_values == len(seen)
    assert 0 < info.accumulated_error < 0.02 * len(seen)
    assert sidecar.counts() == (8192 - 160 + len(seen), 0, 160 - len(seen), 0)
    near.close([1])
    near.sync()


def test_only_sealed_rows_are_ever_read(sidecar: Sidecar, near: Engine) -> None:
    write(near, 1, repeating(30, 30))
    copies = near.lease(PER_TOKEN * 8)  # equal to sealed rows, but leased only
    near.data[copies] = near.data[0]
    near.sync()
    assert not near.decisions
    assert sidecar.status().counters.shared_keys == 0


def test_refused_items_are_counted_misses_and_stay_as_they_were(
    sidecar: Sidecar, near: Engine
) -> None:
    write(near, 1, repeating(40, 10))
    near.sync()
    before = sidecar.counts()
    items = sum(len(decision.kinds) for decision in near.decisions)
    for decision in near.decisions:
        near.answer(decision, np.zeros(0, np.uint8))
    near.sync()
    assert sidecar.counts() == before
    assert sidecar.status().counters.missed == items
    sidecar.check()


def test_a_truncation_while_a_decision_is_under_way_is_a_miss(
    sidecar: Sidecar, near: Engine
) -> None:
    write(near, 1, repeating(40, 10))
    near.sync()
    near.send(
        truncate_request=manager_pb2.TruncateRequest(
            request_id=1, generation=0, new_generation=1, num_tokens=5
        )
    )
    decision = near.decisions[0]
    size = len(decision.kinds)
    refusal = near.refused(
        decision_result=manager_pb2.DecisionResult(
            decision_id=decision.decision_id, applied=bytes([1] * size)
        )
    )
    assert refusal.reason == "STALE_GENERATION"
    near.answer(decision, np.zeros(size, np.uint8))
    near.sync()
    assert sidecar.status().counters.missed == size
    assert sidecar.counts()[2] == 5 * PER_TOKEN
    rows = near.lease(PER_TOKEN)
    refusal = near.refused(
        seal_tokens=manager_pb2.SealTokens(
            request_id=1, generation=0, start=5, num_tokens=1,
            key_rows=rows[:LAYERS].tobytes(), value_rows=rows[LAYERS:].tobytes(),
        )
    )  # fmt: skip
    assert refusal.reason == "STALE_GENERATION"
    near.seal(1, rows, start=5, generation=1)
    near.sync()
    sidecar.check()


def test_sharing_goes_on_after_a_truncation(sidecar: Sidecar, near: Engine) -> None:
    content = repeating(40, 10)
    write(near, 1, content)
    near.sync()
    for decision in near.decisions:
        near.answer(decision, np.zeros(0, np.uint8))
    near.decisions.clear()
    near.send(
        truncate_request=manager_pb2.TruncateRequest(
            request_id=1, generation=0, new_generation=1, num_tokens=18
        )
    )
    rows = near.lease(PER_TOKEN * 22)
    near.data[rows] = 1.0
    near.seal(1, rows, start=18, generation=1)
    near.sync()
    assert {decision.generation for decision in near.decisions} <= {1}
    sidecar.check()


def test_equal_rows_are_shared_among_sessions_of_a_tenant(sidecar: Sidecar) -> None:
    engines = [Engine(sidecar), Engine(sidecar), Engine(sidecar, tenant="other")]
    for engine in engines:
        engine.fill(1, 16)
        engine.sync()
    assert [len(engine.decisions) for engine in engines] == [0, 1, 0]
    [decision] = engines[1].decisions
    assert len(decision.kinds) == 16 * PER_TOKEN
    assert not any(columns(decision)["deltas"])
    engines[1].answer(decision)
    engines[1].step(1)
    engines[1].sync()
    assert sidecar.counts()[2] == 2 * 16 * PER_TOKEN
    [info] = [
        info
        for info in sidecar.admin.ListRequests(admin_pb2.ListRequestsRequest()).requests
        if info.shared_keys
    ]
    assert (info.taint, info.accumulated_error) == (-1, 0)
    engines[0].goodbye()
    assert sidecar.counts()[2] == 2 * 16 * PER_TOKEN  # named by the second session
    sidecar.check()
    for engine in engines[1:]:
        engine.goodbye()


def test_observe_counts_each_entry_once_and_changes_nothing(sidecar: Sidecar) -> None:
    policy = Policy("watch", Mode.OBSERVE, (*NEAR.stages, Stage(9, 0.1, 0.1)), 2, (), 1.0)
    engine = Engine(sidecar, policy=policy.to_proto())
    write(engine, 1, repeating(40, 10))
    for _ in range(2):
        engine.sync()
        counters = sidecar.status().counters
        assert counters.shareable_keys + counters.shareable_values == 14 * PER_TOKEN
    assert not engine.decisions
    assert sidecar.counts()[2] == 40 * PER_TOKEN
    engine.goodbye()


def test_the_fidelity_budget_bounds_what_is_shared(sidecar: Sidecar) -> None:
    policy = Policy("thrifty", Mode.ROW, NEAR.stages, 2, (), 1e-6)
    engine = Engine(sidecar, policy=policy.to_proto())
    write(engine, 1, repeating(40, 10, noise=0.02))
    engine.sync()
    counters = sidecar.status().counters
    assert counters.over_budget > 0
    assert not engine.decisions
    engine.goodbye()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capabilities": []}, "row-tables"),
        (
            {
                "layout": common_pb2.RowLayout(
                    num_layers=LAYERS, num_kv_heads=1, key_head_dim=HEAD, value_head_dim=HEAD,
                    dtype=common_pb2.ROW_DTYPE_FP32,
                ),
                "row_mode_obstacle": "interleaved rotary embedding",
            },
            "interleaved rotary",
        ),
    ],
)  # fmt: skip
def test_a_row_policy_is_narrowed_with_a_reason(
    sidecar: Sidecar, changes: dict[str, object], reason: str
) -> None:
    engine = Engine(sidecar, policy_name="balanced", **changes)
    assert engine.welcome.policy.mode == common_pb2.SHARING_MODE_EXACT
    assert reason in engine.welcome.mode_reason
    engine.fill(1, 16, repeat=4)
    engine.sync()
    engine.goodbye()


def test_policies_are_set_at_run_time(sidecar: Sidecar, near: Engine) -> None:
    follower = Engine(sidecar)
    try:
        answer = sidecar.admin.SetPolicy(admin_pb2.SetPolicyRequest(preset="strict"))
        assert answer.sessions_changed == 1
        assert follower.receive().policy_changed.policy.name == "strict"
        get = admin_pb2.GetPolicyRequest
        assert sidecar.admin.GetPolicy(get()).policy.name == "strict"
        assert (
            sidecar.admin.GetPolicy(get(session_id=near.welcome.session_id)).policy.name == "near"
        )
        sidecar.admin.SetPolicy(
            admin_pb2.SetPolicyRequest(session_id=near.welcome.session_id, preset="observe")
        )
        assert near.receive().policy_changed.policy.name == "observe"
    finally:
        sidecar.admin.SetPolicy(admin_pb2.SetPolicyRequest(preset="exact"))
    follower.goodbye()


def test_sealing_alone_starts_the_search(sidecar: Sidecar, near: Engine) -> None:
    write(near, 1, repeating(60, 10))
    assert near.receive().share_decision.kinds


def test_a_worker_that_crashes_is_indexed_again(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh()
    engine = Engine(sidecar, policy=NEAR.to_proto())
    content = repeating(60, 10)
    write(engine, 1, content[:, :, :20])
    engine.sync()
    for decision in engine.decisions:
        engine.answer(decision, np.zeros(0, np.uint8))
    engine.decisions.clear()
    before = sidecar.status()
    os.kill(before.worker_pid, signal.SIGKILL)
    engine.sync()  # answered although nothing can be searched
    assert sidecar.status().state == "serving"
    wait_for(lambda: sidecar.status().worker_restarts == 1, "the worker to come back", timeout=30)
    assert sidecar.status().worker_epoch != before.worker_epoch
    write(engine, 2, content)
    engine.sync()
    assert any(decision.request_id == 2 for decision in engine.decisions)
    sidecar.check()
    engine.goodbye()

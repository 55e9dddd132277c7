"""Engines with block tables over real sockets: attaching, naming, giving back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from block_harness import BLOCK, BLOCKS, LAYOUT, POOL_BYTES, TOKENS, TWO_GROUPS, BlockEngine
from manager_harness import Engine, Sidecar, wait_for

from memshare.manager.policy import PRESETS
from memshare.v1 import admin_pb2, common_pb2, manager_pb2
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import (
    InvalidArgument,
    LayoutMismatch,
    MemshareError,
    RowNotHeld,
    StaleGeneration,
)
from memshare.wire.layout import RowLayout
from memshare.wire.packing import INT32, pack


@pytest.fixture
def blocks(sidecar: Sidecar) -> Iterator[BlockEngine]:
    engine = BlockEngine(sidecar)
    yield engine
    engine.vanish()
    wait_for(lambda: not sidecar.status().sessions, "the session to end")


def test_what_is_closed_truncated_and_left_stays_on_lease(
    sidecar: Sidecar, blocks: BlockEngine
) -> None:
    assert blocks.welcome.pool.num_rows == BLOCKS
    assert blocks.welcome.pool.row_bytes == BLOCK
    assert "block-tables" in blocks.welcome.capabilities
    rows = blocks.lease(BLOCKS)
    blocks.open(1)
    blocks.seal(1, rows[:8])
    blocks.open(2)
    blocks.seal(2, rows[:4])  # the engine's own prefix cache
    blocks.seal(2, rows[8:10], start=4)
    blocks.sync()
    assert sidecar.counts() == (0, BLOCKS - 10, 10, 0)
    blocks.truncate(1, 6)
    blocks.sync()
    assert sidecar.counts() == (0, BLOCKS - 8, 8, 0)
    blocks.close([1], [1])
    blocks.sync()
    assert sidecar.counts() == (0, BLOCKS - 6, 6, 0)
    blocks.seal(2, rows[[7, 3]], start=6)
    blocks.sync()
    blocks.step(1)
    blocks.close([2])
    blocks.send(return_rows=manager_pb2.ReturnRows(rows=pack(rows[:8], INT32)))
    blocks.sync()
    assert sidecar.counts() == (8, BLOCKS - 8, 0, 0)
    sidecar.check()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"layout": RowLayout(1, 1, 4, 4, 1).to_proto()}, InvalidArgument, "either layout or"),
        ({"capabilities": ["row-tables"]}, InvalidArgument, "needs the capability block-tables"),
        ({"block_layout": common_pb2.BlockLayout()}, InvalidArgument, "block_tokens is 0"),
        (
            {
                "block_layout": BlockLayout(
                    LAYOUT.dtype, TOKENS, BLOCK, BLOCKS - 1, LAYOUT.groups
                ).to_proto()
            },
            LayoutMismatch,
            f"made for {BLOCKS - 1} blocks .* has {BLOCKS}",
        ),
        ({"policy_name": "bold"}, InvalidArgument, "aggressive, adaptive, block"),
    ],
)
def test_a_wrong_block_hello_is_refused(
    sidecar: Sidecar, changes: dict[str, object], kind: type[MemshareError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        BlockEngine(sidecar, **changes)
    assert not sidecar.status().sessions


def test_one_pool_is_of_rows_or_of_blocks_of_one_layout(
    sidecar: Sidecar, blocks: BlockEngine
) -> None:
    with pytest.raises(
        LayoutMismatch,
        match=f"into blocks of {TOKENS} tokens and {BLOCK} bytes, this engine has rows of 128",
    ):
        Engine(sidecar)
    with pytest.raises(LayoutMismatch, match="blocks of the same size that lie otherwise"):
        BlockEngine(sidecar, TWO_GROUPS)
    same_size = RowLayout(1, 1, BLOCK // 4, BLOCK // 4, common_pb2.ROW_DTYPE_FP32)
    with pytest.raises(LayoutMismatch, match="this engine has rows"):
        Engine(sidecar, layout=same_size.to_proto())
    BlockEngine(sidecar).goodbye()
    blocks.goodbye()
    engine = Engine(sidecar)
    with pytest.raises(LayoutMismatch, match="into rows of 128 bytes, this engine has blocks"):
        BlockEngine(sidecar)
    engine.goodbye()


M = manager_pb2
B = BLOCKS


def test_every_wrong_message_is_refused_and_changes_nothing(
    sidecar: Sidecar, blocks: BlockEngine
) -> None:
    other = BlockEngine(sidecar)
    theirs = other.lease(4)
    rows = blocks.lease(12)
    blocks.open(1)
    blocks.seal(1, rows[:4])
    blocks.sync()
    other.open(1)
    other.seal(1, theirs[:2])
    other.sync()
    before = sidecar.counts()

    def seal(*named: int, **changes: object) -> dict[str, M.SealTokens]:
        fields = {
            "request_id": 1, "start": 4, "num_tokens": len(named),
            "key_rows": pack(named, INT32), **changes,
        }  # fmt: skip
        return {"seal_tokens": M.SealTokens(**fields)}  # type: ignore[arg-type]

    good = rows[4:6].tolist()
    for kind, message, text in (
        (RowNotHeld, seal(*theirs[:2].tolist()), "live and held by another"),
        (RowNotHeld, seal(*theirs[2:].tolist()), "leased and held by another"),
        (RowNotHeld, seal(B - 1), "free"),
        (InvalidArgument, seal(good[0], good[0]), "twice"),
        (InvalidArgument, seal(B), "not in 0"),
        (InvalidArgument, seal(*good, value_rows=pack(good, INT32)), "value_rows: expected 0"),
        (InvalidArgument, seal(*good, num_tokens=1), "key_rows: expected 1"),
        (InvalidArgument, seal(*good, start=5), "start is 5"),
        (InvalidArgument, seal(*good, candidates=pack([0, 1, 2], INT32)), "3 candidates for 2"),
        (InvalidArgument, seal(*good, candidates=b"abc"), "candidates"),
        (InvalidArgument, seal(*good, candidates=pack([0, 5], INT32)), "candidate 5 of block 5"),
        (InvalidArgument, seal(*good, candidates=pack([-2, 0], INT32)), "candidate -2"),
        (InvalidArgument, seal(*good, candidates=pack([0] * 130, INT32)), "at most 64"),
        (StaleGeneration, seal(*good, generation=1), "generation"),
        (RowNotHeld, {"return_rows": M.ReturnRows(rows=pack(rows[:1], INT32))}, "live"),
        (StaleGeneration, {"pin_result": M.PinResult(pin_id=77)}, "pin 77 is not asked for"),
        (StaleGeneration, {"decision_result": M.DecisionResult(decision_id=77)}, "not open"),
        (InvalidArgument, {"lease_rows": M.LeaseRows(count=(1 << 23) + 1)}, "in pieces"),
    ):
        refusal = blocks.refused(**message)
        assert type(refusal) is kind, refusal
        assert text in str(refusal)
        assert sidecar.counts() == before
    blocks.seal(1, rows[4:6], start=4, candidates=pack([0, 3, -1, 4], INT32))
    blocks.sync()
    sidecar.check()
    other.goodbye()


def test_rows_have_no_pins_and_no_candidates(sidecar: Sidecar, engine: Engine) -> None:
    rows = engine.lease(4)
    engine.open(1)
    refusal = engine.refused(
        seal_tokens=M.SealTokens(
            request_id=1, num_tokens=1, key_rows=pack(rows[:2], INT32),
            value_rows=pack(rows[2:], INT32), candidates=pack([-1], INT32),
        )
    )  # fmt: skip
    assert "only blocks" in str(refusal)
    assert isinstance(engine.refused(pin_result=M.PinResult(pin_id=1)), StaleGeneration)


def test_leases_of_another_tenants_blocks_hold_zeros(sidecar: Sidecar) -> None:
    first = BlockEngine(sidecar, tenant="a")
    rows = first.lease(8)
    first.blocks[rows] = np.nan
    first.goodbye()
    second = BlockEngine(sidecar, tenant="b")
    assert np.array_equal(second.lease(8), rows)
    assert not second.blocks[rows].any()
    second.goodbye()


def test_an_engine_may_have_several_groups(sidecar: Sidecar) -> None:
    engine = BlockEngine(sidecar, TWO_GROUPS)
    rows = engine.lease(6)
    engine.open(1)
    engine.seal(1, rows)
    engine.sync()
    [info] = sidecar.admin.ListRequests(admin_pb2.ListRequestsRequest()).requests
    assert info.sealed_tokens == 3
    assert len(info.shared_keys_by_layer) == 2 * 4
    assert not info.shared_values_by_layer
    refusal = engine.refused(
        seal_tokens=M.SealTokens(
            request_id=1, start=3, num_tokens=1, key_rows=pack(rows[:1], INT32)
        )
    )
    assert "key_rows: expected 2 values" in str(refusal)
    engine.goodbye()


def test_operators_see_blocks(sidecar: Sidecar, blocks: BlockEngine) -> None:
    rows = blocks.lease(10)
    blocks.open(1)
    blocks.seal(1, rows[:6])
    blocks.sync()
    status = sidecar.status()
    assert (status.block_tokens, status.counters.sealed_tokens) == (TOKENS, 6)
    [info] = sidecar.admin.ListEngines(admin_pb2.ListEnginesRequest()).engines
    assert not info.HasField("layout")
    assert BlockLayout.from_proto(info.block_layout) == LAYOUT
    assert (info.leased_rows, info.live_rows) == (4, 6)
    assert BLOCK * status.rows.total == POOL_BYTES


@pytest.mark.parametrize(
    ("asked", "mode", "reason"),
    [
        ("block", common_pb2.SHARING_MODE_BLOCK, ""),
        ("exact", common_pb2.SHARING_MODE_EXACT, ""),
        ("observe", common_pb2.SHARING_MODE_OBSERVE, ""),
        ("balanced", common_pb2.SHARING_MODE_EXACT, "cannot share rows"),
    ],
)
def test_a_policy_is_narrowed_with_a_reason(
    sidecar: Sidecar, asked: str, mode: int, reason: str
) -> None:
    engine = BlockEngine(sidecar, policy_name=asked)
    assert engine.welcome.policy.mode == mode
    assert reason in engine.welcome.mode_reason
    assert bool(reason) == bool(engine.welcome.mode_reason)
    if mode != common_pb2.SHARING_MODE_EXACT:
        assert engine.welcome.policy.stages == PRESETS["block"].to_proto().stages
    engine.goodbye()


def test_a_policy_for_all_is_what_each_can_follow(sidecar: Sidecar, blocks: BlockEngine) -> None:
    try:
        for preset, followed in (("block", "BLOCK"), ("strict", "EXACT"), ("observe", "OBSERVE")):
            answer = sidecar.admin.SetPolicy(admin_pb2.SetPolicyRequest(preset=preset))
            assert (answer.sessions_changed, answer.policy.name) == (1, preset)
            news = blocks.receive().policy_changed
            assert news.policy.mode == common_pb2.SharingMode.Value(f"SHARING_MODE_{followed}")
            assert bool(news.mode_reason) == (preset == "strict")
            [info] = sidecar.admin.ListEngines(admin_pb2.ListEnginesRequest()).engines
            assert (info.policy, info.mode_reason) == (news.policy, news.mode_reason)
        blocks.goodbye()
        engine = Engine(sidecar)
        sidecar.admin.SetPolicy(admin_pb2.SetPolicyRequest(preset="block"))
        news = engine.receive().policy_changed
        assert news.policy.mode == common_pb2.SHARING_MODE_EXACT
        assert "has no block table" in news.mode_reason
        engine.goodbye()
    finally:
        sidecar.admin.SetPolicy(admin_pb2.SetPolicyRequest(preset="exact"))


def test_attaching_and_dying_a_hundred_times_leaves_every_count_as_it_was(
    fresh: Callable[..., Sidecar],
) -> None:
    sidecar = fresh()
    keeper = BlockEngine(sidecar)
    rows = keeper.lease(10)
    keeper.open(1)
    keeper.seal(1, rows[:6])
    keeper.sync()
    before = sidecar.counts()
    for number in range(100):
        engine = BlockEngine(sidecar, tenant=f"tenant {number % 3}")
        mine = engine.lease(20)
        for request in (1, 2):
            engine.open(request)
            engine.seal(request, mine[:15])
        engine.truncate(1, 3)
        engine.sync()
        (engine.goodbye if number % 2 else engine.vanish)()
    wait_for(lambda: sidecar.counts() == before, "the counts of before")
    assert sidecar.status().sessions == 1
    sidecar.check()
    keeper.goodbye()
    assert sidecar.all_free()

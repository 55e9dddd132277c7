"""A session of an engine's own blocks with the real sidecar: leases, decisions, blocks lent."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

from memshare.client import SessionOptions
from memshare.client.block_session import BlockSession
from memshare.client.block_tables import MAX_CANDIDATES, NO_CANDIDATE, BlockDecision, BlockTable
from memshare.client.cli.sidecar import Sidecar, running_sidecar
from memshare.client.memory import MappedPool
from memshare.v1 import common_pb2, handoff_pb2
from memshare.wire.block_layout import BlockGroup, BlockLayout, PagePart
from memshare.wire.errors import LayoutMismatch, MemshareError, PoolExhausted
from memshare.wire.handoff import connect_pool
from tests.client.harness import counts, wait_for

LAYERS, TOKENS, DIM = 2, 16, 64
PART = TOKENS * DIM
BLOCK = LAYERS * 2 * PART * 4
BLOCKS = 256
GROUP = BlockGroup(
    1,
    DIM,
    DIM,
    tuple(layer * BLOCK // LAYERS for layer in range(LAYERS)),
    BLOCK,
    PagePart(0, PART, DIM, 1),
    PagePart(PART, PART, DIM, 1),
)
LAYOUT = BlockLayout(common_pb2.ROW_DTYPE_FP32, TOKENS, BLOCK, BLOCKS, (GROUP,))
Content = npt.NDArray[np.float32]


def policy(key: float, value: float, min_age: int = 0, protected: int = 0) -> common_pb2.Policy:
    return common_pb2.Policy(
        name="test-block",
        mode=common_pb2.SHARING_MODE_BLOCK,
        stages=[common_pb2.PolicyStage(min_age=min_age, key_threshold=key, value_threshold=value)],
        protected_tokens=protected,
        fidelity_budget=1.0,
    )


def content(blocks: int, seed: int = 0) -> Content:
    """Random blocks, float32 [blocks, layers, K and V, elements]."""
    random = np.random.default_rng(seed)
    return random.standard_normal((blocks, LAYERS, 2, PART), np.float32)


def distance(target: Content, donor: Content) -> npt.NDArray[np.float64]:
    """K's and V's relative squared distance, [2]."""
    x, y = target.astype(np.float64), donor.astype(np.float64)
    result: npt.NDArray[np.float64] = (((x - y) ** 2).sum(-1) / (x * x).sum(-1)).mean(0)
    return result


class BlockEngine:
    """Has a free list and block tables, and applies what is decided."""

    def __init__(
        self, sidecar: Sidecar, lease: int = 40, *, split: bool = False, **options: Any
    ) -> None:
        """`split`: as if the memory were mapped by another process than the session's."""
        connection = connect_pool(sidecar.runtime.owner_socket, handoff_pb2.POOL_ROLE_ENGINE, 10.0)
        pool = MappedPool(connection.descriptor, connection.pool.pool_bytes, BLOCK, 0)
        self.memory = pool.rows(np.float32).reshape(-1, LAYERS, 2, PART)
        settings = {"runtime_dir": sidecar.runtime.path, "timeout": 10.0, "policy": "exact"}
        self.session = BlockSession(
            LAYOUT, SessionOptions(**(settings | options)), connection.token if split else None
        )
        self.connection = connection
        if split:
            connection.close_descriptor()
        else:
            connection.close()
        self.free: list[int] = self.session.lease(lease).tolist() if lease else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.detach()
        self.connection.close()

    def seal(self, table: BlockTable, written: Content, candidates: Any = None) -> list[int]:
        """Write the next blocks of a request and seal them; their ids."""
        blocks = [self.free.pop(0) for _ in range(len(written))]
        self.memory[blocks] = written
        named = np.full((len(blocks), MAX_CANDIDATES), NO_CANDIDATE, np.int32)
        if candidates is not None:
            named[:] = candidates
        self.session.seal(table, np.array([blocks], np.int32), named)
        return blocks

    def start(self, written: Content, *, private: bool = False) -> BlockTable:
        """A request of these blocks, of which all that comes of it is decided."""
        table = self.session.open_request(private=private)
        self.seal(table, written)
        self.synchronise()
        return table

    def synchronise(self) -> None:
        assert self.session.synchronise()

    def decide(self) -> list[BlockDecision]:
        """What the sidecar decides on all that is sealed."""
        self.synchronise()
        return list(self.session.take_decisions())

    def apply(self, decision: BlockDecision) -> None:
        """Follow a decision: the target's block is free for whatever comes next."""
        self.session.answer(decision, np.ones(len(decision.targets), np.bool_))
        self.free += decision.target_blocks.tolist()
        self.synchronise()

    def read(self, table: BlockTable) -> Content:
        """What attention would read of a request."""
        return self.memory[table.blocks[0, : table.sealed]]

    def close(self, table: BlockTable) -> None:
        self.session.close_requests([table])
        self.synchronise()

    def lend(self, keep: bool = True) -> list[int]:
        """Wait until another engine wants blocks, and answer; those that are kept."""
        wait_for(lambda: self.session._uplink.pin_requests, "a request for pins")
        [(request, valid)] = self.session.take_pin_requests()
        self.session.answer_pins(request, valid & keep)
        self.synchronise()
        return sorted(request.blocks[valid & keep].tolist())

    def assert_nothing_asked(self) -> None:
        self.synchronise()
        assert not list(self.session.take_pin_requests())

    def wait_unpinned(self) -> list[int]:
        """The next blocks that need not be kept any more."""
        return sorted(wait_for(self.session.take_unpinned, "blocks to come back"))


def states(sidecar: Sidecar) -> tuple[int, int]:
    """(live, leased) blocks of the pool, of which all others are free; nothing is amiss."""
    rows = counts(sidecar)
    assert rows.quarantined == 0
    assert rows.free + rows.live + rows.leased == rows.total == BLOCKS
    return rows.live, rows.leased


def of_engine(sidecar: Sidecar, engine: BlockEngine) -> tuple[int, int]:
    """(live, leased) blocks that the manager has for an engine."""
    with sidecar.admin() as admin:
        [info] = [one for one in admin.engines() if one.session_id == engine.session.session_id]
    return info.live_rows, info.leased_rows


def requests_of(sidecar: Sidecar, engine: BlockEngine) -> dict[int, Any]:
    with sidecar.admin() as admin:
        return {one.request_id: one for one in admin.requests(engine.session.session_id)}


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """One with a pool so small that all of it can be leased."""
    with running_sidecar(pool_bytes=BLOCKS * BLOCK) as running:
        yield running


@pytest.fixture
def fresh_sidecar() -> Iterator[Sidecar]:
    with running_sidecar(pool_bytes=BLOCKS * BLOCK) as running:
        yield running


@pytest.fixture(autouse=True)
def _all_blocks_come_back(sidecar: Sidecar) -> Iterator[None]:
    yield
    wait_for(lambda: counts(sidecar).free == BLOCKS, "all blocks")


# ---- leases --------------------------------------------------------------------------------


def test_some_blocks_are_leased_then_all_that_are_left(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar, lease=5) as engine:
        assert len(set(engine.free)) == 5
        assert np.flatnonzero(engine.session.held).tolist() == sorted(engine.free)
        assert states(sidecar) == (0, 5)
        with BlockEngine(sidecar, lease=3, split=True) as other:
            assert not engine.session.held[other.free].any()
            rest = other.session.lease()
            assert len(rest) == BLOCKS - 8
            assert sorted([*engine.free, *other.free, *rest.tolist()]) == list(range(BLOCKS))
            assert other.session.held.sum() == BLOCKS - 5
            assert states(sidecar) == (0, BLOCKS)
            for count in (0, 1):
                with pytest.raises(PoolExhausted):
                    engine.session.lease(count)
        assert states(sidecar) == (0, 5)
        assert len(engine.session.lease()) == BLOCKS - 5


def test_more_than_are_left_are_refused_and_none_is_taken(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar, lease=10) as engine:
        with pytest.raises(PoolExhausted) as refusal:
            engine.session.lease(BLOCKS - 9)
        assert refusal.value.details["free"] == str(BLOCKS - 10)
        assert engine.session.held.sum() == 10
        assert states(sidecar) == (0, 10)
        assert len(engine.session.lease(BLOCKS - 10)) == BLOCKS - 10


def test_a_session_is_of_the_pools_own_division(sidecar: Sidecar) -> None:
    half = BlockLayout(LAYOUT.dtype, TOKENS, BLOCK, BLOCKS // 2, (GROUP,))
    options = SessionOptions(runtime_dir=sidecar.runtime.path)
    with pytest.raises(LayoutMismatch, match=f"made for {BLOCKS // 2} blocks"):
        BlockSession(half, options)
    two = BlockLayout(LAYOUT.dtype, TOKENS, BLOCK, BLOCKS, (GROUP, GROUP))
    with BlockEngine(sidecar), pytest.raises(LayoutMismatch, match="lie otherwise"):
        BlockSession(two, options)
    BlockSession(two, options).detach()


def test_a_policy_of_rows_is_narrowed_and_says_why(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar, policy="balanced") as engine:
        assert engine.session.policy.mode == common_pb2.SHARING_MODE_EXACT
        assert "cannot share rows" in engine.session.mode_reason
    with BlockEngine(sidecar, policy=policy(0.1, 0.2)) as engine:
        assert engine.session.policy.mode == common_pb2.SHARING_MODE_BLOCK
        assert engine.session.mode_reason == ""


# ---- within one session --------------------------------------------------------------------


def test_equal_blocks_of_a_request_are_shared_and_the_engine_has_one_more(
    sidecar: Sidecar,
) -> None:
    with BlockEngine(sidecar) as engine:
        written = content(3)
        table = engine.start(written)
        assert engine.decide() == []
        copies = engine.seal(table, np.concatenate((written[[2, 0]], content(1, seed=1))))
        [decision] = engine.decide()
        assert decision.table is table
        assert decision.targets.tolist() == [3, 4]
        assert decision.target_blocks.tolist() == copies[:2]
        assert decision.donors.tolist() == [2, 0]
        assert decision.donor_blocks.tolist() == table.blocks[0, [2, 0]].tolist()
        assert decision.groups.tolist() == [0, 0]
        assert decision.distances.tolist() == [0.0, 0.0]
        assert decision.donor_requests.tolist() == [table.request_id] * 2
        assert decision.donor_generations.tolist() == [table.generation] * 2
        assert states(sidecar) == (6, 34)
        engine.apply(decision)
        # What it leased for good stays its own, only not in use.
        assert engine.session.held.sum() == 40
        assert engine.session.held[copies].all()
        assert states(sidecar) == of_engine(sidecar, engine) == (4, 36)
        expected = np.concatenate((written, written[[2, 0]], content(1, seed=1)))
        assert np.array_equal(engine.read(table), expected)
        assert table.shared[0, :6].tolist() == [False] * 3 + [True] * 2 + [False]
        request = requests_of(sidecar, engine)[table.request_id]
        assert (request.sealed_tokens, request.shared_keys, request.taint) == (6, 2, -1)
        statistics = engine.session.statistics
        assert (statistics.applied, statistics.missed, statistics.rejected) == (2, 0, 0)
        assert statistics.sealed_tokens == 6 * TOKENS
        # The blocks are named twice: the first that is let go leaves them in use.
        engine.session.truncate(table, 4)
        engine.synchronise()
        assert states(sidecar) == (3, 37)
        engine.close(table)
        assert states(sidecar) == (0, 40)


def test_a_block_that_was_given_up_is_used_again_at_once(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar, lease=4) as engine:
        written = content(4)
        table = engine.start(written[:3])
        engine.seal(table, written[:1])
        [decision] = engine.decide()
        engine.apply(decision)
        later = engine.start(written[3:])
        assert later.blocks[0, 0] == decision.target_blocks[0]
        assert np.array_equal(engine.read(table), written[[0, 1, 2, 0]])
        assert states(sidecar) == (4, 0)
        # A block of two requests, as the engine's own prefix cache has it.
        third = engine.session.open_request()
        shared = table.blocks[:, 1:3].copy()
        none = np.full((2, MAX_CANDIDATES), NO_CANDIDATE, np.int32)
        engine.session.seal(third, shared, none)
        engine.close(table)
        assert states(sidecar) == (3, 1)
        engine.close(third)
        assert states(sidecar) == (1, 3)
        assert engine.session.statistics.rejected == 0


def test_only_what_the_engine_applied_is_counted(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar) as engine:
        written = content(2)
        table = engine.start(written)
        engine.seal(table, written)
        [decision] = engine.decide()
        assert decision.targets.tolist() == [2, 3]
        engine.session.answer(decision, np.array([False, True]))
        engine.synchronise()
        assert states(sidecar) == (3, 37)
        assert table.shared[0, :4].tolist() == [False, False, False, True]
        statistics = engine.session.statistics
        assert (statistics.applied, statistics.missed) == (1, 1)
        assert requests_of(sidecar, engine)[table.request_id].shared_keys == 1


def test_requests_of_a_tenant_share_with_each_other(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar) as engine:
        written = content(2)
        first = engine.start(written)
        second = engine.start(written[::-1])
        [decision] = engine.decide()
        assert decision.donor_requests.tolist() == [first.request_id] * 2
        assert decision.donors.tolist() == [1, 0]
        engine.apply(decision)
        engine.close(first)
        assert np.array_equal(engine.read(second), written[::-1])
        assert states(sidecar) == (2, 38)
    with BlockEngine(sidecar, tenant="") as engine:
        engine.start(written)
        engine.start(written)
        assert engine.decide() == []
        assert states(sidecar) == (4, 36)


def test_a_private_request_shares_within_itself_alone(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar) as engine:
        written = content(2)
        mine = engine.start(written, private=True)
        engine.start(written, private=True)
        public = engine.start(written)
        assert engine.decide() == []
        engine.seal(mine, written[:1])
        [decision] = engine.decide()
        assert decision.table is mine
        assert (decision.targets.tolist(), decision.donors.tolist()) == ([2], [0])
        assert decision.donor_requests.tolist() == [mine.request_id]
        engine.apply(decision)
        assert states(sidecar) == (6, 34)
        # As one that is not private does with another.
        other = engine.start(written)
        [decision] = engine.decide()
        assert decision.table is other
        assert set(decision.donor_requests.tolist()) == {public.request_id}
        engine.apply(decision)
        assert states(sidecar) == (6, 34)


# ---- rollbacks -----------------------------------------------------------------------------


def test_a_rollback_voids_decisions_on_their_way(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar) as engine:
        written = content(3)
        table = engine.start(written)
        engine.seal(table, written)
        engine.synchronise()
        # It has arrived, and is of another generation when it would be applied.
        engine.session.truncate(table, 4)
        assert table.generation == 2
        assert list(engine.session.take_decisions()) == []
        engine.synchronise()
        assert engine.session.statistics.missed == 3
        assert states(sidecar) == (4, 36)
        # What is left is searched anew, and what comes now is of the new generation.
        engine.seal(table, written[1:2])
        [decision] = engine.decide()
        assert decision.donor_generations.tolist() == [2] * len(decision.donors)
        assert decision.targets.tolist()[-1] == 4
        engine.apply(decision)
        assert np.array_equal(engine.read(table), written[[0, 1, 2, 0, 1]])
        assert engine.session.statistics.rejected == 0


def test_a_decision_in_hand_may_be_refused_after_a_rollback(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar) as engine:
        written = content(2)
        table = engine.start(written)
        engine.seal(table, written)
        [decision] = engine.decide()
        engine.session.truncate(table)
        engine.session.answer(decision, np.zeros(2, np.bool_))
        engine.synchronise()
        assert states(sidecar) == (0, 40)
        assert engine.session.statistics.rejected == 0
        assert requests_of(sidecar, engine)[table.request_id].generation == 2


def test_a_closed_request_takes_no_decision(sidecar: Sidecar) -> None:
    with BlockEngine(sidecar) as engine:
        written = content(2)
        table = engine.start(written)
        engine.seal(table, written)
        engine.synchronise()
        engine.session.close_requests([table])
        assert list(engine.session.take_decisions()) == []
        engine.close(table)
        assert engine.session.statistics.missed == 2
        assert engine.session.statistics.rejected == 0
        assert states(sidecar) == (0, 40)


# ---- similar blocks ------------------------------------------------------------------------


def test_similar_blocks_are_shared_by_the_policys_thresholds(sidecar: Sidecar) -> None:
    """Blocks count as 16 tokens: one is protected, and two newer ones must exist."""
    base = content(6)
    near, far = base[1].copy(), base[2].copy()
    near += 0.1 * content(1, seed=1)[0]
    far[:, 1] += 0.5 * content(1, seed=2)[0, :, 1]
    key, value = distance(near, base[1])
    assert key < 0.05 > value
    assert distance(far, base[2])[1] > 0.05
    followers = content(3, seed=3)
    with BlockEngine(sidecar, policy=policy(0.05, 0.05, 2 * TOKENS, TOKENS)) as engine:
        table = engine.start(base)
        engine.seal(table, np.stack((near, base[0], far, base[3])))
        engine.seal(table, followers[:1])
        # Index 6 is near to 1; 7 is equal to a protected one; of 8 only K is near; 9 is too young.
        [decision] = engine.decide()
        assert (decision.targets.tolist(), decision.donors.tolist()) == ([6], [1])
        assert decision.distances.tolist() == pytest.approx([(key + value) / 2], rel=1e-3)
        engine.apply(decision)
        assert states(sidecar) == (10, 30)
        request = requests_of(sidecar, engine)[table.request_id]
        assert request.taint == 6
        assert request.accumulated_error == pytest.approx(table.errors[: table.sealed].sum())
        assert request.accumulated_error == pytest.approx((key + value) / 2, rel=1e-3)
        engine.seal(table, followers[1:2])
        [decision] = engine.decide()
        assert (decision.targets.tolist(), decision.donors.tolist()) == ([9], [3])
        engine.apply(decision)
        # Another request is never a donor of what is not equal, whatever the tenant.
        engine.start(np.concatenate((base, followers)))
        assert engine.decide() == []


def decoys_and_donor() -> tuple[Content, Content]:
    """Blocks that signatures prefer to the last of them, which alone is near enough."""
    base = content(1)
    offsets = 0.05 * (1 + np.arange(40, dtype=np.float32))
    decoys = np.repeat(base, 40, axis=0)
    decoys[:, :, 1] += offsets[:, None, None]
    donor = base.copy()
    donor[:, :, 0] += 0.4 * content(1, seed=1)[:, :, 0]
    return np.concatenate((decoys, donor)), base


def test_what_the_engine_takes_for_similar_is_verified_beside_signatures(
    sidecar: Sidecar,
) -> None:
    earlier, target = decoys_and_donor()
    with BlockEngine(sidecar, 100, policy=policy(0.5, 1e-6)) as engine:
        for named, found in ((NO_CANDIDATE, []), (40, [40])):
            table = engine.start(earlier)
            engine.seal(table, target, [NO_CANDIDATE, 3, named, NO_CANDIDATE])
            decisions = engine.decide()
            assert [donor for one in decisions for donor in one.donors.tolist()] == found
            assert all(one.targets.tolist() == [41] for one in decisions)
            for decision in decisions:
                engine.apply(decision)
        assert engine.session.statistics.rejected == 0
        assert states(sidecar) == (83, 17)


# ---- between sessions ----------------------------------------------------------------------


def test_equal_blocks_of_another_engine_are_lent_and_given_back(sidecar: Sidecar) -> None:
    written, own = content(3), content(1, seed=1)
    with BlockEngine(sidecar, split=True) as lender, BlockEngine(sidecar) as borrower:
        source = lender.start(written)
        copy = borrower.session.open_request()
        copies = borrower.seal(copy, np.concatenate((written[2:], own, written[:1])))
        lent = lender.lend()
        assert lent == sorted(source.blocks[0, [2, 0]].tolist())
        assert lender.session.pinned == set(lent)
        [decision] = borrower.decide()
        assert decision.targets.tolist() == [0, 2]
        assert decision.donor_requests.tolist() == [0, 0]
        assert decision.donor_blocks.tolist() == source.blocks[0, [2, 0]].tolist()
        assert not borrower.session.held[decision.donor_blocks].any()
        borrower.apply(decision)
        assert np.array_equal(borrower.read(copy), np.concatenate((written[2:], own, written[:1])))
        # Each has what it leased; what the borrower names of the lender's is the lender's.
        assert of_engine(sidecar, lender) == (3, 37)
        assert of_engine(sidecar, borrower) == (1, 39)
        assert states(sidecar) == (4, 76)
        assert borrower.session.held[copies].all()
        # The lender ends its request: what is lent stays as it is.
        lender.close(source)
        assert of_engine(sidecar, lender) == (2, 38)
        assert lender.session.take_unpinned() == []
        assert np.array_equal(borrower.read(copy), np.concatenate((written[2:], own, written[:1])))
        borrower.session.truncate(copy, 2)
        assert lender.wait_unpinned() == [source.blocks[0, 0]]
        assert states(sidecar) == (2, 78)
        borrower.close(copy)
        assert lender.wait_unpinned() == [source.blocks[0, 2]]
        assert not lender.session.pinned
        assert states(sidecar) == (0, 80)
        for engine in (lender, borrower):
            assert engine.session.statistics.rejected == 0


def test_another_tenant_and_a_private_request_get_nothing(sidecar: Sidecar) -> None:
    written = content(2)
    with (
        BlockEngine(sidecar, tenant="a") as lender,
        BlockEngine(sidecar, tenant="b") as stranger,
        BlockEngine(sidecar, tenant="a") as peer,
    ):
        lender.start(written)
        lender.start(content(2, seed=1), private=True)
        stranger.start(written)
        peer.start(written, private=True)
        peer.start(content(2, seed=1))
        lender.assert_nothing_asked()
        assert stranger.decide() == peer.decide() == []
        assert states(sidecar) == (10, 110)
        # As the same tenant in public does.
        copy = peer.session.open_request()
        peer.seal(copy, written)
        assert len(lender.lend()) == 2
        [decision] = peer.decide()
        peer.apply(decision)
        assert states(sidecar) == (10, 110)


def test_blocks_that_the_lender_does_not_keep_are_not_proposed(sidecar: Sidecar) -> None:
    written = content(2)
    with BlockEngine(sidecar) as lender, BlockEngine(sidecar) as borrower:
        lender.start(written)
        copy = borrower.session.open_request()
        borrower.seal(copy, written)
        assert lender.lend(keep=False) == []
        assert borrower.decide() == []
        assert not lender.session.pinned
        assert states(sidecar) == (4, 76)
        lender.assert_nothing_asked()


@pytest.mark.parametrize(
    "change",
    [
        lambda lender, source: lender.session.truncate(source, 1),
        lambda lender, source: lender.session.close_requests([source]),
    ],
    ids=["truncated", "closed"],
)
def test_the_lenders_table_must_bear_out_what_it_is_asked_for(
    sidecar: Sidecar, change: Callable[[BlockEngine, BlockTable], None]
) -> None:
    written = content(2)
    with BlockEngine(sidecar) as lender, BlockEngine(sidecar) as borrower:
        source = lender.start(written)
        copy = borrower.session.open_request()
        borrower.seal(copy, written)
        wait_for(lambda: lender.session._uplink.pin_requests, "a request for pins")
        change(lender, source)
        assert lender.lend() == []
        assert borrower.decide() == []
        assert states(sidecar)[0] == 2 + (source.sealed if source.generation > 1 else 0)
        assert borrower.session.statistics.rejected == lender.session.statistics.rejected == 0


def test_what_is_lent_outlives_the_lender(sidecar: Sidecar) -> None:
    written = content(2)
    with BlockEngine(sidecar) as borrower:
        with BlockEngine(sidecar) as lender:
            lender.start(written)
            copy = borrower.session.open_request()
            borrower.seal(copy, written)
            assert len(lender.lend()) == 2
            [decision] = borrower.decide()
            borrower.apply(decision)
        wait_for(lambda: states(sidecar) == (2, 40), "the lender's own blocks")
        with BlockEngine(sidecar, lease=0) as greedy:
            got = greedy.session.lease()
            assert len(got) == BLOCKS - 42
            greedy.memory[got] = np.nan
            assert np.array_equal(borrower.read(copy), written)
        borrower.close(copy)
        assert states(sidecar) == (0, 40)


# ---- when the manager or an engine dies ------------------------------------------------------


def agent_state(sidecar: Sidecar) -> str:
    with sidecar.admin() as admin:
        return admin.status().agent_state


def restart(sidecar: Sidecar, *engines: BlockEngine) -> None:
    """A new manager, which all engines come back to."""
    before = [engine.session.statistics.reattached for engine in engines]
    sidecar.start_manager()

    def back() -> bool:
        return all(
            engine.session.state == "attached" and engine.session.statistics.reattached > number
            for engine, number in zip(engines, before, strict=True)
        )

    wait_for(back, "the engines to come back")
    # Until it has found the worker, a manager has nothing to say of what is sealed.
    wait_for(lambda: agent_state(sidecar) == "ready", "the worker")
    for engine in engines:
        engine.synchronise()


def kill_manager(sidecar: Sidecar, *engines: BlockEngine) -> None:
    sidecar.kill_manager()
    for engine in engines:
        wait_for(lambda it=engine: it.session.state == "detached-by-manager", "it to be noticed")


def test_a_new_manager_counts_what_the_engines_hold_lend_and_borrow(sidecar: Sidecar) -> None:
    written = content(4)
    with BlockEngine(sidecar) as lender, BlockEngine(sidecar) as borrower:
        source = lender.start(written[:3])
        copy = borrower.session.open_request()
        borrower.seal(copy, written[:2])
        assert len(lender.lend()) == 2
        [decision] = borrower.decide()
        borrower.apply(decision)
        borrower.seal(copy, np.concatenate((written[3:], written[3:])))
        borrower.synchronise()
        undecided = of_engine(sidecar, lender), of_engine(sidecar, borrower)
        assert undecided == ((3, 37), (2, 38))
        names = lender.session.session_id, borrower.session.session_id
        kill_manager(sidecar, lender, borrower)
        assert not borrower.session.can_seal()
        with pytest.raises(MemshareError, match="nothing was leased"):
            borrower.session.lease(1)
        # Nobody listens, and the snapshot says it all.
        lender.session.truncate(source, 2)
        borrower.seal(copy, written[3:])
        restart(sidecar, lender, borrower)
        assert (lender.session.session_id, borrower.session.session_id) == names
        assert borrower.session.can_seal()
        assert of_engine(sidecar, lender) == (2, 38)
        assert of_engine(sidecar, borrower) == (3, 37)
        assert requests_of(sidecar, borrower)[copy.request_id].shared_keys == 2
        assert requests_of(sidecar, lender)[source.request_id].generation == 2
        # What was borrowed is kept over the end of the lender's request, and then given back.
        lent = sorted(source.blocks[0, :2].tolist())
        lender.close(source)
        assert of_engine(sidecar, lender) == (2, 38)
        assert lender.session.take_unpinned() == []
        assert np.array_equal(borrower.read(copy), written[[0, 1, 3, 3, 3]])
        borrower.close(copy)
        assert lender.wait_unpinned() == lent
        assert states(sidecar) == (0, 80)
        for engine in (lender, borrower):
            assert engine.session.statistics.rejected == 0


def test_what_nobody_borrows_is_given_back_by_the_new_manager(sidecar: Sidecar) -> None:
    written = content(2)
    with BlockEngine(sidecar) as lender, BlockEngine(sidecar) as borrower:
        source = lender.start(written)
        copy = borrower.session.open_request()
        borrower.seal(copy, written)
        lent = lender.lend()
        assert len(lent) == 2
        # The decision has come and is void by now, for its manager is gone.
        borrower.synchronise()
        kill_manager(sidecar, lender, borrower)
        borrower.session.close_requests([copy])
        restart(sidecar, lender, borrower)
        assert list(borrower.session.take_decisions()) == []
        assert lender.wait_unpinned() == lent
        assert not lender.session.pinned
        # Both may be lent as before, once the lender's request was searched again: while they were
        # kept for others, there may have been nothing to search for.
        lender.seal(source, written[:1] + 1)
        lender.synchronise()
        copy = borrower.session.open_request()
        borrower.seal(copy, written)
        assert lender.lend() == lent
        [decision] = borrower.decide()
        borrower.apply(decision)
        lender.close(source)
        assert np.array_equal(borrower.read(copy), written)
        assert states(sidecar) == (2, 78)


def test_a_donor_whose_own_request_is_over_stays_on_lease_after_a_restart(
    sidecar: Sidecar,
) -> None:
    with BlockEngine(sidecar, 40) as engine:
        written = content(2)
        first, second = engine.start(written), engine.start(written)
        [decision] = engine.decide()
        engine.apply(decision)
        named = second.blocks[0, :2].tolist()
        engine.close(first)
        kill_manager(sidecar, engine)
        restart(sidecar, engine)
        engine.close(second)
        engine.synchronise()
        with BlockEngine(sidecar, 0) as other:
            assert not set(other.session.lease().tolist()) & set(named)
        assert int(engine.session.held.sum()) == 40


def test_what_an_open_decision_would_borrow_is_kept_while_the_session_comes_back(
    sidecar: Sidecar,
) -> None:
    with BlockEngine(sidecar) as lender, BlockEngine(sidecar) as borrower:
        written = content(2)
        source = lender.start(written)
        copy = borrower.session.open_request()
        borrower.seal(copy, written)
        lender.lend()
        [decision] = borrower.decide()
        borrower.session._uplink._stream.cancel()
        wait_for(lambda: borrower.session.state != "attached", "the stream to break")
        borrower.session.answer(decision, np.ones(2, np.bool_))
        lender.close(source)
        wait_for(lambda: borrower.session.state == "attached", "the session to resume")
        borrower.synchronise()
        lender.synchronise()
        assert lender.session.take_unpinned() == []
        assert np.array_equal(borrower.read(copy), written)


def test_a_manager_waits_for_no_more_than_the_sessions_it_had(fresh_sidecar: Sidecar) -> None:
    with BlockEngine(fresh_sidecar, split=True) as engine:
        kill_manager(fresh_sidecar, engine)
        restart(fresh_sidecar, engine)
        with fresh_sidecar.admin() as admin:
            status = admin.status()
        assert (status.state, list(status.awaited_pids)) == ("serving", [])


def test_candidates_and_privacy_survive_the_manager(sidecar: Sidecar) -> None:
    earlier, target = decoys_and_donor()
    with BlockEngine(sidecar, 100, policy=policy(0.5, 1e-6)) as engine:
        table = engine.start(earlier)
        kill_manager(sidecar, engine)
        engine.seal(table, target, [NO_CANDIDATE, NO_CANDIDATE, NO_CANDIDATE, 40])
        restart(sidecar, engine)
        [decision] = engine.decide()
        assert (decision.targets.tolist(), decision.donors.tolist()) == ([41], [40])
    with BlockEngine(sidecar) as engine:
        written = content(2)
        engine.start(written, private=True)
        kill_manager(sidecar, engine)
        restart(sidecar, engine)
        engine.start(written)
        assert engine.decide() == []


_CHILD = """
import os, sys
sys.path.insert(0, os.getcwd())
from memshare.client.cli.sidecar import Sidecar
from memshare.wire.runtime import RuntimeDirectory
from tests.client.test_block_session import *
engine = BlockEngine(Sidecar(RuntimeDirectory.at(None), pool_bytes=0), lease=50, split=True)
written = content(2)
"""


@pytest.fixture
def child(sidecar: Sidecar) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start another process with an engine, which runs what it is told and then waits."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{_CHILD}\n{script}\nprint('done', flush=True)\ninput()"],
            env=sidecar.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def await_done(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


def test_a_killed_engine_frees_all(
    sidecar: Sidecar, child: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = child(
        "table = engine.start(written)\n"
        "engine.seal(table, written)\n"
        "[decision] = engine.decide()\n"
        "engine.apply(decision)\n"
        "engine.seal(table, written)\n"
        "engine.synchronise()"
    )
    await_done(process)
    assert states(sidecar) == (4, 46)
    kill(process)
    wait_for(lambda: states(sidecar) == (0, 0), "all that the engine held")


def test_a_killed_borrower_gives_back_what_it_borrowed(
    sidecar: Sidecar, child: Callable[[str], subprocess.Popen[str]]
) -> None:
    with BlockEngine(sidecar) as lender:
        source = lender.start(content(2))
        process = child(
            "table = engine.start(written)\n[decision] = engine.decide()\nengine.apply(decision)"
        )
        lent = lender.lend()
        await_done(process)
        lender.close(source)
        assert states(sidecar) == (2, 88)
        kill(process)
        assert lender.wait_unpinned() == lent
        wait_for(lambda: states(sidecar) == (0, 40), "all that the borrower held")


def test_what_a_killed_engine_lent_is_free_once_it_is_not_read(
    sidecar: Sidecar, child: Callable[[str], subprocess.Popen[str]]
) -> None:
    written = content(2)
    process = child("engine.start(written)\nprint('done', flush=True)\nengine.lend()")
    await_done(process)
    with BlockEngine(sidecar) as borrower:
        copy = borrower.session.open_request()
        borrower.seal(copy, written)
        await_done(process)
        [decision] = borrower.decide()
        borrower.apply(decision)
        kill(process)
        wait_for(lambda: states(sidecar) == (2, 40), "what the lender held for itself")
        assert np.array_equal(borrower.read(copy), written)
        borrower.close(copy)
        assert states(sidecar) == (0, 40)

"""The counts: what each call does, and what it refuses without a change."""

from __future__ import annotations

import time

import numpy as np
import pytest

from memshare.manager.decisions import Candidates
from memshare.manager.recovery import Snapshot, SnapshotTable
from memshare.manager.rows import RowState
from memshare.manager.state import ManagerState
from memshare.manager.tables import MAX_REQUESTS, OWN, SHARED
from memshare.wire.errors import (
    InvalidArgument,
    MemshareError,
    PoolExhausted,
    RowNotHeld,
    StaleGeneration,
    UnknownRequest,
    UnknownSession,
)

FREE, LEASED, LIVE, QUARANTINED = RowState
LAYERS = 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new_state(rows: int = 64, sessions: int = 1, tenant: str = "t") -> ManagerState:
    state = ManagerState(rows)
    for number in range(sessions):
        state.open_session(number + 1, tenant=tenant, num_layers=LAYERS)
    return state


def fill(
    state: ManagerState, session: int, request: int, tokens: int, private: bool = False
) -> np.ndarray:
    rows, _ = state.lease(session, 2 * LAYERS * tokens)
    state.confirm_zeroed(session, rows)
    state.open_request(session, request, 0, private=private)
    half = len(rows) // 2
    state.seal(session, request, 0, 0, rows[:half], rows[half:])
    return rows.reshape(2, LAYERS, tokens)


def items(rows: np.ndarray, pairs: list[tuple[int, int]], **lender: int) -> Candidates:
    """Key entries in layer 0: (target, donor)."""
    targets, donors = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    count = len(pairs)
    return Candidates(
        np.zeros(count, np.uint16),
        np.zeros(count, np.uint8),
        targets,
        donors,
        rows[0, 0, donors],
        np.full(count, 0.01, np.float32),
        np.full(count, lender["session"], np.uint64) if lender else None,
        np.full(count, lender["request"], np.uint64) if lender else None,
    )


def share(state: ManagerState, rows: np.ndarray, target: int, donor: int) -> None:
    decision = state.propose(1, 1, 0, items(rows, [(target, donor)]), approximate=True)
    assert decision is not None
    state.resolve(1, decision.decision_id, np.ones(1, np.uint8))


class TestRows:
    def test_lowest_free_rows_are_granted_first(self) -> None:
        state = new_state()
        first, _ = state.lease(1, 8)
        assert first.tolist() == list(range(8))
        state.return_rows(1, first[2:4])
        assert state.lease(1, 2)[0].tolist() == [2, 3]

    def test_one_run_is_preferred_where_there_is_one(self) -> None:
        state = new_state()
        rows, _ = state.lease(1, 16)
        state.return_rows(1, rows[[3, 8, 9, 10]])
        assert state.lease(1, 3)[0].tolist() == [8, 9, 10]

    def test_scattered_rows_are_granted_when_no_run_is_left(self) -> None:
        state = new_state(8)
        rows, _ = state.lease(1, 8)
        state.return_rows(1, rows[[1, 4, 6]])
        assert state.lease(1, 3)[0].tolist() == [1, 4, 6]
        assert state.check_integrity() == []

    def test_random_leases_and_returns_never_grant_a_row_twice(self) -> None:
        state, draw = new_state(300), np.random.default_rng(0)
        held: set[int] = set()
        for _ in range(500):
            count = int(draw.integers(1, 40))
            if count <= 300 - len(held):
                rows = state.lease(1, count)[0].tolist()
                assert not held & set(rows)
                held |= set(rows)
            else:
                back = draw.permutation(sorted(held))[:count].astype(np.int32)
                state.return_rows(1, back)
                held -= set(back.tolist())
        assert state.check_integrity() == []

    def test_all_or_nothing_with_the_free_count(self) -> None:
        state = new_state(10)
        state.lease(1, 4)
        with pytest.raises(PoolExhausted, match="6 of 10 are free") as caught:
            state.lease(1, 7)
        assert caught.value.details["free"] == "6"
        assert caught.value.retry_after
        assert state.row_counts()[FREE] == 6

    @pytest.mark.parametrize("count", [0, -1, -(1 << 40)])
    def test_counts_below_one_are_refused(self, count: int) -> None:
        with pytest.raises(InvalidArgument):
            new_state().lease(1, count)

    @pytest.mark.parametrize(
        ("rows", "kind"),
        [
            (ids(), InvalidArgument),
            (ids(-1), InvalidArgument),
            (ids(64), InvalidArgument),
            (ids(2**31 - 1), InvalidArgument),
            (ids(-(2**31)), InvalidArgument),
            (ids(0, 1, 0), InvalidArgument),
            (ids(0, 20), RowNotHeld),
        ],
    )
    def test_a_batch_with_one_wrong_row_changes_nothing(
        self, rows: np.ndarray, kind: type[MemshareError]
    ) -> None:
        state = new_state()
        state.lease(1, 8)
        with pytest.raises(kind):
            state.return_rows(1, rows)
        assert state.row_counts()[LEASED] == 8
        assert state.check_integrity() == []

    def test_double_free_in_two_calls_names_row_and_generation(self) -> None:
        state = new_state()
        rows, _ = state.lease(1, 4)
        state.return_rows(1, rows[:2])
        with pytest.raises(RowNotHeld, match=r"row 0 \(generation 1\) is free") as caught:
            state.return_rows(1, rows)
        assert caught.value.details["generation"] == "1"
        assert state.row_counts()[LEASED] == 2

    def test_rows_of_another_session_are_refused(self) -> None:
        state = new_state(sessions=2)
        rows, _ = state.lease(1, 4)
        with pytest.raises(RowNotHeld, match="another session"):
            state.return_rows(2, rows)

    def test_a_late_message_about_a_reused_row_is_refused(self) -> None:
        state = new_state(4, sessions=2)
        rows, _ = state.lease(1, 4)
        state.return_rows(1, rows)
        assert np.array_equal(state.lease(2, 4)[0], rows)
        with pytest.raises(RowNotHeld, match="another session"):
            state.return_rows(1, rows[:1])
        assert state.row_counts()[LEASED] == 4

    def test_a_quota_above_the_pool_is_refused_with_what_is_free(self) -> None:
        state = new_state(10)
        with pytest.raises(PoolExhausted, match="11, the pool has 10 rows and 10 are free"):
            state.open_session(9, tenant="t", num_layers=1, max_rows=11)

    def test_a_session_never_holds_more_than_its_quota(self) -> None:
        state = new_state()
        state.open_session(9, tenant="t", num_layers=LAYERS, max_rows=8)
        rows = fill(state, 9, 1, 1)
        state.lease(9, 4)
        with pytest.raises(PoolExhausted, match="holds 8 of its bound of 8"):
            state.lease(9, 1)
        state.close_requests(9, [1], [0])
        assert len(state.lease(9, 4)[0]) == rows.size

    def test_rows_of_another_tenant_must_be_zeroed(self) -> None:
        state = ManagerState(8)
        for number, tenant in enumerate(("a", "b", "", ""), 1):
            state.open_session(number, tenant=tenant, num_layers=1)

        def pass_on(session: int) -> np.ndarray:
            rows, foreign = state.lease(session, 4)
            state.confirm_zeroed(session, rows)
            state.return_rows(session, rows)
            return foreign

        assert pass_on(1).all()  # who had them before this manager is unknown
        assert not pass_on(1).any()
        assert pass_on(2).all()
        assert pass_on(3).all()
        assert pass_on(4).all()  # two sessions without a tenant are strangers
        assert not pass_on(4).any()


class TestRequests:
    def test_only_leased_rows_are_sealed_and_only_in_order(self) -> None:
        state = new_state()
        rows, _ = state.lease(1, 8)
        state.open_request(1, 1, 0)
        for start, keys, values, kind in (
            (1, rows[:2], rows[2:4], InvalidArgument),
            (0, rows[:2], rows[:2], InvalidArgument),
            (0, rows[:2], rows[2:5], InvalidArgument),
            (0, rows[:1], rows[1:2], InvalidArgument),
            (0, ids(), ids(), InvalidArgument),
            (0, rows[:2], ids(30, 31), RowNotHeld),
        ):
            with pytest.raises(kind):
                state.seal(1, 1, 0, start, keys, values)
        assert state.row_counts()[LEASED] == 8
        state.seal(1, 1, 0, 0, rows[:2], rows[2:4])
        with pytest.raises(RowNotHeld, match="live"):
            state.seal(1, 1, 0, 1, rows[:2], rows[2:4])
        assert (state.row_counts()[LEASED], state.row_counts()[LIVE]) == (4, 4)

    def test_unknown_names_are_typed(self) -> None:
        state = new_state()
        with pytest.raises(UnknownSession, match="attach again"):
            state.lease(7, 1)
        with pytest.raises(UnknownRequest):
            state.truncate(1, 5, 0, 1, 0)
        state.open_request(1, 5, 3)
        with pytest.raises(StaleGeneration, match="in generation 3, the message in 2"):
            state.truncate(1, 5, 2, 4, 0)
        with pytest.raises(InvalidArgument, match="open already"):
            state.open_request(1, 5, 4)

    def test_an_older_epoch_is_refused(self) -> None:
        state = ManagerState(4)
        state.open_session(1, tenant="", num_layers=1, epoch=3)
        with pytest.raises(StaleGeneration, match="epoch 3"):
            state.session(1, epoch=2)

    def test_truncate_moves_the_generation_and_releases_the_rows(self) -> None:
        state = new_state()
        fill(state, 1, 1, 4)
        state.truncate(1, 1, 0, 1, 1)
        assert state.row_counts()[LIVE] == 4
        with pytest.raises(StaleGeneration):
            state.truncate(1, 1, 0, 2, 0)
        for generation, keep in ((1, 0), (2, 2), (2, -1)):
            with pytest.raises(InvalidArgument):
                state.truncate(1, 1, 1, generation, keep)

    def test_close_is_all_or_nothing(self) -> None:
        state = new_state()
        fill(state, 1, 1, 1)
        fill(state, 1, 2, 1)
        for names, generations, kind in (
            ([1, 3], [0, 0], UnknownRequest),
            ([1, 2], [0, 1], StaleGeneration),
            ([1, 1], [0, 0], InvalidArgument),
            ([1, 2], [0], InvalidArgument),
            ([], [], InvalidArgument),
        ):
            with pytest.raises(kind):
                state.close_requests(1, names, generations)
        assert state.row_counts()[LIVE] == 8
        state.close_requests(1, [1, 2], [0, 0])
        assert state.row_counts()[FREE] == 64

    def test_a_closing_session_is_released_in_slices(self) -> None:
        state = new_state(1 << 16, sessions=2)
        fill(state, 1, 1, 1 << 12)
        state.lease(1, 100)
        state.close_session(1)
        with pytest.raises(UnknownSession):
            state.lease(1, 1)
        slices = 1
        while not state.close_slice(1, 1024):
            slices += 1
            assert state.check_integrity() == []
        assert slices > 16
        assert state.row_counts()[FREE] == 1 << 16
        assert state.close_slice(1)

    @pytest.mark.slow
    def test_no_slice_of_a_huge_close_takes_long(self) -> None:
        state = new_state(1 << 22)
        for request in range(16):
            fill(state, 1, request, 1 << 15)
        longest, began = 0.0, time.perf_counter()
        state.close_session(1)
        done = False
        while not done:
            longest = max(longest, time.perf_counter() - began)
            began = time.perf_counter()
            done = state.close_slice(1)
        assert longest < 0.05
        assert state.row_counts()[FREE] == 1 << 22


class TestSharing:
    def test_apply_points_the_entry_at_the_donor_and_quarantines_its_row(self) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 4)
        share(state, rows, 2, 0)
        table = state.request(1, 1, 0)
        assert table.rows[0, 0, 2] == rows[0, 0, 0]
        assert table.entries[0, 0].tolist() == [OWN, OWN, SHARED, OWN]
        assert state.pool.references[rows[0, 0, 0]] == 2
        assert state.row_counts()[QUARANTINED] == 1

    def test_quarantine_lasts_until_a_step_is_acknowledged(self) -> None:
        state = new_state(16)
        rows = fill(state, 1, 1, 4)
        share(state, rows, 2, 0)
        with pytest.raises(PoolExhausted):
            state.lease(1, 1)
        state.step_completed(1, 5)
        assert state.lease(1, 1)[0].tolist() == [rows[0, 0, 2]]
        with pytest.raises(StaleGeneration, match="step 4"):
            state.step_completed(1, 4)

    def test_another_sessions_step_frees_nothing(self) -> None:
        state = new_state(sessions=2)
        share(state, fill(state, 1, 1, 4), 2, 0)
        state.step_completed(2, 100)
        assert state.row_counts()[QUARANTINED] == 1

    @pytest.mark.parametrize(
        "pairs",
        [
            [(1, 1)],  # itself
            [(1, 2)],  # younger than the target
            [(9, 0)],  # not sealed
            [(2, 9)],
            [(-1, 0)],
            [(2, -1)],
        ],
    )
    def test_impossible_items_are_dropped(self, pairs: list[tuple[int, int]]) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 4)
        wanted = items(np.pad(rows, ((0, 0), (0, 0), (0, 9))), pairs)
        assert state.propose(1, 1, 0, wanted, approximate=True) is None
        assert state.check_integrity() == []

    def test_no_chains(self) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 6)
        share(state, rows, 2, 0)
        table = state.request(1, 1, 0)
        # A shared entry is no donor, a donor is no target, a pending one neither.
        assert state.propose(1, 1, 0, items(table.rows, [(4, 2)]), approximate=True) is None
        assert state.propose(1, 1, 0, items(rows, [(4, 2)]), approximate=True) is None
        pending = state.propose(1, 1, 0, items(rows, [(3, 1)]), approximate=True)
        assert pending
        assert state.propose(1, 1, 0, items(rows, [(4, 3)]), approximate=True) is None
        assert state.propose(1, 1, 0, items(rows, [(3, 1)]), approximate=True) is None
        exact = items(rows, [(0, 4)], session=1, request=1)
        assert state.propose(1, 1, 0, exact, approximate=False) is None
        exact = items(rows, [(1, 4)], session=1, request=1)
        assert state.propose(1, 1, 0, exact, approximate=False) is None

    def test_one_proposal_fills_a_target_once_and_lends_from_none_of_its_targets(self) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 6)
        decision = state.propose(
            1, 1, 0, items(rows, [(3, 1), (3, 0), (5, 3), (4, 0)]), approximate=True
        )
        assert decision is not None
        assert decision.items.targets.tolist() == [3, 4]

    def test_a_donor_whose_row_changed_is_dropped(self) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 4)
        moved = rows.copy()
        moved[0, 0, 0] = rows[1, 1, 3]
        assert state.propose(1, 1, 0, items(moved, [(2, 0)]), approximate=True) is None

    @pytest.mark.parametrize(("same", "shared"), [("t", True), ("other", False)])
    def test_exact_sharing_stays_within_a_tenant(self, same: str, shared: bool) -> None:
        state = new_state()
        state.open_session(2, tenant=same, num_layers=LAYERS)
        lent = fill(state, 1, 7, 4)
        fill(state, 2, 1, 4)
        wanted = items(lent, [(2, 2)], session=1, request=7)
        assert (state.propose(2, 1, 0, wanted, approximate=False) is not None) is shared

    def test_without_a_tenant_only_the_same_request_lends(self) -> None:
        state = new_state(tenant="")
        lent = fill(state, 1, 7, 4)
        fill(state, 1, 1, 4)
        wanted = items(lent, [(2, 2)], session=1, request=7)
        assert state.propose(1, 1, 0, wanted, approximate=False) is None
        wanted = items(lent, [(2, 1)], session=1, request=7)
        assert state.propose(1, 7, 0, wanted, approximate=False) is not None

    @pytest.mark.parametrize("private", [(True, False), (False, True)])
    def test_a_private_request_shares_within_itself_alone(self, private: tuple[bool, bool]) -> None:
        state = new_state()
        lent = fill(state, 1, 7, 4, private[0])
        own = fill(state, 1, 1, 4, private[1])
        wanted = items(lent, [(2, 2)], session=1, request=7)
        assert state.propose(1, 1, 0, wanted, approximate=False) is None
        wanted = items(own, [(2, 1)], session=1, request=1)
        assert state.propose(1, 1, 0, wanted, approximate=False) is not None

    def test_approximate_sharing_stays_within_a_request(self) -> None:
        state = new_state()
        lent = fill(state, 1, 7, 4)
        fill(state, 1, 1, 4)
        wanted = items(lent, [(2, 1)], session=1, request=7)
        assert state.propose(1, 1, 0, wanted, approximate=True) is None

    def test_other_layouts_share_nothing(self) -> None:
        state = ManagerState(64)
        state.open_session(1, tenant="t", num_layers=LAYERS, layout="x")
        state.open_session(2, tenant="t", num_layers=LAYERS, layout="y")
        lent = fill(state, 1, 7, 4)
        fill(state, 2, 1, 4)
        wanted = items(lent, [(2, 2)], session=1, request=7)
        assert state.propose(2, 1, 0, wanted, approximate=False) is None

    def test_a_row_outlives_its_first_holder_while_it_is_named(self) -> None:
        state = new_state(sessions=2)
        lent = fill(state, 1, 7, 4)
        fill(state, 2, 1, 4)
        decision = state.propose(
            2, 1, 0, items(lent, [(2, 2)], session=1, request=7), approximate=False
        )
        assert decision
        state.resolve(2, decision.decision_id, np.ones(1, np.uint8))
        state.close_session(1)
        while not state.close_slice(1):
            pass
        assert state.check_integrity() == []
        assert state.row_counts()[LIVE] == 16
        state.close_requests(2, [1], [0])
        state.step_completed(2, 1)
        assert state.row_counts()[FREE] == 64

    def test_a_donor_truncated_while_a_decision_is_under_way_is_a_counted_miss(self) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 4)
        decision = state.propose(1, 1, 0, items(rows, [(2, 1)]), approximate=True)
        assert decision
        state.truncate(1, 1, 0, 1, 1)
        assert state.check_integrity() == []
        with pytest.raises(StaleGeneration, match="taken back"):
            state.resolve(1, decision.decision_id, np.ones(1, np.uint8))
        assert state.resolve(1, decision.decision_id, np.zeros(1, np.uint8)).missed == 1
        assert state.session(1).counters.missed == 1
        with pytest.raises(StaleGeneration, match="not open"):
            state.resolve(1, decision.decision_id, np.zeros(1, np.uint8))

    def test_a_donor_closed_elsewhere_stays_alive_until_the_decision_is_answered(self) -> None:
        state = new_state(sessions=2)
        lent = fill(state, 1, 7, 4)
        fill(state, 2, 1, 4)
        wanted = items(lent, [(2, 2), (3, 3)], session=1, request=7)
        decision = state.propose(2, 1, 0, wanted, approximate=False)
        assert decision
        state.close_requests(1, [7], [0])
        assert state.row_counts()[LIVE] == 18
        state.resolve(2, decision.decision_id, np.array([1, 0], np.uint8))
        assert state.row_counts()[LIVE] == 16
        assert state.row_counts()[QUARANTINED] == 1
        assert state.check_integrity() == []

    @pytest.mark.parametrize("mask", [[1], [1, 1, 1], [2, 0], [255, 1]])
    def test_answers_of_another_shape_are_refused(self, mask: list[int]) -> None:
        state = new_state(sessions=2)
        rows = fill(state, 1, 1, 6)
        decision = state.propose(1, 1, 0, items(rows, [(2, 1), (3, 1)]), approximate=True)
        assert decision
        with pytest.raises(InvalidArgument):
            state.resolve(1, decision.decision_id, np.array(mask, np.uint8))
        with pytest.raises(StaleGeneration):
            state.resolve(2, decision.decision_id, np.ones(2, np.uint8))
        assert state.check_integrity() == []
        assert state.resolve(1, decision.decision_id, np.empty(0, np.uint8)).missed == 2

    def test_the_taint_is_the_first_approximately_shared_position(self) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 6)
        table = state.request(1, 1, 0)
        share(state, rows, 4, 0)
        assert table.taint == 4
        share(state, rows, 2, 0)
        assert table.taint == 2
        state.truncate(1, 1, 0, 1, 2)
        assert table.taint == -1
        assert table.error == 0

    def test_exact_sharing_taints_nothing(self) -> None:
        state = new_state()
        rows = fill(state, 1, 1, 6)
        wanted = items(rows, [(2, 0)], session=1, request=1)
        decision = state.propose(1, 1, 0, wanted, approximate=False)
        assert decision
        state.resolve(1, decision.decision_id, np.ones(1, np.uint8))
        assert state.request(1, 1, 0).taint == -1


class TestBounds:
    def test_tenants_that_nobody_uses_are_forgotten_and_those_of_rows_are_not(self) -> None:
        state = ManagerState(64)
        for number in range(1, 3000):
            state.open_session(number, tenant=f"tenant {number}", num_layers=1)
            if number == 1:
                row, _ = state.lease(1, 1)
                state.confirm_zeroed(1, row)
            if number != 2:
                state.close_session(number)
                while not state.close_slice(number):
                    pass
        assert len(state._tenants) <= 1024
        assert {"tenant 1", "tenant 2"} <= set(state._tenants)
        state.open_session(3000, tenant="tenant 1", num_layers=1)
        assert not state.lease(3000, 1)[1].any()

    def test_open_requests_of_a_session_are_bounded(self) -> None:
        state = new_state(sessions=2)
        for number in range(MAX_REQUESTS):
            state.open_request(1, number, 0)
        with pytest.raises(InvalidArgument, match="close some") as refused:
            state.open_request(1, MAX_REQUESTS, 0)
        assert refused.value.details["max_requests"] == str(MAX_REQUESTS)
        state.open_request(2, 1, 0)
        state.close_requests(1, [0], [0])
        state.open_request(1, MAX_REQUESTS, 0)


class TestRestore:
    def snapshot(self, rows: np.ndarray, shared: np.ndarray | None = None) -> Snapshot:
        flags = np.zeros(rows.shape, np.bool_) if shared is None else shared
        return Snapshot([ids(40, 41)], [SnapshotTable(1, 3, 0, rows[0], rows[1], flags, 0.5)])

    def test_counts_are_what_they_were(self) -> None:
        rows = np.arange(16, dtype=np.int32).reshape(2, LAYERS, 4)
        shared = np.zeros(rows.shape, np.bool_)
        rows[0, 0, 2], shared[0, 0, 2] = rows[0, 0, 0], True
        state = new_state()
        state.restore(1, self.snapshot(rows, shared), approximate=True)
        assert state.check_integrity() == []
        assert (state.row_counts()[LIVE], state.row_counts()[LEASED]) == (15, 2)
        assert state.pool.references[0] == 2
        assert state.request(1, 1, 3).taint == 2
        assert state.request(1, 1, 3).error == 0.5

    @pytest.mark.parametrize(
        ("position", "row", "kind"),
        [
            (0, 5, InvalidArgument),  # twice
            (0, 40, InvalidArgument),  # leased and owned
            (0, -1, InvalidArgument),
            (0, 64, InvalidArgument),
            (0, 50, RowNotHeld),  # another session's
        ],
    )
    def test_a_contradictory_snapshot_changes_nothing(
        self, position: int, row: int, kind: type[MemshareError]
    ) -> None:
        state = new_state(sessions=2)
        state.lease(2, 60)
        state.return_rows(2, np.r_[0:50, 51:60].astype(np.int32))
        rows = np.arange(16, dtype=np.int32)
        rows[position] = row
        with pytest.raises(kind):
            state.restore(1, self.snapshot(rows.reshape(2, LAYERS, 4)), approximate=True)
        assert state.row_counts()[LEASED] == 1
        assert state.check_integrity() == []

    def test_a_table_in_parts_has_the_error_and_taint_of_all_of_them(self) -> None:
        rows = np.arange(16, dtype=np.int32).reshape(2, LAYERS, 4)
        shared = np.zeros(rows.shape, np.bool_)
        for token in (2, 3):
            rows[0, 0, token], shared[0, 0, token] = rows[0, 0, 0], True
        parts = [
            SnapshotTable(
                1, 3, 0, rows[0, :, span], rows[1, :, span], shared[:, :, span], error, span.start
            )
            for span, error in ((slice(0, 3), 0.25), (slice(3, 4), 0.5))
        ]
        state = new_state()
        state.restore(1, Snapshot([], parts), approximate=True)
        assert state.check_integrity() == []
        table = state.request(1, 1, 3)
        assert (table.sealed, table.taint, table.error) == (4, 2, 0.75)
        assert table.errors[0, 0].tolist() == [0, 0, 0.25, 0.5]
        assert np.array_equal(table.rows, rows)

    def test_a_session_is_restored_once(self) -> None:
        state = new_state()
        rows = np.arange(16, dtype=np.int32).reshape(2, LAYERS, 4)
        state.restore(1, self.snapshot(rows), approximate=True)
        with pytest.raises(InvalidArgument, match="once"):
            state.restore(1, self.snapshot(rows), approximate=True)


def test_check_integrity_sees_what_is_broken() -> None:
    def broken(change: str) -> list[str]:
        state = new_state()
        rows = fill(state, 1, 1, 4)
        share(state, rows, 2, 0)
        exec(change, {"state": state, "table": state.request(1, 1, 0), "rows": rows})
        return state.check_integrity()

    assert broken("pass") == []
    for change in (
        "state.pool.references[rows[0, 0, 0]] += 1",
        "state.pool.pins[3] = 1",
        "state.pool.state[rows[0, 0, 1]] = 0",
        "state.pool.state[40] = 2",
        "state.pool.holder[40] = 0",
        "state.pool.holder[rows[0, 0, 1]] = 9",
        "state.pool.tenant[rows[0, 0, 1]] = 9",
        "state.pool.quarantine.clear()",
        "table.rows[0, 0, 3] = table.rows[0, 0, 1]",
        "table.entries[0, 0, 2] = 0",
        "table.entries[0, 0, 1] = 1",
        "table.error = 5.0",
        "table.taint = 50",
        "state.pool._leased[1] = 3",
    ):
        assert broken(change), change

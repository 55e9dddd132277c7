"""All invariants hold after any sequence of calls, refused ones included."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memshare.manager.decisions import Candidates, Decision
from memshare.manager.recovery import Snapshot, SnapshotTable
from memshare.manager.rows import RowState
from memshare.manager.state import ManagerState
from memshare.manager.tables import OWN, SHARED
from memshare.wire.errors import MemshareError

ROWS = 96
LAYERS = 2


def raises_and_changes_nothing(state: ManagerState, call: object) -> None:
    before = state.row_counts()
    try:
        call()  # type: ignore[operator]
    except MemshareError:
        assert state.row_counts() == before


class Sharing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = ManagerState(ROWS)
        self.next_session = 1
        self.next_request = 1
        self.leased: dict[int, list[int]] = {}
        self.step = 0

    @initialize()
    def begin(self) -> None:
        for tenant in ("a", "a", ""):
            session = self.add_session(tenant, 0)
            for _ in range(2):
                self.add_request(session, 0)
                self.grow((session, self.next_request - 1, 0), 3)

    def open_sessions(self) -> list[int]:
        return [s.session_id for s in self.state.sessions.values() if not s.closing]

    def pick_session(self, data: st.DataObject) -> int | None:
        sessions = self.open_sessions()
        return data.draw(st.sampled_from(sessions)) if sessions else None

    def pick_request(self, data: st.DataObject) -> tuple[int, int, int] | None:
        choices = [
            (session.session_id, table.request_id, table.generation)
            for session, table in self.state.tables()
            if not session.closing
        ]
        return data.draw(st.sampled_from(choices)) if choices else None

    @precondition(lambda self: len(self.open_sessions()) < 4)
    @rule(tenant=st.sampled_from(["", "a", "b"]), max_rows=st.sampled_from([0, 0, 20]))
    def open_session(self, tenant: str, max_rows: int) -> None:
        self.add_session(tenant, max_rows)

    def add_session(self, tenant: str, max_rows: int) -> int:
        self.state.open_session(
            self.next_session, tenant=tenant, num_layers=LAYERS, max_rows=max_rows
        )
        self.leased[self.next_session] = []
        self.next_session += 1
        return self.next_session - 1

    def add_request(self, session: int, first: int) -> None:
        self.state.open_request(session, self.next_request, 0, first)
        self.next_request += 1

    @rule(data=st.data(), count=st.integers(-1, 40))
    def lease(self, data: st.DataObject, count: int) -> None:
        session = self.pick_session(data)
        if session is not None:
            self.lease_rows(session, count)

    def lease_rows(self, session: int, count: int) -> None:
        free = self.state.row_counts()[RowState.FREE]
        try:
            rows, foreign = self.state.lease(session, count)
        except MemshareError:
            assert self.state.row_counts()[RowState.FREE] == free
            return
        assert len(rows) == count == len(set(rows.tolist()))
        if foreign.any():
            self.state.confirm_zeroed(session, rows[foreign])
        self.leased[session] += rows.tolist()

    @rule(data=st.data(), tokens=st.integers(1, 3))
    def grow_a_request(self, data: st.DataObject, tokens: int) -> None:
        """What engines mostly do, in one rule, so that there is something to share."""
        choice = self.pick_request(data)
        if choice is not None:
            self.grow(choice, tokens)

    def grow(self, choice: tuple[int, int, int], tokens: int) -> None:
        count = 2 * LAYERS * tokens
        if len(self.leased[choice[0]]) < count:
            self.lease_rows(choice[0], count)
        rows = np.array(self.leased[choice[0]][:count], np.int32)
        if len(rows) == count:
            start = self.state.request(*choice).sealed
            self.state.seal(*choice, start, rows[: count // 2], rows[count // 2 :])
            del self.leased[choice[0]][:count]

    @rule(data=st.data(), rows=st.lists(st.integers(-2, ROWS + 1), max_size=3))
    def return_any_rows(self, data: st.DataObject, rows: list[int]) -> None:
        session = self.pick_session(data)
        if session is None:
            return
        held = self.leased[session]
        legal = bool(rows) and len(set(rows)) == len(rows) and set(rows) <= set(held)
        before = self.state.row_counts()
        try:
            self.state.return_rows(session, np.array(rows, np.int32))
        except MemshareError:
            assert not legal
            assert self.state.row_counts() == before
            return
        assert legal
        self.leased[session] = [row for row in held if row not in rows]

    @rule(data=st.data())
    def open_request(self, data: st.DataObject) -> None:
        session = self.pick_session(data)
        if session is not None:
            self.add_request(session, data.draw(st.integers(0, 1)))

    @rule(data=st.data(), tokens=st.integers(1, 4))
    def seal(self, data: st.DataObject, tokens: int) -> None:
        choice = self.pick_request(data)
        if choice is None:
            return
        session, request, generation = choice
        rows = self.leased[session][: 2 * LAYERS * tokens]
        start = self.state.request(*choice).sealed
        half = len(rows) // 2
        keys, values = np.array(rows[:half], np.int32), np.array(rows[half:], np.int32)
        try:
            self.state.seal(session, request, generation, start, keys, values)
        except MemshareError:
            assert len(rows) % (2 * LAYERS) or not rows
            return
        self.leased[session] = self.leased[session][len(rows) :]

    @rule(data=st.data())
    def wrong_seal(self, data: st.DataObject) -> None:
        choice = self.pick_request(data)
        if choice is None:
            return
        rows = np.array(
            data.draw(st.lists(st.integers(-1, ROWS), min_size=4, max_size=4)), np.int32
        )
        held = self.leased[choice[0]]
        if len(set(rows.tolist())) == 4 and set(rows.tolist()) <= set(held):
            return
        start = self.state.request(*choice).sealed
        before = self.state.row_counts()
        try:
            self.state.seal(*choice, start, rows[:2], rows[2:])
        except MemshareError:
            assert self.state.row_counts() == before
        else:
            raise AssertionError("rows that are not leased were sealed")

    @rule(data=st.data(), approximate=st.booleans(), answers=st.sampled_from([1, 1, 1, 0]))
    def propose(self, data: st.DataObject, approximate: bool, answers: int) -> None:
        choice = self.pick_request(data)
        lender = self.pick_request(data)
        if choice is None or lender is None:
            return
        if approximate:
            lender = choice
        draw = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
        for _ in range(3):
            decision = self.propose_some(choice, lender, approximate, draw)
            if decision is not None and answers:
                self.answer(decision, draw)

    def propose_some(
        self,
        choice: tuple[int, int, int],
        lender: tuple[int, int, int],
        approximate: bool,
        draw: np.random.Generator,
    ) -> Decision | None:
        table, lending = self.state.request(*choice), self.state.request(*lender)
        if not table.sealed or not lending.sealed:
            return None
        count = int(draw.integers(1, 20))
        kinds = draw.integers(0, 2, count).astype(np.uint8)
        layers = draw.integers(0, LAYERS, count).astype(np.uint16)
        targets = draw.integers(0, table.sealed, count).astype(np.int32)
        donors = draw.integers(0, lending.sealed, count).astype(np.int32)
        items = Candidates(
            layers, kinds, targets, donors, lending.rows[kinds, layers, donors],
            np.zeros(count, np.float32) if not approximate else draw.random(count, np.float32),
            None if approximate else np.full(count, lender[0], np.uint64),
            None if approximate else np.full(count, lender[1], np.uint64),
        )  # fmt: skip
        decision = self.state.propose(*choice, items, approximate=approximate)
        if decision is None:
            return None
        chosen, borrower = decision.items, self.state.session(choice[0])
        assert len(np.unique(decision.target_rows)) == len(chosen)
        assert not np.isin(chosen.donor_rows, decision.target_rows).any()
        donor_entries = lending.entries[chosen.kinds, chosen.layers, chosen.donors]
        assert (donor_entries == OWN).all()
        if lender != choice:
            assert self.state.session(lender[0]).tenant == borrower.tenant
            assert borrower.tenant
        return decision

    def answer(self, decision: Decision, draw: np.random.Generator) -> None:
        size = len(decision.items)
        mask = draw.random(size if draw.random() < 0.9 else 0) < 0.7
        resolution = self.state.resolve(
            decision.session_id, decision.decision_id, mask.astype(np.uint8)
        )
        assert resolution.applied == mask.sum()
        assert resolution.missed == size - mask.sum()

    @precondition(lambda self: self.state.pending)
    @rule(data=st.data(), seed=st.integers(0, 1 << 20))
    def resolve(self, data: st.DataObject, seed: int) -> None:
        decision = self.state.pending[data.draw(st.sampled_from(sorted(self.state.pending)))]
        self.answer(decision, np.random.default_rng(seed))

    @rule(data=st.data())
    def answer_stale(self, data: st.DataObject) -> None:
        session_id = self.pick_session(data)
        session = self.state.sessions.get(session_id or 0)
        if session is None or not session.stale:
            return
        decision_id, size = next(iter(session.stale.items()))
        missed = session.counters.missed
        assert self.state.resolve(session_id, decision_id, np.empty(0, np.uint8)).missed == size
        assert session.counters.missed == missed + size

    @rule(data=st.data(), forward=st.integers(0, 2))
    def truncate(self, data: st.DataObject, forward: int) -> None:
        choice = self.pick_request(data)
        if choice is None:
            return
        session, request, generation = choice
        keep = data.draw(st.integers(0, self.state.request(*choice).sealed))
        call = lambda: self.state.truncate(  # noqa: E731
            session, request, generation, generation + forward, keep
        )
        if forward:
            call()
        else:
            raises_and_changes_nothing(self.state, call)

    @rule(data=st.data())
    def close_request(self, data: st.DataObject) -> None:
        choice = self.pick_request(data)
        if choice is not None:
            self.state.close_requests(choice[0], [choice[1]], [choice[2]])

    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        session = self.pick_session(data)
        if session is None:
            return
        self.step += 1
        self.state.step_completed(session, self.step)
        assert self.state.pool.quarantined_by(self.state.session(session).slot) == 0

    @precondition(lambda self: len(self.open_sessions()) > 2)
    @rule(data=st.data())
    def begin_to_close(self, data: st.DataObject) -> None:
        session = self.pick_session(data)
        if session is not None:
            self.state.close_session(session)
            del self.leased[session]

    @rule(limit=st.integers(1, 30))
    def close_some_more(self, limit: int) -> None:
        for session in [s for s in self.state.sessions.values() if s.closing]:
            self.state.close_slice(session.session_id, limit)

    @rule()
    def restore_elsewhere(self) -> None:
        """A new manager that hears all snapshots counts what this one counts."""
        if any(s.closing or s.condemned for s in self.state.sessions.values()):
            return
        restored = ManagerState(ROWS)
        for session in self.state.sessions.values():
            restored.open_session(
                session.session_id, tenant=session.tenant, num_layers=LAYERS,
                max_rows=session.max_rows,
            )  # fmt: skip
        for session in self.state.sessions.values():
            restored.restore(session.session_id, snapshot_of(self, session), approximate=True)
            assert restored.check_integrity() == []
        counts, pool = self.state.row_counts(), self.state.pool
        only_pinned = int(((pool.references == 0) & (pool.pins > 0)).sum())
        gone = counts[RowState.QUARANTINED] + only_pinned
        assert restored.row_counts() == {
            RowState.FREE: counts[RowState.FREE] + gone,
            RowState.LEASED: counts[RowState.LEASED],
            RowState.LIVE: counts[RowState.LIVE] - only_pinned,
            RowState.QUARANTINED: 0,
        }
        assert np.array_equal(restored.pool.references, pool.references)

    @invariant()
    def counts_hold(self) -> None:
        assert self.state.check_integrity() == []
        assert sum(self.state.row_counts().values()) == ROWS


def snapshot_of(machine: Sharing, session: object) -> Snapshot:
    snapshot = Snapshot(leases=[np.array(machine.leased[session.session_id], np.int32)])  # type: ignore[attr-defined]
    for table in session.requests.values():  # type: ignore[attr-defined]
        snapshot.tables.append(
            SnapshotTable(
                table.request_id,
                table.generation,
                table.first_token,
                table.rows[0].ravel(),
                table.rows[1].ravel(),
                (table.entries == SHARED).ravel(),
                table.error,
            )
        )
    return snapshot


TestSharing = Sharing.TestCase
TestSharing.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

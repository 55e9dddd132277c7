"""Engines that reuse their blocks as they please never change one that another names.

Each row has a version, new whenever an engine writes it; each entry of a table remembers the one
it was sealed or applied with. Engines hear of the manager in order, but late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memshare.manager import lending
from memshare.manager.blocks import BlockPool
from memshare.manager.decisions import Candidates, Decision
from memshare.manager.lending import Ask
from memshare.manager.recovery import Snapshot, SnapshotTable
from memshare.manager.rows import RowState
from memshare.manager.state import ManagerState
from memshare.manager.tables import OWN, SHARED
from memshare.wire.errors import MemshareError

ROWS = 64
GROUPS = 2
NONE = np.empty(0, np.int32)
Name = tuple[int, int, int]


@dataclass
class Engine:
    """What one engine knows: its blocks, its promises, and what it has not read yet."""

    tenant: str
    leased: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    inbox: deque[Ask | list[int]] = field(default_factory=deque)
    versions: dict[int, np.ndarray] = field(default_factory=dict)
    """By request, [groups, sealed]."""


@dataclass(eq=False)
class Search:
    """Exact matches that were found, until they are proposed."""

    name: Name
    items: Candidates
    versions: np.ndarray
    as_of: int
    asks: list[Ask]


class Blocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = ManagerState(ROWS, blocks=True)
        self.engines: dict[int, Engine] = {}
        self.searches: list[Search] = []
        self.versions = np.zeros(ROWS, np.int64)
        self.next_session = self.next_request = 1

    @property
    def pool(self) -> BlockPool:
        assert isinstance(self.state.pool, BlockPool)
        return self.state.pool

    @initialize()
    def begin(self) -> None:
        for tenant in ("a", "a", ""):
            session = self.add_session(tenant)
            for _ in range(2):
                self.add_request(session)
                self.grow((session, self.next_request - 1, 0), 3, np.random.default_rng(session))

    # What engines do

    def add_session(self, tenant: str) -> int:
        session, self.next_session = self.next_session, self.next_session + 1
        self.engines[session] = Engine(tenant)
        self.state.open_session(session, tenant=tenant, num_layers=GROUPS)
        self.lease(session, 12)
        return session

    def lease(self, session: int, count: int) -> None:
        try:
            rows, _ = self.state.lease(session, count)
        except MemshareError:
            return
        self.state.confirm_zeroed(session, rows)
        self.engines[session].leased |= set(rows.tolist())

    def add_request(self, session: int) -> None:
        request, self.next_request = self.next_request, self.next_request + 1
        self.state.open_request(session, request, 0)
        self.engines[session].versions[request] = np.empty((GROUPS, 0), np.int64)

    def named(self, session: int) -> set[int]:
        tables = self.state.sessions[session].requests.values()
        return {row for table in tables for row in table.rows.ravel().tolist()}

    def unused(self, session: int) -> list[int]:
        engine = self.engines[session]
        return sorted(engine.leased - self.named(session) - engine.pinned)

    def grow(self, name: Name, blocks: int, draw: np.random.Generator) -> None:
        session, request, _ = name
        own = sorted(self.engines[session].leased - set(self.unused(session)))
        written = self.unused(session)[: GROUPS * blocks]
        rows = np.array(written, np.int32)
        cached = draw.random(len(rows)) < 0.3  # found in the engine's own prefix cache
        if own and cached.any():
            cached[len(own) :] = False
            rows[cached] = draw.permutation(own)[: cached.sum()]
        if len(rows) < GROUPS * blocks:
            return
        self.versions[rows[~cached]] += 1
        table = self.state.request(*name)
        start = table.sealed
        similar = np.full((blocks, 1), -1, np.int32)
        self.state.seal(*name, start, rows, NONE, similar)
        mine = self.engines[session].versions
        sealed = self.versions[rows].reshape(GROUPS, blocks)
        mine[request] = np.concatenate((mine[request], sealed), axis=1)

    # Who does it

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.engines)))

    def names(self) -> list[Name]:
        return [
            (session.session_id, table.request_id, table.generation)
            for session, table in self.state.tables()
        ]

    def pick_request(self, data: st.DataObject) -> Name | None:
        names = self.names()
        return data.draw(st.sampled_from(names)) if names else None

    @precondition(lambda self: len(self.engines) < 4)
    @rule(tenant=st.sampled_from(["a", "a", "b", ""]))
    def attach(self, tenant: str) -> None:
        self.add_session(tenant)

    @rule(data=st.data(), count=st.integers(1, 12))
    def lease_more(self, data: st.DataObject, count: int) -> None:
        self.lease(self.pick(data), count)

    @rule(data=st.data(), count=st.integers(1, 6))
    def give_some_back(self, data: st.DataObject, count: int) -> None:
        session = self.pick(data)
        # What a decision offers that the engine has not answered yet would be refused.
        free = [row for row in self.unused(session) if self.pool.state[row] == RowState.LEASED]
        if rows := free[:count]:
            self.state.return_rows(session, np.array(rows, np.int32))
            self.engines[session].leased -= set(rows)

    @rule(data=st.data())
    def open_request(self, data: st.DataObject) -> None:
        self.add_request(self.pick(data))

    @rule(data=st.data(), blocks=st.integers(1, 4), seed=st.integers(0, 999))
    def seal(self, data: st.DataObject, blocks: int, seed: int) -> None:
        if name := self.pick_request(data):
            self.grow(name, blocks, np.random.default_rng(seed))

    @rule(data=st.data())
    def seal_what_is_not_its_own(self, data: st.DataObject) -> None:
        name = self.pick_request(data)
        if name is None:
            return
        rows = data.draw(st.lists(st.integers(0, ROWS - 1), min_size=2, max_size=2, unique=True))
        if set(rows) <= self.engines[name[0]].leased:
            return
        before = self.state.row_counts()
        try:
            sealed = self.state.request(*name).sealed
            self.state.seal(*name, sealed, np.array(rows, np.int32), NONE)
        except MemshareError:
            assert self.state.row_counts() == before
        else:
            raise AssertionError("blocks of others were sealed")

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        if name := self.pick_request(data):
            keep = data.draw(st.integers(0, self.state.request(*name).sealed))
            self.state.truncate(*name, name[2] + 1, keep)
            mine = self.engines[name[0]].versions
            mine[name[1]] = mine[name[1]][:, :keep]

    @rule(data=st.data())
    def close_request(self, data: st.DataObject) -> None:
        if name := self.pick_request(data):
            self.state.close_requests(name[0], [name[1]], [name[2]])
            del self.engines[name[0]].versions[name[1]]

    # Sharing

    @rule(data=st.data(), seed=st.integers(0, 1 << 20))
    def share_similar(self, data: st.DataObject, seed: int) -> None:
        if name := self.pick_request(data):
            draw = np.random.default_rng(seed)
            items = self.pair(name, name, draw, similar=True)
            self.decide(self.state.propose(*name, items, approximate=True), draw)

    @rule(data=st.data(), seed=st.integers(0, 1 << 20))
    def search_equal(self, data: st.DataObject, seed: int) -> None:
        if name := self.pick_request(data):
            lender = self.pick_request(data) or name
            self.search(name, lender, np.random.default_rng(seed))

    @rule(data=st.data(), seed=st.integers(0, 1 << 20), steps=st.integers(0, 3))
    def borrow(self, data: st.DataObject, seed: int, steps: int) -> None:
        """What engines of a tenant mostly do, whole or in part: ask, be answered, propose."""
        names = [name for name in self.names() if self.engines[name[0]].tenant == "a"]
        pairs = [(name, lender) for name in names for lender in names if name[0] != lender[0]]
        if not pairs:
            return
        draw = np.random.default_rng(seed)
        self.search(*data.draw(st.sampled_from(pairs)), draw)
        search = self.searches[-1] if self.searches else None
        if search is None or not steps:
            return
        for lender in {ask.lender for ask in search.asks}:
            while self.engines[lender].inbox:
                self.read_next(lender, refuses=False)
        if steps > 1 and search in self.searches:
            self.propose_found(self.searches.index(search), draw)

    def pair(
        self, name: Name, lender: Name, draw: np.random.Generator, *, similar: bool
    ) -> Candidates:
        """Some entries of a request and some of another's, mostly such as may be shared."""
        table, lending_table = self.state.request(*name), self.state.request(*lender)
        count = int(draw.integers(1, 12)) if table.sealed and lending_table.sealed else 0
        groups = draw.integers(0, GROUPS, count).astype(np.uint16)
        donors = draw.integers(0, max(1, lending_table.sealed), count).astype(np.int32)
        targets = draw.integers(0, max(1, table.sealed), count).astype(np.int32)
        return Candidates(
            groups, np.zeros(count, np.uint8), targets, donors,
            lending_table.rows[0, groups, donors],
            draw.random(count, np.float32) if similar else np.zeros(count, np.float32),
            None if similar else np.full(count, lender[0], np.uint64),
            None if similar else np.full(count, lender[1], np.uint64),
        )  # fmt: skip

    def search(self, name: Name, lender: Name, draw: np.random.Generator) -> None:
        items = self.pair(name, lender, draw, similar=False)
        as_of = self.state.clock
        asks = lending.ask(self.state, *name, items, as_of)
        for ask in asks:
            self.engines[ask.lender].inbox.append(ask)
        self.searches.append(Search(name, items, self.versions.copy(), as_of, asks))
        if not asks:
            self.propose_found(len(self.searches) - 1, draw)

    @precondition(lambda self: self.searches)
    @rule(data=st.data(), seed=st.integers(0, 1 << 20))
    def stop_waiting(self, data: st.DataObject, seed: int) -> None:
        """For the answers to a search, whether they have come or not."""
        at = data.draw(st.integers(0, len(self.searches) - 1))
        self.propose_found(at, np.random.default_rng(seed))

    def propose_found(self, at: int, draw: np.random.Generator) -> None:
        search = self.searches.pop(at)
        decision = None
        if search.name in self.names():
            decision = self.state.propose(
                *search.name, search.items, approximate=False, as_of=search.as_of
            )
        if decision is not None:
            donors = decision.items.donor_rows
            foreign = self.pool.holder[donors] != self.state.session(search.name[0]).slot
            assert (self.versions[donors] == search.versions[donors])[foreign].all()
            assert self.pool.lent[donors[foreign]].all()
        for ask in search.asks:
            lending.finish(self.state, ask.pin_id)
        self.decide(decision, draw)

    def decide(self, decision: Decision | None, draw: np.random.Generator) -> None:
        if decision is not None and draw.random() < 0.7:
            self.answer(decision, draw)

    def answer(self, decision: Decision, draw: np.random.Generator) -> None:
        """The engine applies what it finds unchanged, its own donors among it."""
        session, items = decision.session_id, decision.items
        own = self.pool.holder[items.donor_rows] == self.state.session(session).slot
        free = np.isin(items.donor_rows, self.unused(session))
        mask = (draw.random(len(items)) < 0.8) & ~(own & free)
        table = self.state.request(session, decision.request_id, decision.generation)
        self.state.resolve(session, decision.decision_id, mask.astype(np.uint8))
        where = items.layers[mask], items.targets[mask]
        donors = items.donor_rows[mask]
        assert (table.rows[0][where] == donors).all()
        self.engines[session].versions[decision.request_id][where] = self.versions[donors]

    @precondition(lambda self: self.state.pending)
    @rule(data=st.data(), seed=st.integers(0, 1 << 20))
    def answer_late(self, data: st.DataObject, seed: int) -> None:
        decision = self.state.pending[data.draw(st.sampled_from(sorted(self.state.pending)))]
        self.answer(decision, np.random.default_rng(seed))

    @rule(data=st.data(), refuses=st.sampled_from([False, False, False, True]))
    def read(self, data: st.DataObject, refuses: bool) -> None:
        """An engine reads the next message of the manager."""
        waiting = [session for session, engine in self.engines.items() if engine.inbox]
        if not waiting:
            return
        self.read_next(data.draw(st.sampled_from(waiting)), refuses=refuses)

    def read_next(self, session: int, *, refuses: bool) -> None:
        engine = self.engines[session]
        message = engine.inbox.popleft()
        if isinstance(message, list):
            assert set(message) <= engine.pinned
            engine.pinned -= set(message)
            return
        mask = np.zeros(len(message.rows), np.uint8)
        if not refuses:
            for place, row in enumerate(message.rows.tolist()):
                name = session, int(message.requests[place]), int(message.generations[place])
                if name in self.names():
                    table = self.state.request(*name)
                    at = 0, int(message.groups[place]), int(message.indices[place])
                    mask[place] = at[2] < table.sealed and table.rows[at] == row
            engine.pinned |= set(message.rows[mask.astype(np.bool_)].tolist())
        lending.answer(self.state, session, message.pin_id, mask)

    # Ends and beginnings

    def forget(self, session: int) -> None:
        """The session's driver ends, and its stream."""
        for search in [search for search in self.searches if search.name[0] == session]:
            self.searches.remove(search)
            for ask in search.asks:
                lending.finish(self.state, ask.pin_id)
        lending.forsake(self.state, self.state.session(session))
        self.engines[session].inbox.clear()

    def release(self, session: int) -> None:
        self.state.close_session(session)
        while not self.state.close_slice(session, 7):
            self.tell()
            assert self.state.check_integrity() == []

    @precondition(lambda self: len(self.engines) > 2)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.forget(session)
        self.release(session)
        del self.engines[session]

    def snapshot(self, session: int, tables: list[SnapshotTable], whole: bool) -> Snapshot:
        engine = self.engines[session]
        owned = {
            row
            for table in tables
            for row in table.key_rows.reshape(-1)[~table.shared.reshape(-1)].tolist()
        }
        leases = engine.leased if whole else engine.leased - owned
        return Snapshot([ids(leases)], tables, [ids(engine.pinned)])

    def tables_of(self, session: int) -> list[SnapshotTable]:
        return [
            SnapshotTable(
                table.request_id, table.generation, 0, table.rows[0].copy(), NONE,
                (table.entries == SHARED).copy(), table.error,
            )
            for table in self.state.session(session).requests.values()
        ]  # fmt: skip

    @rule(data=st.data(), whole=st.booleans())
    def resume(self, data: st.DataObject, whole: bool) -> None:
        """One engine comes back after its stream broke; the others stay."""
        session = self.pick(data)
        snapshot = self.snapshot(session, self.tables_of(session), whole)
        self.forget(session)
        lending.keep_borrowed(self.state, self.state.session(session))
        self.release(session)
        self.state.open_session(session, tenant=self.engines[session].tenant, num_layers=GROUPS)
        self.restore(session, snapshot)
        lending.settle(self.state)

    @rule(data=st.data(), whole=st.booleans())
    def restart(self, data: st.DataObject, whole: bool) -> None:
        """A new manager hears all snapshots, in any order."""
        pool = self.pool
        snapshots = {
            session: self.snapshot(session, self.tables_of(session), whole)
            for session in data.draw(st.permutations(sorted(self.engines)))
        }
        self.state = ManagerState(ROWS, blocks=True)
        self.searches.clear()
        for session, engine in self.engines.items():
            engine.inbox.clear()
            self.state.open_session(session, tenant=engine.tenant, num_layers=GROUPS)
        for session, snapshot in snapshots.items():
            self.restore(session, snapshot)
        lending.settle(self.state)
        assert np.array_equal(self.pool.references, pool.references)
        live = pool.references > 0
        assert np.array_equal(self.pool.state[live], pool.state[live])
        for session, engine in self.engines.items():
            assert self.pool.held_by(self.state.session(session).slot) == len(engine.leased)

    def restore(self, session: int, snapshot: Snapshot) -> None:
        self.state.restore(session, snapshot, approximate=True)
        assert self.state.check_integrity() == []

    # What always holds

    def tell(self) -> None:
        for session, rows in lending.take_returned(self.state).items():
            # Nobody listens at the end of a stream that broke.
            if session in self.engines and not self.state.sessions[session].closing:
                self.engines[session].inbox.append(rows.tolist())

    @invariant()
    def counts_hold(self) -> None:
        self.tell()
        assert self.state.check_integrity() == []
        assert sum(self.state.row_counts().values()) == ROWS
        assert self.state.row_counts()[RowState.QUARANTINED] == 0

    @invariant()
    def no_entry_names_what_was_overwritten(self) -> None:
        for session, table in self.state.tables():
            mine = self.engines[session.session_id].versions[table.request_id]
            assert np.array_equal(self.versions[table.rows[0]], mine)
            assert (self.pool.holder[table.rows[table.entries == OWN]] == session.slot).all()

    @invariant()
    def every_promise_is_known_or_on_its_way_back(self) -> None:
        for session, engine in self.engines.items():
            slot = self.state.session(session).slot
            on_its_way = {
                row for message in engine.inbox if isinstance(message, list) for row in message
            }
            lent = set(np.flatnonzero(self.pool.lent & (self.pool.holder == slot)).tolist())
            assert lent == engine.pinned - on_its_way
            held = set(np.flatnonzero(self.pool.holder == slot).tolist())
            assert held == engine.leased


def ids(rows: set[int]) -> np.ndarray:
    return np.array(sorted(rows), np.int32)


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

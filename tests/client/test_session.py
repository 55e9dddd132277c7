"""A session with the real sidecar: rows, steps, decisions."""

from __future__ import annotations

import dataclasses
import os
import threading

import numpy as np
import pytest

from memshare.client import SessionOptions, attach
from memshare.client.cli.sidecar import running_sidecar
from memshare.client.tables import BLOCK_TOKENS, KEY, VALUE
from memshare.client.uplink import Uplink
from memshare.v1 import common_pb2
from memshare.wire import tokens
from memshare.wire.errors import (
    AgentUnavailable,
    InvalidArgument,
    LayoutMismatch,
    ManagerUnavailable,
    PoolExhausted,
    PoolLost,
    TokenRefused,
    VersionMismatch,
)
from tests.client.harness import (
    LAYERS,
    LAYOUT,
    PER_TOKEN,
    PERIOD,
    ROW,
    TinyEngine,
    assert_counted,
    attached,
    counts,
    held_rows,
    run_engine,
    wait_for,
)

BLOCK_ROWS = BLOCK_TOKENS * PER_TOKEN


@pytest.fixture(autouse=True)
def _all_rows_come_back(sidecar):
    """Whatever a test did, its rows are free again after it."""
    yield
    wait_for(lambda: counts(sidecar).free == counts(sidecar).total, "all rows")


# ---- the life of a request ----------------------------------------------------------------


def test_a_request_lives_from_open_to_close_and_leaves_nothing(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 40)
        for _ in range(60):
            engine.step(tables)
        engine.assert_intact(tables)
        shared = engine.share(tables)
        assert shared > 0
        engine.assert_intact(tables)
        assert_counted(sidecar, session)
        with sidecar.admin() as admin:
            (request,) = admin.requests(session.session_id)
        assert request.sealed_tokens == 100
        assert request.shared_keys + request.shared_values == shared
        session.close_requests([tables])
        session.synchronise()
        assert held_rows(session)[0] == counts(sidecar).live == 0
        assert session.statistics.rejected == 0


def test_shared_rows_come_back_to_the_pool_and_serve_others(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 8 * PERIOD)
        engine.synchronise()
        shared = engine.share(tables)
        live = counts(sidecar).live
        assert live == tables.sealed * PER_TOKEN - shared
        assert shared > 0.8 * tables.sealed * PER_TOKEN
        # A key of the second period is the first one's, turned by whole periods.
        deltas = tables.deltas[tables.shared[KEY][:, : tables.deltas.shape[1]]]
        assert (deltas > 0).all()
        assert (deltas % PERIOD == 0).all()


def test_a_session_counts_what_it_did(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 3 * PERIOD)
        shared = engine.share(tables)
        statistics = session.statistics
        assert statistics.applied == shared
        assert statistics.sealed_tokens == 3 * PERIOD
        assert (statistics.rejected, statistics.missed, statistics.overflow_tokens) == (0, 0, 0)
        assert statistics.waits == 1


def test_only_whole_blocks_are_sealed_on_the_way(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 10)
        for _ in range(5):
            engine.step(tables)
        assert tables.sealed == 0
        for _ in range(2):
            engine.step(tables)
        assert tables.sealed == BLOCK_TOKENS
        engine.synchronise()
        assert tables.sealed == 17


def test_a_decode_step_never_waits_for_rows(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 16)
        for _ in range(200):
            engine.step(tables)
        assert session.statistics.waits == 1


def test_detaching_twice_and_closing_twice_is_safe(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 16)
        session.close_requests([tables, tables])
        session.close_requests([tables])
        session.detach()
        session.detach()
        assert session.state == "closed"
        with pytest.raises(PoolLost, match=r"is closed.*attach a new session"):
            session.open_request()


def test_detaching_ends_the_open_requests(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        engine.step(engine.open(), 40)
        engine.step(engine.open(), 40)
        engine.synchronise()
        assert counts(sidecar).live > 0
    rows = counts(sidecar)
    assert rows.free == rows.total
    # What is mapped stays readable.
    engine.assert_intact(engine.requests[0])


def test_sessions_end_without_leaking_threads_or_descriptors(sidecar):
    def resources():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once():
        with attached(sidecar) as session:
            engine = TinyEngine(session)
            engine.step(engine.open(), 20)

    for _ in range(3):
        once()
    wait_for(lambda: resources()[1] < 100, "threads")
    before = resources()
    for _ in range(10):
        once()
    wait_for(lambda: resources() <= before or resources()[0] <= before[0] + 2, "descriptors")
    wait_for(lambda: resources()[1] <= before[1] + 2, "threads")


# ---- decisions ------------------------------------------------------------------------------


def test_decisions_are_applied_between_two_steps_and_never_before(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        engine.finish()
        before = tables.rows.copy(), tables.deltas.copy()
        wait_for(lambda: session._uplink.decisions, "a decision")
        assert (tables.rows == before[0]).all()
        assert (tables.deltas == before[1]).all()
        assert not tables.shared.any()
        session.end_step()
        assert tables.shared.any()
        engine.assert_intact(tables)


def test_a_rollback_makes_undecided_sharing_a_miss(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        engine.finish()
        wait_for(lambda: session._uplink.decisions, "a decision")
        session.truncate(tables, 3 * PERIOD)
        assert tables.generation == 2
        before = tables.rows[:, :, : 3 * PERIOD].copy()
        session.end_step()
        assert (tables.rows[:, :, : 3 * PERIOD] == before).all()
        assert session.statistics.applied == 0
        assert session.statistics.missed > 0
        assert_counted(sidecar, session)
        # The request goes on, and shares.
        engine.step(tables, 2 * PERIOD)
        assert engine.share(tables) > 0
        engine.assert_intact(tables)
        assert_counted(sidecar, session)
        assert session.statistics.rejected == 0


def test_decisions_on_a_request_that_was_closed_are_misses(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        engine.finish()
        wait_for(lambda: session._uplink.decisions, "a decision")
        session.close_requests([tables])
        engine.requests.clear()
        session.end_step()
        assert session.statistics.missed > 0
        session.synchronise()
        assert counts(sidecar).live == 0


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 40, 63, 64, 65, 100])
def test_a_rollback_to_any_length_keeps_both_sides_agreed(sidecar, length):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 65)
        engine.share(tables)
        for _ in range(35):
            engine.step(tables)
        engine.finish()
        session.truncate(tables, length)
        engine.assert_intact(tables)
        assert_counted(sidecar, session)
        engine.step(tables, 20)
        for _ in range(20):
            engine.step(tables)
        engine.share(tables)
        engine.assert_intact(tables)
        assert_counted(sidecar, session)
        assert session.statistics.rejected == 0


def test_random_steps_rollbacks_and_closes_keep_both_sides_agreed(sidecar):
    random = np.random.default_rng(7)
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        for _ in range(250):
            act = random.random()
            if not engine.requests or (act < 0.05 and len(engine.requests) < 5):
                engine.step(engine.open(), int(random.integers(1, 90)))
                continue
            tables = engine.requests[random.integers(len(engine.requests))]
            if act < 0.8:
                engine.step(tables)
            elif act < 0.9 and tables.length:
                engine.finish()
                session.truncate(tables, int(random.integers(tables.length)))
            elif act < 0.93:
                engine.requests.remove(tables)
                session.close_requests([tables])
            else:
                engine.synchronise()
        assert_counted(sidecar, session)
        for tables in engine.requests:
            engine.assert_intact(tables)
        assert session.statistics.rejected == 0
        assert session.statistics.applied > 0


def test_a_policy_changed_by_the_operator_reaches_the_session(sidecar):
    with attached(sidecar) as session, sidecar.admin() as admin:
        admin.set_policy("exact", session.session_id)
        wait_for(lambda: session.policy.name == "exact", "the policy")
        assert session.mode_reason == ""
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        shared = engine.share(tables)
        # Values repeat bit for bit, keys are turned.
        assert shared == 3 * PERIOD * LAYERS
        assert not tables.deltas.any()
        admin.set_policy(ROW, session.session_id)
        wait_for(lambda: session.policy.name == "test-row", "the policy")
        assert engine.share(tables) > shared
        engine.assert_intact(tables)


# ---- what may be shared with whom -----------------------------------------------------------


def test_observing_changes_nothing_and_counts(sidecar):
    observe = common_pb2.Policy()
    observe.CopyFrom(ROW)
    observe.mode = common_pb2.SHARING_MODE_OBSERVE
    with attached(sidecar, policy=observe) as session, sidecar.admin() as admin:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        assert engine.share(tables) == 0
        (info,) = admin.engines()
        assert info.counters.shareable_keys > 0
        assert info.counters.shareable_values > 0


@pytest.mark.parametrize(("tenant", "shares"), [("one", True), ("two", False), ("", False)])
def test_equal_rows_are_shared_within_a_tenant_alone(sidecar, tenant, shares):
    with (
        attached(sidecar, policy="exact", tenant="one") as first,
        attached(sidecar, policy="exact", tenant=tenant) as second,
    ):
        engines = TinyEngine(first), TinyEngine(second)
        for engine in engines:
            engine.step(engine.open(), PERIOD)
            engine.synchronise()
        (borrower,) = engines[1].requests
        shared = engines[1].share(borrower)
        assert shared == (PERIOD * PER_TOKEN if shares else 0)
        engines[1].assert_intact(borrower)
        assert counts(sidecar).live == (1 if shares else 2) * PERIOD * PER_TOKEN
        # The lender leaves: what it lent stays.
        first.detach()
        engines[1].assert_intact(borrower)
        assert counts(sidecar).live == PERIOD * PER_TOKEN
        second.detach()
        wait_for(lambda: counts(sidecar).live == 0, "the lent rows")


@pytest.mark.parametrize("leaves", ["request", "session"])
def test_a_donor_that_ends_while_a_decision_is_on_its_way_is_kept(sidecar, leaves):
    with (
        attached(sidecar, policy="exact") as lender,
        attached(sidecar, policy="exact") as borrower,
    ):
        engines = TinyEngine(lender), TinyEngine(borrower)
        for engine in engines:
            engine.step(engine.open(), PERIOD)
        engines[0].synchronise()
        engines[1].finish()
        borrower.end_step(flush=True)
        wait_for(lambda: borrower._uplink.decisions, "a decision")
        if leaves == "request":
            lender.close_requests(engines[0].requests)
            engines[0].requests.clear()
            lender.synchronise()
        else:
            lender.detach()
        with attached(sidecar, policy="exact") as intruder:
            # Whatever is free now is written over.
            other = TinyEngine(intruder, seed=1)
            other.step(other.open(), 20 * PERIOD)
            engines[1].synchronise()
            assert borrower.statistics.applied > 0
            engines[1].assert_intact(engines[1].requests[0])
            other.assert_intact(other.requests[0])
        counts(sidecar)


def test_rows_that_go_to_another_tenant_are_wiped_first(sidecar):
    with attached(sidecar, tenant="one") as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 64)
        used = np.sort(tables.rows[:, :, :64].ravel())
    with attached(sidecar, tenant="two") as session:
        tables = session.open_request()
        session.reserve([tables], 64, wait=True)
        got = tables.rows[:, :, :64].ravel()
        assert set(used) <= set(got.tolist())
        assert not session.pool.rows(np.uint8)[got].any()


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"inv_freq": ()}, {}, "no rotary frequencies"),
        ({"inv_freq": ()}, {"row_mode_obstacle": "it is ALiBi"}, "it is ALiBi"),
        ({}, {"capabilities": ()}, "lacks the capability row-tables"),
    ],
)
def test_an_engine_that_cannot_turn_keys_is_told_why_and_gets_exact(
    sidecar, change, options, reason
):
    layout = dataclasses.replace(LAYOUT, **change)
    options = SessionOptions(runtime_dir=sidecar.runtime.path, policy="balanced", **options)
    with attach(layout, options) as session:
        assert session.policy.mode == common_pb2.SHARING_MODE_EXACT
        assert reason in session.mode_reason


# ---- too little memory ----------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_is_refused_and_leaks_nothing(sidecar):
    bound = 10 * BLOCK_ROWS
    with attached(sidecar, max_rows=bound) as session:
        engine = TinyEngine(session)
        tables = session.open_request()
        with pytest.raises(PoolExhausted, match=r"bound of \d+") as refused:
            session.reserve([tables], 11 * BLOCK_TOKENS, wait=True)
        assert refused.value.retry_after is not None
        assert int(refused.value.details["max_rows"]) == bound
        assert tables.allocated == 0
        session.close_requests([tables])
        # A smaller one fits, to the last row.
        tables = engine.open()
        engine.step(tables, 10 * BLOCK_TOKENS)
        engine.assert_intact(tables)
        assert session.statistics.overflow_tokens == 0
        assert_counted(sidecar, session)


def test_a_batch_that_fits_by_half_is_refused_and_leaks_nothing(sidecar):
    with attached(sidecar, max_rows=10 * BLOCK_ROWS) as session:
        batch = [session.open_request() for _ in range(3)]
        with pytest.raises(PoolExhausted):
            session.reserve(batch, 4 * BLOCK_TOKENS, wait=True)
        session.close_requests(batch)
        assert_counted(sidecar, session)
        assert held_rows(session)[0] == 0


def test_decoding_goes_on_in_private_memory_and_comes_home(sidecar):
    with attached(sidecar, max_rows=8 * BLOCK_ROWS, policy="observe") as session:
        engine = TinyEngine(session)
        other = engine.open()
        engine.step(other, 2 * BLOCK_TOKENS)
        tables = engine.open()
        engine.step(tables, 4 * BLOCK_TOKENS)
        for _ in range(6 * BLOCK_TOKENS):
            engine.step(tables)
            session._uplink.synchronise(10)
        # The last rows were used before the overflow was.
        assert held_rows(session)[1] < BLOCK_ROWS
        assert session._allocator.overflow_in_use > 0
        assert session.statistics.overflow_tokens > 0
        private = tables.overflow_from
        assert private is not None
        assert tables.sealed <= private
        engine.assert_intact(tables)
        # Nothing private is ever named to the manager.
        assert_counted(sidecar, session)
        engine.requests.remove(other)
        session.close_requests([other])
        for _ in range(12):
            engine.synchronise()
        assert tables.overflow_from is None or tables.overflow_from > private
        engine.assert_intact(tables)
        assert_counted(sidecar, session)
        assert session.statistics.rejected == 0


def test_all_comes_home_once_sharing_makes_room(sidecar):
    with attached(sidecar, max_rows=6 * BLOCK_ROWS) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, BLOCK_TOKENS)
        # Without the sidecar's answers there is nothing to decode from but the overflow.
        for _ in range(7 * BLOCK_TOKENS):
            engine.session.reserve([tables], 1, wait=False)
            start, tables.length = tables.length, tables.length + 1
            engine.rows[tables.rows[:, :, start : tables.length]] = engine.expected(
                start, tables.length
            )
        assert tables.overflow_from is not None
        for _ in range(30):
            engine.synchronise()
        assert tables.overflow_from is None
        assert session._allocator.overflow_in_use == 0
        assert tables.sealed == tables.length
        engine.assert_intact(tables)
        assert_counted(sidecar, session)


def test_an_overflow_that_is_used_up_is_told_with_what_to_do(sidecar):
    overflow = 2 * BLOCK_ROWS * LAYOUT.row_bytes
    with attached(sidecar, max_rows=BLOCK_ROWS, overflow_bytes=overflow) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, BLOCK_TOKENS)
        for _ in range(2 * BLOCK_TOKENS):
            engine.step(tables)
        with pytest.raises(PoolExhausted, match="raise overflow_bytes"):
            engine.step(tables)
        engine.assert_intact(tables)


def test_a_bound_above_the_pool_is_refused_with_what_is_free(sidecar):
    with pytest.raises(PoolExhausted, match=r"max_rows is \d+, the pool has \d+ rows"):
        attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path, max_rows=1 << 40))


def test_of_two_sessions_that_race_for_the_last_rows_one_gets_all_it_asked_for(runtime_dir):
    blocks = 64
    pool_bytes = blocks * BLOCK_ROWS * LAYOUT.row_bytes
    with (
        running_sidecar(runtime_dir, pool_bytes=pool_bytes) as small,
        attached(small, timeout=5.0) as one,
        attached(small, timeout=5.0) as two,
    ):
        total = counts(small).total
        assert total == blocks * BLOCK_ROWS
        for _ in range(3):
            start = threading.Barrier(2)
            refused = []

            def race(session, start=start, refused=refused):
                tables = session.open_request()
                start.wait()
                try:
                    session.reserve([tables], 40 * BLOCK_TOKENS, wait=True)
                except PoolExhausted as refusal:
                    refused.append(refusal)

            racers = [threading.Thread(target=race, args=(s,)) for s in (one, two)]
            for racer in racers:
                racer.start()
            for racer in racers:
                racer.join()
            assert len(refused) == 1
            assert refused[0].retry_after is not None
            assert_counted(small, one, two)
            for session in (one, two):
                session.close_requests(list(session._tables.values()))
                surplus = session._allocator.trim(0)
                if len(surplus):
                    session._send(return_rows={"rows": surplus.tobytes()})
                session.synchronise()


# ---- attaching ------------------------------------------------------------------------------


def test_no_manager_is_told_with_what_to_do(runtime_dir):
    with pytest.raises(AgentUnavailable, match="memshare up"):
        attach(LAYOUT, SessionOptions(runtime_dir=runtime_dir))


def test_another_row_size_is_refused_with_both(sidecar):
    with attached(sidecar):
        other = dataclasses.replace(LAYOUT, num_kv_heads=3)
        with pytest.raises(LayoutMismatch, match=r"rows of 128 bytes, .* rows of 192 bytes"):
            attach(other, SessionOptions(runtime_dir=sidecar.runtime.path))


def test_the_pool_is_divided_anew_for_a_new_row_size(sidecar):
    other = dataclasses.replace(LAYOUT, num_kv_heads=3, inv_freq=())
    with attach(other, SessionOptions(runtime_dir=sidecar.runtime.path)) as session:
        assert session.pool.row_bytes == 192
    with attached(sidecar) as session:
        assert session.pool.row_bytes == 128


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("swift", "no preset 'swift', use observe, exact"),
        (common_pb2.Policy(mode=common_pb2.SHARING_MODE_ROW), "stages is 0"),
        (common_pb2.Policy(), "mode is 0, must be observe, exact, row or block"),
    ],
)
def test_an_unknown_policy_is_refused_with_the_known_ones(sidecar, policy, words):
    with pytest.raises(InvalidArgument, match=words):
        attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path, policy=policy))


def test_a_client_of_another_protocol_is_refused_by_both_versions(sidecar, monkeypatch):
    monkeypatch.setattr("memshare.client.messages.MIN_PROTOCOL", 7)
    monkeypatch.setattr("memshare.client.messages.MAX_PROTOCOL", 9)
    monkeypatch.setattr("memshare.client.messages.VERSION", "7.0.0")
    with pytest.raises(VersionMismatch, match=r"engine 7\.0\.0 .* 7 to 9.*upgrade the older"):
        attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path))
    monkeypatch.setattr("memshare.wire.handoff.MIN_PROTOCOL", 7)
    monkeypatch.setattr("memshare.wire.handoff.MAX_PROTOCOL", 9)
    with pytest.raises(VersionMismatch, match=r"engine .* 7 to 9.*upgrade the older"):
        attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path))


def test_a_forged_token_is_refused(sidecar, monkeypatch):
    real = Uplink._greet

    def forge(self, stream, resume):
        peer = tokens.PeerCredentials(os.getpid(), os.getuid(), os.getgid())
        self._token = tokens.mint_token(b"k" * tokens.KEY_BYTES, peer)
        return real(self, stream, resume)

    monkeypatch.setattr(Uplink, "_greet", forge)
    with pytest.raises(TokenRefused, match="not minted by this pool's owner"):
        attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path))


# ---- other processes ------------------------------------------------------------------------


def test_the_end_of_a_forked_child_is_none_of_the_parents(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 3 * PERIOD)
        engine.share(tables)
        session._uplink.lock.acquire()  # as if another thread were at work at the fork
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert session.state == "closed"
                session.close_requests([tables])
                session.detach()
                status = 0
            finally:
                os._exit(status)
        session._uplink.lock.release()
        assert os.waitpid(child, 0)[1] == 0
        assert session.state == "attached"
        engine.step(tables, PERIOD)
        engine.share(tables)
        engine.assert_intact(tables)
        assert_counted(sidecar, session)


def test_an_engine_that_ends_without_detaching_ends_at_once_and_frees_all(sidecar):
    engine = run_engine(sidecar, "print('bye', flush=True)\n")
    assert engine.communicate(timeout=20)[0] == "bye\n"
    assert engine.returncode == 0
    wait_for(lambda: counts(sidecar).free == counts(sidecar).total, "its rows")


def test_a_forked_child_that_runs_to_its_own_end_leaves_the_parent_attached(sidecar):
    more = """
if os.fork() == 0:
    import gc
    del session, engine, tables
    gc.collect()
    sys.exit(0)
assert os.wait()[1] == 0
engine.step(tables, 32)
engine.share(tables)
engine.assert_intact(tables)
print(session.state, session.statistics.rejected, session.statistics.reattached, flush=True)
"""
    engine = run_engine(sidecar, more)
    assert engine.communicate(timeout=20)[0] == "attached 0 0\n"
    assert engine.returncode == 0


def test_an_engine_that_is_killed_frees_all(sidecar):
    engine = run_engine(sidecar, "print('ready', flush=True)\nsys.stdin.read()\n")
    assert engine.stdout.readline() == "ready\n"
    assert counts(sidecar).live > 0
    engine.kill()
    engine.communicate()
    wait_for(lambda: counts(sidecar).free == counts(sidecar).total, "its rows", timeout=5)


def test_a_manager_that_is_missing_is_told_with_what_to_do(runtime_dir):
    with running_sidecar(runtime_dir, pool_bytes=1 << 20) as partial:
        partial.kill_manager()
        with pytest.raises(ManagerUnavailable, match="memshare up"):
            attach(LAYOUT, SessionOptions(runtime_dir=runtime_dir))


def test_values_and_keys_have_rows_of_their_own(sidecar):
    with attached(sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 40)
        named = tables.rows[:, :, :40]
        assert len(np.unique(named)) == named.size
        assert not np.intersect1d(named[KEY], named[VALUE]).size


def test_a_closed_session_touches_no_row_any_more(sidecar):
    session = attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path))
    engine = TinyEngine(session)
    tables = engine.open()
    engine.step(tables, 5)
    session.detach()
    # There is room in the tables' last block, so that no new row would be needed.
    for use in (
        lambda: session.reserve([tables], 1, wait=False),
        lambda: session.truncate(tables, 1),
        session.open_request,
    ):
        with pytest.raises(PoolLost, match="closed"):
            use()
    session.close_requests([tables])


def test_a_forked_child_cannot_write_into_its_parents_rows(sidecar):
    with attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path)) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 40)
        child = os.fork()
        if child == 0:
            try:
                engine.step(tables)
            except PoolLost as error:
                os._exit(0 if "forked child" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.step(tables)
        engine.assert_intact(tables)


def test_a_refused_prompt_gives_back_what_came_in_pieces(sidecar, monkeypatch):
    monkeypatch.setattr("memshare.client.uplink.MAX_LEASED_ROWS", 1000)
    with attach(LAYOUT, SessionOptions(runtime_dir=sidecar.runtime.path)) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        with sidecar.admin() as admin:
            rows = admin.status().rows
            with pytest.raises(PoolExhausted):
                engine.step(tables, int(rows.total) // PER_TOKEN + 1)
            session.synchronise()
            kept = admin.status().rows.leased
        assert kept <= 4 * session.options.ahead_tokens * PER_TOKEN
        engine.step(tables, 40)
        engine.assert_intact(tables)

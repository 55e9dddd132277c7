"""A manager that starts under running engines."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from manager_harness import LAYERS, PER_TOKEN, ROWS, Engine, Sidecar, drain, wait_for

from memshare.v1 import admin_pb2, agent_pb2, agent_pb2_grpc, common_pb2, manager_pb2
from memshare.wire import status
from memshare.wire.errors import (
    InvalidArgument,
    LayoutMismatch,
    MemshareError,
    PoolExhausted,
    Recovering,
    RowNotHeld,
    StaleGeneration,
    TokenRefused,
    UnknownSession,
)
from memshare.wire.layout import RowLayout
from memshare.wire.packing import INT32, UINT8, pack

WIDE = RowLayout(1, 1, 64, 64, common_pb2.ROW_DTYPE_FP32)


def resume(engine: Engine) -> None:
    point = manager_pb2.Resume(session_id=engine.welcome.session_id, epoch=engine.welcome.epoch)
    engine.attach(resume=point)


def table_part(
    request: int, rows: np.ndarray, shared: np.ndarray | None = None, **changes: int
) -> manager_pb2.SnapshotTable:
    half = len(rows) // 2
    flags = np.zeros(len(rows), np.uint8) if shared is None else shared
    return manager_pb2.SnapshotTable(
        request_id=request, generation=0, num_tokens=half // LAYERS,
        key_rows=pack(rows[:half], INT32), value_rows=pack(rows[half:], INT32),
        shared=pack(flags, UINT8), accumulated_error=0.25 if flags.any() else 0,
        **changes,
    )  # fmt: skip


def snapshot(
    engine: Engine, leases: np.ndarray | None = None,
    *tables: manager_pb2.SnapshotTable, **changes: int,
) -> manager_pb2.SnapshotResponse:  # fmt: skip
    parts: list[dict[str, object]] = []
    if leases is not None:
        parts.append({"lease": manager_pb2.SnapshotLease(rows=pack(leases, INT32))})
    parts += [{"table": table} for table in tables]
    return send_parts(engine, *parts, end(len(parts)), **changes)


def end(count: int) -> dict[str, object]:
    return {"end": manager_pb2.SnapshotEnd(parts=count)}


def send_parts(
    engine: Engine, *messages: dict[str, object], **changes: int
) -> manager_pb2.SnapshotResponse:
    name = {"session_id": engine.welcome.session_id, "epoch": engine.welcome.epoch, **changes}
    parts = [manager_pb2.SnapshotRequest(**name, **message) for message in messages]  # type: ignore[arg-type]
    try:
        return engine.stub.Snapshot(iter(parts), timeout=10)
    except grpc.RpcError as failure:
        raise status.from_rpc_error(failure) from None


def restart(sidecar: Sidecar) -> None:
    sidecar.kill("manager")
    sidecar.start_manager()
    wait_for(sidecar.serves, "the new manager")


def test_counts_are_rebuilt_from_the_engines_and_proven(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh()
    engines = [Engine(sidecar), Engine(sidecar)]
    rows = [engine.fill(1, 32, repeat=8, seed=number) for number, engine in enumerate(engines)]
    leases = [engine.lease(6) for engine in engines]
    tables = []
    for engine, mine in zip(engines, rows, strict=True):
        engine.sync()
        table, shared = mine.reshape(2, LAYERS, 32).copy(), np.zeros((2, LAYERS, 32), np.uint8)
        for decision in engine.decisions:
            where = tuple(
                np.frombuffer(column, dtype)
                for column, dtype in (
                    (decision.kinds, "u1"), (decision.layers, "<u2"), (decision.targets, "<i4"),
                )
            )  # fmt: skip
            table[where] = np.frombuffer(decision.donor_rows, "<i4")
            shared[where] = 1
            engine.answer(decision)
        assert shared.any()
        engine.step(1)
        engine.sync()
        tables.append((table.ravel(), shared.ravel()))
    before = sidecar.counts()

    restart(sidecar)
    state = sidecar.status()
    assert state.state == "recovering"
    assert list(state.awaited_pids) == [os.getpid()] * 2

    newcomer = None
    with pytest.raises(Recovering):
        newcomer = Engine(sidecar)
    assert newcomer is None
    ids = [engine.welcome.session_id for engine in engines]
    for number, engine in enumerate(engines):
        resume(engine)
        assert engine.welcome.session_id == ids[number]
        assert engine.welcome.epoch == 2
        assert engine.welcome.snapshot_required
        assert isinstance(engine.refused(lease_rows=manager_pb2.LeaseRows(count=1)), Recovering)
        answer = snapshot(engine, leases[number], table_part(1, *tables[number]))
        assert answer.leased_rows == 6
        sidecar.check()
        if number == 0:
            refusal = engine.refused(lease_rows=manager_pb2.LeaseRows(count=1))
            assert isinstance(refusal, Recovering)
            assert refusal.retry_after
    assert sidecar.counts() == before
    assert sidecar.status().state == "serving"
    engines[0].lease(1)
    for engine in engines:
        engine.sync()
        engine.goodbye()
    assert sidecar.all_free()


def test_grants_wait_until_an_engine_is_back_or_gone(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh()
    lost, back = Engine(sidecar), Engine(sidecar)
    lost.fill(1, 4)
    lost.sync()
    restart(sidecar)
    resume(back)
    snapshot(back)
    with pytest.raises(Recovering, match=f"pids \\[{os.getpid()}\\]"):
        back.lease(1)
    lost.drop_connection()
    wait_for(lambda: sidecar.status().state == "serving", "the end of recovery")
    assert len(back.lease(1)) == 1
    back.goodbye()


def test_a_new_manager_has_the_worker_forget_engines_that_are_gone(
    fresh: Callable[..., Sidecar],
) -> None:
    sidecar = fresh()
    gone = Engine(sidecar)
    gone.fill(1, 32, repeat=8)
    gone.sync()
    assert worker_sessions(sidecar) == 1
    sidecar.kill("manager")
    gone.vanish()
    sidecar.start_manager()
    wait_for(sidecar.serves, "the new manager")
    assert worker_sessions(sidecar) == 0


def worker_sessions(sidecar: Sidecar) -> int:
    with grpc.insecure_channel(f"unix:{sidecar.runtime.worker_socket}") as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        return int(stub.GetAgentInfo(agent_pb2.GetAgentInfoRequest(), timeout=5).sessions)


def test_an_engine_that_begins_anew_is_not_waited_for(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh()
    engine = Engine(sidecar)
    engine.lease(4)
    restart(sidecar)
    assert sidecar.status().awaited_pids
    engine.attach()
    assert not engine.welcome.snapshot_required
    assert not sidecar.status().awaited_pids
    assert len(engine.lease(4)) == 4
    engine.goodbye()


def test_resuming_twice_is_resuming_once(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh()
    engine = Engine(sidecar)
    rows = engine.fill(1, 8)
    engine.sync()
    restart(sidecar)
    for epoch in (2, 3):
        resume(engine)
        assert engine.welcome.epoch == epoch
    snapshot(engine, None, table_part(1, rows))
    for epoch in (4, 5):  # from a session that is whole
        old, name = engine.inbox, engine.welcome.session_id
        resume(engine)
        ending = drain(old)
        assert isinstance(ending, StaleGeneration)
        assert "attached anew" in str(ending)
        assert (engine.welcome.session_id, engine.welcome.epoch) == (name, epoch)
        snapshot(engine, None, table_part(1, rows))
    assert sidecar.counts()[2] == 8 * PER_TOKEN
    sidecar.check()
    engine.goodbye()
    assert sidecar.all_free()


def test_a_broken_stream_is_resumed_by_the_same_process(sidecar: Sidecar, engine: Engine) -> None:
    rows = engine.fill(1, 8)
    engine.sync()
    engine.break_stream()
    resume(engine)
    assert engine.welcome.snapshot_required
    with pytest.raises(StaleGeneration):
        snapshot(engine, epoch=1)
    snapshot(engine, None, table_part(1, rows))
    assert sidecar.counts()[2] == 8 * PER_TOKEN
    with pytest.raises(InvalidArgument, match="nothing to restore"):
        snapshot(engine, None, table_part(1, rows))
    engine.close([1])
    engine.sync()
    engine.goodbye()


def test_a_released_session_cannot_be_resumed(sidecar: Sidecar, engine: Engine) -> None:
    engine.send(goodbye=manager_pb2.Goodbye())
    engine.reader.join(10)
    with pytest.raises(UnknownSession, match="attach anew"):
        resume(engine)
    with pytest.raises(UnknownSession):
        snapshot(engine)


def test_a_session_is_resumed_with_its_own_token_only(sidecar: Sidecar, engine: Engine) -> None:
    other = Engine(sidecar)
    open_call, other.welcome.session_id = other.call, engine.welcome.session_id
    with pytest.raises(TokenRefused, match="another"):
        resume(other)
    open_call.cancel()
    other.vanish()
    engine.sync()


@pytest.mark.parametrize(
    ("point", "hello"),
    [
        ({"session_id": 12345}, {}),
        ({"epoch": 2**64 - 1}, {}),
        ({}, {"max_rows": ROWS + 1}),
        ({}, {"layout": WIDE.to_proto()}),
        ({}, {"tenant": "t" * 257}),
        ({}, {"policy_name": "bold"}),
        (None, {"layout": WIDE.to_proto()}),
        (None, {"max_rows": ROWS + 1}),
    ],
)
def test_a_hello_that_is_refused_changes_nothing(
    sidecar: Sidecar, engine: Engine, point: dict[str, int] | None, hello: dict[str, object]
) -> None:
    other = Engine(sidecar)
    rows = engine.fill(1, 8)
    engine.sync()
    engine.break_stream()
    name = {"session_id": engine.welcome.session_id, "epoch": engine.welcome.epoch}
    if point is not None:
        hello = {**hello, "resume": manager_pb2.Resume(**{**name, **point})}
    with pytest.raises(MemshareError) as refused:
        engine.attach(**hello)
    assert not isinstance(refused.value, Recovering)
    assert sidecar.counts()[2] == 8 * PER_TOKEN
    assert sidecar.status().state == "serving"
    assert len(other.lease(1)) == 1
    [left] = sidecar.admin.ListEngines(admin_pb2.ListEnginesRequest()).engines
    assert left.session_id == other.welcome.session_id
    engine.attach(resume=manager_pb2.Resume(**name))
    snapshot(engine, None, table_part(1, rows))
    sidecar.check()
    engine.goodbye()
    other.goodbye()


def test_a_refused_resume_does_not_end_the_stream_that_is_open(
    sidecar: Sidecar, engine: Engine
) -> None:
    twin = object.__new__(Engine)
    twin.sidecar, twin.connection, twin.options = sidecar, engine.connection, {}
    point = manager_pb2.Resume(session_id=engine.welcome.session_id, epoch=1)
    with pytest.raises(LayoutMismatch):
        twin.attach(resume=point, layout=WIDE.to_proto())
    engine.sync()
    assert len(engine.lease(1)) == 1


def test_a_refused_resume_leaves_the_pool_of_a_new_manager_undivided(
    fresh: Callable[..., Sidecar],
) -> None:
    sidecar = fresh()
    engine = Engine(sidecar)
    rows = engine.fill(1, 8)
    engine.sync()
    restart(sidecar)
    name = {"session_id": engine.welcome.session_id, "epoch": engine.welcome.epoch}
    with pytest.raises(PoolExhausted):
        engine.attach(resume=manager_pb2.Resume(**name), layout=WIDE.to_proto(), max_rows=ROWS + 1)
    engine.attach(resume=manager_pb2.Resume(**name))
    snapshot(engine, None, table_part(1, rows))
    assert sidecar.counts()[2] == 8 * PER_TOKEN
    engine.goodbye()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda rows: rows[[0, 0, *range(2, len(rows))]], InvalidArgument),
        (lambda rows: rows - 1, InvalidArgument),
        (lambda rows: rows + 40, RowNotHeld),
    ],
)
def test_a_wrong_snapshot_changes_nothing_and_may_be_sent_again(
    sidecar: Sidecar, engine: Engine, change: Callable[[np.ndarray], np.ndarray],
    kind: type[MemshareError],
) -> None:  # fmt: skip
    rows = engine.fill(1, 8)
    other = Engine(sidecar)
    other.lease(40)
    engine.sync()
    engine.break_stream()
    resume(engine)
    with pytest.raises(kind):
        snapshot(engine, None, table_part(1, change(rows)))
    assert sidecar.counts()[1:3] == (40, 0)
    assert sidecar.status().state == "recovering"
    snapshot(engine, None, table_part(1, rows))
    assert sidecar.counts()[1:3] == (40, 8 * PER_TOKEN)
    assert sidecar.status().state == "serving"
    other.vanish()


def halves(rows: np.ndarray, **second: int) -> list[dict[str, object]]:
    """The table of request 1 in two parts of four tokens, the second changed."""
    tokens = rows.reshape(2, LAYERS, 8)
    first = table_part(1, tokens[:, :, :4].ravel())
    last = table_part(1, tokens[:, :, 4:].ravel(), start=4)
    for name, value in second.items():
        setattr(last, name, value)
    return [{"table": first}, {"table": last}]


def resumed(engine: Engine, tokens: int = 8) -> np.ndarray:
    """An engine whose stream broke and that is to send its snapshot: rows of request 1."""
    rows = engine.fill(1, tokens)
    engine.sync()
    engine.break_stream()
    resume(engine)
    return rows


def test_a_snapshot_in_parts_restores_what_one_message_does(
    sidecar: Sidecar, engine: Engine
) -> None:
    rows = resumed(engine)
    lease = {"lease": manager_pb2.SnapshotLease(rows=pack([900, 901], INT32))}
    more = {"lease": manager_pb2.SnapshotLease(rows=pack([902], INT32))}
    answer = send_parts(engine, lease, more, *halves(rows), end(4))
    assert (answer.live_rows, answer.leased_rows) == (8 * PER_TOKEN, 3)
    sidecar.check()
    assert (
        sidecar.admin.ListRequests(admin_pb2.ListRequestsRequest()).requests[0].sealed_tokens == 8
    )
    engine.goodbye()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda parts: parts[:1],  # cut off
        lambda parts: parts,  # no end
        lambda parts: [*parts, end(1)],  # one message was lost
        lambda parts: [*parts, end(3)],
        lambda parts: [*parts, end(2), parts[0]],
        lambda parts: [*parts, end(2), end(3)],
        lambda parts: [*parts, {}, end(3)],
        lambda parts: [parts[1], parts[0], end(2)],
        lambda parts: [parts[0], parts[0], end(2)],
    ],
)
def test_a_snapshot_that_is_not_whole_restores_nothing(
    sidecar: Sidecar, engine: Engine,
    spoil: Callable[[list[dict[str, object]]], list[dict[str, object]]],
) -> None:  # fmt: skip
    rows = resumed(engine)
    parts = halves(rows)
    with pytest.raises(InvalidArgument):
        send_parts(engine, *spoil(parts))
    assert sidecar.counts()[1:3] == (0, 0)
    assert list(sidecar.status().awaited_pids) == [os.getpid()]
    send_parts(engine, *parts, end(2))
    assert sidecar.counts()[2] == 8 * PER_TOKEN
    sidecar.check()
    engine.goodbye()


@pytest.mark.parametrize(
    "second",
    [{"start": 3}, {"start": 5}, {"start": 0}, {"generation": 1}, {"first_token": 1}],
)
def test_parts_that_do_not_fit_together_restore_nothing(
    sidecar: Sidecar, engine: Engine, second: dict[str, int]
) -> None:
    rows = resumed(engine)
    with pytest.raises(InvalidArgument, match="request 1: a part"):
        send_parts(engine, *halves(rows, **second), end(2))
    assert sidecar.status().state == "recovering"
    send_parts(engine, *halves(rows), end(2))
    engine.goodbye()


def test_a_snapshot_whose_call_is_cancelled_restores_nothing(
    sidecar: Sidecar, engine: Engine
) -> None:
    resumed(engine)
    name = {"session_id": engine.welcome.session_id, "epoch": engine.welcome.epoch}
    parts: queue.SimpleQueue[manager_pb2.SnapshotRequest | None] = queue.SimpleQueue()
    lease = manager_pb2.SnapshotLease(rows=pack([900], INT32))
    parts.put(manager_pb2.SnapshotRequest(**name, lease=lease))
    call = engine.stub.Snapshot.future(iter(parts.get, None))
    time.sleep(0.1)
    call.cancel()
    time.sleep(0.2)
    assert sidecar.counts()[1:3] == (0, 0)
    assert sidecar.status().state == "recovering"
    parts.put(None)
    engine.goodbye()


def test_first_token_of_a_snapshot_is_bounded_as_at_open(sidecar: Sidecar, engine: Engine) -> None:
    rows = resumed(engine)
    with pytest.raises(InvalidArgument, match="first_token"):
        snapshot(engine, None, table_part(1, rows, first_token=2**24 + 1))
    snapshot(engine, None, table_part(1, rows, first_token=2**24))
    engine.goodbye()


def test_a_session_without_rows_sends_an_end_alone(sidecar: Sidecar, engine: Engine) -> None:
    engine.break_stream()
    resume(engine)
    send_parts(engine, end(0))
    assert sidecar.status().state == "serving"
    engine.goodbye()

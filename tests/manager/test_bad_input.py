"""Every message and call with values it must refuse: a typed answer, and nothing changed."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from manager_harness import LAYERS, PER_TOKEN, ROWS, Engine, Sidecar, drain

from memshare.v1 import admin_pb2, common_pb2, manager_pb2
from memshare.wire import status
from memshare.wire.errors import (
    InvalidArgument,
    MemshareError,
    PoolExhausted,
    RowNotHeld,
    StaleGeneration,
    UnknownRequest,
    UnknownSession,
)
from memshare.wire.packing import INT32, UINT32, UINT64, pack


def rows(*values: int) -> bytes:
    return pack(values, INT32)


def seal(**changes: object) -> manager_pb2.SealTokens:
    # Rows 16 to 19 are leased and name one token of request 1, which has 2.
    fields = {
        "request_id": 1, "generation": 0, "start": 2, "num_tokens": 1,
        "key_rows": rows(16, 17), "value_rows": rows(18, 19), **changes,
    }  # fmt: skip
    return manager_pb2.SealTokens(**fields)  # type: ignore[arg-type]


def close(requests: list[int], generations: list[int]) -> manager_pb2.CloseRequests:
    return manager_pb2.CloseRequests(
        request_ids=pack(requests, UINT64), generations=pack(generations, UINT32)
    )


def truncate(**changes: int) -> manager_pb2.TruncateRequest:
    return manager_pb2.TruncateRequest(request_id=1, **changes)


M = manager_pb2
MESSAGES: list[tuple[type[MemshareError], dict[str, object]]] = [
    (InvalidArgument, {}),
    (InvalidArgument, {"hello": M.Hello()}),
    (InvalidArgument, {"lease_rows": M.LeaseRows()}),
    (InvalidArgument, {"lease_rows": M.LeaseRows(count=2**32 - 1)}),
    (PoolExhausted, {"lease_rows": M.LeaseRows(count=2**23)}),
    (InvalidArgument, {"return_rows": M.ReturnRows()}),
    (InvalidArgument, {"return_rows": M.ReturnRows(rows=b"abc")}),
    (InvalidArgument, {"return_rows": M.ReturnRows(rows=rows(-1))}),
    (InvalidArgument, {"return_rows": M.ReturnRows(rows=rows(2**31 - 1))}),
    (InvalidArgument, {"return_rows": M.ReturnRows(rows=rows(16, 16))}),
    (RowNotHeld, {"return_rows": M.ReturnRows(rows=rows(0))}),
    (RowNotHeld, {"return_rows": M.ReturnRows(rows=rows(16, 500))}),
    (InvalidArgument, {"open_request": M.OpenRequest(request_id=1)}),
    (InvalidArgument, {"open_request": M.OpenRequest(request_id=2, first_token=2**32 - 1)}),
    (UnknownRequest, {"seal_tokens": seal(request_id=9)}),
    (StaleGeneration, {"seal_tokens": seal(generation=3)}),
    (InvalidArgument, {"seal_tokens": seal(start=0)}),
    (InvalidArgument, {"seal_tokens": seal(start=2**32 - 1)}),
    (InvalidArgument, {"seal_tokens": seal(num_tokens=0, key_rows=b"", value_rows=b"")}),
    (InvalidArgument, {"seal_tokens": seal(num_tokens=2**32 - 1)}),
    (InvalidArgument, {"seal_tokens": seal(key_rows=b"12345")}),
    (InvalidArgument, {"seal_tokens": seal(value_rows=rows(18))}),
    (InvalidArgument, {"seal_tokens": seal(value_rows=rows(16, 17))}),
    (InvalidArgument, {"seal_tokens": seal(value_rows=rows(-5, 17))}),
    (RowNotHeld, {"seal_tokens": seal(value_rows=rows(0, 1))}),
    (RowNotHeld, {"seal_tokens": seal(value_rows=rows(600, 601))}),
    (UnknownRequest, {"truncate_request": M.TruncateRequest(request_id=9, new_generation=1)}),
    (StaleGeneration, {"truncate_request": truncate(generation=4, new_generation=5)}),
    (InvalidArgument, {"truncate_request": M.TruncateRequest(request_id=1)}),
    (InvalidArgument, {"truncate_request": truncate(new_generation=1, num_tokens=3)}),
    (InvalidArgument, {"close_requests": close([], [])}),
    (InvalidArgument, {"close_requests": close([1], [])}),
    (InvalidArgument, {"close_requests": close([1, 1], [0, 0])}),
    (InvalidArgument, {"close_requests": M.CloseRequests(request_ids=b"1")}),
    (UnknownRequest, {"close_requests": close([1, 2**64 - 1], [0, 0])}),
    (StaleGeneration, {"close_requests": close([1], [2])}),
    (StaleGeneration, {"decision_result": M.DecisionResult(decision_id=99)}),
    (StaleGeneration, {"decision_result": M.DecisionResult(decision_id=2**64 - 1, applied=b"\1")}),
    (StaleGeneration, {"step_completed": M.StepCompleted(step=4)}),
]  # fmt: skip


def test_every_wrong_message_is_refused_and_the_stream_goes_on(
    sidecar: Sidecar, engine: Engine
) -> None:
    engine.fill(1, 2)
    assert engine.lease(8).tolist() == list(range(8, 16))
    assert engine.lease(8).tolist() == list(range(16, 24))
    engine.step(5)
    engine.sync()
    before = sidecar.counts()
    for kind, message in MESSAGES:
        refusal = engine.refused(**message)
        assert type(refusal) is kind, (message, refusal)
        assert sidecar.counts() == before, message
        if kind is PoolExhausted:
            assert refusal.retry_after
    sidecar.check()
    engine.send(seal_tokens=seal())
    engine.sync()
    assert sidecar.counts()[2] == before[2] + PER_TOKEN
    assert LAYERS == 2
    engine.goodbye()


def test_a_lease_beyond_the_bound_says_the_bound_and_pieces_of_it_add_up(
    sidecar: Sidecar, engine: Engine
) -> None:
    refusal = engine.refused(lease_rows=M.LeaseRows(count=2**23 + 1))
    assert refusal.details["max_count"] == str(2**23)
    assert "in pieces" in str(refusal)
    pieces = [engine.lease(ROWS // 4) for _ in range(4)]
    assert len(np.unique(np.concatenate(pieces))) == ROWS
    engine.goodbye()


def test_a_double_free_in_one_call_or_two_names_the_row(sidecar: Sidecar, engine: Engine) -> None:
    lease = engine.lease(8)
    refusal = engine.refused(return_rows=M.ReturnRows(rows=rows(3, 4, 3)))
    assert "row 3 (generation" in str(refusal)
    engine.send(return_rows=M.ReturnRows(rows=lease[:4].tobytes()))
    refusal = engine.refused(return_rows=M.ReturnRows(rows=lease[3:].tobytes()))
    assert refusal.details["row"] == "3"
    assert refusal.details["state"] == "free"
    assert sidecar.counts()[1] == 4
    engine.goodbye()


def test_a_late_message_about_a_row_that_another_engine_holds(
    sidecar: Sidecar, engine: Engine
) -> None:
    lease = engine.lease(8)
    engine.send(return_rows=M.ReturnRows(rows=lease.tobytes()))
    engine.sync()
    other = Engine(sidecar)
    assert np.array_equal(other.lease(8), lease)
    refusal = engine.refused(return_rows=M.ReturnRows(rows=lease.tobytes()))
    assert isinstance(refusal, RowNotHeld)
    assert sidecar.counts()[1] == 8
    other.goodbye()
    engine.goodbye()


def test_a_message_above_the_bound_ends_only_its_own_stream(
    sidecar: Sidecar, engine: Engine
) -> None:
    other = Engine(sidecar)
    other.send(return_rows=M.ReturnRows(rows=bytes(65 << 20)))
    drain(other.inbox)
    engine.sync()
    other.vanish()
    engine.goodbye()


@pytest.mark.parametrize(
    ("method", "request_", "kind"),
    [
        ("ListRequests", admin_pb2.ListRequestsRequest(session_id=5), UnknownSession),
        ("GetPolicy", admin_pb2.GetPolicyRequest(session_id=5), UnknownSession),
        ("SetPolicy", admin_pb2.SetPolicyRequest(session_id=5, preset="exact"), UnknownSession),
        ("SetPolicy", admin_pb2.SetPolicyRequest(), InvalidArgument),
        ("SetPolicy", admin_pb2.SetPolicyRequest(preset="bold"), InvalidArgument),
        ("SetPolicy", admin_pb2.SetPolicyRequest(policy=common_pb2.Policy()), InvalidArgument),
        (
            "SetPolicy",
            admin_pb2.SetPolicyRequest(
                policy=common_pb2.Policy(mode=common_pb2.SHARING_MODE_ROW, fidelity_budget=-1)
            ),
            InvalidArgument,
        ),
    ],
)
def test_wrong_admin_calls_are_refused(
    sidecar: Sidecar, method: str, request_: object, kind: type[MemshareError]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(sidecar.admin, method)(request_)
    assert type(status.from_rpc_error(caught.value)) is kind
    assert sidecar.admin.GetPolicy(admin_pb2.GetPolicyRequest()).policy.name == "exact"


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([], InvalidArgument),
        ([M.SnapshotRequest()], UnknownSession),
        ([M.SnapshotRequest(session_id=77, epoch=1)], UnknownSession),
        ([M.SnapshotRequest(session_id=2**64 - 1)], UnknownSession),
    ],
)
def test_wrong_snapshots_are_refused(
    sidecar: Sidecar, engine: Engine, parts: list[M.SnapshotRequest], kind: type[MemshareError]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        sidecar.manager.Snapshot(iter(parts))
    assert type(status.from_rpc_error(caught.value)) is kind
    engine.goodbye()

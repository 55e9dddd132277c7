"""Every wrong argument of every call is refused, and then nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memshare.v1 import agent_pb2, common_pb2
from memshare.wire import packing
from memshare.wire.errors import (
    InvalidArgument,
    LayoutMismatch,
    MemshareError,
    StaleGeneration,
    UnknownRequest,
    UnknownSession,
)
from memshare.wire.layout import RowLayout

if TYPE_CHECKING:
    from conftest import Calls

NUM_ROWS = 1024


def pack32(*values: int) -> bytes:
    return packing.pack(values, packing.INT32)


def floats(*values: float) -> bytes:
    return packing.pack(values, packing.FLOAT32)


def layout_message(**changes: Any) -> common_pb2.RowLayout:
    fields = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "key_head_dim": 2,
        "value_head_dim": 2,
        "dtype": common_pb2.ROW_DTYPE_FP32,
    }
    return common_pb2.RowLayout(**(fields | changes))


def drop_message(ids: bytes, keeps: bytes, generations: bytes) -> agent_pb2.DropRequestsRequest:
    return agent_pb2.DropRequestsRequest(
        session_id=1, request_ids=ids, keep_tokens=keeps, generations=generations
    )


@pytest.fixture
def busy(calls: Calls) -> Calls:
    """A session with four tokens of a request of generation 3."""
    calls.rows[:] = np.random.default_rng(0).standard_normal(calls.rows.shape)
    ids = np.arange(16, dtype=np.int32).reshape(2, 2, 4)
    calls.index(ids[0], ids[1], generation=3)
    return calls


REFUSED: dict[str, tuple[type[MemshareError], Callable[[Calls], object]]] = {
    "open: no rows": (InvalidArgument, lambda c: c.open(2, row_bytes=0)),
    "open: odd rows": (InvalidArgument, lambda c: c.open(2, row_bytes=17)),
    "open: rows too small": (InvalidArgument, lambda c: c.open(2, row_bytes=12)),
    "open: rows larger than the pool": (InvalidArgument, lambda c: c.open(2, row_bytes=1 << 30)),
    "open: another division": (LayoutMismatch, lambda c: c.open(2, row_bytes=32)),
    "open: unknown dtype": (
        InvalidArgument,
        lambda c: c.open(2, layout=layout_message(dtype=99)),
    ),
    "open: no layers": (
        InvalidArgument,
        lambda c: c.open(2, layout=layout_message(num_layers=0)),
    ),
    "open: huge": (
        InvalidArgument,
        lambda c: c.open(2, layout=layout_message(num_layers=1 << 31)),
    ),
    "open: another tenant": (InvalidArgument, lambda c: c.open(1, tenant="b")),
    "open: NaN rope": (
        InvalidArgument,
        lambda c: c.open(
            2, layout=layout_message(rope=common_pb2.RopeParameters(inv_freq=floats(math.nan)))
        ),
    ),
    "open: half a rope": (
        InvalidArgument,
        lambda c: c.open(2, layout=layout_message(rope=common_pb2.RopeParameters(inv_freq=b"123"))),
    ),
    "index: unknown session": (UnknownSession, lambda c: c.index([[1]], [[1]], session=9)),
    "index: no tokens": (InvalidArgument, lambda c: c.index([[], []], [[], []], request=2)),
    "index: a gap": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1], [1]], start=5, generation=3),
    ),
    "index: again": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1], [1]], start=3, generation=3),
    ),
    "index: a new request not from its start": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1], [1]], request=2, start=1),
    ),
    "index: an older generation": (
        StaleGeneration,
        lambda c: c.index([[1], [1]], [[1], [1]], start=4, generation=2),
    ),
    "index: a row too many": (
        InvalidArgument,
        lambda c: c.index([[1], [NUM_ROWS]], [[1], [1]], start=4, generation=3),
    ),
    "index: a negative row": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1], [-1]], start=4, generation=3),
    ),
    "index: a row too few": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1]], start=4, generation=3),
    ),
    "index: half a row": (
        InvalidArgument,
        lambda c: c.operations.index_rows(
            agent_pb2.IndexRowsRequest(
                session_id=1,
                request_id=1,
                generation=3,
                start=4,
                num_tokens=1,
                key_rows=pack32(20, 21)[:-1],
                value_rows=pack32(20, 21),
            )
        ),
    ),
    "index: far too many": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1], [1]], start=4, generation=3, num_tokens=(1 << 32) - 1),
    ),
    "index: moved padding": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1], [1]], start=4, generation=3, first_token=1),
    ),
    "index: endless padding": (
        InvalidArgument,
        lambda c: c.index([[1], [1]], [[1], [1]], request=2, first_token=1 << 31),
    ),
    "drop: unknown session": (UnknownSession, lambda c: c.drop(session=9)),
    "drop: an older generation": (StaleGeneration, lambda c: c.drop(generation=2)),
    "drop: twice": (
        InvalidArgument,
        lambda c: c.operations.drop_requests(
            drop_message(packing.pack([1, 1], packing.UINT64), pack32(0, 0), pack32(3, 3))
        ),
    ),
    "drop: too few counts": (
        InvalidArgument,
        lambda c: c.operations.drop_requests(
            drop_message(packing.pack([1, 2], packing.UINT64), pack32(0), pack32(3, 3))
        ),
    ),
    "drop: too few generations": (
        InvalidArgument,
        lambda c: c.operations.drop_requests(
            drop_message(packing.pack([1], packing.UINT64), pack32(0), b"")
        ),
    ),
    "drop: half an id": (
        InvalidArgument,
        lambda c: c.operations.drop_requests(drop_message(b"1234", pack32(0), pack32(3))),
    ),
    "find: unknown session": (UnknownSession, lambda c: c.find(0, 4, session=9)),
    "find: unknown request": (UnknownRequest, lambda c: c.find(0, 4, request=9)),
    "find: an older generation": (StaleGeneration, lambda c: c.find(0, 4, generation=2)),
    "find: nothing": (InvalidArgument, lambda c: c.find(2, 2, generation=3)),
    "find: backwards": (InvalidArgument, lambda c: c.find(3, 2, generation=3)),
    "find: beyond the end": (InvalidArgument, lambda c: c.find(0, 5, generation=3)),
    "find: short donor mask": (
        InvalidArgument,
        lambda c: c.find(2, 4, generation=3, donor_mask=b"1"),
    ),
    "find: long target mask": (
        InvalidArgument,
        lambda c: c.find(2, 4, generation=3, target_mask=bytes(5)),
    ),
    "find: NaN threshold": (InvalidArgument, lambda c: c.find(2, 4, generation=3, key=math.nan)),
    "find: infinite threshold": (
        InvalidArgument,
        lambda c: c.find(2, 4, generation=3, key=math.inf),
    ),
    "find: negative threshold": (
        InvalidArgument,
        lambda c: c.find(2, 4, generation=3, value=-0.1),
    ),
    "find: a threshold too few": (
        InvalidArgument,
        lambda c: c.find(2, 4, generation=3, key_thresholds=floats(1)),
    ),
    "find: no candidates": (InvalidArgument, lambda c: c.find(2, 4, generation=3, candidates=0)),
    "find: too many candidates": (
        InvalidArgument,
        lambda c: c.find(2, 4, generation=3, candidates=65),
    ),
    "copy: no row size": (InvalidArgument, lambda c: copy(c, [1], [2], row_bytes=0)),
    "copy: another division": (LayoutMismatch, lambda c: copy(c, [1], [2], row_bytes=32)),
    "copy: lengths": (InvalidArgument, lambda c: copy(c, [1, 2], [3])),
    "copy: outside": (InvalidArgument, lambda c: copy(c, [1, 2], [3, NUM_ROWS])),
    "copy: negative": (InvalidArgument, lambda c: copy(c, [-1, 2], [3, 4])),
    "copy: twice to one": (InvalidArgument, lambda c: copy(c, [1, 2], [3, 3])),
    "copy: read and written": (InvalidArgument, lambda c: copy(c, [1, 2], [2, 3])),
    "zero: another division": (LayoutMismatch, lambda c: zero(c, [1], row_bytes=32)),
    "zero: outside": (InvalidArgument, lambda c: zero(c, [1, NUM_ROWS])),
    "zero: negative": (InvalidArgument, lambda c: zero(c, [1, -1])),
    "zero: twice": (InvalidArgument, lambda c: zero(c, [1, 1])),
}


def copy(calls: Calls, sources: list[int], destinations: list[int], row_bytes: int = 16) -> None:
    calls.operations.copy_rows(
        agent_pb2.CopyRowsRequest(
            row_bytes=row_bytes,
            source_rows=pack32(*sources),
            destination_rows=pack32(*destinations),
        )
    )


def zero(calls: Calls, rows: list[int], row_bytes: int = 16) -> None:
    calls.operations.zero_rows(agent_pb2.ZeroRowsRequest(row_bytes=row_bytes, rows=pack32(*rows)))


def state(calls: Calls) -> Any:
    """All that a refused call must leave as it was."""
    info = calls.operations.get_agent_info()
    info.ClearField("cpu_seconds")
    request = calls.sessions.get(1).requests[1].index
    return info, request.generation, request.rows.tolist(), calls.rows.tolist()


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_refused_call_changes_nothing(busy: Calls, case: str) -> None:
    error, call = REFUSED[case]
    before = state(busy)
    with pytest.raises(error):
        call(busy)
    assert state(busy) == before


def test_opening_twice_is_opening_once(busy: Calls) -> None:
    busy.open(1)
    assert busy.operations.get_agent_info().requests == 1


def test_closing_frees_the_division_and_may_be_repeated(busy: Calls) -> None:
    assert busy.operations.get_agent_info().pool.num_rows == NUM_ROWS
    busy.close()
    busy.close()
    info = busy.operations.get_agent_info()
    assert (info.sessions, info.requests, info.indexed_rows) == (0, 0, 0)
    assert (info.pool.row_bytes, info.pool.num_rows) == (0, 0)
    busy.open(5, row_bytes=32)
    assert busy.operations.get_agent_info().pool.num_rows == NUM_ROWS // 2
    with pytest.raises(UnknownSession):
        busy.find(0, 4, generation=3)


def test_closing_session_0_forgets_all(busy: Calls) -> None:
    request = agent_pb2.CloseIndexRequest(worker_epoch=busy.operations.epoch)
    busy.operations.close_index(request)
    info = busy.operations.get_agent_info()
    assert (info.sessions, info.requests, info.pool.row_bytes) == (0, 0, 0)


def test_rows_may_be_wider_than_the_layout_needs(make_calls: type[Calls]) -> None:
    calls = make_calls()
    calls.close()
    calls.open(1, row_bytes=24)
    wide = calls.pool.rows(24, 4).view(np.float32)
    wide[:8, :4] = 1.0
    wide[:8, 4:] = np.nan
    ids = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    calls.index(ids[0], ids[1])
    assert {one["kind"] for one in calls.find(1, 2, exact=True)} == {0, 1}
    assert {one["kind"] for one in calls.find(1, 2)} == {1}


def test_generations_move_on_with_a_drop(busy: Calls) -> None:
    busy.drop(keep=2, generation=4)
    assert busy.operations.get_agent_info().indexed_rows == 2 * 2 * 2
    with pytest.raises(StaleGeneration):
        busy.find(0, 2, generation=3)
    busy.find(0, 2, generation=4)
    assert busy.index([[50], [51]], [[52], [53]], start=2, generation=4) == 3
    busy.drop(keep=100, generation=5)
    assert busy.operations.get_agent_info().indexed_rows == 3 * 2 * 2
    busy.drop(keep=0, generation=5)
    assert busy.operations.get_agent_info().requests == 0
    busy.drop(keep=0, generation=5)


def test_one_stale_request_keeps_the_whole_batch(busy: Calls) -> None:
    busy.index([[50], [51]], [[52], [53]], request=2, generation=9)
    before = state(busy)
    with pytest.raises(StaleGeneration):
        busy.operations.drop_requests(
            drop_message(packing.pack([1, 2], packing.UINT64), pack32(1, 0), pack32(4, 8))
        )
    assert state(busy) == before


def test_without_rope_only_exact_donors_are_found(make_calls: type[Calls]) -> None:
    calls = make_calls()
    calls.rows[:] = 1.0
    layout = RowLayout(2, 2, 2, 2, common_pb2.ROW_DTYPE_FP32)
    calls.open(2, layout=layout.to_proto())
    ids = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    calls.index(ids[0], ids[1], session=2)
    with pytest.raises(InvalidArgument, match="no rope"):
        calls.find(1, 2, session=2)
    assert len(calls.find(1, 2, session=2, exact=True)) == 4


def test_copies_and_zeroes_touch_only_what_is_named(busy: Calls) -> None:
    before = busy.rows.copy()
    copy(busy, [1, 2, 1], [5, 6, 7])
    zero(busy, [3, 900])
    expected = before.copy()
    expected[[5, 6, 7]] = before[[1, 2, 1]]
    expected[[3, 900]] = 0
    assert np.array_equal(busy.rows, expected)

"""Exact donors: equal bit for bit, of the same tenant, layer and kind, and still there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.gpu_agent.table import MAX_EQUAL, ExactTable
from memshare.wire import packing

if TYPE_CHECKING:
    from conftest import Calls

LAYERS = 2


def add(calls: Calls, session: int, request: int, content: Any, first_row: int) -> Any:
    """Index one request whose planes all hold `content` [tokens], and enter its rows."""
    tokens = len(content)
    ids = np.arange(first_row, first_row + 4 * tokens, dtype=np.int32).reshape(2, LAYERS, tokens)
    for plane in range(4):
        # A number of its own for each plane, so that no plane resembles another.
        calls.rows[ids.reshape(4, tokens)[plane]] = (
            np.asarray(content, np.float32)[:, None] + 1000.0 * plane
        )
    calls.index(ids[0], ids[1], session=session, request=request)
    return ids


def test_equal_rows_of_another_request_and_session_are_found(calls: Calls) -> None:
    calls.open(2, tenant="a")
    calls.open(3, tenant="a")
    ids = add(calls, 2, 1, [1, 2, 3, 4], 0)
    add(calls, 3, 9, [1, 2, 5, 4], 100)
    assert calls.find(0, 4, session=2, exact=True) == []
    found = calls.find(0, 4, session=3, request=9, exact=True)
    assert len(found) == 4 * 3
    for match in found:
        assert match["donor"] == match["target"] != 2
        assert match["row"] == ids[match["kind"], match["layer"], match["donor"]]
        assert (match["session"], match["request"], match["distance"]) == (2, 1, 0)


def test_only_the_oldest_is_returned(calls: Calls) -> None:
    calls.open(2, tenant="a")
    for request in range(1, 7):
        add(calls, 2, request, [1, 2], 100 * request)
        found = calls.find(0, 2, session=2, request=request, exact=True)
        assert {one["request"] for one in found} == (set() if request == 1 else {1})


@pytest.mark.parametrize(("left", "right"), [("a", "b"), ("", ""), ("a", ""), ("", "a")])
def test_nothing_is_shared_between_tenants_or_without_one(
    calls: Calls, left: str, right: str
) -> None:
    calls.open(2, tenant=left)
    calls.open(3, tenant=right)
    add(calls, 2, 1, [1, 2], 0)
    calls.find(0, 2, session=2, exact=True)
    add(calls, 3, 1, [1, 2], 100)
    assert calls.find(0, 2, session=3, exact=True) == []


def test_without_a_tenant_a_request_still_finds_its_own_rows(calls: Calls) -> None:
    add(calls, 1, 1, [1, 2, 1, 1], 0)
    found = calls.find(1, 4, exact=True)
    assert {(one["target"], one["donor"]) for one in found} == {(2, 0), (3, 0)}
    add(calls, 1, 2, [1], 100)
    assert calls.find(0, 1, request=2, exact=True) == []


def test_keys_must_be_equal_as_stored(calls: Calls) -> None:
    calls.rows[:4] = [[1, 0, 1, 0]] * 2 + [[1, 1, 1, 1]] * 2
    cos, sin = np.cos(np.float32(0.5)), np.sin(np.float32(0.5))
    calls.rows[1] = [cos, sin, cos, sin]
    rows = np.array([[0, 1], [0, 1]]), np.array([[2, 3], [2, 3]])
    calls.index(*rows)
    assert {one["kind"] for one in calls.find(1, 2)} == {0, 1}
    assert {one["kind"] for one in calls.find(1, 2, exact=True)} == {1}


def test_dropped_and_truncated_donors_are_not_returned(calls: Calls) -> None:
    calls.open(2, tenant="a")
    add(calls, 2, 1, [1, 2, 3, 4], 0)
    calls.find(0, 4, session=2, request=1, exact=True)
    calls.drop(1, keep=2, session=2, generation=1)
    add(calls, 2, 2, [1, 2, 3, 4], 100)
    found = calls.find(0, 4, session=2, request=2, exact=True)
    assert {one["target"] for one in found} == {0, 1}
    calls.drop(1, session=2, generation=1)
    assert calls.find(0, 4, session=2, request=2, exact=True) == []
    add(calls, 2, 3, [3, 1], 200)
    found = calls.find(0, 2, session=2, request=3, exact=True)
    assert {(one["request"], one["donor"]) for one in found} == {(2, 2)}
    calls.close(2)
    calls.open(3, tenant="a")
    add(calls, 3, 1, [1], 300)
    assert calls.find(0, 1, session=3, exact=True) == []


def test_tokens_after_a_rollback_are_found_in_their_new_form(calls: Calls) -> None:
    calls.open(2, tenant="a")
    add(calls, 2, 1, [1, 2, 3], 0)
    calls.find(0, 3, session=2, exact=True)
    calls.drop(1, keep=1, session=2, generation=1)
    ids = np.arange(50, 58, dtype=np.int32).reshape(2, LAYERS, 2)
    calls.rows[ids.reshape(4, 2)] = (
        np.array([7, 8], np.float32)[:, None] + 1000.0 * np.arange(4)[:, None, None]
    )
    calls.index(ids[0], ids[1], session=2, start=1, generation=1)
    calls.find(0, 3, session=2, generation=1, exact=True)
    add(calls, 2, 2, [1, 2, 3, 7, 8], 100)
    found = calls.find(0, 5, session=2, request=2, exact=True)
    assert {(one["target"], one["donor"]) for one in found} == {(0, 0), (3, 1), (4, 2)}


def test_a_donor_whose_row_was_overwritten_is_passed_over_for_the_next(calls: Calls) -> None:
    calls.open(2, tenant="a")
    first = add(calls, 2, 1, [1], 0)
    calls.find(0, 1, session=2, request=1, exact=True)
    add(calls, 2, 2, [1], 100)
    no_targets = packing.pack_mask(np.zeros((2, LAYERS, 1), np.bool_))
    calls.find(0, 1, session=2, request=2, exact=True, target_mask=no_targets)
    calls.rows[first.reshape(-1)] = 5.0
    add(calls, 2, 3, [1], 200)
    found = calls.find(0, 1, session=2, request=3, exact=True)
    assert len(found) == 4
    assert {one["request"] for one in found} == {2}


def test_a_row_given_up_for_a_donor_hides_no_other(calls: Calls) -> None:
    calls.open(2, tenant="a")
    for request in (1, 2):
        add(calls, 2, request, [1], 100 * request)
        calls.find(0, 1, session=2, request=request, exact=True)
    calls.drop(1, session=2)
    donors = []
    for request in (3, 4):
        add(calls, 2, request, [1], 100 * request)
        found = calls.find(0, 1, session=2, request=request, exact=True)
        donors.append({one["request"] for one in found})
    # The row of request 2 is free again by then.
    assert donors == [set(), {3}]


def test_the_donor_mask_speaks_of_the_request_itself_alone(calls: Calls) -> None:
    calls.open(2, tenant="a")
    add(calls, 2, 1, [1], 0)
    calls.find(0, 1, session=2, request=1, exact=True)
    add(calls, 2, 2, [2, 2, 1], 100)
    nothing = packing.pack_mask(np.zeros((2, LAYERS, 3), np.bool_))
    found = calls.find(1, 3, session=2, request=2, exact=True, donor_mask=nothing)
    assert {(one["target"], one["request"]) for one in found} == {(2, 1)}


def table_insert(table: ExactTable, segment: int, first: int, hashes: list[int]) -> None:
    count = len(hashes)
    tokens = np.arange(first, first + count, dtype=np.int32)
    table.insert(
        segment,
        np.zeros(count, np.int32),
        tokens,
        tokens + np.int32(1000 * segment),
        np.array(hashes, np.uint64),
    )


def table_find(table: ExactTable, hashes: list[int]) -> list[list[tuple[int, int]]]:
    """(request, token) of the candidates of each hash."""
    count = len(hashes)
    found = table.find(
        [],
        np.zeros(count, np.int32),
        np.zeros(count, np.int32),
        np.array(hashes, np.uint64),
        np.zeros((1, 1), np.bool_),
    )
    return [
        [(int(one["request"]), int(one["token"])) for one in row if one["row"] >= 0]
        for row in found
    ]


# Few different hashes and few different home slots, so that probes collide and wrap.
HASHES = st.sampled_from([0, 1, 2, 3, 1 << 63, (1 << 63) + 1, (1 << 64) - 1])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3), st.lists(HASHES, max_size=12)),
            st.tuples(st.just("cut"), st.integers(0, 3), st.integers(0, 12)),
        ),
        max_size=20,
    )
)
def test_the_table_finds_what_a_list_would(steps: list[tuple[str, int, Any]]) -> None:
    table = ExactTable(1 << 16)
    # (hash, request, token) in order of age, for as long as they live.
    alive: list[tuple[int, int, int]] = []
    segments = [[table.open_segment(0, request)] for request in range(4)]
    lengths = [0] * 4
    for what, request, argument in steps:
        if what == "add":
            table_insert(table, segments[request][-1], lengths[request], argument)
            for offset, value in enumerate(argument):
                same = [one for one in alive if one[0] == value]
                if value and len(same) < MAX_EQUAL:
                    alive.append((value, request, lengths[request] + offset))
            lengths[request] += len(argument)
        else:
            table.truncate(segments[request], argument)
            alive = [one for one in alive if one[1] != request or one[2] < argument]
            lengths[request] = min(lengths[request], argument)
            segments[request].append(table.open_segment(0, request))
    keys = [1, 2, 3, 1 << 63, (1 << 63) + 1, (1 << 64) - 1]
    for key, found in zip(keys, table_find(table, keys), strict=True):
        assert found == [(one[1], one[2]) for one in alive if one[0] == key]
    assert table_find(table, [0]) == [[]]


def test_the_table_outlives_its_growth() -> None:
    table = ExactTable(1 << 20)
    segment = table.open_segment(1, 1)
    random = np.random.default_rng(0)
    hashes = random.integers(1, 1 << 63, 30_000, dtype=np.uint64)
    for start in range(0, 30_000, 1000):
        table_insert(table, segment, start, hashes[start : start + 1000].tolist())
    found = table_find(table, hashes.tolist())
    assert [one[0] for one in found] == [(1, token) for token in range(30_000)]


def test_dead_entries_do_not_pile_up() -> None:
    table = ExactTable(1 << 20)
    for request in range(300):
        segment = table.open_segment(1, request)
        table_insert(table, segment, 0, [5] * 20 + list(range(100, 300)))
        assert table_find(table, [5])[0][0] == (request, 0)
        table.truncate([segment], 0)
    assert len(table) <= 4096
    assert len(table._segments) < 64


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    table = ExactTable(1000)
    segment = table.open_segment(1, 1)
    for start in range(1, 5001, 500):
        table_insert(table, segment, start, list(range(start, start + 500)))
        assert len(table) <= 1000
    assert table_find(table, [1]) == [[]]
    assert table_find(table, [5000]) == [[(1, 5000)]]
    table_insert(table, segment, 6000, list(range(6000, 16000)))
    assert len(table) <= 1000
    assert table_find(table, [15999]) == [[(1, 15999)]]

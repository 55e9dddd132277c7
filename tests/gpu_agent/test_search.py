"""Similar donors: every search against the yardstick, and what may never be a donor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.gpu_agent.search import SEARCHES, CandidateSearch, search_exhaustively
from memshare.kernels import get_kernels
from memshare.wire import packing

if TYPE_CHECKING:
    from conftest import Calls

LAYERS = 2
KINDS = (0, 1)


@pytest.fixture(params=sorted(SEARCHES))
def search(request: pytest.FixtureRequest) -> CandidateSearch:
    return SEARCHES[request.param](get_kernels("numpy"))


def bits_between(left: Any, right: Any) -> Any:
    return np.bitwise_count(left ^ right).sum(axis=-1)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_candidates_are_the_nearest_valid_signatures(search: CandidateSearch, share: float) -> None:
    random = np.random.default_rng(int(share * 100))
    slab = random.integers(0, 1 << 63, (300, 2), dtype=np.uint64)
    queries = slab[random.integers(0, 300, 20)] ^ np.uint64(0b1011)
    valid = random.random(300) < share
    found = search(queries, slab, valid, 8)
    assert found.shape == (20, 8)
    for query, slots in zip(queries, found, strict=True):
        present = slots[slots >= 0]
        assert len(set(present.tolist())) == len(present) == min(8, valid.sum())
        assert valid[present].all()
        best = np.sort(bits_between(slab[valid], query))[: len(present)]
        assert np.array_equal(np.sort(bits_between(slab[present], query)), best)


def test_the_exhaustive_search_leaves_nothing_valid_out() -> None:
    valid = np.array([True, False, True])
    slab = np.zeros((3, 2), np.uint64)
    assert search_exhaustively(slab[:2], slab, valid, 1).tolist() == [[0, 2], [0, 2]]


def fill(calls: Calls, tokens: int, kinds_of_rows: int, seed: int = 0) -> Any:
    """Index `tokens` tokens made of few different rows; keys rotated to their position."""
    random = np.random.default_rng(seed)
    prototypes = random.standard_normal((kinds_of_rows, 4)).astype(np.float32)
    ids = np.arange(4 * tokens, dtype=np.int32).reshape(2, LAYERS, tokens)
    choice = random.integers(0, kinds_of_rows, (2, LAYERS, tokens))
    for kind in KINDS:
        for layer in range(LAYERS):
            for token in range(tokens):
                row = prototypes[choice[kind, layer, token]]
                calls.rows[ids[kind, layer, token]] = rotated(row, token if kind == 0 else 0)
    calls.index(ids[0], ids[1])
    return ids, choice


def rotated(row: Any, position: int) -> Any:
    """The row, each head of two turned by position * 0.5."""
    x, y = row.reshape(2, 2).T
    cos, sin = np.cos(0.5 * position), np.sin(0.5 * position)
    return np.stack((x * cos - y * sin, y * cos + x * sin), axis=1).reshape(-1)


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_repeated_content_is_found_wherever_it_stood(make_calls: type[Calls], name: str) -> None:
    calls = make_calls(search=name)
    ids, choice = fill(calls, tokens=100, kinds_of_rows=5)
    found = calls.find(60, 100, key=1e-6, value=1e-6)
    assert len(found) == calls.reply.examined == 2 * LAYERS * 40
    for match in found:
        plane = match["kind"], match["layer"]
        assert match["donor"] < 60 <= match["target"]
        assert choice[plane][match["donor"]] == choice[plane][match["target"]]
        assert match["row"] == ids[plane][match["donor"]]
        assert match["distance"] <= 1e-6


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_no_search_beats_the_exhaustive_one(make_calls: type[Calls], name: str) -> None:
    calls = make_calls(search=name)
    calls.rows[:] = np.random.default_rng(3).standard_normal(calls.rows.shape)
    ids = np.arange(800, dtype=np.int32).reshape(2, LAYERS, 200)
    calls.index(ids[0], ids[1])
    exact = {
        (one["kind"], one["layer"], one["target"]): one["distance"]
        for one in calls.find(150, 200, key=0.3, value=0.3, exhaustive=True)
    }
    found = calls.find(150, 200, key=0.3, value=0.3, candidates=64)
    assert len(found) > len(exact) * 0.8
    for match in found:
        assert match["distance"] >= exact[match["kind"], match["layer"], match["target"]]


def test_thresholds_count_layer_by_layer_and_kind_by_kind(calls: Calls) -> None:
    calls.rows[:8] = 1.0
    calls.rows[:8, 0] = np.repeat([1.0, 1.1], 4)
    ids = np.arange(8, dtype=np.int32).reshape(2, 2, 2).transpose(1, 2, 0)
    calls.index(ids[0], ids[1])
    everything = calls.find(1, 2, key=10, value=10)
    assert [(one["kind"], one["layer"]) for one in everything] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    value = everything[-1]["distance"]
    assert value == pytest.approx(0.01 / (1.21 + 3), rel=1e-4)
    only = packing.pack([0.0, value], packing.FLOAT32)
    found = calls.find(1, 2, key=0, value_thresholds=only)
    assert [(one["kind"], one["layer"]) for one in found] == [(1, 1)]


def test_masks_are_obeyed(calls: Calls) -> None:
    calls.rows[:] = 1.0
    ids = np.arange(40, dtype=np.int32).reshape(2, LAYERS, 10)
    calls.index(ids[0], ids[1])
    donors = np.zeros((2, LAYERS, 10), np.bool_)
    targets = np.ones((2, LAYERS, 10), np.bool_)
    assert calls.find(5, 10, donor_mask=packing.pack_mask(donors)) == []
    donors[1, 0, 3] = donors[1, 1, 7] = True
    targets[1, 0, 6] = False
    found = calls.find(
        5,
        10,
        donor_mask=packing.pack_mask(donors),
        target_mask=packing.pack_mask(targets),
    )
    assert [(one["layer"], one["target"], one["donor"]) for one in found] == [
        (0, 5, 3),
        (0, 7, 3),
        (0, 8, 3),
        (0, 9, 3),
    ]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_donors_are_older_marked_and_never_a_target(
    make_calls: type[Calls], data: st.DataObject
) -> None:
    calls = make_calls()
    tokens = data.draw(st.integers(2, 40))
    fill(calls, tokens, kinds_of_rows=3, seed=data.draw(st.integers(0, 9)))
    start = data.draw(st.integers(0, tokens - 1))
    end = data.draw(st.integers(start + 1, tokens))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    donors = random.random((2, LAYERS, end)) < 0.5
    targets = random.random((2, LAYERS, end)) < 0.5
    for exact in (False, True):
        found = calls.find(
            start,
            end,
            exact=exact,
            donor_mask=packing.pack_mask(donors),
            target_mask=packing.pack_mask(targets),
        )
        named = [(one["kind"], one["layer"], one["target"]) for one in found]
        assert len(set(named)) == len(named)
        assert calls.reply.examined == targets[:, :, start:].sum()
        for match in found:
            assert match["donor"] < start <= match["target"] < end
            assert donors[match["kind"], match["layer"], match["donor"]]
            assert targets[match["kind"], match["layer"], match["target"]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("exact", [False, True])
def test_nonfinite_rows_match_nothing_and_are_counted_once(
    calls: Calls, bad: float, exact: bool
) -> None:
    calls.rows[:] = 1.0
    ids = np.arange(40, dtype=np.int32).reshape(2, LAYERS, 10)
    calls.rows[ids[1, 0, 2]] = bad
    calls.rows[ids[1, 0, 8], 1] = bad
    calls.index(ids[0], ids[1])
    found = calls.find(5, 10, exact=exact, exhaustive=not exact)
    of_plane = [one for one in found if (one["kind"], one["layer"]) == (1, 0)]
    assert {one["target"] for one in of_plane} == {5, 6, 7, 9}
    assert 2 not in {one["donor"] for one in of_plane}
    first = calls.reply.nonfinite
    assert first == (1 if exact else 2)
    calls.find(5, 10, exact=exact, exhaustive=not exact)
    assert calls.reply.nonfinite == 0
    assert calls.operations.get_agent_info().nonfinite_rows == first


@pytest.mark.parametrize("exact", [False, True])
def test_all_zero_rows_are_neither_donors_nor_targets(calls: Calls, exact: bool) -> None:
    ids = np.arange(40, dtype=np.int32).reshape(2, LAYERS, 10)
    calls.index(ids[0], ids[1])
    calls.rows[ids[1, 0]] = 1.0
    calls.rows[ids[1, 0, :2]] = 0.0
    calls.rows[ids[1, 0, 2]] = -0.0
    found = calls.find(5, 10, exact=exact, key=1.0, value=1.0)
    assert [(one["kind"], one["layer"], one["target"]) for one in found] == [
        (1, 0, target) for target in range(5, 10)
    ]
    assert {one["donor"] for one in found} <= {3, 4}
    assert calls.reply.nonfinite == 0


@pytest.mark.parametrize("exact", [False, True])
def test_left_padding_is_neither_donor_nor_target(calls: Calls, exact: bool) -> None:
    calls.rows[:] = 1.0
    ids = np.arange(40, dtype=np.int32).reshape(2, LAYERS, 10)
    ids[:, :, :6] = -1
    calls.index(ids[0], ids[1], first_token=6)
    assert calls.find(2, 6, exact=exact) == []
    found = calls.find(7, 10, exact=exact)
    assert {one["donor"] for one in found} == {6}


def test_heads_weigh_the_same_when_asked(make_calls: type[Calls]) -> None:
    calls = make_calls(layers=1)
    # The second head is small, and only there do the two tokens differ.
    calls.rows[:4] = [[10, 10, 0.1, 0.1], [10, 10, 0.1, -0.1]] * 2
    calls.index([[0, 1]], [[2, 3]])
    (plain,) = calls.find(1, 2, key=0, value=2)
    assert plain["distance"] < 0.001
    calls.operations._weigh_heads = True
    (weighed,) = calls.find(1, 2, key=0, value=2)
    assert weighed["distance"] == pytest.approx(1.0, rel=1e-4)

"""Sessions of an engine's own blocks: what is found, what never matches, what is refused."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from memshare.gpu_agent.operations import AgentOperations
from memshare.gpu_agent.pool import HostPool
from memshare.gpu_agent.search import SEARCHES
from memshare.gpu_agent.sessions import Sessions
from memshare.kernels import RowDtype, bits_to_float32, float32_to_bits
from memshare.kernels import get_block_kernels as block_kernels
from memshare.kernels import get_kernels as row_kernels
from memshare.v1 import agent_pb2, common_pb2
from memshare.wire import packing
from memshare.wire.block_layout import BlockGroup, BlockLayout, PagePart
from memshare.wire.errors import (
    InvalidArgument,
    LayoutMismatch,
    MemshareError,
    StaleGeneration,
    UnknownRequest,
    UnknownSession,
)
from memshare.wire.layout import RowLayout
from memshare.wire.status import from_rpc_error

if TYPE_CHECKING:
    from conftest import Agent

HEADS, TOKENS, DIMS, LAYERS, BLOCKS = 2, 4, 8, 3, 96
PART = HEADS * TOKENS * DIMS
DTYPES = {
    RowDtype.FP32: common_pb2.ROW_DTYPE_FP32,
    RowDtype.FP16: common_pb2.ROW_DTYPE_FP16,
    RowDtype.BF16: common_pb2.ROW_DTYPE_BF16,
}
RUN = TOKENS * DIMS
FORMS = {
    # K transposed and then V, head by head.
    "transposed": (PagePart(0, 2 * RUN, 1, TOKENS), PagePart(RUN, 2 * RUN, DIMS, 1)),
    # K and then V of each token of each head.
    "head by head": (
        PagePart(0, 2 * RUN, 2 * DIMS, 1),
        PagePart(DIMS, 2 * RUN, 2 * DIMS, 1),
    ),
    "token by token": (
        PagePart(0, DIMS, HEADS * DIMS, 1),
        PagePart(PART, DIMS, HEADS * DIMS, 1),
    ),
}


def layout_of(
    form: str = "transposed",
    dtype: RowDtype = RowDtype.FP32,
    groups: int = 1,
    contiguous: bool = False,
) -> BlockLayout:
    """`BLOCKS` blocks; the groups lie in the same memory, as engines do it."""
    page = 2 * PART * dtype.itemsize
    stride = LAYERS * page if contiguous else page
    offsets = tuple(layer * (page if contiguous else BLOCKS * page) for layer in range(LAYERS))
    group = BlockGroup(HEADS, DIMS, DIMS, offsets, stride, *FORMS[form])
    return BlockLayout(DTYPES[dtype], TOKENS, LAYERS * page, BLOCKS, (group,) * groups)


class Blocks:
    """A worker's operations on a pool of blocks, with the messages filled in."""

    def __init__(
        self,
        layout: BlockLayout | None = None,
        kernels: str = "numpy",
        search: str = "popcount",
        spare: int = 0,
    ) -> None:
        self.layout = layout or layout_of()
        self.pool = HostPool.create(self.layout.num_bytes + spare)
        rows = row_kernels(kernels)
        self.sessions = Sessions(self.pool, rows, block_kernels(kernels))
        self.operations = AgentOperations(self.sessions, SEARCHES[search](rows), 7)
        self.dtype = next(one for one, wire in DTYPES.items() if wire == self.layout.dtype)
        size = self.layout.itemsize
        self.bits: npt.NDArray[Any] = self.pool.rows(size, size).reshape(-1)
        self.open()

    def places(self, block: int, group: int = 0) -> npt.NDArray[np.int64]:
        """Elements of the pool, int64 [layers, K and V, heads, tokens, dims]."""
        shape = self.layout.groups[group]
        parts = [part.positions(HEADS, TOKENS, DIMS) for part in (shape.keys, shape.values)]
        starts = np.array(shape.layer_offsets) + block * shape.block_stride
        page = np.stack(parts)
        result: npt.NDArray[np.int64] = (
            starts[:, None, None, None, None] // self.layout.itemsize + page
        )
        return result

    def write(self, block: int, values: npt.ArrayLike) -> None:
        """Fill a block with values that broadcast to [layers, 2, heads, tokens, dims]."""
        places = self.places(block)
        full = np.broadcast_to(np.asarray(values, np.float32), places.shape)
        self.bits[places] = float32_to_bits(np.ascontiguousarray(full), self.dtype)

    def read(self, block: int) -> npt.NDArray[np.float64]:
        """What lies in a block, float64 [layers, 2, elements]."""
        values = bits_to_float32(self.bits[self.places(block)], self.dtype)
        return values.astype(np.float64).reshape(LAYERS, 2, PART)

    def distance(self, target: int, donor: int) -> npt.NDArray[np.float64]:
        """K's and V's relative squared distance, [2]."""
        x, y = self.read(target), self.read(donor)
        result: npt.NDArray[np.float64] = (((x - y) ** 2).sum(-1) / (x * x).sum(-1)).mean(0)
        return result

    def open(self, session: int = 1, tenant: str = "", **changes: Any) -> None:
        """OpenIndex."""
        fields: dict[str, Any] = {
            "session_id": session,
            "block_layout": self.layout.to_proto(),
            "row_bytes": self.layout.block_bytes,
            "tenant": tenant,
        }
        given = {name: value for name, value in (fields | changes).items() if value is not None}
        self.operations.open_index(agent_pb2.OpenIndexRequest(**given))

    def index(
        self,
        blocks: npt.ArrayLike,
        candidates: npt.ArrayLike = (),
        session: int = 1,
        request: int = 1,
        start: int = 0,
        **changes: Any,
    ) -> int:
        """IndexRows of block ids, [n] for all groups or [groups, n]."""
        ids = np.atleast_2d(np.asarray(blocks, np.int32))
        ids = np.broadcast_to(ids, (self.layout.num_groups, ids.shape[1]))
        fields: dict[str, Any] = {
            "session_id": session,
            "request_id": request,
            "start": start,
            "num_tokens": ids.shape[1],
            "key_rows": packing.pack(ids, packing.INT32),
            "candidates": packing.pack(candidates, packing.INT32),
        }
        message = agent_pb2.IndexRowsRequest(**(fields | changes))
        return self.operations.index_rows(message).num_tokens

    def drop(self, request: int = 1, keep: int = 0, generation: int = 0, session: int = 1) -> None:
        """DropRequests of one request."""
        self.operations.drop_requests(
            agent_pb2.DropRequestsRequest(
                session_id=session,
                request_ids=packing.pack([request], packing.UINT64),
                keep_tokens=packing.pack([keep], packing.UINT32),
                generations=packing.pack([generation], packing.UINT32),
            )
        )

    def find(
        self,
        start: int,
        end: int,
        session: int = 1,
        request: int = 1,
        key: float = 0.1,
        value: float = 0.1,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        """FindDonors among all blocks, as one dictionary a match, in order."""
        groups = self.layout.num_groups
        mask = packing.pack_mask(np.ones((1, groups, end), np.bool_))
        fields: dict[str, Any] = {
            "session_id": session,
            "request_id": request,
            "target_start": start,
            "target_end": end,
            "donor_mask": mask,
            "target_mask": mask,
            "key_thresholds": packing.pack(np.full(groups, key), packing.FLOAT32),
            "value_thresholds": packing.pack(np.full(groups, value), packing.FLOAT32),
            "candidates": 4,
        }
        self.reply = self.operations.find_donors(agent_pb2.FindDonorsRequest(**(fields | changes)))
        assert not any(self.reply.kinds)
        columns = {
            "group": np.frombuffer(self.reply.layers, packing.UINT16),
            "target": np.frombuffer(self.reply.targets, packing.INT32),
            "donor": np.frombuffer(self.reply.donors, packing.INT32),
            "row": np.frombuffer(self.reply.donor_rows, packing.INT32),
            "distance": np.frombuffer(self.reply.distances, packing.FLOAT32),
        }
        if self.reply.donor_sessions:
            columns["session"] = np.frombuffer(self.reply.donor_sessions, packing.UINT64)
            columns["request"] = np.frombuffer(self.reply.donor_requests, packing.UINT64)
        lengths = {len(column) for column in columns.values()}
        assert lengths == {len(self.reply.kinds)}
        found = [
            dict(zip(columns, values, strict=True))
            for values in zip(*(column.tolist() for column in columns.values()), strict=True)
        ]
        return sorted(found, key=lambda one: (one["group"], one["target"]))


def families(blocks: Blocks, noise: float, size: int = 8, seed: int = 0) -> npt.NDArray[np.int32]:
    """Fill all blocks, each near one of some prototypes; int32 [BLOCKS]: which.

    Layers and kinds are of very different size, and there is a mean above everything.
    """
    random = np.random.default_rng(seed)
    shape = blocks.places(0).shape
    prototypes = random.standard_normal((size, *shape)) + 3 * random.standard_normal(shape)
    scale = 10.0 ** random.uniform(-1.5, 1.5, (LAYERS, 2, 1, 1, 1))
    choice = random.integers(0, size, BLOCKS).astype(np.int32)
    for block in range(BLOCKS):
        off = noise * random.uniform(0.3, 1.0) * random.standard_normal(shape)
        blocks.write(block, scale * (prototypes[choice[block]] + off))
    return choice


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("dtype", list(RowDtype), ids=lambda dtype: dtype.value)
def test_near_blocks_are_found_wherever_they_lie(
    form: str, dtype: RowDtype, contiguous: bool, kernels: str
) -> None:
    calls = Blocks(layout_of(form, dtype, contiguous=contiguous), kernels)
    choice = families(calls, noise=0.3)
    ids = np.random.default_rng(1).permutation(BLOCKS).astype(np.int32)
    assert calls.index(ids) == BLOCKS
    found = calls.find(60, BLOCKS, key=0.05, value=0.05)
    assert len(found) > 30
    for match in found:
        assert match["donor"] < 60 <= match["target"]
        assert match["row"] == ids[match["donor"]]
        assert choice[ids[match["target"]]] == choice[match["row"]]
        expected = calls.distance(ids[match["target"]], match["row"])
        assert match["distance"] == pytest.approx(expected.mean(), rel=1e-4)
        assert (expected <= 0.05 * 1.0001).all()
    assert calls.operations.get_agent_info().indexed_rows == BLOCKS


@pytest.mark.parametrize("search", sorted(SEARCHES))
def test_signatures_find_nearly_all_that_an_exhaustive_search_finds(search: str) -> None:
    everything, found, nearest = 0, 0, 0
    for seed in range(4):
        calls = Blocks(kernels="numba", search=search)
        families(calls, noise=0.8, size=24, seed=seed)
        # In parts, so that some are signed before the mean is what it becomes.
        for start, end in ((0, 3), (3, 20), (20, 64), (64, BLOCKS)):
            calls.index(np.arange(start, end), start=start)
            calls.find(start, end, key=0.1, value=0.1)
        best = calls.find(32, BLOCKS, key=0.1, value=0.1, exhaustive=True)
        chosen = calls.find(32, BLOCKS, key=0.1, value=0.1)
        by_target = {one["target"]: one["distance"] for one in best}
        assert {one["target"] for one in chosen} <= set(by_target)
        for match in chosen:
            assert match["distance"] >= by_target[match["target"]]
            nearest += match["distance"] == by_target[match["target"]]
        everything += len(best)
        found += len(chosen)
    assert everything > 100
    assert found >= 0.95 * everything
    assert nearest >= 0.8 * everything


def test_the_engines_candidates_are_verified_beside_those_of_the_signatures() -> None:
    calls = Blocks()
    random = np.random.default_rng(0)
    base = random.standard_normal(calls.places(0).shape)
    # Twelve blocks nearer to the target by direction, but V alone is beyond its threshold; the
    # signatures put them first.
    for block in range(12):
        off = np.array([0.0, 0.05 * (1 + block)]).reshape(2, 1, 1, 1)
        calls.write(block, base + off)
    keys_off = base.copy()
    keys_off[:, 0] += 0.4 * random.standard_normal(base[:, 0].shape)
    calls.write(12, keys_off)
    calls.write(13, base)
    thresholds = {"key": 0.5, "value": 1e-9}
    calls.index(np.arange(14))
    assert calls.find(13, 14, candidates=1, **thresholds) == []
    named = np.full((14, 2), -1)
    named[13, 1] = 12
    calls.index(np.arange(14), named, request=2)
    (match,) = calls.find(13, 14, request=2, candidates=1, **thresholds)
    assert match["donor"] == match["row"] == 12
    # Named or not, it must be a donor by the mask, and near enough.
    mask = np.ones((1, 1, 14), np.bool_)
    mask[0, 0, 12] = False
    closed = packing.pack_mask(mask)
    assert calls.find(13, 14, request=2, candidates=1, donor_mask=closed, **thresholds) == []
    assert calls.find(13, 14, request=2, candidates=1, key=0.01, value=1e-9) == []
    # And older than the first target.
    assert calls.find(12, 14, request=2, candidates=1, **thresholds) == []


def test_candidates_may_widen_and_stop_from_call_to_call(blocks: Blocks) -> None:
    families(blocks, noise=0.2)
    blocks.index([0, 1, 2], [[-1], [0], [1]])
    blocks.index([3, 4], [[0, 1, 2], [3, -1, -1]], start=3)
    blocks.index([5], start=5)
    everything = blocks.find(0, 6, key=100, value=100, exhaustive=True)
    assert everything == []
    found = blocks.find(3, 6, key=100, value=100)
    assert {one["target"] for one in found} == {3, 4, 5}


def test_k_and_v_must_both_be_near(blocks: Blocks) -> None:
    blocks.write(0, 1.0)
    blocks.write(1, [[[[[1.1]]], [[[1.2]]]]])
    blocks.index([0, 1])
    key, value = blocks.distance(1, 0)
    assert key == pytest.approx(0.01 / 1.21, rel=1e-4)
    (match,) = blocks.find(1, 2, key=key * 1.001, value=value * 1.001)
    assert match["distance"] == pytest.approx((key + value) / 2, rel=1e-5)
    assert blocks.find(1, 2, key=key * 0.999, value=1) == []
    assert blocks.find(1, 2, key=1, value=value * 0.999) == []


def test_the_nearest_within_both_thresholds_wins(blocks: Blocks) -> None:
    blocks.write(0, [[[[[1.0]]], [[[1.5]]]]])  # nearest by the mean, but not in V
    blocks.write(1, [[[[[1.6]]], [[[1.0]]]]])
    blocks.write(2, [[[[[1.7]]], [[[1.0]]]]])
    blocks.write(3, 1.0)
    blocks.index([0, 1, 2, 3])
    (match,) = blocks.find(3, 4, key=1, value=0.1)
    assert match["donor"] == 1


def test_masks_are_obeyed(blocks: Blocks) -> None:
    for block in range(10):
        blocks.write(block, 1.0)
    blocks.index(np.arange(10))
    donors = np.zeros((1, 1, 10), np.bool_)
    targets = np.ones((1, 1, 10), np.bool_)
    for exact in (False, True):
        assert blocks.find(5, 10, exact=exact, donor_mask=packing.pack_mask(donors)) == []
    donors[0, 0, [3, 7]] = True
    targets[0, 0, 6] = False
    for exact in (False, True):
        found = blocks.find(
            5,
            10,
            exact=exact,
            donor_mask=packing.pack_mask(donors),
            target_mask=packing.pack_mask(targets),
        )
        # Never a target of the same answer, such as 7.
        assert [(one["target"], one["donor"]) for one in found] == [(5, 3), (7, 3), (8, 3), (9, 3)]
        assert blocks.reply.examined == 4


def test_groups_are_searched_apart_and_by_their_own_thresholds() -> None:
    calls = Blocks(layout_of(groups=2))
    for block in range(8):
        calls.write(block, 1.0 + 0.1 * (block % 4))
    # The same request, in the first group in blocks 0-2, in the second in 4-6.
    calls.index([[0, 1, 2], [4, 5, 6]])
    both = calls.find(1, 3, key=1, value=1)
    assert [(one["group"], one["target"], one["row"]) for one in both] == [
        (0, 1, 0),
        (0, 2, 0),
        (1, 1, 4),
        (1, 2, 4),
    ]
    thresholds = packing.pack([0, 1], packing.FLOAT32)
    second = calls.find(1, 3, key_thresholds=thresholds, value=1)
    assert {one["group"] for one in second} == {1}
    mask = np.zeros((1, 2, 3), np.bool_)
    mask[0, 0, 2] = True
    (one,) = calls.find(1, 3, key=1, value=1, target_mask=packing.pack_mask(mask))
    assert (one["group"], one["target"]) == (0, 2)
    assert calls.operations.get_agent_info().indexed_rows == 2 * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", list(RowDtype), ids=lambda dtype: dtype.value)
def test_nonfinite_blocks_match_nothing_and_are_counted_once(
    dtype: RowDtype, exact: bool, bad: float
) -> None:
    calls = Blocks(layout_of(dtype=dtype), "numba")
    for block in range(10):
        calls.write(block, 1.0)
    for block, layer, kind in ((2, 0, 1), (8, LAYERS - 1, 0)):
        where = calls.places(block)[layer, kind, -1, -1, -1]
        calls.bits[where] = float32_to_bits(np.array([bad], np.float32), dtype)[0]
    calls.index(np.arange(10))
    found = calls.find(5, 10, exact=exact, exhaustive=not exact)
    assert {one["target"] for one in found} == {5, 6, 7, 9}
    assert 2 not in {one["donor"] for one in found}
    first = calls.reply.nonfinite
    assert first == (1 if exact else 2)
    calls.find(5, 10, exact=exact, exhaustive=not exact)
    assert calls.reply.nonfinite == 0
    assert calls.operations.get_agent_info().nonfinite_rows == first


@pytest.mark.parametrize("exact", [False, True])
def test_blocks_of_nothing_but_zeros_are_neither_donors_nor_targets(
    blocks: Blocks, exact: bool
) -> None:
    """Memory that nobody wrote is no content, equal as it is."""
    for block in range(10):
        blocks.write(block, 0.0 if block in (0, 1, 7) else 1.0)
    blocks.write(2, -0.0)
    blocks.index(np.arange(10))
    found = blocks.find(5, 10, exact=exact, key=1, value=1)
    assert {one["target"] for one in found} == {5, 6, 8, 9}
    assert {one["donor"] for one in found} <= {3, 4}
    assert blocks.reply.nonfinite == 0


# Layer 1 of V is all zero, or the sum of the squares of layer 1 of K is beyond float32.
IMMEASURABLE = {"zeros": (1, 0.0), "large": (0, 1e25)}


@pytest.mark.parametrize("exact_first", [False, True])
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("dtype", [RowDtype.FP32, RowDtype.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("case", sorted(IMMEASURABLE))
def test_a_block_of_no_distance_is_equal_to_another_all_the_same(
    case: str, dtype: RowDtype, kernels: str, exact_first: bool
) -> None:
    calls = Blocks(layout_of(dtype=dtype), kernels)
    kind, content = IMMEASURABLE[case]
    odd, even = np.ones((LAYERS, 2, 1, 1, 1)), np.ones((LAYERS, 2, 1, 1, 1))
    odd[1, kind] = content
    for block in range(10):
        calls.write(block, odd if block in (2, 6, 8) else even)
    calls.index(np.arange(10))
    for exact in (True, False) if exact_first else (False, True, False):
        found = calls.find(5, 10, exact=exact, exhaustive=not exact, key=4, value=4)
        assert calls.reply.nonfinite == 0
        pairs = {one["target"]: one["donor"] for one in found}
        expected = {5, 6, 7, 8, 9} if exact else {5, 7, 9}
        assert set(pairs) == expected
        assert {pairs[target] for target in expected & {6, 8}} <= {2}
        assert {pairs[target] for target in (5, 7, 9)} <= {0, 1, 3, 4}
    # It was found out once, and is not measured again.
    calls.find(5, 10, key=4, value=4)
    assert calls.reply.examined == 3
    assert calls.operations.get_agent_info().nonfinite_rows == 0


def test_a_nonfinite_block_is_counted_once_whatever_is_looked_for(blocks: Blocks) -> None:
    for block in range(6):
        blocks.write(block, 1.0)
    blocks.bits[blocks.places(4)[0, 0, 0, 0, 0]] = np.float32(np.nan).view(np.uint32)
    blocks.index(np.arange(6))
    counted = []
    for exact in (False, True, False):
        found = blocks.find(3, 6, exact=exact)
        assert [one["target"] for one in found] == [3, 5]
        counted.append(blocks.reply.nonfinite)
    assert counted == [1, 0, 0]


def test_many_bad_blocks_do_not_hide_the_good_ones() -> None:
    """The mean and the weights are of the finite blocks alone."""
    calls = Blocks(kernels="numba")
    choice = families(calls, noise=0.1)
    for block in range(0, BLOCKS, 3):
        calls.bits[calls.places(block)[0, 0, 0, 0, 0]] = np.float32(np.nan).view(np.uint32)
    calls.index(np.arange(BLOCKS))
    found = calls.find(48, BLOCKS, key=0.05, value=0.05)
    assert len(found) >= 30
    for match in found:
        assert match["target"] % 3
        assert match["donor"] % 3
        assert choice[match["target"]] == choice[match["donor"]]


def test_equal_blocks_of_another_request_and_session_are_found(blocks: Blocks) -> None:
    blocks.open(2, tenant="a")
    blocks.open(3, tenant="a")
    blocks.open(4, tenant="b")
    families(blocks, noise=1.0, size=BLOCKS)
    for block in (20, 40, 60):
        blocks.bits[blocks.places(block)] = blocks.bits[blocks.places(5)]
    blocks.index([4, 5, 6], session=2)
    assert blocks.find(0, 3, session=2, exact=True) == []
    for session in (3, 4):
        blocks.index([19, 20, 21], session=session, request=9)
    (match,) = blocks.find(0, 3, session=3, request=9, exact=True)
    assert match == {
        "group": 0, "target": 1, "donor": 1, "row": 5, "distance": 0.0, "session": 2, "request": 1,
    }  # fmt: skip
    assert blocks.find(0, 3, session=4, request=9, exact=True) == []
    # The same block under another request, as an engine's prefix cache has it, is no donor.
    blocks.index([5, 40], session=2, request=2)
    (match,) = blocks.find(0, 2, session=2, request=2, exact=True)
    assert (match["target"], match["row"]) == (1, 5)
    # Changed since: not found any more.
    blocks.write(5, 1.0)
    blocks.index([60], session=2, request=3)
    assert blocks.find(0, 1, session=2, request=3, exact=True) == []


def test_a_private_request_is_equal_to_itself_alone(blocks: Blocks) -> None:
    blocks.open(2, tenant="a")
    families(blocks, noise=1.0, size=BLOCKS)
    for block in (7, 20, 40):
        blocks.bits[blocks.places(block)] = blocks.bits[blocks.places(5)]
    blocks.index([5, 6, 7], session=2, private=True)
    (match,) = blocks.find(1, 3, session=2, exact=True)
    assert (match["target"], match["row"], match["request"]) == (2, 5, 1)
    # What it holds is no donor of another, and nothing of another is one of its.
    blocks.index([20], session=2, request=2)
    assert blocks.find(0, 1, session=2, request=2, exact=True) == []
    blocks.index([40], session=2, request=3, private=True)
    assert blocks.find(0, 1, session=2, request=3, exact=True) == []


def test_groups_are_never_exact_donors_of_each_other() -> None:
    calls = Blocks(layout_of(groups=2))
    for block in range(4):
        calls.write(block, 1.0)
    calls.index([[0], [1]])
    assert calls.find(0, 1, exact=True) == []
    calls.index([[2, 2], [3, 3]], request=2)
    assert calls.find(1, 2, exact=True, request=2) == []


def test_dropped_donors_are_not_returned(blocks: Blocks) -> None:
    blocks.open(2, tenant="a")
    for block in range(20):
        blocks.write(block, 1.0 + block % 10)
    blocks.index([0, 1, 2], session=2)
    blocks.find(0, 3, session=2, exact=True)
    blocks.drop(keep=1, session=2, generation=1)
    assert blocks.operations.get_agent_info().indexed_rows == 1
    blocks.index([10, 11, 12], session=2, request=2)
    assert [one["row"] for one in blocks.find(0, 3, session=2, request=2, exact=True)] == [0]
    assert blocks.index([3], session=2, start=1, generation=1) == 2
    with pytest.raises(StaleGeneration):
        blocks.find(0, 1, session=2)
    blocks.drop(session=2, generation=1)
    with pytest.raises(UnknownRequest):
        blocks.find(0, 1, session=2, generation=1)


def zero(calls: Blocks, *rows: int, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "row_bytes": calls.layout.block_bytes,
        "rows": packing.pack(rows, packing.INT32),
        "block_layout": calls.layout.to_proto(),
    }
    calls.operations.zero_rows(agent_pb2.ZeroRowsRequest(**(fields | changes)))


def copy(calls: Blocks, sources: list[int], destinations: list[int]) -> None:
    calls.operations.copy_rows(
        agent_pb2.CopyRowsRequest(
            row_bytes=calls.layout.block_bytes,
            source_rows=packing.pack(sources, packing.INT32),
            destination_rows=packing.pack(destinations, packing.INT32),
            block_layout=calls.layout.to_proto(),
        )
    )


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dtype", [RowDtype.FP32, RowDtype.BF16], ids=lambda dtype: dtype.value)
def test_copies_and_zeroes_touch_only_what_is_named(dtype: RowDtype, contiguous: bool) -> None:
    calls = Blocks(layout_of(dtype=dtype, contiguous=contiguous), spare=100)
    families(calls, noise=1.0)
    expected = calls.bits.copy()
    for source, destination in ((1, 5), (2, 6), (1, 7)):
        expected[calls.places(destination)] = calls.bits[calls.places(source)]
    for block in (3, BLOCKS - 1):
        expected[calls.places(block)] = 0
    copy(calls, [1, 2, 1], [5, 6, 7])
    zero(calls, 3, BLOCKS - 1)
    assert np.array_equal(calls.bits, expected)


ROWS = RowLayout(1, 1, 4, 4, common_pb2.ROW_DTYPE_FP32, inv_freq=(0.5,))
THRESHOLD = packing.pack([0.1, 0.1], packing.FLOAT32)
LARGER = dataclasses.replace(layout_of(contiguous=True), num_blocks=BLOCKS + 1)


def shifted() -> common_pb2.BlockLayout:
    message = layout_of().to_proto()
    message.groups[0].layer_offsets = packing.pack([0, 4, 1 << 40], packing.UINT64)
    return message


REFUSED: dict[str, tuple[type[MemshareError], Callable[[Blocks], object]]] = {
    "open: both layouts": (InvalidArgument, lambda c: c.open(2, layout=ROWS.to_proto())),
    "open: no layout": (InvalidArgument, lambda c: c.open(2, block_layout=None)),
    "open: rows of another size": (InvalidArgument, lambda c: c.open(2, row_bytes=16)),
    "open: pages outside": (InvalidArgument, lambda c: c.open(2, block_layout=shifted())),
    "open: more blocks than the pool has": (
        InvalidArgument,
        lambda c: c.open(2, block_layout=LARGER.to_proto()),
    ),
    "open: rows beside blocks": (
        LayoutMismatch,
        lambda c: c.open(2, block_layout=None, layout=ROWS.to_proto()),
    ),
    "open: other blocks of the same size": (
        LayoutMismatch,
        lambda c: c.open(2, block_layout=layout_of("token by token").to_proto()),
    ),
    "open: another tenant": (InvalidArgument, lambda c: c.open(1, tenant="b")),
    "index: values": (
        InvalidArgument,
        lambda c: c.index([5], start=4, value_rows=packing.pack([5], packing.INT32)),
    ),
    "index: padding": (InvalidArgument, lambda c: c.index([5], start=4, first_token=1)),
    "index: a block too many": (InvalidArgument, lambda c: c.index([BLOCKS], start=4)),
    "index: a negative block": (InvalidArgument, lambda c: c.index([-1], start=4)),
    "index: too few blocks": (InvalidArgument, lambda c: c.index([5], start=4, num_tokens=2)),
    "index: half a block": (InvalidArgument, lambda c: c.index([5], start=4, key_rows=b"123")),
    "index: a gap": (InvalidArgument, lambda c: c.index([5], start=5)),
    "index: unknown session": (UnknownSession, lambda c: c.index([5], session=9)),
    "index: a candidate that is itself": (
        InvalidArgument,
        lambda c: c.index([5], [[4]], start=4),
    ),
    "index: a later candidate": (
        InvalidArgument,
        lambda c: c.index([5, 6], [[0], [5]], start=4),
    ),
    "index: a negative candidate": (InvalidArgument, lambda c: c.index([5], [[-2]], start=4)),
    "index: candidates for some": (
        InvalidArgument,
        lambda c: c.index([5, 6], [0, 1, 2], start=4),
    ),
    "index: half a candidate": (
        InvalidArgument,
        lambda c: c.index([5], start=4, candidates=b"12345"),
    ),
    "index: far too many candidates": (
        InvalidArgument,
        lambda c: c.index([5], [[0] * 65], start=4),
    ),
    "find: masks of rows": (
        InvalidArgument,
        lambda c: c.find(2, 4, target_mask=bytes(2)),
    ),
    "find: thresholds of more groups": (
        InvalidArgument,
        lambda c: c.find(2, 4, key_thresholds=THRESHOLD),
    ),
    "find: NaN threshold": (InvalidArgument, lambda c: c.find(2, 4, value=math.nan)),
    "find: no candidates": (InvalidArgument, lambda c: c.find(2, 4, candidates=0)),
    "find: beyond the end": (InvalidArgument, lambda c: c.find(2, 5)),
    "zero: outside": (InvalidArgument, lambda c: zero(c, 1, BLOCKS)),
    "zero: twice": (InvalidArgument, lambda c: zero(c, 1, 1)),
    "zero: blocks of another size": (InvalidArgument, lambda c: zero(c, 1, row_bytes=32)),
    "zero: another division": (
        LayoutMismatch,
        lambda c: zero(c, 1, block_layout=layout_of("token by token").to_proto()),
    ),
    "copy: outside": (InvalidArgument, lambda c: copy(c, [1], [BLOCKS])),
    "copy: twice to one": (InvalidArgument, lambda c: copy(c, [1, 2], [3, 3])),
    "copy: read and written": (InvalidArgument, lambda c: copy(c, [1, 2], [2, 3])),
}


def state(calls: Blocks) -> Any:
    """All that a refused call must leave as it was."""
    info = calls.operations.get_agent_info()
    info.ClearField("cpu_seconds")
    request = calls.sessions.get(1).requests[1].index
    return info, request.generation, request.rows.tolist(), calls.bits.tobytes()


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_refused_call_changes_nothing(blocks: Blocks, case: str) -> None:
    families(blocks, noise=0.1)
    blocks.index([0, 1, 2, 3], [[-1], [0], [1], [2]])
    error, call = REFUSED[case]
    before = state(blocks)
    with pytest.raises(error):
        call(blocks)
    assert state(blocks) == before


def test_row_sessions_refuse_blocks_and_their_candidates(blocks: Blocks) -> None:
    blocks.operations.close_index(agent_pb2.CloseIndexRequest(session_id=1))
    rows = {"block_layout": None, "layout": ROWS.to_proto(), "row_bytes": 16}
    blocks.open(2, **rows)
    with pytest.raises(LayoutMismatch):
        blocks.open(3)
    row = packing.pack([1], packing.INT32)
    message = agent_pb2.IndexRowsRequest(
        session_id=2, request_id=1, num_tokens=1, key_rows=row, value_rows=row, candidates=row
    )
    with pytest.raises(InvalidArgument, match="candidates"):
        blocks.operations.index_rows(message)
    assert blocks.operations.get_agent_info().requests == 0


def test_opening_twice_is_opening_once_and_closing_frees_the_division(blocks: Blocks) -> None:
    blocks.index([0, 1])
    blocks.open(1)
    info = blocks.operations.get_agent_info()
    assert (info.sessions, info.requests, info.indexed_rows) == (1, 1, 2)
    assert (info.pool.row_bytes, info.pool.num_rows) == (blocks.layout.block_bytes, BLOCKS)
    blocks.operations.close_index(agent_pb2.CloseIndexRequest(session_id=1))
    info = blocks.operations.get_agent_info()
    assert (info.sessions, info.indexed_rows, info.pool.row_bytes) == (0, 0, 0)
    other = layout_of("token by token")
    blocks.open(2, block_layout=other.to_proto())


def test_blocks_through_the_worker_itself(agent: Agent) -> None:
    """Index, search, zero and copy over the socket, with compiled kernels and a mapped pool."""
    info = agent.wait_worker()
    layout = layout_of()
    connection = agent.connect()
    mapping = mmap.mmap(connection.descriptor, info.pool.pool_bytes)
    values = np.frombuffer(mapping, np.float32)
    page = 2 * PART
    values[: 3 * BLOCKS * page] = np.random.default_rng(0).standard_normal(3 * BLOCKS * page)
    layers = values[: 3 * BLOCKS * page].reshape(LAYERS, BLOCKS, page)
    layers[:, 20] = layers[:, 3]
    name = {"worker_epoch": info.worker_epoch, "session_id": 71}
    place = {"row_bytes": layout.block_bytes, "block_layout": layout.to_proto()}
    mask = packing.pack_mask(np.ones((1, 1, 24), np.bool_))
    search: dict[str, Any] = {
        **name,
        "request_id": 1,
        "target_start": 12,
        "target_end": 24,
        "donor_mask": mask,
        "target_mask": mask,
        "key_thresholds": packing.pack([0.01], packing.FLOAT32),
        "value_thresholds": packing.pack([0.01], packing.FLOAT32),
        "candidates": 4,
    }
    with agent.channel() as channel:
        stub = agent.stub(channel)
        stub.OpenIndex(agent_pb2.OpenIndexRequest(**name, **place, tenant="t"))
        sealed = {"request_id": 1, "num_tokens": 24}
        rows = packing.pack(range(24), packing.INT32)
        with pytest.raises(grpc.RpcError) as refused:
            stub.IndexRows(
                agent_pb2.IndexRowsRequest(**name, **sealed, key_rows=rows, candidates=rows)
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidArgument)
        assert error.details == {"field": "candidates"}
        stub.IndexRows(agent_pb2.IndexRowsRequest(**name, **sealed, key_rows=rows))
        for exact in (False, True):
            found = stub.FindDonors(agent_pb2.FindDonorsRequest(**search, exact=exact))
            assert packing.unpack(found.targets, packing.INT32, "targets").tolist() == [20]
            assert packing.unpack(found.donor_rows, packing.INT32, "donor_rows").tolist() == [3]
        stub.ZeroRows(
            agent_pb2.ZeroRowsRequest(
                worker_epoch=info.worker_epoch, rows=packing.pack([3], packing.INT32), **place
            )
        )
        stub.CopyRows(
            agent_pb2.CopyRowsRequest(
                worker_epoch=info.worker_epoch,
                source_rows=packing.pack([5], packing.INT32),
                destination_rows=packing.pack([6], packing.INT32),
                **place,
            )
        )
        assert stub.GetAgentInfo(agent_pb2.GetAgentInfoRequest()).indexed_rows == 24
        stub.CloseIndex(agent_pb2.CloseIndexRequest(**name))
    assert not layers[:, 3].any()
    assert layers[:, [2, 4]].all()
    assert np.array_equal(layers[:, 6], layers[:, 5])
    connection.close()

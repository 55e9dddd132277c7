"""Block operations: every backend against plain float64, in every page layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.kernels import (
    BlockKernels,
    BlockPages,
    BlockSketcher,
    RowDtype,
    float32_to_bits,
    get_block_kernels,
)
from memshare.kernels.block_pages import CHUNK

from .block_cases import FORMS, NUM_BLOCKS, Form, fill, pages_of, positions_of, values_of
from .conftest import ids

NAMES = ("numba", "numpy")
ALL = np.arange(NUM_BLOCKS, dtype=np.int32)
SMALL = Form("tokens", 2, 4, 8, 2)


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> BlockKernels:
    return get_block_kernels(request.param)


@pytest.fixture(params=FORMS, ids=str)
def form(request: pytest.FixtureRequest) -> Form:
    value: Form = request.param
    return value


def relative_distances(x: Any, y: Any) -> Any:
    """[layers, 2, elements] to [2], in float64."""
    return (((x - y) ** 2).sum(-1) / (x * x).sum(-1)).mean(0)


def test_distances_against_float64(
    kernels: BlockKernels, form: Form, dtype: RowDtype, rng: np.random.Generator
) -> None:
    pages = pages_of(form, dtype)
    pool = fill(pages, rng)
    x = values_of(pool, form, pages)
    targets = rng.integers(0, NUM_BLOCKS, 17).astype(np.int32)
    donors = rng.integers(-1, NUM_BLOCKS, (17, 3)).astype(np.int32)
    got = kernels.pair_distances(pool, pages, targets, donors)
    assert got.dtype == np.float32
    for i, target in enumerate(targets):
        for j, donor in enumerate(donors[i]):
            expected = relative_distances(x[target], x[donor]) if donor >= 0 else np.inf
            np.testing.assert_allclose(got[i, j], expected, rtol=2e-6, atol=1e-12)


def test_squares_are_means_over_the_elements(
    kernels: BlockKernels, form: Form, dtype: RowDtype, rng: np.random.Generator
) -> None:
    pages = pages_of(form, dtype)
    pool = fill(pages, rng)
    got = kernels.squares(pool, pages, ALL[::-1])
    expected = (values_of(pool, form, pages)[::-1] ** 2).mean(axis=-1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_sketches_are_the_projection_that_is_described(
    kernels: BlockKernels, form: Form, dtype: RowDtype, rng: np.random.Generator
) -> None:
    """Element by element: its chunk, its place in it, its two signs, its weight."""
    pages = pages_of(form, dtype)
    pool = fill(pages, rng)
    sketcher = BlockSketcher(pages, seed=5)
    weights = rng.uniform(0.1, 3, (form.layers, 2)).astype(np.float32)
    floats = values_of(pool, form, pages)
    page_values = np.empty((NUM_BLOCKS, form.layers, pages.page_elems))
    page_values[..., form.key_mask] = floats[:, :, 0]
    page_values[..., ~form.key_mask] = floats[:, :, 1]
    expected = np.zeros((NUM_BLOCKS, 256))
    for c, (start, stride, runs, run, kind) in enumerate(pages.chunks.tolist()):
        for i in range(runs * run):
            element = page_values[:, :, start + i // run * stride + i % run]
            bit = i % 256
            minus = sketcher.signs[:, c, bit // 64] >> np.uint64(bit % 64) & np.uint64(1)
            sign = sketcher.flips[i] * (1.0 - 2.0 * minus)
            expected[:, bit] += (element * sign * weights[:, kind]).sum(axis=1)
    got = kernels.sketches(pool, pages, ALL, weights, sketcher)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-4)


def test_sketches_are_linear_and_keep_inner_products(dtype: RowDtype) -> None:
    """Of blocks with layers and kinds of very different size, as weighted."""
    rng = np.random.default_rng(3)
    form = Form("heads", 3, 16, 64, 8)
    pages = pages_of(form, RowDtype.FP32)
    scale = 10.0 ** rng.uniform(-1, 1, (form.layers, 2, 1))
    pool = np.zeros(pages.end, np.float32)
    base = rng.standard_normal((form.layers, 2, 3072))
    for block in range(NUM_BLOCKS):
        mixed = base + 0.1 * block * rng.standard_normal(base.shape)
        pool[positions_of(form, pages, block)] = scale * mixed
    kernels = get_block_kernels()
    bits = pool.view(np.uint32)
    squares = kernels.squares(bits, pages, ALL)
    weights = (1 / np.sqrt(squares[0])).astype(np.float32)
    sketches = kernels.sketches(bits, pages, ALL, weights, BlockSketcher(pages)).astype(np.float64)
    x = values_of(bits, form, pages) * weights[:, :, None]
    x = x.reshape(NUM_BLOCKS, -1)
    for block in range(1, NUM_BLOCKS):
        got = ((sketches[block] - sketches[0]) ** 2).sum()
        expected = ((x[block] - x[0]) ** 2).sum()
        assert got == pytest.approx(expected, rel=0.35)


def test_signatures_of_sketches_agree_bit_for_bit(rng: np.random.Generator) -> None:
    sketches = rng.standard_normal((50, 256)).astype(np.float32)
    mean = rng.standard_normal(256).astype(np.float32)
    sketcher = BlockSketcher(pages_of(SMALL, RowDtype.FP32))
    fast, plain = (
        get_block_kernels(name).sketch_signatures(sketches, mean, sketcher) for name in NAMES
    )
    assert fast.shape == (50, 2)
    np.testing.assert_array_equal(fast, plain)
    shifted = get_block_kernels().sketch_signatures(sketches + mean, 2 * mean, sketcher)
    assert np.bitwise_count(fast ^ shifted).sum(axis=1).mean() < 0.1


def test_near_blocks_have_near_signatures(form: Form, dtype: RowDtype) -> None:
    rng = np.random.default_rng(1)
    pages = pages_of(form, dtype)
    floats = rng.standard_normal((NUM_BLOCKS, form.layers, 2, pages.page_elems // 2))
    floats[1] = floats[0] + 0.1 * rng.standard_normal(floats[0].shape)
    pool = np.zeros(pages.end, pages.dtype.bits_dtype)
    for block in range(NUM_BLOCKS):
        values = (floats[block] + 20.0).astype(np.float32)
        pool[positions_of(form, pages, block)] = float32_to_bits(values, dtype)
    signed = []
    for name in NAMES:
        kernels = get_block_kernels(name)
        sketcher = BlockSketcher(pages)
        weights = np.ones((form.layers, 2), np.float32)
        sketches = kernels.sketches(pool, pages, ALL, weights, sketcher)
        signed.append(kernels.sketch_signatures(sketches, sketches[2:].mean(axis=0), sketcher))
    assert np.bitwise_count(signed[0] ^ signed[1]).sum() < 3 * NUM_BLOCKS
    differ = np.bitwise_count(signed[0][:1] ^ signed[0]).sum(axis=1)
    assert differ[1] < 16
    assert differ[2:].min() > 25


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_blocks_that_never_match(
    kernels: BlockKernels, form: Form, dtype: RowDtype, value: float, rng: np.random.Generator
) -> None:
    pages = pages_of(form, dtype)
    pool = fill(pages, rng)
    kind = int(rng.integers(0, 2))
    bad = positions_of(form, pages, 1)[-1, kind, -1]
    pool[bad] = float32_to_bits(np.array([value], np.float32), dtype)[0]
    pool[positions_of(form, pages, 2)] = 0
    pool[positions_of(form, pages, 3)] = dtype.magnitude_mask + 1  # minus zero
    every = ids(0, 1, 2, 3)
    distance = kernels.pair_distances(pool, pages, every, np.tile(every, (4, 1)))
    usable = np.zeros((4, 4, 2), np.bool_)
    usable[0, 0] = True
    usable[:2, :2, 1 - kind] = True  # the other of K and V is sound in block 1
    np.testing.assert_array_equal(np.isfinite(distance), usable)
    assert (distance[~usable] == np.inf).all()
    np.testing.assert_array_equal(
        kernels.equal(pool, pages, every, every), [True, False, False, False]
    )
    np.testing.assert_array_equal(
        kernels.hashes(pool, pages, every) != 0, [True, False, False, False]
    )
    finite = np.isfinite(kernels.squares(pool, pages, every)).all(axis=(1, 2))
    np.testing.assert_array_equal(finite, [True, False, True, True])
    ones = np.ones((form.layers, 2), np.float32)
    sketches = kernels.sketches(pool, pages, every, ones, BlockSketcher(pages))
    np.testing.assert_array_equal(np.isfinite(sketches).all(axis=1), finite)


def test_a_layer_of_zeros_is_similar_to_nothing(
    kernels: BlockKernels, rng: np.random.Generator
) -> None:
    pages = pages_of(SMALL, RowDtype.FP32)
    pool = fill(pages, rng)
    pool[positions_of(SMALL, pages, 1)[1, 0]] = 0
    got = kernels.pair_distances(pool, pages, ids(0, 1), ids(1, 1)[:, None])
    assert (got[:, 0, 0] == np.inf).all()
    assert np.isfinite(got[:, 0, 1]).all()
    # Bit for bit it may still be shared.
    assert kernels.equal(pool, pages, ids(1), ids(1)).all()


def test_overflow_is_not_similar(kernels: BlockKernels) -> None:
    pages = pages_of(SMALL, RowDtype.FP32)
    pool = np.full(pages.end, 1e30, np.float32).view(np.uint32)
    assert (kernels.pair_distances(pool, pages, ids(0), ids(1)[None]) == np.inf).all()


def test_sums_of_a_large_block_keep_their_precision(kernels: BlockKernels) -> None:
    """Where one float32 sum would stand still: many small terms after a large one."""
    form = Form("apart", 8, 1024, 128, 1)
    stride = 4 * len(form.key_mask)
    pages = BlockPages.build(RowDtype.FP32, 2, [0], stride, form.key_mask)
    values = np.full((2, len(form.key_mask)), 1e-2, np.float32)
    values[:, 0] = 1e3
    values[1, 1:] = 1.001e-2
    pool = values.reshape(-1).view(np.uint32)
    x = values.astype(np.float64)[:, form.key_mask]
    expected = ((x[0] - x[1]) ** 2).sum() / (x[0] ** 2).sum()
    got = kernels.pair_distances(pool, pages, ids(0), ids(1)[None])[0, 0]
    assert got[0] == pytest.approx(expected, rel=2e-6)


def test_equality_and_hashes_see_every_bit(
    form: Form, dtype: RowDtype, rng: np.random.Generator
) -> None:
    pages = pages_of(form, dtype)
    pool = fill(pages, rng)
    for block in range(7, NUM_BLOCKS):
        pool[positions_of(form, pages, block)] = pool[positions_of(form, pages, block - 6)]
    for block in (8, 10):
        places = positions_of(form, pages, block).reshape(-1)
        pool[rng.choice(places)] ^= 1
    a, b = ALL[1:7], ALL[7:]
    expected = [True, False, True, False, True, True]
    hashes = []
    for name in NAMES:
        kernels = get_block_kernels(name)
        np.testing.assert_array_equal(kernels.equal(pool, pages, a, b), expected)
        hashes.append(kernels.hashes(pool, pages, ALL))
        np.testing.assert_array_equal(hashes[-1][1:7] == hashes[-1][7:], expected)
    np.testing.assert_array_equal(*hashes)
    assert len(np.unique(hashes[0])) == 1 + 6 + 2


def test_hashes_tell_the_order_of_layers_and_chunks(kernels: BlockKernels) -> None:
    form = Form("apart", 2, 64, 64, 2)
    pages = pages_of(form, RowDtype.FP32)
    rng = np.random.default_rng(0)
    pool = fill(pages, rng)
    first = pool[positions_of(form, pages, 0)].reshape(2, -1, CHUNK)
    for block, order in ((1, np.s_[::-1]), (2, np.s_[:, ::-1])):
        pool[positions_of(form, pages, block)] = first[order].reshape(2, 2, -1)
    assert len(np.unique(kernels.hashes(pool, pages, ids(0, 1, 2)))) == 3


def test_copies_and_zeroes_touch_what_is_named_and_nothing_else(
    kernels: BlockKernels, form: Form, dtype: RowDtype, rng: np.random.Generator
) -> None:
    pages = pages_of(form, dtype)
    pool = fill(pages, rng)
    expected = pool.copy()
    for source, destination in ((1, 5), (2, 6), (1, 7)):
        place = positions_of(form, pages, destination)
        expected[place] = pool[positions_of(form, pages, source)]
    for block in (3, 12):
        expected[positions_of(form, pages, block)] = 0
    kernels.copy_blocks(pool, [pages], ids(1, 2, 1), ids(5, 6, 7))
    kernels.zero_blocks(pool, [pages], ids(3, 12))
    np.testing.assert_array_equal(pool, expected)


def test_copies_and_zeroes_reach_all_groups(kernels: BlockKernels) -> None:
    mask = SMALL.key_mask
    page = 4 * len(mask)
    groups = [
        BlockPages.build(RowDtype.FP32, NUM_BLOCKS, offsets, 4 * page, mask)
        for offsets in ([0, page], [2 * page, 3 * page])
    ]
    pool = np.ones(groups[1].end, np.float32).view(np.uint32)
    blocks = pool.reshape(NUM_BLOCKS, -1)
    kernels.zero_blocks(pool, groups, ids(3))
    assert not blocks[3].any()
    assert blocks[[2, 4]].all()
    kernels.copy_blocks(pool, groups, ids(4), ids(3))
    assert blocks.all()


@st.composite
def key_masks(draw: st.DrawFn) -> npt.NDArray[np.bool_]:
    """Pages cut in any way, of some length."""
    runs = draw(st.lists(st.integers(1, 40), min_size=2, max_size=30))
    repeat = draw(st.integers(1, 120))
    pieces = [np.full(size, i % 2 == 0) for i, size in enumerate(runs)]
    mask = np.concatenate([np.concatenate(pieces)] * repeat)
    return mask if not mask.all() else np.append(mask, False)


@settings(max_examples=100, deadline=None)
@given(key_masks())
def test_chunks_hold_every_element_of_their_kind_once(mask: npt.NDArray[np.bool_]) -> None:
    pages = BlockPages.build(RowDtype.FP16, 1, [0], 2 * len(mask), mask)
    seen = np.zeros(len(mask), np.int64)
    for start, stride, runs, run, kind in pages.chunks.tolist():
        assert 0 < runs * run <= CHUNK
        for r in range(runs):
            piece = slice(start + r * stride, start + r * stride + run)
            assert (mask[piece] == (kind == 0)).all()
            seen[piece] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("order", "chunks"), [("apart", 16), ("heads", 16), ("tokens", 16), ("elements", 16)]
)
def test_regular_pages_are_cut_into_full_chunks(order: str, chunks: int) -> None:
    pages = pages_of(Form(order, 8, 16, 128, 1), RowDtype.BF16)
    assert (pages.chunks[:, 2] * pages.chunks[:, 3] == CHUNK).all()
    assert len(pages.chunks) == chunks


@settings(max_examples=60, deadline=None)
@given(mask=key_masks(), seed=st.integers(0, 99))
def test_backends_agree_on_any_page(mask: npt.NDArray[np.bool_], seed: int) -> None:
    mask = mask[:700]
    if mask.all():
        mask[-1] = False
    rng = np.random.default_rng(seed)
    pages = BlockPages.build(RowDtype.BF16, 3, [2, 0], 4 * len(mask), mask)
    pool = float32_to_bits(rng.standard_normal(pages.end).astype(np.float32), RowDtype.BF16)
    sketcher = BlockSketcher(pages)
    weights = np.ones((2, 2), np.float32)
    blocks = ids(2, 0, 1)
    results = [
        (
            kernels.pair_distances(pool, pages, blocks, blocks[:, None] % np.int32(2)),
            kernels.sketches(pool, pages, blocks, weights, sketcher),
            kernels.hashes(pool, pages, blocks),
        )
        for kernels in map(get_block_kernels, NAMES)
    ]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=2e-6, atol=1e-12)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(results[0][2], results[1][2])


PAGES = pages_of(SMALL, RowDtype.FP32)
POOL = np.ones(PAGES.end, np.float32).view(np.uint32)
SKETCHER = BlockSketcher(PAGES)
ONES = np.ones((2, 2), np.float32)
PAIR = ids(0, 12)[:, None]

Call = Callable[[BlockKernels, Any], Any]
WITH_IDS: dict[str, Call] = {
    "squares": lambda k, b: k.squares(POOL, PAGES, b),
    "sketches": lambda k, b: k.sketches(POOL, PAGES, b, ONES, SKETCHER),
    "targets": lambda k, b: k.pair_distances(POOL, PAGES, b, PAIR),
    "donors": lambda k, b: k.pair_distances(POOL, PAGES, ids(0, 1), b[:, None]),
    "hashes": lambda k, b: k.hashes(POOL, PAGES, b),
    "equal a": lambda k, b: k.equal(POOL, PAGES, b, ids(0, 1)),
    "equal b": lambda k, b: k.equal(POOL, PAGES, ids(0, 1), b),
    "src": lambda k, b: k.copy_blocks(POOL.copy(), [PAGES], b, ids(1, 2)),
    "dst": lambda k, b: k.copy_blocks(POOL.copy(), [PAGES], ids(1, 2), b),
    "zero": lambda k, b: k.zero_blocks(POOL.copy(), [PAGES], b),
}


@pytest.mark.parametrize("call", WITH_IDS.values(), ids=WITH_IDS)
@pytest.mark.parametrize("bad", [13, -2, 2**31 - 1, -(2**31)])
def test_blocks_outside_the_pool(kernels: BlockKernels, call: Call, bad: int) -> None:
    call(kernels, ids(0, 12))
    with pytest.raises(ValueError, match=rf"block {bad} is outside the pool of 13 blocks"):
        call(kernels, ids(0, bad))
    with pytest.raises(ValueError, match="int32"):
        call(kernels, np.array([0, 12]))


BAD_CALLS: dict[str, tuple[str, Callable[[BlockKernels], Any]]] = {
    "pool dtype": ("flat", lambda k: k.hashes(POOL.view(np.uint16), PAGES, ids(0))),
    "pool shape": ("flat", lambda k: k.hashes(POOL.reshape(1, -1), PAGES, ids(0))),
    "pool order": ("flat", lambda k: k.hashes(POOL[::2], PAGES, ids(0))),
    "small pool": ("pages reach element", lambda k: k.hashes(POOL[:-1], PAGES, ids(0))),
    "weights": ("weights", lambda k: k.sketches(POOL, PAGES, ids(0), ONES[:1], SKETCHER)),
    "sketcher": (
        "other pages",
        lambda k: k.sketches(
            POOL, PAGES, ids(0), ONES, BlockSketcher(pages_of(FORMS[0], RowDtype.FP32))
        ),
    ),
    "mean": (
        "mean",
        lambda k: k.sketch_signatures(np.ones((1, 256), "f4"), np.ones(255, "f4"), SKETCHER),
    ),
    "donors": ("donors", lambda k: k.pair_distances(POOL, PAGES, ids(0), PAIR)),
    "lengths": ("b must", lambda k: k.equal(POOL, PAGES, ids(0), ids(0, 1))),
    "twice": (
        "block 3 is written twice",
        lambda k: k.copy_blocks(POOL.copy(), [PAGES], ids(1, 2), ids(3, 3)),
    ),
    "both": (
        "block 2 is both read and written",
        lambda k: k.copy_blocks(POOL.copy(), [PAGES], ids(1, 2), ids(2, 3)),
    ),
}


@pytest.mark.parametrize(("message", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments(
    kernels: BlockKernels, message: str, call: Callable[[BlockKernels], Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        call(kernels)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("at least one", {"num_blocks": 0}),
        ("at least one", {"layer_offsets": []}),
        ("multiples of 4", {"layer_offsets": [2]}),
        ("multiples of 4", {"layer_offsets": [-4]}),
        ("multiples of 4", {"block_stride": 514}),
        ("overlap", {"block_stride": 508}),
        ("K and of V", {"is_key": np.ones(128, np.bool_)}),
        ("K and of V", {"is_key": np.zeros(128, np.bool_)}),
    ],
)
def test_pages_that_cannot_be(message: str, changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "dtype": RowDtype.FP32,
        "num_blocks": 2,
        "layer_offsets": [0, 1024],
        "block_stride": 512,
        "is_key": np.arange(128) < 64,
    }
    BlockPages.build(**fields)
    with pytest.raises(ValueError, match=message):
        BlockPages.build(**(fields | changes))


def test_nothing_asked_is_nothing_done(kernels: BlockKernels) -> None:
    none = ids()
    assert kernels.squares(POOL, PAGES, none).shape == (0, 2, 2)
    assert kernels.sketches(POOL, PAGES, none, ONES, SKETCHER).shape == (0, 256)
    assert kernels.hashes(POOL, PAGES, none).shape == (0,)
    assert kernels.equal(POOL, PAGES, none, none).shape == (0,)
    assert kernels.pair_distances(POOL, PAGES, none, none[:, None]).shape == (0, 1, 2)
    assert kernels.pair_distances(POOL, PAGES, ids(0), none[None]).shape == (1, 0, 2)


def test_read_only_pools_and_strided_ids(kernels: BlockKernels) -> None:
    pool = np.frombuffer(POOL.tobytes(), np.uint32)
    assert kernels.hashes(pool, PAGES, ALL[::3]).shape == (5,)
    assert kernels.pair_distances(pool, PAGES, ALL[::3], ALL[::3][:, None]).max() == 0

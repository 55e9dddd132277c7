"""The index of a request: growth, truncation, and when rows are signed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.gpu_agent.index import MEAN_TOKENS, RequestIndex
from memshare.gpu_agent.rows import KEY, VALUE, SessionRows
from memshare.kernels import get_kernels
from memshare.v1 import common_pb2
from memshare.wire.layout import RowLayout

LAYERS = 2
LAYOUT = RowLayout(LAYERS, 2, 4, 4, common_pb2.ROW_DTYPE_FP32, inv_freq=(0.5, 0.1))


@pytest.fixture
def reader() -> SessionRows:
    values = np.random.default_rng(1).standard_normal((4096, 8), dtype=np.float32) + 3
    return SessionRows(get_kernels("numpy"), values.view(np.uint32), LAYOUT)


def rows_of(start: int, end: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Row ids [2, LAYERS, n], different for each entry."""
    tokens = np.arange(start, end, dtype=np.int32)
    return np.stack([tokens + 1024 * plane for plane in range(4)]).reshape(2, LAYERS, -1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900)), min_size=1, max_size=5))
def test_appends_and_truncations_keep_every_row_in_its_slot(steps: list[tuple[int, int]]) -> None:
    reader = SessionRows(get_kernels("numpy"), np.zeros((4096, 8), np.uint32), LAYOUT)
    index = RequestIndex(reader, 0, 0)
    expected = rows_of(0, 0)
    for count, keep in steps:
        added = rows_of(index.num_tokens, index.num_tokens + count) % 4096
        index.append(added)
        expected = np.concatenate((expected, added), axis=2)[:, :, : max(keep, 0)]
        index.truncate(keep)
        assert index.num_tokens == expected.shape[2]
        assert np.array_equal(index.rows[:, :, : index.num_tokens], expected)
        assert index.usable[:, :, : index.num_tokens].all()


def test_signatures_do_not_depend_on_the_batches_once_the_mean_is_settled(
    reader: SessionRows,
) -> None:
    whole, parts = RequestIndex(reader, 0, 0), RequestIndex(reader, 0, 0)
    whole.append(rows_of(0, 400))
    whole.sign()
    for start, end in ((0, 10), (10, 64), (64, 256), (256, 300), (300, 400)):
        parts.append(rows_of(start, end))
        parts.sign()
    assert np.array_equal(whole.signatures[:, :, :400], parts.signatures[:, :, :400])


@pytest.mark.parametrize("step", MEAN_TOKENS)
def test_what_is_signed_is_signed_again_when_the_mean_moves(reader: SessionRows, step: int) -> None:
    index = RequestIndex(reader, 0, 0)
    index.append(rows_of(0, step - 1))
    index.sign()
    before = index.signatures[:, :, : step - 1].copy()
    index.append(rows_of(step - 1, step))
    index.sign()
    after = index.signatures[:, :, : step - 1].copy()
    assert (before != after).any()
    index.append(rows_of(step, step + 1))
    index.sign()
    assert np.array_equal(after, index.signatures[:, :, : step - 1])


def test_signatures_are_those_of_the_centred_position_free_rows(reader: SessionRows) -> None:
    index = RequestIndex(reader, 0, 0)
    index.append(rows_of(0, 300))
    index.sign()
    tokens = np.arange(300, dtype=np.int32)
    for kind in (KEY, VALUE):
        for layer in range(LAYERS):
            rows = rows_of(0, 300)[kind, layer]
            mean, squares = reader.moments(kind, rows[:256], tokens[:256])
            expected = reader.sign(kind, rows, tokens, mean)
            assert np.array_equal(index.signatures[kind, layer, :300], expected)
            assert np.allclose(index.head_weights[kind][layer] * squares, 1)


def test_padding_is_never_read(reader: SessionRows) -> None:
    index = RequestIndex(reader, 0, first_token=5)
    padded = rows_of(0, 20)
    padded[:, :, :5] = -1
    index.append(padded[:, :, :3])
    index.sign()
    index.append(padded[:, :, 3:])
    index.sign()
    assert not index.usable[:, :, :5].any()
    assert index.usable[:, :, 5:20].all()
    assert index.signatures[:, :, 5:20].any(axis=3).all()

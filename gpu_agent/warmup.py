"""Compiles the kernels before the first call needs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memshare.gpu_agent.block_index import BlockIndex, find_similar_blocks
from memshare.gpu_agent.blocks import SessionBlocks
from memshare.gpu_agent.exact import ExactRequest
from memshare.gpu_agent.index import RequestIndex
from memshare.gpu_agent.rows import SessionRows
from memshare.gpu_agent.search import PopcountSearch, Query, find_similar
from memshare.gpu_agent.table import ExactTable
from memshare.kernels import BlockKernels, Kernels, RowDtype
from memshare.v1 import common_pb2
from memshare.wire.block_layout import BlockGroup, BlockLayout, PagePart
from memshare.wire.layout import RowLayout


def warm_up(kernels: Kernels, block_kernels: BlockKernels) -> None:
    """Run every operation of the worker once for each element type, on a few rows of its own."""
    for dtype, element in (
        (common_pb2.ROW_DTYPE_BF16, RowDtype.BF16),
        (common_pb2.ROW_DTYPE_FP16, RowDtype.FP16),
        (common_pb2.ROW_DTYPE_FP32, RowDtype.FP32),
    ):
        layout = RowLayout(1, 1, 8, 8, dtype, inv_freq=(1.0, 0.1, 0.01, 0.001))
        # Any small numbers will do: 1.0 and its neighbours in each format.
        one = {RowDtype.BF16: 0x3F80, RowDtype.FP16: 0x3C00, RowDtype.FP32: 0x3F800000}[element]
        pool = np.full((8, 8), one, element.bits_dtype)
        reader = SessionRows(kernels, pool, layout)
        index = RequestIndex(reader, 0, 0)
        index.append(np.arange(8, dtype=np.int32).reshape(2, 1, 4))
        everything = np.ones((2, 1, 4), np.bool_)
        query = Query(2, 4, everything, everything)
        thresholds = np.ones((2, 1), np.float32)
        find_similar(index, reader, PopcountSearch(kernels), query, thresholds, candidates=2)
        ExactRequest(ExactTable(8), 0, 0).find(index, reader, query)
        _warm_up_blocks(kernels, block_kernels, layout, np.full(64, one, element.bits_dtype))
    rows = np.array([0, 1], np.int32)
    pool_of_words = np.zeros((4, 8), np.uint16)
    kernels.copy_rows(pool_of_words, rows, rows + np.int32(2))
    kernels.zero_rows(pool_of_words, rows)


def _warm_up_blocks(
    kernels: Kernels, block_kernels: BlockKernels, rows: RowLayout, pool: npt.NDArray[Any]
) -> None:
    """The same for four blocks of two tokens, K and then V of each."""
    page = 16 * rows.itemsize
    group = BlockGroup(1, 4, 4, (0,), page, PagePart(0, 8, 8, 1), PagePart(4, 8, 8, 1))
    layout = BlockLayout(rows.dtype, 2, page, 4, (group,))
    reader = SessionBlocks(block_kernels, pool, layout)
    index = BlockIndex(reader, 0)
    index.append(np.arange(4, dtype=np.int32).reshape(1, 1, 4), np.full((4, 1), -1, np.int32))
    everything = np.ones((1, 1, 4), np.bool_)
    query = Query(2, 4, everything, everything)
    thresholds = np.ones((2, 1), np.float32)
    find_similar_blocks(index, reader, PopcountSearch(kernels), query, thresholds, candidates=2)
    ExactRequest(ExactTable(4), 0, 0).find(index, reader, query)
    blocks = np.array([0, 1], np.int32)
    reader.copy(blocks, blocks + np.int32(2))
    reader.zero(blocks)

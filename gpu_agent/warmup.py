"""Compiles the kernels before the first call needs them."""

from __future__ import annotations

import numpy as np

from memshare.gpu_agent.exact import ExactRequest
from memshare.gpu_agent.index import RequestIndex
from memshare.gpu_agent.rows import SessionRows
from memshare.gpu_agent.search import PopcountSearch, Query, find_similar
from memshare.gpu_agent.table import ExactTable
from memshare.kernels import Kernels, RowDtype
from memshare.v1 import common_pb2
from memshare.wire.layout import RowLayout


def warm_up(kernels: Kernels) -> None:
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
    rows = np.array([0, 1], np.int32)
    pool_of_words = np.zeros((4, 8), np.uint16)
    kernels.copy_rows(pool_of_words, rows, rows + np.int32(2))
    kernels.zero_rows(pool_of_words, rows)

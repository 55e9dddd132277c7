"""How close the signatures come to the memory's bandwidth."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from memshare.kernels import Kernels, RopeTable, RowDtype, SimHasher, float32_to_bits, get_kernels
from memshare.kernels.host_stream import sum_words

_NUM_HEADS, _HEAD_DIM = 8, 128
# Larger than any cache, so that both sides read from memory.
_BUFFER_BYTES = 256 << 20
# Rows a call signs: a batch of the worker's.
_BATCH = 4096
# How far ahead the plain read asks for memory: the processor's own guess, then by bytes.
_READ_AHEAD = (0, 2048, 4096, 8192, 16384)


def measure_signature_bandwidth(seconds: float = 2.0, backend: str = "numba") -> dict[str, float]:
    """Bytes per second of signing rows, against a plain read of the same memory, on one thread.

    All of it reads one buffer of 256 MiB, shared memory as that of a pool, from one end to the
    other. The plain read adds up words and does nothing else: NumPy's sum, and compiled sums that
    ask for memory from 0 to 16 KiB ahead. The fastest of these is the measure. Other processes
    take bandwidth at their whim, so the reads and the signatures take turns, for about `seconds`
    in all, and the best pass of each counts.

    Gives `read_bytes_per_second`; for each of fp32 and bf16 `<dtype>_bytes_per_second` for values
    and `<dtype>_key_bytes_per_second` for keys, which are un-rotated on the way; and
    `<dtype>_ratio`, `<dtype>_key_ratio` of these to the plain read.
    """
    words = _shared_memory(_BUFFER_BYTES).view(np.uint64)
    kernels = get_kernels(backend)
    # Ordinary numbers, of bf16, which two by two are ordinary numbers of fp32 as well.
    block = np.random.default_rng(0).standard_normal(_BUFFER_BYTES // 64, dtype=np.float32)
    bits = float32_to_bits(block, RowDtype.BF16).view(np.uint64)
    words.reshape(-1, len(bits))[:] = bits
    readers: list[Callable[[], object]] = [words.sum]
    readers += [partial(sum_words, words, ahead // 8) for ahead in _READ_AHEAD]
    signers = {}
    for dtype in (RowDtype.FP32, RowDtype.BF16):
        pool = words.view(dtype.bits_dtype).reshape(-1, _NUM_HEADS * _HEAD_DIM)
        for suffix, rotated in (("", False), ("_key", True)):
            signers[dtype.value + suffix] = _signing(kernels, pool, dtype, rotated)
    shortest = _take_turns([*readers, *signers.values()], seconds)
    read = words.nbytes / min(shortest[: len(readers)])
    results = {"read_bytes_per_second": read}
    for name, duration in zip(signers, shortest[len(readers) :], strict=True):
        results[f"{name}_bytes_per_second"] = words.nbytes / duration
        results[f"{name}_ratio"] = words.nbytes / duration / read
    return results


def _shared_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    descriptor = os.memfd_create("memshare-bench")
    try:
        os.ftruncate(descriptor, num_bytes)
        return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
    finally:
        os.close(descriptor)


def _signing(
    kernels: Kernels, pool: npt.NDArray[Any], dtype: RowDtype, rotated: bool
) -> Callable[[], None]:
    hasher = SimHasher(_NUM_HEADS * _HEAD_DIM)
    mean = np.zeros(_NUM_HEADS * _HEAD_DIM, np.float32)
    rope = RopeTable.from_theta(_HEAD_DIM) if rotated else None
    rows = np.arange(len(pool), dtype=np.int32)

    def sign() -> None:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            positions = np.arange(len(batch), dtype=np.int32) if rotated else None
            kernels.signatures(
                pool, batch, positions, dtype, _NUM_HEADS, _HEAD_DIM, mean, hasher, rope
            )

    return sign


def _take_turns(works: list[Callable[[], object]], seconds: float) -> list[float]:
    """The shortest duration of each, in seconds, after a first one that compiles."""
    for work in works:
        work()
    shortest = [float("inf")] * len(works)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or shortest[-1] == float("inf"):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            shortest[i] = min(shortest[i], time.perf_counter() - start)
    return shortest

"""How close the signatures come to the memory's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from memshare.kernels import Kernels, RopeTable, RowDtype, SimHasher, float32_to_bits, get_kernels

_NUM_HEADS, _HEAD_DIM = 8, 128
# Larger than any cache, so that both sides read from memory.
_BUFFER_BYTES = 256 << 20
# Rows a call signs: a batch of the worker's.
_BATCH = 4096


def measure_signature_bandwidth(seconds: float = 2.0, backend: str = "numba") -> dict[str, float]:
    """Bytes per second of signing rows, against a plain read of the same memory, on one thread.

    Runs for about `seconds` in all and gives the best of several passes:
    `read_bytes_per_second`; for each of fp32 and bf16 `<dtype>_bytes_per_second` for values and
    `<dtype>_key_bytes_per_second` for keys, which are un-rotated on the way; and `<dtype>_ratio`,
    `<dtype>_key_ratio` of these to the plain read.
    """
    kernels = get_kernels(backend)
    random = np.random.default_rng(0)
    block = random.standard_normal(_BUFFER_BYTES // 64, dtype=np.float32)
    words = np.empty(_BUFFER_BYTES // 8, np.uint64)
    share = seconds / 5
    words.view(np.float32).reshape(-1, len(block))[:] = block
    read = _best_rate(lambda: words.sum(), words.nbytes, share)
    results = {"read_bytes_per_second": read}
    for dtype in (RowDtype.FP32, RowDtype.BF16):
        bits = float32_to_bits(block, dtype)
        words.view(bits.dtype).reshape(-1, len(bits))[:] = bits
        pool = words.view(bits.dtype).reshape(-1, _NUM_HEADS * _HEAD_DIM)
        for suffix, rotated in (("", False), ("_key", True)):
            rate = _best_rate(_signing(kernels, pool, dtype, rotated), words.nbytes, share)
            results[f"{dtype.value}{suffix}_bytes_per_second"] = rate
            results[f"{dtype.value}{suffix}_ratio"] = rate / read
    return results


def _signing(
    kernels: Kernels,
    pool: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    dtype: RowDtype,
    rotated: bool,
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


def _best_rate(work: Callable[[], object], num_bytes: int, seconds: float) -> float:
    work()
    best = 0.0
    end = time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = max(best, num_bytes / (time.perf_counter() - start))
    return best

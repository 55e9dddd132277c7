"""Engines killed with -9 in the middle of work, and what the sidecar is left with."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from memshare.client.options import SessionOptions
from memshare.client.session import Session, attach
from memshare.client.tables import RowTables
from memshare.v1 import common_pb2
from memshare.wire.layout import RowLayout

_LAYOUT: Final = RowLayout(
    num_layers=8,
    num_kv_heads=2,
    key_head_dim=32,
    value_head_dim=32,
    dtype=common_pb2.ROW_DTYPE_FP32,
    inv_freq=tuple(10000.0 ** (-i / 16) for i in range(16)),
)
# Rows are drawn from so few different ones that much of them is shared.
_DISTINCT_ROWS: Final = 64


@dataclass(frozen=True)
class ChaosResult:
    """What is left after the last engine is dead.

    Attributes:
        kills: engines killed.
        shared: engines that had applied share decisions when they were killed.
        leaked_rows: rows that did not come back.
        settle_seconds: longest time from a kill until all rows were back.
    """

    kills: int
    shared: int
    leaked_rows: int
    settle_seconds: float


def kill_engines(
    runtime_dir: Path,
    kills: int,
    free_rows: Callable[[], int],
    progress: Callable[[], object],
    seed: int = 0,
) -> ChaosResult:
    """Start an engine, let it work for a random while, kill it; `kills` times.

    `free_rows()` tells the pool's free count; it is read before, and awaited after each kill.
    """
    before = free_rows()
    dice = random.Random(seed)
    slowest, shared = 0.0, 0
    for _ in range(kills):
        engine = subprocess.Popen(
            [sys.executable, "-m", __name__, str(runtime_dir)], stdout=subprocess.PIPE
        )
        # The first line comes when it is attached and at work.
        assert engine.stdout is not None
        engine.stdout.readline()
        time.sleep(dice.uniform(0.0, 0.4))
        engine.kill()
        shared += b"shared" in engine.stdout.read()
        engine.wait()
        killed = time.monotonic()
        while free_rows() != before and time.monotonic() - killed < 10.0:
            time.sleep(0.005)
        slowest = max(slowest, time.monotonic() - killed)
        progress()
    return ChaosResult(kills, shared, before - free_rows(), slowest)


def work_until_killed(runtime_dir: Path) -> None:
    """An engine without a model: requests open, grow, roll back and close for ever."""
    options = SessionOptions(runtime_dir=runtime_dir, policy="aggressive", engine="chaos")
    session = attach(_LAYOUT, options)
    pool = session.pool.rows(np.float32)
    dice = np.random.default_rng()
    distinct = dice.standard_normal((_DISTINCT_ROWS, pool.shape[1]), dtype=np.float32)
    requests = [session.open_request() for _ in range(3)]
    print("working", flush=True)
    said = False
    while True:
        for index, tables in enumerate(requests):
            _step(session, tables, pool, distinct, dice)
            if tables.length > 600:
                session.close_requests([tables])
                requests[index] = session.open_request()
            elif dice.random() < 0.01 and tables.length > 100:
                session.truncate(tables, tables.length - 50)
        if session.statistics.applied and not said:
            said = True
            print("shared", flush=True)


def _step(
    session: Session,
    tables: RowTables,
    pool: np.ndarray,
    distinct: np.ndarray,
    dice: np.random.Generator,
) -> None:
    tokens = int(dice.integers(1, 32))
    session.reserve([tables], tokens, wait=True)
    rows = tables.rows[:, :, tables.length : tables.length + tokens]
    noise = dice.standard_normal((*rows.shape, pool.shape[1]), dtype=np.float32)
    pool[rows] = distinct[dice.integers(len(distinct), size=rows.shape)] + 0.01 * noise
    tables.length += tokens
    tables.final = tables.length
    session.end_step()


if __name__ == "__main__":
    work_until_killed(Path(sys.argv[1]))

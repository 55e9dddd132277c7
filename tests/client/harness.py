"""A tiny engine: it writes rows of known content through a session, as an engine's steps would."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from memshare.client import Session, SessionOptions, attach
from memshare.client.cli.sidecar import Sidecar
from memshare.client.tables import KEY, VALUE, RowTables
from memshare.v1 import common_pb2
from memshare.wire.layout import RowLayout

LAYERS = 2
HEADS = 2
DIM = 16
WIDTH = HEADS * DIM
PER_TOKEN = 2 * LAYERS
PERIOD = 32
INV_FREQ = tuple(float(f) for f in np.float32(10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))))
LAYOUT = RowLayout(LAYERS, HEADS, DIM, DIM, common_pb2.ROW_DTYPE_FP32, INV_FREQ)

ROW = common_pb2.Policy(
    name="test-row",
    mode=common_pb2.SHARING_MODE_ROW,
    stages=[common_pb2.PolicyStage(min_age=8, key_threshold=0.01, value_threshold=0.01)],
    protected_tokens=0,
    fidelity_budget=1.0,
)


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 20.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)
    return value


def rotated(heads: npt.NDArray[Any], positions: npt.NDArray[Any] | int) -> npt.NDArray[np.float64]:
    """Half-split rotation of `[..., heads * dim]` by positions, in float64."""
    x = np.asarray(heads, np.float64).reshape(*heads.shape[:-1], HEADS, 2, DIM // 2)
    angle = np.asarray(positions, np.float64)[..., None, None] * np.array(INV_FREQ)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[..., 0, :], x[..., 1, :]
    turned = np.stack((first * cos - second * sin, second * cos + first * sin), axis=-2)
    return turned.reshape(heads.shape)


class TinyEngine:
    """Generates token after token. Token t of a request has the content of token t - PERIOD."""

    def __init__(self, session: Session, seed: int = 0) -> None:
        self.session = session
        self.rows = session.pool.rows(np.float32)
        random = np.random.default_rng(seed)
        self.content = random.normal(size=(2, LAYERS, PERIOD, WIDTH)).astype(np.float32)
        self.requests: list[RowTables] = []

    def open(self) -> RowTables:
        """A new request."""
        self.requests.append(self.session.open_request())
        return self.requests[-1]

    def expected(self, start: int, end: int) -> npt.NDArray[np.float32]:
        """What the engine wrote for tokens [start, end): `[2, LAYERS, n, WIDTH]`."""
        tokens = np.arange(start, end)
        states = self.content[:, :, tokens % PERIOD].copy()
        states[KEY] = rotated(states[KEY], tokens)
        return states

    def step(self, tables: RowTables, tokens: int = 1) -> None:
        """End the last step and write `tokens` more tokens; many are a prompt."""
        self.finish()
        self.session.reserve([tables], tokens, wait=tokens > 1)
        start, tables.length = tables.length, tables.length + tokens
        rows = tables.rows[:, :, start : tables.length]
        self.rows[rows] = self.expected(start, tables.length)

    def finish(self) -> None:
        """End the last step."""
        for tables in self.requests:
            tables.final = tables.length
        self.session.end_step()

    def synchronise(self) -> None:
        """End the last step and wait for all that the sidecar decides."""
        self.finish()
        assert self.session.synchronise()

    def share(self, tables: RowTables) -> int:
        """Apply decisions until the sidecar has no more; the shared entries of this request."""
        before = -1
        while (shared := int(tables.shared_entries.sum())) > before:
            before = shared
            self.synchronise()
        return shared

    def read(self, tables: RowTables) -> npt.NDArray[np.float64]:
        """All tokens as attention would read them, `[2, LAYERS, length, WIDTH]`."""
        states = self.rows[tables.rows[:, :, : tables.length]].astype(np.float64)
        states[KEY] = rotated(states[KEY], tables.deltas[:, : tables.length])
        return states

    def assert_intact(self, tables: RowTables) -> None:
        """Attention reads what was written, up to rounding."""
        read, written = self.read(tables), self.expected(0, tables.length)
        np.testing.assert_allclose(read[KEY], written[KEY], atol=1e-4)
        np.testing.assert_allclose(read[VALUE], written[VALUE], atol=1e-5)


@contextmanager
def attached(sidecar: Sidecar, **options: Any) -> Iterator[Session]:
    """A session that has no policy but ROW, and little overflow."""
    settings = {"policy": ROW, "ahead_tokens": 16, "overflow_bytes": 1 << 20, "timeout": 10.0}
    runtime = sidecar.runtime.path
    with attach(LAYOUT, SessionOptions(runtime_dir=runtime, **(settings | options))) as session:
        yield session


def counts(sidecar: Sidecar) -> Any:
    """The rows of the pool, after a check of every invariant."""
    with sidecar.admin() as admin:
        checked = admin.check_integrity()
    assert list(checked.errors) == []
    return checked.rows


def held_rows(session: Session) -> tuple[int, int]:
    """(live, leased) rows as the session's own tables say."""
    tables = list(session._tables.values())
    live = {int(row) for t in tables for row in t.rows[:, :, : t.sealed].ravel()}
    unsealed = np.concatenate([session._allocator.held(), *(t.unsealed_rows() for t in tables)])
    return len(live), int((unsealed < session.pool.num_rows).sum())


def assert_counted(sidecar: Sidecar, *sessions: Session) -> None:
    """The manager counts exactly what the sessions hold, and all else is free."""

    def agree() -> bool:
        # A lease that is on its way is counted here and not yet there.
        for session in sessions:
            assert session.synchronise()
        with sidecar.admin() as admin:
            engines = {engine.session_id: engine for engine in admin.engines()}
        counted = [(e.live_rows, e.leased_rows) for e in (engines[s.session_id] for s in sessions)]
        held = [held_rows(session) for session in sessions]
        rows = counts(sidecar)
        assert rows.free + rows.live + rows.leased + rows.quarantined == rows.total
        sums = tuple(sum(column) for column in zip(*held, strict=True))
        return counted == held and sums == (rows.live, rows.leased)

    wait_for(agree, "the manager to count what the sessions hold", timeout=5)


_SCRIPT = """
import os, sys
sys.path.insert(0, os.getcwd())
from memshare.client import SessionOptions, attach
from tests.client.harness import LAYOUT, ROW, TinyEngine
session = attach(LAYOUT, SessionOptions(policy=ROW))
engine = TinyEngine(session)
tables = engine.open()
engine.step(tables, 64)
engine.synchronise()
"""


def run_engine(sidecar: Sidecar, more: str) -> subprocess.Popen[str]:
    """Another process with a session, a request of 64 tokens, and `more` to run."""
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT + more],
        env=sidecar.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

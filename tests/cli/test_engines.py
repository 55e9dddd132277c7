"""What operators see of an attached engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memshare.client import Session, SessionOptions, attach
from memshare.client.cli.sidecar import Sidecar
from memshare.client.tables import RowTables
from memshare.v1 import common_pb2
from memshare.wire.layout import RowLayout

from .conftest import Result

Run = Callable[..., Result]
TOKENS = 1024
LAYOUT = RowLayout(
    num_layers=2,
    num_kv_heads=1,
    key_head_dim=16,
    value_head_dim=16,
    dtype=common_pb2.ROW_DTYPE_FP32,
    inv_freq=tuple(1.0 / 10000 ** (pair / 8) for pair in range(8)),
)


@pytest.fixture(scope="module")
def engine(sidecar: Sidecar) -> Iterator[Session]:
    options = SessionOptions(
        runtime_dir=sidecar.runtime.path, policy="balanced", engine="test-engine"
    )
    with attach(LAYOUT, options) as session:
        yield session


@pytest.fixture(scope="module")
def request_tables(engine: Session) -> RowTables:
    """A request with values that repeat and keys that do not."""
    tables = engine.open_request()
    engine.reserve([tables], TOKENS, wait=True)
    random = np.random.default_rng(1)
    rows = engine.pool.rows(np.uint32)
    keys = random.standard_normal((2, TOKENS, 16), dtype=np.float32)
    values = np.tile(random.standard_normal((2, TOKENS // 4, 16), dtype=np.float32), (1, 4, 1))
    rows[tables.rows[0, :, :TOKENS]] = keys.view(np.uint32)
    rows[tables.rows[1, :, :TOKENS]] = values.view(np.uint32)
    tables.length = tables.final = TOKENS
    assert engine.synchronise()
    return tables


def test_an_engine_is_listed(
    sidecar: Sidecar, engine: Session, request_tables: RowTables, command: Run
) -> None:
    directory = ("-d", sidecar.runtime.path)
    (listed,) = command("engines", *directory, "--json").document
    assert listed["session_id"] == engine.session_id
    assert listed["policy"]["name"] == "balanced"
    assert listed["layout"]["dtype"] == "fp32"
    assert listed["counters"]["sealed_tokens"] == TOKENS
    text = command("engines", *directory).out
    assert "test-engine" in text
    assert "balanced (row)" in text


def test_a_request_is_listed_with_what_it_shares(
    sidecar: Sidecar, engine: Session, request_tables: RowTables, command: Run
) -> None:
    directory = ("-d", sidecar.runtime.path)
    (listed,) = command("requests", "-s", engine.session_id, *directory, "--json").document
    assert listed["sealed_tokens"] == TOKENS
    assert listed["shared_values"] == sum(listed["shared_values_by_layer"]) > 0
    assert command("requests", *directory).out.count("\n") == 2


def test_the_status_tells_what_sharing_saves(
    sidecar: Sidecar, request_tables: RowTables, command: Run
) -> None:
    text = command("status", "-d", sidecar.runtime.path).out
    assert "1 attached, 1 open requests" in text
    assert "need no memory of their own" in text


def test_a_session_has_a_policy_of_its_own(sidecar: Sidecar, engine: Session, command: Run) -> None:
    directory = ("-d", sidecar.runtime.path)
    session = ("-s", engine.session_id)
    changed = command("policy", "set", *session, "--min-age", "600", *directory, "--json")
    assert changed.document["sessions_changed"] == 1
    mine = command("policy", "get", *session, *directory, "--json").document["policy"]
    assert mine["stages"][0]["min_age"] == 600
    default = command("policy", "get", *directory, "--json").document["policy"]
    assert default["name"] == "exact"


def test_the_doctor_finds_nothing(
    sidecar: Sidecar, request_tables: RowTables, command: Run
) -> None:
    examination = command("doctor", "-d", sidecar.runtime.path)
    assert examination.code == 0, examination.out
